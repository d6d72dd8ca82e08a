"""This file is attention by FlashInfer for prompts, and by our own kernels for decode rows.

FlashInfer's paged prefill runs on Hopper's own instructions where the device has them. Its decode
needs a plan on the host each step; ours reads lengths on the device, so that a captured step can be
replayed, and measures no slower (bench/NOTES.md). The wrappers are planned once a step. Keys of a
pool narrower than the queries are widened as they are copied out of it; prompts with too many for
that are left to our own kernel.

It does not know models. Law: a wrapper is planned again only when two steps have been launched
since: its plan travels through pinned memory.
"""

from __future__ import annotations

import importlib.util
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kernels.attention.base import ATTENTION, AttentionBatch, AttentionShape
from kernels.attention.triton import TritonAttention
from kernels.ops.base import OpsUnavailable

HEAD_DIMS = (64, 128, 256)
WORKSPACE_BYTES = 384 << 20
WRAPPERS = 3  # in turn
# Prompts that are mostly new have their keys and values copied out of the pages: what reads them in
# one piece is faster by more than the copy costs (bench/NOTES.md).
GATHER_FACTOR_MAX = 3  # keys for each query
GATHER_TOKENS_MAX = 65536
GATHER_BLOCK = 16


@ATTENTION.register("flashinfer")
def flashinfer_attention(shape: AttentionShape) -> FlashInferAttention:
    """Raises OpsUnavailable with the reason."""
    if importlib.util.find_spec("flashinfer") is None:
        raise OpsUnavailable("flashinfer is not installed")
    if importlib.util.find_spec("triton") is None:
        raise OpsUnavailable("triton is not installed")
    if shape.device.type != "cuda":
        raise OpsUnavailable(f"flashinfer has no form for {shape.device.type}")
    if shape.wide_dtype not in (torch.bfloat16, torch.float16):
        raise OpsUnavailable(f"flashinfer has no form for {shape.wide_dtype}")
    if shape.heads.dim not in HEAD_DIMS:
        raise OpsUnavailable(f"flashinfer has no form for heads of {shape.heads.dim}")
    return FlashInferAttention(shape)


class FlashInferAttention(TritonAttention):
    """See `Attention`."""

    def __init__(self, shape: AttentionShape) -> None:
        super().__init__(shape)
        import flashinfer  # only now: its import takes seconds

        workspace = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=shape.device)
        windows = dict.fromkeys(window or 0 for window in shape.windows)
        self.paged, self.ragged = (
            {window: [make(workspace, "NHD") for _ in range(WRAPPERS)] for window in windows}
            for make in (
                flashinfer.BatchPrefillWithPagedKVCacheWrapper,
                flashinfer.BatchPrefillWithRaggedKVCacheWrapper,
            )
        )
        self.turn = 0
        self.start = 0  # of the first token that is not a decode row's
        self.gathered: tuple[Tensor, int, int] | None = None  # kv starts, their sum, the longest
        self.own = False  # whether this step's prompts are left to our own kernel
        self.settings: dict[str, Any] = {
            "causal": True,
            "sm_scale": shape.scale,
            "logits_soft_cap": shape.softcap or 0.0,
            "q_data_type": shape.wide_dtype,
            "kv_data_type": shape.wide_dtype,
        }
        self.build()

    def build(self) -> None:
        """Has the kernels of each window found, or compiled, now and not in the first step. Raises
        OpsUnavailable with the reason."""
        one = pinned_starts(torch.ones(1, dtype=torch.int32))
        try:
            self.plan_ragged(one, one)
        except (RuntimeError, OSError) as error:
            lines = str(error).strip().splitlines() or [type(error).__name__]
            raise OpsUnavailable(f"flashinfer can't build its kernels: {lines[0]}") from error

    def plan(self, batch: AttentionBatch) -> None:
        super().plan(batch)
        first = self.decode_count
        if first == len(self.table_rows):
            return
        self.turn = (self.turn + 1) % WRAPPERS
        self.start = first
        if batch.host is None:
            query_len, kv_len = batch.query_len[first:].cpu(), batch.kv_len[first:].cpu()
            table = batch.page_table[self.table_rows[first:].long()].cpu().numpy()
        else:
            query_len = torch.from_numpy(batch.host.query_len[first:])
            kv_len = torch.from_numpy(batch.host.kv_len[first:])
            table = batch.host.page_table[first:]
        token_count, total = int(query_len.sum()), int(kv_len.sum())
        narrow = self.shape.dtype != self.shape.wide_dtype
        few = GATHER_TOKENS_MAX if narrow else GATHER_FACTOR_MAX * token_count
        self.own = narrow and total > GATHER_TOKENS_MAX
        if self.own:
            return
        if total <= min(few, GATHER_TOKENS_MAX):
            starts = pinned_starts(kv_len)
            self.gathered = (
                starts.to(self.shape.device, non_blocking=True),
                total,
                int(kv_len.max()),
            )
            self.plan_ragged(pinned_starts(query_len), starts)
        else:
            self.gathered = None
            self.plan_paged(batch.page_size, query_len, kv_len, table)

    def plan_ragged(self, query_start: Tensor, kv_start: Tensor) -> None:
        heads = self.shape.heads
        for window, wrappers in self.ragged.items():
            wrappers[self.turn].plan(
                query_start,
                kv_start,
                heads.query,
                heads.kv,
                heads.dim,
                window_left=window - 1 if window else -1,
                **self.settings,
            )

    def plan_paged(
        self,
        page_size: int,
        query_len: Tensor,
        kv_len: Tensor,
        table: NDArray[np.int32],
    ) -> None:
        heads = self.shape.heads
        page_count = (kv_len + page_size - 1) // page_size
        used = np.arange(table.shape[1]) < page_count.numpy()[:, None]
        pages = torch.from_numpy(table[used].astype(np.int32)).pin_memory()
        for window, wrappers in self.paged.items():
            wrappers[self.turn].plan(
                pinned_starts(query_len),
                pinned_starts(page_count),
                pages.to(self.shape.device, non_blocking=True),
                ((kv_len - 1) % page_size + 1).int().pin_memory(),
                heads.query,
                heads.kv,
                heads.dim,
                page_size,
                window_left=window - 1 if window else -1,
                # Given here it is copied from pinned memory: any other copy waits for the stream.
                seq_lens=kv_len.int().pin_memory(),
                **self.settings,
            )

    def prefill(
        self, layer_index: int, q: Tensor, k_pool: Tensor, v_pool: Tensor, out: Tensor
    ) -> None:
        if self.own:
            super().prefill(layer_index, q, k_pool, v_pool, out)
            return
        window = self.shape.windows[layer_index] or 0
        q, out = q[self.start :], out[self.start :]
        if self.gathered is not None:
            scales = self.shape.scales(layer_index)
            k, v = self.gather(k_pool, v_pool, *self.gathered, scales)
            self.ragged[window][self.turn].run(q, k, v, out=out)
            return
        size = self.batch.page_size
        pools = tuple(pool.view(-1, size, *pool.shape[1:]) for pool in (k_pool, v_pool))
        self.paged[window][self.turn].run(q, pools, out=out)

    def gather(
        self,
        k_pool: Tensor,
        v_pool: Tensor,
        starts: Tensor,
        total: int,
        longest: int,
        scales: tuple[float, float],
    ) -> tuple[Tensor, Tensor]:
        """Keys and values of the rows that are not decode rows, one after the other, as wide as
        the queries."""
        heads, batch = self.shape.heads, self.batch
        like: dict[str, Any] = {"dtype": self.shape.wide_dtype, "device": k_pool.device}
        k, v = (torch.empty((total, heads.kv, heads.dim), **like) for _ in range(2))
        width = heads.kv * heads.dim
        self.kernels.gather_kernel[(len(starts) - 1, -(-longest // GATHER_BLOCK))](
            k_pool,
            v_pool,
            batch.page_table,
            self.table_rows[self.decode_count :],
            starts,
            k,
            v,
            *scales,
            batch.page_table.stride(0),
            WIDTH=width,
            WIDE=1 << (width - 1).bit_length(),
            PAGE=batch.page_size,
            BLOCK=GATHER_BLOCK,
            num_warps=8,
        )
        return k, v


def pinned_starts(lens: Tensor) -> Tensor:
    """int32 [rows + 1] on the host: where each row begins, and where the last one ends."""
    starts: Tensor = torch.nn.functional.pad(lens.cumsum(0), (1, 0)).int().pin_memory()
    return starts
