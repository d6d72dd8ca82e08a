"""This file maps large memory of the host: zero, committed only as it is touched, in huge pages
where the system has them (scattered reads of weights and KV pages otherwise wait for the TLB); and
gives back what nobody uses any more. It does not know what the memory is for.
"""

from __future__ import annotations

import gc
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


def forget_freed() -> None:
    """A model that nobody refers to is taken apart now, and its device memory is free for whoever
    asks how much there is."""
    forget_unused()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()


def forget_unused() -> None:
    """What nobody refers to is taken apart now; torch keeps the memory for the same use again."""
    gc.collect()


def release_freed(device: torch.device) -> None:
    """What torch keeps of a device's memory for later, in pieces of sizes that were used once, can
    be had in others. Waits for the device."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
