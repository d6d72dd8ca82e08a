"""This file maps large memory of the host: zero, committed only as it is touched, in huge pages
where the system has them (scattered reads of weights and KV pages otherwise wait for the TLB). It
does not know what the memory is for.
"""

from __future__ import annotations

import math
import mmap

import torch
from torch import Tensor


def mapped_zeros(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Aligned to pages; lives as long as a tensor refers to it. Raises MemoryError."""
    byte_count = math.prod(shape) * dtype.itemsize
    try:
        memory = mmap.mmap(-1, max(byte_count, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise MemoryError(f"no memory for {byte_count >> 20} MiB") from error
    try:
        memory.madvise(mmap.MADV_HUGEPAGE)
    except (AttributeError, OSError):
        pass  # a system without huge pages: slower, not wrong
    return torch.frombuffer(memory, dtype=dtype, count=math.prod(shape)).view(shape)
