"""This file makes attention's inputs for tests: ragged rows over shuffled pages, pools that are NaN
where no row has a page, results that are NaN until they are written; and what must come out, in
float64, row by row, with nothing of the backends in it.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor

from kernels.attention.base import ATTENTION, Attention, AttentionBatch, AttentionShape
from kernels.ops.base import Heads, OpsUnavailable

Mix = list[tuple[int, int]]  # (query_len, kv_len) of each row

QUERIES = 512  # whose scores the reference holds at once


def batch_of(mix: Mix, page_size: int, device: torch.device, page_count: int) -> AttentionBatch:
    query_len = torch.tensor([query for query, _ in mix], dtype=torch.int32)
    kv_len = torch.tensor([length for _, length in mix], dtype=torch.int32)
    start = torch.zeros(len(mix) + 1, dtype=torch.int32)
    start[1:] = query_len.cumsum(0)
    width = -(-int(kv_len.max()) // page_size)
    pages = torch.randperm(page_count, generator=torch.Generator().manual_seed(1))
    table = torch.zeros((len(mix), width), dtype=torch.int32)
    used = 0
    for row, length in enumerate(kv_len.tolist()):
        count = -(-length // page_size)
        table[row, :count] = pages[used : used + count]
        used += count
    return AttentionBatch(
        table.to(device),
        start.to(device),
        query_len.to(device),
        kv_len.to(device),
        page_size,
        int(query_len.max()),
        int(kv_len.max()),
    )


@dataclass(frozen=True)
class Case:
    """One layer's attention over one batch. `dtype` is that of queries and results."""

    mix: Mix
    heads: Heads
    page_size: int
    dtype: torch.dtype
    window: int | None = None
    softcap: float | None = None
    pool_dtype: torch.dtype | None = None
    scales: tuple[float, float] = (1.0, 1.0)
    made: dict[str, Tensor] = field(default_factory=dict)

    def shape(self, device: torch.device) -> AttentionShape:
        narrow = self.pool_dtype is not None
        return AttentionShape(
            self.heads,
            self.heads.dim**-0.5,
            (self.window,),
            self.pool_dtype or self.dtype,
            device,
            softcap=self.softcap,
            query_dtype=self.dtype if narrow else None,
            kv_scales=(self.scales,) if narrow else (),
        )

    def make(self, device: torch.device) -> tuple[AttentionBatch, Tensor, Tensor, Tensor]:
        """The batch, queries [T, hq, d], pools of keys and values."""
        page_count = sum(-(-length // self.page_size) for _, length in self.mix) + 3
        batch = batch_of(self.mix, self.page_size, device, page_count)
        generator = torch.Generator().manual_seed(2)
        total = sum(query for query, _ in self.mix)
        q = torch.randn((total, self.heads.query, self.heads.dim), generator=generator)
        shape = (page_count * self.page_size, self.heads.kv, self.heads.dim)
        pools = [torch.randn(shape, generator=generator).to(device) for _ in range(2)]
        used = torch.zeros(shape[0], dtype=torch.bool, device=device)
        for row, (_, length) in enumerate(self.mix):
            used[places(batch, row, length)] = True
        for pool in pools:
            pool[~used] = torch.nan  # what no row names must not matter
        k, v = (pool.to(self.pool_dtype or self.dtype) for pool in pools)
        return batch, q.to(device, self.dtype), k, v

    def expected(self, batch: AttentionBatch, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """float64 [T, hq, d]."""
        heads, group = self.heads, self.heads.query // self.heads.kv
        out = torch.empty(q.shape, dtype=torch.float64, device=q.device)
        for row, (count, length) in enumerate(self.mix):
            at = places(batch, row, length)
            keys = k[at].double() * self.scales[0] * heads.dim**-0.5
            values = v[at].double() * self.scales[1]
            begin = int(batch.query_start[row])
            spot = torch.arange(length, device=q.device)
            for first in range(0, count, QUERIES):
                last = min(first + QUERIES, count)
                some = q[begin + first : begin + last].double()
                some = some.view(last - first, heads.kv, group, heads.dim)
                score = torch.einsum("qhgd,khd->hgqk", some, keys)
                if self.softcap is not None:
                    score = self.softcap * torch.tanh(score / self.softcap)
                position = length - count + torch.arange(first, last, device=q.device)[:, None]
                hidden = spot > position
                if self.window is not None:
                    hidden |= spot <= position - self.window
                score.masked_fill_(hidden, -torch.inf)
                mixed = torch.einsum("hgqk,khd->qhgd", score.softmax(-1), values)
                out[begin + first : begin + last] = mixed.flatten(1, 2)
        return out


def places(batch: AttentionBatch, row: int, length: int) -> Tensor:
    """int64 [length]: where the row's keys lie in the pools."""
    at = torch.arange(length, device=batch.page_table.device)
    page = batch.page_table[row, at // batch.page_size].long()
    return page * batch.page_size + at % batch.page_size


def backend_of(name: str, shape: AttentionShape) -> Attention:
    """Skips the test if it can't run here; Triton's interpreter is no reason not to."""
    if shape.device.type == "cpu" and name in ("triton", "fixed"):
        from kernels.attention.fixed import FixedAttention
        from kernels.attention.triton import TritonAttention

        return TritonAttention(shape) if name == "triton" else FixedAttention(shape)
    try:
        return ATTENTION.get(name)(shape)
    except OpsUnavailable as reason:
        pytest.skip(str(reason))


def far(out: Tensor, wanted: Tensor) -> float:
    """Relative distance; NaN never passes."""
    return float((out.double() - wanted).norm() / wanted.norm())


def check(device: torch.device, name: str, case: Case, limit: float) -> None:
    batch, q, k, v = case.make(device)
    wanted = case.expected(batch, q, k, v)
    backend = backend_of(name, case.shape(device))
    backend.plan(batch)
    out = torch.full_like(q, torch.nan)
    backend.attend(0, q, k, v, out)
    error = far(out, wanted)
    assert error < limit, error
