"""This file is the gateway with fuses."""

from __future__ import annotations

from actors.gateway.actor import Gateway
from bench.fused import listen


class FusedGateway(Gateway):
    async def on_start(self) -> bytes:
        listen()
        return await super().on_start()
