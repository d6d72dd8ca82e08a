"""This file is the scheduler with fuses."""

from __future__ import annotations

from actors.scheduler.actor import Scheduler
from bench.fused import listen


class FusedScheduler(Scheduler):
    async def on_start(self) -> bytes:
        listen()
        return await super().on_start()
