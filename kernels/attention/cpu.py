"""This file is attention by the compiled library of `kernels.ops.cpu`, over float32 or bfloat16
pools, with float32 queries. Keys and values are read through the page table, never gathered.

The laws of `base.py` hold by construction: see csrc/attention.c. It does not know models.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from kernels.attention.base import ATTENTION, AttentionBatch, AttentionShape
from kernels.ops.base import OpsUnavailable
from kernels.ops.cpu import check, native
from kernels.ops.cpu.native import BatchStruct

GROUP_MAX = 192  # query heads of one kv head (TILE_ROWS_MAX in csrc/attention.h)


@ATTENTION.register("cpu")
class CpuAttention:
    """See `Attention`. Raises OpsUnavailable with the reason."""

    def __init__(self, shape: AttentionShape) -> None:
        heads = shape.heads
        if heads.dim % 16 or heads.query % heads.kv or heads.query // heads.kv > GROUP_MAX:
            raise OpsUnavailable(f"compiled attention has no form for {heads}")
        if shape.softcap is not None:
            raise OpsUnavailable("compiled attention has no form for a soft cap")
        if shape.dtype not in (torch.float32, torch.bfloat16):
            raise OpsUnavailable(f"compiled attention has no form for pools of {shape.dtype}")
        self.library = native.load()
        check.check_once()
        self.shape, self.dtype = shape, shape.dtype
        bf16 = shape.dtype == torch.bfloat16
        self.layers = [
            native.heads_struct(heads, bf16, shape.scale, window=window) for window in shape.windows
        ]
        self.batch = BatchStruct()
        self.kept: tuple[Tensor, ...] = ()

    def plan(self, batch: AttentionBatch) -> None:
        table = batch.page_table.to(torch.int32).contiguous()
        start, query_len, kv_len = (
            each.to(torch.int32).contiguous()
            for each in (batch.query_start, batch.query_len, batch.kv_len)
        )
        self.kept = (table, start, query_len, kv_len)
        self.batch = BatchStruct(
            rows=table.shape[0],
            page_size=batch.page_size,
            pages_max=table.shape[1],
            page_table=table.data_ptr(),
            query_start=start.data_ptr(),
            query_len=query_len.data_ptr(),
            kv_len=kv_len.data_ptr(),
        )

    def attend(
        self, layer_index: int, q: Tensor, k_pool: Tensor, v_pool: Tensor, out: Tensor | None = None
    ) -> Tensor:
        assert q.dtype == torch.float32 and k_pool.dtype == self.dtype == v_pool.dtype
        assert k_pool.is_contiguous() and v_pool.is_contiguous()
        q = q.contiguous()
        if out is None:
            out = torch.empty_like(q)
        assert out.is_contiguous() and out.shape == q.shape
        native.check(
            self.library.hs_attend(
                ctypes.addressof(self.layers[layer_index]),
                ctypes.addressof(self.batch),
                q.data_ptr(),
                k_pool.data_ptr(),
                v_pool.data_ptr(),
                out.data_ptr(),
            )
        )
        return out
