"""This file is the worker with fuses: its forward gets stuck, or its device is lost."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import torch

from actors.worker.actor import Worker
from bench.fused import GO_WRONG, listen


class FusedWorker(Worker):
    is_stuck = loses_device = False

    async def on_start(self) -> bytes:
        listen()
        if threading.current_thread() is threading.main_thread():
            loop = asyncio.get_running_loop()
            loop.add_signal_handler(GO_WRONG["deadlock"], self.get_stuck)
            loop.add_signal_handler(GO_WRONG["assert"], self.lose_device)
        return await super().on_start()

    def get_stuck(self) -> None:
        self.is_stuck = True

    def lose_device(self) -> None:
        self.loses_device = True

    def launch(self, *arguments: Any) -> Any:
        if self.is_stuck:
            threading.Event().wait()
        if self.loses_device:
            # Fails on the device, some time later, and with it all that this process asks of it.
            torch._assert_async(torch.zeros(1, device=self.runner.device))
        return super().launch(*arguments)
