"""This file gives packed weights their memory: pieces of large maps. It knows no weights."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.memory import mapped_zeros

CHUNK_BYTES = 64 << 20
ALIGN = 64


class Arena:
    """Hands out pieces of large maps; a map lives as long as any tensor in it."""

    def __init__(self) -> None:
        self.chunk: Tensor | None = None
        self.used = 0

    def take(self, byte_count: int) -> Tensor:
        """uint8 [byte_count], 64-byte aligned, zero. Raises MemoryError."""
        rounded = -(-byte_count // ALIGN) * ALIGN
        if self.chunk is None or self.used + rounded > self.chunk.numel():
            chunk_bytes = max(rounded, CHUNK_BYTES)
            self.chunk, self.used = mapped_zeros((chunk_bytes,), torch.uint8), 0
        piece = self.chunk[self.used : self.used + byte_count]
        self.used += rounded
        return piece
