"""This file is attention over pages in Triton: for GPUs, no dependency but Triton.

Rows of one query each that stand first in the batch are computed in splits of their keys (decode),
the others in tiles of queries (prefill). A decode batch needs no plan from the host: lengths and
tables are read on the device, so that a captured step can be replayed as sequences grow.

Laws: those of `base.py`; a row of padding (kv_len 0) gives zeros. It does not know models.
"""

from __future__ import annotations

import importlib.util
import math
from typing import Any

import torch
from torch import Tensor

from kernels.attention.base import ATTENTION, AttentionBatch, AttentionShape
from kernels.ops.base import OpsUnavailable

LOG2_E = math.log2(math.e)
BLOCK = 64  # keys of one product
SPLIT_MIN = 64  # keys below which a row is not split further, where rows are few
SPLIT_MIN_CROWDED = 2048  # where they fill the device by themselves: only the longest are split
SPLITS_MAX = 64
PROGRAMS_WANTED = 132 * 8  # programs that fill the device
SPLITS_WIDE = 4
SPLIT_KEYS = 8192  # of the longest context, at most in a split
# Of decode kernels over keys of 16 bits and heads up to 128, measured (bench/NOTES.md): up to how
# many programs (rows times key heads), splits, keys below which a row is not split further, keys of
# a product, stages.
SPLITS = (
    (32, 64, SPLIT_MIN, BLOCK, 2),
    (64, 32, SPLIT_MIN, 128, 3),
    (128, 32, 128, 128, 3),
    (384, 16, 256, 128, 3),
    (1056, 2, 1024, 128, 3),
    (math.inf, 4, SPLIT_MIN_CROWDED, 128, 3),
)
SHARES_MAX = 16  # splits of keys that many rows share
SHARED_TILE = 64  # query heads of one program over them
PACKED_SCALE = 256.0  # what `packed.py` leaves to the scales


@ATTENTION.register("triton")
def triton_attention(shape: AttentionShape) -> TritonAttention:
    """Raises OpsUnavailable with the reason."""
    if importlib.util.find_spec("triton") is None:
        raise OpsUnavailable("triton is not installed")
    if shape.device.type != "cuda":
        raise OpsUnavailable(f"triton attention has no form for {shape.device.type}")
    return TritonAttention(shape)


class TritonAttention:
    """See `Attention`."""

    by_slot = True  # reads `table_rows`
    replayable = True  # a decode step may be captured and replayed
    cascades = True  # reads keys that rows share once

    def __init__(self, shape: AttentionShape) -> None:
        from kernels.ops.triton import attend  # only now: it needs Triton

        heads = shape.heads
        if heads.query % heads.kv:
            raise OpsUnavailable(f"triton attention has no form for {heads}")
        self.kernels = attend
        self.shape = shape
        self.group = heads.query // heads.kv
        self.wide = 1 << (heads.dim - 1).bit_length()
        # A product has at least 16 rows; the heads of one key head share its keys.
        self.rows = max(16, 1 << (self.group - 1).bit_length())
        cuda = shape.device.type == "cuda"
        self.pdl = cuda and torch.cuda.get_device_capability(shape.device) >= (9, 0)
        self.launch: dict[str, Any] = {"launch_pdl": True} if self.pdl else {}
        # As the kernels take it: in powers of two. 0: none.
        self.softcap = (shape.softcap or 0.0) * LOG2_E
        # Of a decode kernel: keys of one product, warps, depth of its pipeline.
        self.narrow = shape.wide_dtype.itemsize == 2 and self.wide <= 128
        self.block, self.warps, self.stages = (BLOCK, 4, 2) if self.narrow else (BLOCK // 2, 4, 1)
        self.packed = (
            shape.dtype == torch.float8_e4m3fn
            and shape.wide_dtype.itemsize == 2
            and heads.dim % 2 == 0
            and self.wide >= 32
        )
        self.split_min = SPLIT_MIN
        self.batch: AttentionBatch
        self.table_rows: Tensor
        self.decode_count = 0
        self.splits, self.shares = 1, 0
        self.part = self.part_lse = torch.empty(0)

    def plan(self, batch: AttentionBatch) -> None:
        count = batch.page_table.shape[0] if batch.table_rows is None else len(batch.table_rows)
        lens = batch.query_len.tolist() if batch.host is None else batch.host.query_len.tolist()
        decode_count = next((n for n, length in enumerate(lens) if length != 1), len(lens))
        self.batch, self.decode_count = batch, decode_count
        rows = batch.table_rows
        if rows is None:
            rows = torch.arange(count, dtype=torch.int32, device=batch.page_table.device)
        self.table_rows = rows
        if decode_count:
            self.plan_splits(decode_count)

    def forget(self) -> None:
        """Lets go of the plan's scratch; the next step is planned again."""
        self.part = self.part_lse = torch.empty(0)

    def plan_splits(self, count: int) -> None:
        heads = self.shape.heads
        self.shares = 0
        if self.batch.shared is not None and not any(self.shape.windows):
            tiles = -(-count // self.shared_rows())
            self.shares = min(max(PROGRAMS_WANTED // 4 // (tiles * heads.kv), 1), SHARES_MAX)
        # By the number of rows alone, so that no step meets a kernel that isn't compiled yet.
        programs = count * heads.kv
        if self.narrow:
            found = next(each for each in SPLITS if programs <= each[0])
            _, splits, self.split_min, self.block, self.stages = found
            # Among many short rows a long one should not be what all wait for.
            self.splits = min(max(splits, self.shape.context_len // SPLIT_KEYS), SPLITS_MAX)
        else:
            wanted = -(-PROGRAMS_WANTED // programs)
            self.split_min = SPLIT_MIN if wanted > 1 else SPLIT_MIN_CROWDED
            self.splits = min(max(wanted, SPLITS_WIDE), SPLITS_MAX)
        slots = self.splits + self.shares
        like: dict[str, Any] = {"dtype": torch.float32, "device": self.shape.device}
        self.part = torch.empty((count, heads.query, slots, heads.dim), **like)
        self.part_lse = torch.empty((count, heads.query, slots), **like)

    def shared_rows(self) -> int:
        """Rows of one program over shared keys."""
        return max(SHARED_TILE // (1 << (self.group - 1).bit_length()), 1)

    def attend(
        self, layer_index: int, q: Tensor, k_pool: Tensor, v_pool: Tensor, out: Tensor | None = None
    ) -> Tensor:
        assert q.is_contiguous() and k_pool.is_contiguous() and v_pool.is_contiguous()
        if out is None:
            out = torch.empty_like(q)
        count = self.decode_count
        if count:
            self.decode(layer_index, q[:count], k_pool, v_pool, out[:count])
        if count < len(self.table_rows):
            self.prefill(layer_index, q, k_pool, v_pool, out)
        return out

    def replayer(self) -> TritonAttention:
        """Another one, whose decode steps can be captured."""
        return TritonAttention(self.shape)

    def decode(
        self, layer_index: int, q: Tensor, k_pool: Tensor, v_pool: Tensor, out: Tensor
    ) -> None:
        heads, batch, splits = self.shape.heads, self.batch, self.splits
        window = self.shape.windows[layer_index] or 0
        slots = splits + self.shares
        k_scale, v_scale = self.shape.scales(layer_index)
        scale = self.shape.scale * LOG2_E * k_scale
        unused = batch.kv_len
        lens = unused if batch.shared is None else batch.shared.lens
        source = unused if batch.shared is None else batch.shared.source
        sizes = {"D": heads.dim, "WIDE": self.wide, "BLOCK": self.block, "PDL": self.pdl}
        pages_max = batch.page_table.stride(0)
        if self.shares:
            self.decode_shared(q, k_pool, v_pool, scale, v_scale)
        if self.packed and not self.shares:
            self.decode_packed(q, k_pool, v_pool, out, scale, v_scale, window)
        else:
            self.kernels.decode_kernel[(q.shape[0], heads.kv, splits)](
                q,
                k_pool,
                v_pool,
                batch.page_table,
                self.table_rows,
                batch.kv_len,
                lens,
                self.part,
                self.part_lse,
                out,
                scale,
                v_scale,
                self.softcap,
                pages_max,
                splits,
                slots,
                HKV=heads.kv,
                G=self.group,
                ROWS=self.rows,
                PAGE=batch.page_size,
                SPLIT_MIN=self.split_min,
                WINDOW=window,
                CAP=self.softcap > 0,
                SHARED=self.shares > 0,
                num_warps=self.warps,
                num_stages=self.stages,
                **sizes,
                **self.launch,
            )
        # Most rows of a crowded step have nothing to sum: few programs find that out.
        each = self.group if self.split_min == SPLIT_MIN_CROWDED else 1
        self.kernels.combine_kernel[(q.shape[0], heads.query // each)](
            self.part,
            self.part_lse,
            batch.kv_len,
            lens,
            source,
            out,
            splits,
            slots,
            HQ=heads.query,
            EACH=each,
            SLOTS=max(1 << (slots - 1).bit_length(), 2),
            SPLIT_MIN=self.split_min,
            WINDOW=window,
            SHARED=self.shares > 0,
            SHARES=max(self.shares, 1),
            num_warps=4,
            **sizes,
            **self.launch,
        )

    def decode_shared(
        self, q: Tensor, k_pool: Tensor, v_pool: Tensor, scale: float, v_scale: float
    ) -> None:
        """Keys that many rows share, into the last slots of `part`."""
        heads, batch, tile = self.shape.heads, self.batch, self.shared_rows()
        assert batch.shared is not None
        self.kernels.shared_kernel[(-(-q.shape[0] // tile), heads.kv, self.shares)](
            q,
            k_pool,
            v_pool,
            batch.page_table,
            batch.shared.lens,
            batch.shared.source,
            self.part,
            self.part_lse,
            scale,
            v_scale,
            self.softcap,
            batch.page_table.stride(0),
            q.shape[0],
            self.splits,
            self.splits + self.shares,
            HKV=heads.kv,
            G=self.group,
            GROUP=1 << (self.group - 1).bit_length(),
            TILE=tile,
            D=heads.dim,
            WIDE=self.wide,
            PAGE=batch.page_size,
            BLOCK=self.block,
            CAP=self.softcap > 0,
            SHARES=self.shares,
            PDL=self.pdl,
            num_warps=4,
            num_stages=min(self.stages, 2),
            **self.launch,
        )

    def decode_packed(
        self,
        q: Tensor,
        k_pool: Tensor,
        v_pool: Tensor,
        out: Tensor,
        scale: float,
        v_scale: float,
        window: int,
    ) -> None:
        """Pools of fp8, two numbers at a time."""
        from kernels.ops.triton import packed

        heads, batch = self.shape.heads, self.batch
        packed.decode_packed_kernel[(q.shape[0], heads.kv, self.splits)](
            q,
            k_pool.view(torch.uint16),
            v_pool.view(torch.uint16),
            batch.page_table,
            self.table_rows,
            batch.kv_len,
            self.part,
            self.part_lse,
            out,
            scale * PACKED_SCALE,
            v_scale * PACKED_SCALE,
            self.softcap,
            batch.page_table.stride(0),
            self.splits,
            self.splits,
            HKV=heads.kv,
            G=self.group,
            ROWS=self.rows,
            D=heads.dim,
            WIDE=self.wide // 2,
            PAGE=batch.page_size,
            BLOCK=self.block,
            SPLIT_MIN=self.split_min,
            WINDOW=window,
            CAP=self.softcap > 0,
            ASM=self.shape.device.type == "cuda",
            PDL=self.pdl,
            num_warps=self.warps,
            num_stages=self.stages,
            **self.launch,
        )

    def prefill(
        self, layer_index: int, q: Tensor, k_pool: Tensor, v_pool: Tensor, out: Tensor
    ) -> None:
        heads, batch, count = self.shape.heads, self.batch, self.decode_count
        k_scale, v_scale = self.shape.scales(layer_index)
        tile = 128 if self.narrow and batch.query_len_max > 64 else 32
        grid = (-(-batch.query_len_max // tile), heads.query, len(self.table_rows) - count)
        self.kernels.prefill_kernel[grid](
            q,
            k_pool,
            v_pool,
            batch.page_table,
            self.table_rows[count:],
            batch.query_start[count:],
            batch.kv_len[count:],
            out,
            self.shape.scale * LOG2_E * k_scale,
            v_scale,
            self.softcap,
            batch.page_table.stride(0),
            HKV=heads.kv,
            G=self.group,
            D=heads.dim,
            WIDE=self.wide,
            PAGE=batch.page_size,
            TILE=tile,
            BLOCK=BLOCK if self.narrow else BLOCK // 2,
            WINDOW=self.shape.windows[layer_index] or 0,
            CAP=self.softcap > 0,
            num_warps=8 if tile == 128 else 4,
            num_stages=2 if self.narrow else 1,
        )
