"""This file carries arrays of the host to the device without waiting for it: through pinned memory,
in one copy, by as many buffers as there are steps whose copies may still be on their way.

It does not know what the arrays are. Law: a buffer is written again only after the step that used
it has ended; whoever names it sees to that.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

STAGES = 4  # steps whose buffers are kept; more than are ever in flight


def pinned(count: int, device: torch.device) -> Tensor:
    """int32 [count] of the host, from where copies to `device` do not wait."""
    return torch.empty(count, dtype=torch.int32, pin_memory=device.type == "cuda")


class Stages:
    """A buffer for each of the last `STAGES` steps, made at its first use; one that is too small is
    made anew."""

    def __init__(self, device: torch.device, count_min: int) -> None:
        self.device, self.count_min = device, count_min
        self.buffers: list[Tensor | None] = [None] * STAGES

    def upload(self, nth: int, *arrays: NDArray[Any]) -> list[Tensor]:
        """`upload` through buffer `nth`."""
        needed = sum(len(array) + 3 for array in arrays)
        buffer = self.buffers[nth]
        if buffer is None or len(buffer) < needed:
            buffer = pinned(max(self.count_min, 1 << needed.bit_length()), self.device)
            self.buffers[nth] = buffer
        return upload(buffer, self.device, *arrays)


def upload(stage: Tensor, device: torch.device, *arrays: NDArray[Any]) -> list[Tensor]:
    """The arrays on the device, float32 or else int32, through pinned memory, in one copy. Each
    begins at a multiple of 16 bytes, as the kernels were compiled to expect."""
    host = stage.numpy()
    starts, end = [], 0
    for array in arrays:
        starts.append(end)
        given = array.view(np.int32) if array.dtype == np.float32 else array
        host[end : end + len(array)] = given
        end = -(-(end + len(array)) // 4) * 4
    there = stage[:end].to(device, non_blocking=True, copy=True)
    parts = (there[start : start + len(array)] for start, array in zip(starts, arrays, strict=True))
    return [
        part.view(torch.float32) if array.dtype == np.float32 else part
        for part, array in zip(parts, arrays, strict=True)
    ]
