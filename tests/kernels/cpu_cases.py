"""This file is what the tests of the compiled CPU path share: the operators, or a skip that says
why there are none here; weights in each format; a paged batch and its attention in float64.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from kernels.attention.base import AttentionBatch
from kernels.ops.base import OPS, Heads, OpsUnavailable
from kernels.ops.cpu.ops import CpuOps
from kernels.quant.weight import BLOCK_FORMATS, BlockWeight

CPU = torch.device("cpu")


def compiled_ops() -> CpuOps:
    """Skips the calling module where the compiled path can't run."""
    try:
        ops = OPS.get("cpu")(CPU)
    except OpsUnavailable as reason:
        pytest.skip(f"no compiled CPU operators: {reason}", allow_module_level=True)
    assert isinstance(ops, CpuOps)
    return ops


@contextmanager
def threads(ops: CpuOps, count: int) -> Iterator[None]:
    ops.set_threads(count)
    try:
        yield
    finally:
        ops.set_threads(2)


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def block_weight(name: str, n: int, k: int, seed: int = 0) -> BlockWeight:
    """Random bytes are a valid weight in every format, once the float16 scales are numbers."""
    _, block_len, block_bytes = BLOCK_FORMATS[name]
    random = generator(seed)
    count = n * k // block_len
    data = torch.randint(0, 256, (count, block_bytes), dtype=torch.uint8, generator=random)
    scales = (torch.rand((count, 2), generator=random) * 0.1 - 0.02).half().view(torch.uint8)
    match name:
        case "q4_1" | "q5_1" | "q4_k" | "q5_k":
            data[:, :4] = scales
        case "q6_k":
            data[:, -2:] = scales[:, :2]
        case _:
            data[:, :2] = scales[:, :2]
    return BlockWeight(name, data.reshape(n, -1), (n, k))


def relative_error(got: Tensor, want: Tensor) -> float:
    return float((got.double() - want.double()).norm() / want.double().norm())


@dataclass(frozen=True, slots=True, eq=False)
class Paged:
    """Sequences with all their keys and values, of which each row asks about the last tokens."""

    batch: AttentionBatch
    heads: Heads
    q: Tensor  # [T, hq, d]
    k_pool: Tensor
    v_pool: Tensor
    keys: list[Tensor]  # of each row: [kv_len, hkv, d], as the pool holds them
    values: list[Tensor]


def paged(
    heads: Heads,
    kv_lens: list[int],
    query_lens: list[int],
    page_size: int = 16,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    page_seed: int = 0,
) -> Paged:
    """Rows of the pools that no sequence owns are NaN. `seed` decides each row's contents by the
    row's number alone; `page_seed` decides where they lie."""
    needed = [-(-length // page_size) for length in kv_lens]
    page_count = sum(needed) + 3
    order = torch.randperm(page_count, generator=generator(page_seed)).tolist()
    pool_shape = (page_count * page_size, heads.kv, heads.dim)
    k_pool, v_pool = (torch.full(pool_shape, torch.nan, dtype=dtype) for _ in range(2))
    table = torch.full((len(kv_lens), max(needed)), 2**30, dtype=torch.int32)
    keys, values, queries = [], [], []
    for row, (kv_len, query_len) in enumerate(zip(kv_lens, query_lens, strict=True)):
        contents = row_contents(seed * 1000 + row, heads.query, heads.dim)
        pages = torch.tensor([order.pop() for _ in range(needed[row])])
        table[row, : needed[row]] = pages
        at = (pages[:, None] * page_size + torch.arange(page_size)).flatten()[:kv_len]
        k_pool[at] = contents[0, :kv_len, : heads.kv].to(dtype)
        v_pool[at] = contents[1, :kv_len, : heads.kv].to(dtype)
        keys.append(k_pool[at])
        values.append(v_pool[at])
        queries.append(contents[2, kv_len - query_len : kv_len, : heads.query])
    start = torch.tensor([0, *query_lens]).cumsum(0).int()
    batch = AttentionBatch(
        page_table=table,
        query_start=start,
        query_len=torch.tensor(query_lens).int(),
        kv_len=torch.tensor(kv_lens).int(),
        page_size=page_size,
        query_len_max=max(query_lens),
        kv_len_max=max(kv_lens),
    )
    return Paged(batch, heads, torch.cat(queries).contiguous(), k_pool, v_pool, keys, values)


@functools.cache
def row_contents(seed: int, heads: int, dim: int) -> Tensor:
    """Keys, values and queries by position."""
    return torch.randn((3, 1536, heads, dim), generator=generator(seed))


def attention_float64(case: Paged, scale: float, window: int | None) -> Tensor:
    """The dull way, row by row."""
    group = case.heads.query // case.heads.kv
    results = []
    for row, (keys, values) in enumerate(zip(case.keys, case.values, strict=True)):
        start, stop = case.batch.query_start[row : row + 2].tolist()
        q = case.q[start:stop].double()
        kv_len = keys.shape[0]
        wide_keys = keys.double().repeat_interleave(group, dim=1)
        wide_values = values.double().repeat_interleave(group, dim=1)
        scores = torch.einsum("thd,khd->htk", q, wide_keys) * scale
        position = torch.arange(kv_len - q.shape[0], kv_len)[:, None]
        key = torch.arange(kv_len)[None]
        unseen = key > position
        if window is not None:
            unseen |= key <= position - window
        weights = scores.masked_fill(unseen, float("-inf")).softmax(-1)
        results.append(torch.einsum("htk,khd->thd", weights, wide_values))
    return torch.cat(results)
