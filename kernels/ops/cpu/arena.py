"""This file gives packed weights their memory: large anonymous maps in huge pages where the system
has them, which spares the products most of their TLB misses. It does not know what it holds.
"""

from __future__ import annotations

import mmap

import torch
from torch import Tensor

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
            self.chunk, self.used = map_chunk(max(rounded, CHUNK_BYTES)), 0
        piece = self.chunk[self.used : self.used + byte_count]
        self.used += rounded
        return piece


def map_chunk(byte_count: int) -> Tensor:
    try:
        memory = mmap.mmap(-1, byte_count)
    except OSError as error:
        raise MemoryError(f"no memory for {byte_count} bytes of weights") from error
    try:
        memory.madvise(mmap.MADV_HUGEPAGE)
    except OSError:
        pass  # a kernel without huge pages: slower, not wrong
    return torch.frombuffer(memory, dtype=torch.uint8)
