"""Attention backends for GPUs agree with the reference on ragged mixes over shuffled pages."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from kernels.attention.base import ATTENTION, AttentionBatch, AttentionShape, SharedPrefix
from kernels.attention.torch import TorchAttention
from kernels.ops.base import Heads, OpsUnavailable

pytestmark = pytest.mark.gpu
# (query_len, kv_len) of each row: decode rows first, then chunks, then a mix
MIXES = {
    "decode": [(1, 1), (1, 17), (1, 130), (1, 700)],
    "prefill": [(5, 5), (33, 33), (140, 140)],
    "chunks": [(16, 100), (70, 71), (1, 40)],
    "mixed": [(1, 300), (1, 64), (90, 130), (1, 1)],
}
LONG = {"decode": [(1, 32_000), (1, 1), (1, 9000)], "prefill": [(4096, 9000), (300, 32_000)]}


def batch_of(
    mix: list[tuple[int, int]], page_size: int, device: torch.device, page_count: int
) -> AttentionBatch:
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


def check(
    device: torch.device,
    name: str,
    mix: list[tuple[int, int]],
    heads: Heads,
    page_size: int,
    dtype: torch.dtype,
    window: int | None,
    limit: float,
) -> None:
    page_count = sum(-(-length // page_size) for _, length in mix) + 3
    shape = AttentionShape(heads, heads.dim**-0.5, (window,), dtype, device)
    if device.type == "cpu":
        from kernels.attention.triton import TritonAttention

        backend = TritonAttention(shape)
    else:
        try:
            backend = ATTENTION.get(name)(shape)
        except OpsUnavailable as reason:
            pytest.skip(str(reason))
    batch = batch_of(mix, page_size, device, page_count)
    generator = torch.Generator().manual_seed(2)
    total = sum(query for query, _ in mix)
    q = torch.randn((total, heads.query, heads.dim), generator=generator).to(device, dtype)
    pool = (page_count * page_size, heads.kv, heads.dim)
    k, v = (torch.randn(pool, generator=generator).to(device, dtype) for _ in range(2))
    used = torch.zeros(page_count * page_size, dtype=torch.bool, device=device)
    for row, (_, length) in enumerate(mix):
        at = torch.arange(length, device=device)
        used[batch.page_table[row, at // page_size].long() * page_size + at % page_size] = True
    k[~used], v[~used] = torch.nan, torch.nan  # what no row names must not matter
    wide = TorchAttention(AttentionShape(heads, heads.dim**-0.5, (window,), dtype, device))
    wide.plan(batch)
    wanted = wide.attend(0, q.float(), k, v)
    backend.plan(batch)
    out = torch.full_like(q, torch.nan)
    backend.attend(0, q, k, v, out)
    error = float((out.double() - wanted.double()).norm() / wanted.double().norm())
    assert error < limit, error


@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize("page_size", [1, 16, 64])
@pytest.mark.parametrize(
    "heads", [Heads(4, 4, 64), Heads(8, 2, 128), Heads(8, 1, 96), Heads(3, 1, 256)], ids=str
)
def test_triton_agrees_in_float32(
    device: torch.device, mix: str, page_size: int, heads: Heads
) -> None:
    check(device, "triton", MIXES[mix], heads, page_size, torch.float32, None, 2e-6)


@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize("window", [1, 33, 100])
def test_triton_keeps_a_sliding_window(device: torch.device, mix: str, window: int) -> None:
    check(device, "triton", MIXES[mix], Heads(4, 2, 64), 16, torch.float32, window, 2e-6)


@pytest.mark.parametrize("name", ["triton", "flashinfer"])
@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize("page_size", [16, 64])
def test_backends_agree_in_bfloat16(
    cuda: torch.device, name: str, mix: str, page_size: int
) -> None:
    check(cuda, name, MIXES[mix], Heads(8, 2, 128), page_size, torch.bfloat16, None, 1e-2)


@pytest.mark.parametrize("name", ["triton", "flashinfer"])
@pytest.mark.parametrize("mix", LONG)
def test_backends_agree_on_long_rows(cuda: torch.device, name: str, mix: str) -> None:
    check(cuda, name, LONG[mix], Heads(8, 2, 128), 16, torch.bfloat16, None, 1e-2)


@pytest.mark.parametrize("heads", [Heads(4, 2, 64), Heads(6, 2, 64), Heads(4, 4, 32)], ids=str)
@pytest.mark.parametrize(
    "sharing", [(True, True, True, True, True), (True, False, True, True, False)]
)
def test_a_shared_prefix_is_read_once_for_many_rows(
    device: torch.device, heads: Heads, sharing: tuple[bool, ...]
) -> None:
    from kernels.attention.triton import TritonAttention

    length, page_size = 96, 16
    mix = [(1, 97), (1, 300), (1, 100), (1, 130), (1, 161)]
    page_count = sum(-(-size // page_size) for _, size in mix) + 1
    batch = batch_of(mix, page_size, device, page_count)
    for row, shares in enumerate(sharing):
        if shares:
            batch.page_table[row, : length // page_size] = batch.page_table[
                0, : length // page_size
            ]
    shape = AttentionShape(heads, heads.dim**-0.5, (None,), torch.float32, device)
    generator = torch.Generator().manual_seed(2)
    q = torch.randn((len(mix), heads.query, heads.dim), generator=generator).to(device)
    pool = (page_count * page_size, heads.kv, heads.dim)
    k, v = (torch.randn(pool, generator=generator).to(device) for _ in range(2))
    reference = TorchAttention(shape)
    reference.plan(batch)
    wanted = reference.attend(0, q, k, v)
    lens = torch.tensor([length * shares for shares in sharing], dtype=torch.int32, device=device)
    source = torch.tensor([2, length], dtype=torch.int32, device=device)
    for prefix in (SharedPrefix(lens, source), SharedPrefix(lens * 0, source * 0)):
        backend = TritonAttention(shape)
        backend.plan(replace(batch, shared=prefix))
        out = torch.full_like(q, torch.nan)
        backend.attend(0, q, k, v, out)
        error = float((out.double() - wanted.double()).norm() / wanted.double().norm())
        assert error < 2e-6, error


def test_rows_that_fill_the_device_are_split_only_where_long(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kernels.attention import triton

    # As if four rows were many: those of up to 64 keys are not split, the others are.
    monkeypatch.setattr(triton, "PROGRAMS_WANTED", 1)
    monkeypatch.setattr(triton, "SPLIT_MIN_CROWDED", 64)
    mix = [(1, 300), (1, 10), (1, 64), (1, 129)]
    check(device, "triton", mix, Heads(8, 2, 64), 16, torch.float32, None, 2e-6)
    check(device, "triton", mix, Heads(8, 2, 64), 16, torch.float32, 50, 2e-6)
