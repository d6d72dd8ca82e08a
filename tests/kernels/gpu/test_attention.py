"""Attention backends for GPUs agree with float64 on ragged mixes over shuffled pages."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from kernels.attention.base import ATTENTION, SharedPrefix
from kernels.attention.torch import TorchAttention
from kernels.ops.base import Heads, OpsUnavailable
from kernels.settle import RunnerOptions, settle_attention
from tests.kernels.gpu.cases import Case, Mix, backend_of, batch_of, check, far

pytestmark = pytest.mark.gpu
# Rows of one query first, then chunks, then a mix
MIXES: dict[str, Mix] = {
    "decode": [(1, 1), (1, 17), (1, 130), (1, 700)],
    "prefill": [(5, 5), (33, 33), (140, 140)],
    "chunks": [(16, 100), (70, 71), (1, 40)],
    "mixed": [(1, 300), (1, 64), (90, 130), (1, 1)],
}
LONG: dict[str, Mix] = {
    "decode": [(1, 32_000), (1, 1), (1, 9000)],
    "prefill": [(4096, 9000), (300, 32_000)],
}
OWN = ["triton", "fixed"]
EACH = [*OWN, "flashinfer"]
EXACT = 2e-6  # float32
CLOSE = 1e-2  # bfloat16
PAGES = (16, 1, 64)
KINDS: tuple[tuple[int | None, float | None], ...] = (  # window, soft cap
    (None, None),
    (100, None),
    (None, 2.0),
    (33, 2.0),
)


@pytest.mark.parametrize("name", OWN)
@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize("page_size", [1, 16, 64])
@pytest.mark.parametrize(
    "heads", [Heads(4, 4, 64), Heads(8, 2, 128), Heads(8, 1, 96), Heads(3, 1, 256)], ids=str
)
def test_own_kernels_agree_in_float32(
    device: torch.device, name: str, mix: str, page_size: int, heads: Heads
) -> None:
    check(device, name, Case(MIXES[mix], heads, page_size, torch.float32), EXACT)


@pytest.mark.parametrize("name", OWN)
@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize(
    ("window", "softcap"), [(1, None), (33, None), (100, None), (None, 2.0), (33, 2.0)]
)
def test_own_kernels_keep_windows_and_soft_caps(
    device: torch.device, name: str, mix: str, window: int | None, softcap: float | None
) -> None:
    case = Case(MIXES[mix], Heads(4, 2, 64), 16, torch.float32, window, softcap)
    check(device, name, case, 5e-6)


@pytest.mark.parametrize("name", ["triton", "torch"])
@pytest.mark.parametrize("dim", [64, 96, 128, 256])
@pytest.mark.parametrize("group", range(1, 9))
def test_head_sizes_and_groups_agree_in_bfloat16(
    cuda: torch.device, name: str, dim: int, group: int
) -> None:
    window, softcap = KINDS[(group + dim // 32) % len(KINDS)]
    for nth, mix in enumerate(MIXES.values()):
        page_size = PAGES[(group + nth) % len(PAGES)] if name == "torch" else PAGES[group % 3]
        heads = Heads(2 * group, 2, dim)
        check(cuda, name, Case(mix, heads, page_size, torch.bfloat16, window, softcap), CLOSE)


@pytest.mark.parametrize("dim", [64, 96, 128, 256])
@pytest.mark.parametrize("group", [1, 3, 4, 8])
def test_fixed_order_agrees_in_bfloat16(cuda: torch.device, dim: int, group: int) -> None:
    window, softcap = KINDS[(group + dim // 32) % len(KINDS)]
    for mix in MIXES.values():
        heads = Heads(2 * group, 2, dim)
        check(cuda, "fixed", Case(mix, heads, 16, torch.bfloat16, window, softcap), CLOSE)


@pytest.mark.parametrize(
    ("dim", "window", "softcap"),
    [(64, None, None), (128, None, None), (128, 33, None), (256, 33, 2.0)],
)
def test_flashinfer_agrees_in_bfloat16(
    cuda: torch.device, dim: int, window: int | None, softcap: float | None
) -> None:
    """All groups and page sizes. Each of these takes its compiler minutes; they are what Llama,
    Qwen, Mistral and Gemma 2 need."""
    for group in range(1, 9):
        for nth, mix in enumerate(MIXES.values()):
            page_size = PAGES[(group + nth) % len(PAGES)]
            heads = Heads(2 * group, 2, dim)
            case = Case(mix, heads, page_size, torch.bfloat16, window, softcap)
            check(cuda, "flashinfer", case, CLOSE)


def test_flashinfer_that_cannot_be_built_is_not_used(
    cuda: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("flashinfer")
    from kernels.attention.flashinfer import FlashInferAttention

    def broken(self: FlashInferAttention, *starts: torch.Tensor) -> None:
        raise RuntimeError("Could not find nvcc\nand much more")

    monkeypatch.setattr(FlashInferAttention, "plan_ragged", broken)
    shape = Case([(1, 1)], Heads(2, 1, 64), 16, torch.bfloat16).shape(cuda)
    with pytest.raises(OpsUnavailable, match="can't build its kernels: Could not find nvcc$"):
        ATTENTION.get("flashinfer")(shape)
    notes: list[str] = []
    found = settle_attention(RunnerOptions(), shape, notes)
    assert type(found).__name__ == "TritonAttention"
    assert notes[0].startswith("attention 'flashinfer' not used: flashinfer can't build")


@pytest.mark.parametrize("name", EACH)
@pytest.mark.parametrize("mix", LONG)
def test_backends_agree_on_long_rows(cuda: torch.device, name: str, mix: str) -> None:
    check(cuda, name, Case(LONG[mix], Heads(8, 2, 128), 16, torch.bfloat16), CLOSE)


@pytest.mark.parametrize("name", [*OWN, "torch"])
@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize("heads", [Heads(4, 2, 64), Heads(3, 1, 96)], ids=str)
def test_pools_of_fp8_are_read_with_their_scales(
    device: torch.device, name: str, mix: str, heads: Heads
) -> None:
    case = Case(
        MIXES[mix],
        heads,
        16,
        torch.float32,
        window=100,
        pool_dtype=torch.float8_e4m3fn,
        scales=(0.5, 3.0),
    )
    check(device, name, case, EXACT)


@pytest.mark.parametrize("name", EACH)
@pytest.mark.parametrize("mix", MIXES)
def test_pools_of_fp8_agree_in_bfloat16(cuda: torch.device, name: str, mix: str) -> None:
    case = Case(
        MIXES[mix],
        Heads(8, 2, 128),
        16,
        torch.bfloat16,
        pool_dtype=torch.float8_e4m3fn,
        scales=(0.7, 1.3),
    )
    check(cuda, name, case, CLOSE)


@pytest.mark.parametrize("heads", [Heads(4, 2, 64), Heads(6, 2, 64), Heads(4, 4, 32)], ids=str)
@pytest.mark.parametrize(
    "sharing", [(True, True, True, True, True), (True, False, True, True, False)]
)
def test_a_shared_prefix_is_read_once_for_many_rows(
    device: torch.device, heads: Heads, sharing: tuple[bool, ...]
) -> None:
    length, page_size = 96, 16
    mix = [(1, 97), (1, 300), (1, 100), (1, 130), (1, 161)]
    page_count = sum(-(-size // page_size) for _, size in mix) + 1
    batch = batch_of(mix, page_size, device, page_count)
    for row, shares in enumerate(sharing):
        if shares:
            batch.page_table[row, : length // page_size] = batch.page_table[
                0, : length // page_size
            ]
    case = Case(mix, heads, page_size, torch.float32)
    shape = case.shape(device)
    generator = torch.Generator().manual_seed(2)
    q = torch.randn((len(mix), heads.query, heads.dim), generator=generator).to(device)
    pool = (page_count * page_size, heads.kv, heads.dim)
    k, v = (torch.randn(pool, generator=generator).to(device) for _ in range(2))
    wanted = case.expected(batch, q, k, v)
    lens = torch.tensor([length * shares for shares in sharing], dtype=torch.int32, device=device)
    source = torch.tensor([2, length], dtype=torch.int32, device=device)
    for prefix in (SharedPrefix(lens, source), SharedPrefix(lens * 0, source * 0)):
        backend = backend_of("triton", shape)
        backend.plan(replace(batch, shared=prefix))
        out = torch.full_like(q, torch.nan)
        backend.attend(0, q, k, v, out)
        assert far(out, wanted) < EXACT


def test_rows_that_fill_the_device_are_split_only_where_long(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kernels.attention import triton

    # As if four rows were many: those of up to 64 keys are not split, the others are.
    monkeypatch.setattr(triton, "PROGRAMS_WANTED", 1)
    monkeypatch.setattr(triton, "SPLIT_MIN_CROWDED", 64)
    mix = [(1, 300), (1, 10), (1, 64), (1, 129)]
    check(device, "triton", Case(mix, Heads(8, 2, 64), 16, torch.float32), EXACT)
    check(device, "triton", Case(mix, Heads(8, 2, 64), 16, torch.float32, 50), EXACT)


@pytest.mark.parametrize("count", [3, 7, 13, 40, 90, 150])
def test_rows_of_any_number_agree_however_they_are_split(device: torch.device, count: int) -> None:
    """Each number of rows has its own splits, blocks and stages."""
    lens = [1 + 37 * row % 190 for row in range(count - 3)]
    mix = [(1, length) for length in (2100, *lens, 1025, 64)]
    check(device, "triton", Case(mix, Heads(16, 8, 64), 16, torch.bfloat16), CLOSE)


def test_the_reference_is_what_it_says(device: torch.device) -> None:
    """Torch's backend, which all else was measured against before."""
    case = Case(MIXES["mixed"], Heads(4, 2, 64), 16, torch.float32, 33, 2.0)
    batch, q, k, v = case.make(device)
    reference = TorchAttention(case.shape(device))
    reference.plan(batch)
    assert far(reference.attend(0, q, k, v), case.expected(batch, q, k, v)) < 5e-6
