"""This file is attention by FlashInfer for prompts, and by our own kernels for decode rows.

FlashInfer's paged prefill runs on Hopper's own instructions where the device has them. Its decode
needs a plan on the host each step; ours reads lengths on the device, so that a captured step can be
replayed, and measures no slower (bench/NOTES.md). The wrappers are planned once a step.

It does not know models. Law: a wrapper is planned again only when two steps have been launched
since: its plan travels through pinned memory.
"""

from __future__ import annotations

import importlib.util
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kernels.attention.base import ATTENTION, AttentionBatch, AttentionShape
from kernels.attention.triton import TritonAttention
from kernels.ops.base import OpsUnavailable

HEAD_DIMS = (64, 128, 256)
WORKSPACE_BYTES = 384 << 20
WRAPPERS = 3  # in turn


@ATTENTION.register("flashinfer")
def flashinfer_attention(shape: AttentionShape) -> FlashInferAttention:
    """Raises OpsUnavailable with the reason."""
    if importlib.util.find_spec("flashinfer") is None:
        raise OpsUnavailable("flashinfer is not installed")
    if importlib.util.find_spec("triton") is None:
        raise OpsUnavailable("triton is not installed")
    if shape.device.type != "cuda":
        raise OpsUnavailable(f"flashinfer has no form for {shape.device.type}")
    if shape.dtype not in (torch.bfloat16, torch.float16):
        raise OpsUnavailable(f"flashinfer has no form for {shape.dtype}")
    if shape.heads.dim not in HEAD_DIMS:
        raise OpsUnavailable(f"flashinfer has no form for heads of {shape.heads.dim}")
    return FlashInferAttention(shape)


class FlashInferAttention(TritonAttention):
    """See `Attention`."""

    def __init__(self, shape: AttentionShape) -> None:
        super().__init__(shape)
        import flashinfer  # only now: its import takes seconds

        workspace = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=shape.device)
        self.wrappers: dict[int, list[Any]] = {
            window or 0: [
                flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD")
                for _ in range(WRAPPERS)
            ]
            for window in dict.fromkeys(shape.windows)
        }
        self.turn = 0
        self.start = 0  # of the first token that is not a decode row's

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
        page_count = (kv_len + batch.page_size - 1) // batch.page_size
        used = np.arange(table.shape[1]) < page_count.numpy()[:, None]
        pages = torch.from_numpy(table[used].astype(np.int32)).pin_memory()
        query_start, page_start = (
            torch.nn.functional.pad(lens.cumsum(0), (1, 0)).int().pin_memory()
            for lens in (query_len, page_count)
        )
        last_page_len = ((kv_len - 1) % batch.page_size + 1).int().pin_memory()
        heads, dtype = self.shape.heads, self.shape.dtype
        for window, wrappers in self.wrappers.items():
            wrappers[self.turn].plan(
                query_start,
                page_start,
                pages.to(self.shape.device, non_blocking=True),
                last_page_len,
                heads.query,
                heads.kv,
                heads.dim,
                batch.page_size,
                causal=True,
                sm_scale=self.shape.scale,
                window_left=window - 1 if window else -1,
                q_data_type=dtype,
                kv_data_type=dtype,
            )

    def prefill(self, q: Tensor, k_pool: Tensor, v_pool: Tensor, out: Tensor, window: int) -> None:
        size = self.batch.page_size
        k, v = (pool.view(-1, size, *pool.shape[1:]) for pool in (k_pool, v_pool))
        self.wrappers[window][self.turn].run(q[self.start :], (k, v), out=out[self.start :])
