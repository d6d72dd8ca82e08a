"""This file is attention over pages in an order of sums that nothing but the row decides: for GPUs,
where results must not depend on batch, chunks, cache or graphs.

One kernel serves decode rows and prompts. A decode row's keys go to one program for each `SPLIT` of
them, counted from position 0, however many rows there are; a prompt's program adds the same splits
up itself. Keys that rows share are read for each. It does not know models.

Laws: those of `base.py`, and the last of them, about bits, in every dtype on every device.
"""

from __future__ import annotations

import importlib.util
from typing import Any

import torch
from torch import Tensor

from kernels.attention.base import ATTENTION, AttentionShape
from kernels.attention.triton import BLOCK, LOG2_E, TritonAttention
from kernels.ops.base import OpsUnavailable

SPLIT_MIN = 512  # keys
SPLITS_MAX = 64  # of the longest context: then they become longer
ROWS = 64  # of one product: queries times heads that share keys
ROWS_EXACT = 16  # in float32, which the matrix units don't multiply


@ATTENTION.register("fixed")
def fixed_attention(shape: AttentionShape) -> FixedAttention:
    """Raises OpsUnavailable with the reason."""
    if importlib.util.find_spec("triton") is None:
        raise OpsUnavailable("triton is not installed")
    if shape.device.type != "cuda":
        raise OpsUnavailable(f"attention of fixed order has no form for {shape.device.type}")
    return FixedAttention(shape)


class FixedAttention(TritonAttention):
    """See `Attention`."""

    cascades = False

    def __init__(self, shape: AttentionShape) -> None:
        super().__init__(shape)
        from kernels.ops.triton import fixed  # only now: it needs Triton

        self.fixed = fixed
        self.forget()
        self.group_wide = 1 << (self.group - 1).bit_length()
        self.split = SPLIT_MIN
        while shape.context_len > SPLITS_MAX * self.split:
            self.split *= 2
        self.keys = BLOCK if self.narrow else BLOCK // 2
        self.fixed_launch: dict[str, Any] = {
            "num_warps": 8 if self.wide > 128 else 4,
            "num_stages": 2 if self.narrow else 1,
        }

    def plan_splits(self, count: int) -> None:
        heads = self.shape.heads
        self.shares = 0
        self.splits = -(-self.batch.kv_len_max // self.split)
        like: dict[str, Any] = {"dtype": torch.float32, "device": self.shape.device}
        slots = self.splits if self.splits > 1 else 0
        self.part = torch.empty((count, heads.query, slots, heads.dim), **like)
        self.part_lse = torch.empty((count, heads.query, slots, 2), **like)

    def forget(self) -> None:
        # Kernels are given them also where there are no decode rows to use them.
        self.part = self.part_lse = torch.empty(0, device=self.shape.device)

    def replayer(self) -> FixedAttention:
        return FixedAttention(self.shape)

    def decode(
        self, layer_index: int, q: Tensor, k_pool: Tensor, v_pool: Tensor, out: Tensor
    ) -> None:
        heads, count = self.shape.heads, self.decode_count
        self.launch_fixed(layer_index, q, k_pool, v_pool, out, slice(0, count), 1, self.splits)
        if self.splits > 1:
            self.fixed.join_fixed_kernel[(count, heads.kv)](
                self.part,
                self.part_lse,
                self.batch.kv_len,
                out,
                self.shape.scales(layer_index)[1],
                1,
                self.splits,
                HQ=heads.query,
                G=self.group,
                GROUP=self.group_wide,
                D=heads.dim,
                WIDE=self.wide,
                BLOCK=self.keys,
                SPLIT=self.split,
                WINDOW=self.shape.windows[layer_index] or 0,
                num_warps=4,
            )

    def prefill(
        self, layer_index: int, q: Tensor, k_pool: Tensor, v_pool: Tensor, out: Tensor
    ) -> None:
        every = -(-self.batch.kv_len_max // self.split)
        rows = slice(self.decode_count, len(self.table_rows))
        self.launch_fixed(layer_index, q, k_pool, v_pool, out, rows, every, 1)

    def launch_fixed(
        self,
        layer_index: int,
        q: Tensor,
        k_pool: Tensor,
        v_pool: Tensor,
        out: Tensor,
        rows: slice,
        each: int,
        programs: int,
    ) -> None:
        """Rows of the batch, their keys in `programs` times `each` splits."""
        heads, batch = self.shape.heads, self.batch
        k_scale, v_scale = self.shape.scales(layer_index)
        rows_wanted = ROWS if self.shape.wide_dtype.itemsize == 2 else ROWS_EXACT
        tile = max(rows_wanted // self.group_wide, 1)
        query_len_max = 1 if rows.start == 0 and self.decode_count else batch.query_len_max
        grid = (-(-query_len_max // tile), heads.kv * programs, rows.stop - rows.start)
        self.fixed.attend_fixed_kernel[grid](
            q,
            k_pool,
            v_pool,
            batch.page_table,
            self.table_rows[rows],
            batch.query_start[rows.start :],
            batch.kv_len[rows],
            self.part,
            self.part_lse,
            out,
            self.shape.scale * LOG2_E * k_scale,
            v_scale,
            self.softcap,
            batch.page_table.stride(0),
            each,
            self.splits,
            HKV=heads.kv,
            G=self.group,
            GROUP=self.group_wide,
            TILE=tile,
            D=heads.dim,
            WIDE=self.wide,
            PAGE=batch.page_size,
            BLOCK=self.keys,
            SPLIT=self.split,
            WINDOW=self.shape.windows[layer_index] or 0,
            CAP=self.softcap > 0,
            **self.fixed_launch,
        )
