"""This file is the flavour of `Ops` for GPUs whose results have the same bits in any company: the
rows of a product may be few or many, next to whatever others.

Products are our own, in one order for every number of rows (`fixed.py`); what works on single rows
is `TritonOps`'. It costs speed: bench/NOTES.md says how much. It does not know pages or graphs.

Law: an element of a result depends on its own row alone, in every dtype.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kernels.ops.triton import fixed
from kernels.ops.triton.ops import TritonLinear, TritonOps

COLUMNS = 128  # of a tile
STEP = 64  # of K; half of it in float32
CHUNK_MIN = 512  # columns of K that are summed by themselves, at least
PROGRAMS = 128  # wanted, where a product has few tiles
FEW_ROWS = 64
SUM_BLOCK = 1024


def pieces(n: int, k: int) -> tuple[int, int]:
    """In how many pieces the columns of a weight [n, k] are summed, and their length. By the
    weight's shape alone."""
    count = 1
    while -(-n // COLUMNS) * count < PROGRAMS and k >= CHUNK_MIN * count * 2:
        count *= 2
    chunk = -(-k // count // STEP) * STEP
    return -(-k // chunk), chunk


class FixedOps(TritonOps):
    """See `Ops`."""

    tunes = False

    def fuse(self, decoder: Any) -> None:
        return None

    def rope_heads(self, rows: int) -> int:
        return 4

    def linear(self, prepared: TritonLinear, x: Tensor) -> Tensor:
        return self.product(prepared, x, x.dtype)

    def linear_float32(self, prepared: TritonLinear, x: Tensor) -> Tensor:
        return self.product(prepared, x, torch.float32)

    def product(self, prepared: TritonLinear, x: Tensor, to: torch.dtype) -> Tensor:
        weight, bias = prepared.weight, prepared.bias
        (n, k), m = weight.shape, x.shape[0]
        assert x.is_contiguous() and weight.is_contiguous() and x.shape == (m, k)
        out = torch.empty((m, n), dtype=to, device=x.device)
        if m == 0:
            return out
        splits, chunk = pieces(n, k)
        few = m <= FEW_ROWS
        rows = 64 if few or x.dtype == torch.float32 else 128
        columns = COLUMNS if x.dtype != torch.float32 else 64
        tiles = -(-m // rows) * -(-n // columns)
        each = 1 if splits > 1 and tiles < PROGRAMS else splits
        part = out
        if each < splits:
            part = torch.empty((splits, m, n), dtype=torch.float32, device=x.device)
        unused = weight if bias is None else bias
        wide = x.dtype == torch.float32
        fixed.linear_fixed_kernel[(tiles, splits // each)](
            x,
            weight,
            unused,
            out,
            part,
            m,
            n,
            each,
            K=k,
            CHUNK=chunk,
            SPLITS=splits,
            BM=rows,
            BN=columns,
            BK=STEP // 2 if wide else STEP,
            BIAS=bias is not None,
            SWATH=8,
            num_warps=8 if rows == 128 else 4,
            num_stages=2 if wide else 4,
        )
        if each < splits:
            fixed.linear_sum_kernel[(-(-m * n // SUM_BLOCK),)](
                part,
                unused,
                out,
                m,
                n,
                SPLITS=splits,
                BLOCK=SUM_BLOCK,
                BIAS=bias is not None,
                num_warps=4,
            )
        return out
