"""This file is the tokenizer with fuses."""

from __future__ import annotations

from actors.tokenizer.actor import Tokenizer
from bench.fused import listen


class FusedTokenizer(Tokenizer):
    async def on_start(self) -> bytes:
        listen()
        return await super().on_start()
