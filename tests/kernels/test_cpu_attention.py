"""The compiled attention against float64, and its law: bits depend on absolute positions alone."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kernels.attention.base import ATTENTION, AttentionShape
from kernels.ops.base import Heads, OpsUnavailable
from tests.kernels.cpu_cases import (
    CPU,
    Paged,
    attention_float64,
    compiled_ops,
    generator,
    paged,
    relative_error,
    threads,
)

OPS = compiled_ops()
BOTH = [torch.float32, torch.bfloat16]


def attend(case: Paged, window: int | None = None, scale: float = 0.1) -> Tensor:
    shape = AttentionShape(case.heads, scale, (window,), case.k_pool.dtype, CPU)
    backend = ATTENTION.get("cpu")(shape)
    backend.plan(case.batch)
    out = torch.full_like(case.q, torch.nan)
    got = backend.attend(0, case.q, case.k_pool, case.v_pool, out)
    assert got is out
    return out


def tolerance(dtype: torch.dtype) -> float:
    return 2e-6 if dtype == torch.float32 else 8e-3


@pytest.mark.parametrize("dtype", BOTH)
@pytest.mark.parametrize("thread_count", [1, 2])
@pytest.mark.parametrize("page_size", [1, 4, 16, 24])
def test_ragged_mixes_of_prefill_and_decode(
    page_size: int, thread_count: int, dtype: torch.dtype
) -> None:
    kv_lens, query_lens = [70, 1, 33, 200, 16, 64, 65, 130], [70, 1, 1, 37, 16, 1, 2, 1]
    case = paged(Heads(6, 2, 64), kv_lens, query_lens, page_size, dtype)
    with threads(OPS, thread_count):
        got = attend(case)
    assert relative_error(got, attention_float64(case, 0.1, None)) < tolerance(dtype)


@pytest.mark.parametrize("dtype", BOTH)
@pytest.mark.parametrize(
    "heads",
    [
        Heads(9, 3, 64),
        Heads(1, 1, 16),
        Heads(4, 4, 80),
        Heads(8, 1, 96),
        Heads(4, 2, 128),
        Heads(2, 1, 256),
        Heads(48, 1, 32),
        Heads(7, 1, 48),
    ],
)
def test_head_shapes(heads: Heads, dtype: torch.dtype) -> None:
    case = paged(heads, [90, 20, 5], [90, 1, 3], 16, dtype)
    assert relative_error(attend(case), attention_float64(case, 0.1, None)) < tolerance(dtype)


@pytest.mark.parametrize("dtype", BOTH)
@pytest.mark.parametrize("window", [1, 5, 16, 64, 100, 600])
def test_sliding_windows(window: int, dtype: torch.dtype) -> None:
    case = paged(Heads(4, 2, 64), [300, 150, 7, 1200], [300, 1, 7, 2], 16, dtype)
    got = attend(case, window)
    assert relative_error(got, attention_float64(case, 0.1, window)) < tolerance(dtype)


@pytest.mark.parametrize("dtype", BOTH)
@pytest.mark.parametrize("kv_len", [511, 512, 513, 1024, 1500])
def test_long_contexts_in_segments(kv_len: int, dtype: torch.dtype) -> None:
    case = paged(Heads(3, 1, 64), [kv_len], [1], 16, dtype)
    for thread_count in (1, 2):  # with two, the segments are shared out
        with threads(OPS, thread_count):
            got = attend(case)
        assert relative_error(got, attention_float64(case, 0.1, None)) < tolerance(dtype)


@pytest.mark.parametrize("dtype", BOTH)
@pytest.mark.parametrize("seed", range(8))
def test_random_batches_are_close_to_float64(seed: int, dtype: torch.dtype) -> None:
    random = generator(seed)

    def draw(low: int, high: int) -> int:
        return int(torch.randint(low, high + 1, (1,), generator=random))

    kv = draw(1, 3)
    heads = Heads(kv * draw(1, 8), kv, 16 * draw(1, 6))
    kv_lens = [draw(1, 1500) for _ in range(draw(1, 6))]
    query_lens = [min(length, [1, draw(1, 8), draw(1, 400)][draw(0, 2)]) for length in kv_lens]
    case = paged(heads, kv_lens, query_lens, draw(1, 40), dtype, seed, page_seed=seed)
    window = [None, None, draw(1, 700)][draw(0, 2)]
    got = attend(case, window)
    assert relative_error(got, attention_float64(case, 0.1, window)) < tolerance(dtype)


@pytest.mark.parametrize("dtype", BOTH)
@pytest.mark.parametrize(
    ("kv_lens", "query_lens"),
    [
        ([1500], [1]),  # few pieces: cut into segments of keys
        ([20] * 20 + [1500], [1] * 21),  # one row is most of the work
        ([1400] * 9, [1] * 9),  # the kv heads of a row are one piece
        ([1500], [400]),
        ([1500, 90, 33], [30, 90, 1]),  # smaller tiles
    ],
)
def test_bits_do_not_depend_on_how_work_is_shared_out(
    kv_lens: list[int], query_lens: list[int], dtype: torch.dtype
) -> None:
    case = paged(Heads(6, 2, 32), kv_lens, query_lens, 16, dtype)
    results = []
    for thread_count in (1, 2, 5):
        with threads(OPS, thread_count):
            results.append(attend(case))
    assert relative_error(results[0], attention_float64(case, 0.1, None)) < tolerance(dtype)
    assert all(torch.equal(each, results[0]) for each in results)


@pytest.mark.parametrize("dtype", BOTH)
@pytest.mark.parametrize("window", [None, 40, 300])
def test_bits_do_not_depend_on_chunks_pages_company_or_threads(
    window: int | None, dtype: torch.dtype
) -> None:
    heads, kv_len = Heads(6, 2, 64), 700
    whole = attend(paged(heads, [kv_len], [kv_len], 16, dtype), window)
    for page_size, chunk in ((1, 350), (4, 100), (16, 1), (16, 7), (16, 64), (64, 333)):
        for thread_count in (1, 2):
            with threads(OPS, thread_count):
                for stop in (kv_len, 641, 513, 129, 15):
                    count = min(chunk, stop)
                    # Row 0 has the same contents whatever the rest; company comes after it.
                    case = paged(
                        heads, [stop, 50, 200], [count, 1, 30], page_size, dtype, page_seed=stop
                    )
                    got = attend(case, window)[:count]
                    want = whole[stop - count : stop]
                    assert torch.equal(got, want), (page_size, chunk, stop, thread_count)


def test_hostile_queries_and_keys_do_not_crash_and_stay_in_their_row() -> None:
    for dtype in BOTH:
        case = paged(Heads(4, 2, 64), [70, 33, 40], [1, 1, 2], 16, dtype)
        want = attend(case)
        case.q[1, 0, 3] = torch.nan
        case.q[1, 1, 3] = torch.inf
        case.q[1, 2] = 1e30
        got = attend(case)
        assert torch.equal(got[[0, 2, 3]], want[[0, 2, 3]])
        assert got[1, 0].isnan().all() and torch.equal(got[1, 3], want[1, 3])


def test_large_scores_do_not_overflow() -> None:
    case = paged(Heads(3, 1, 64), [100], [100])
    got = attend(case, scale=50.0)
    assert relative_error(got, attention_float64(case, 50.0, None)) < 1e-3


def test_later_keys_may_be_poisoned_over_a_float32_pool() -> None:
    case = paged(Heads(3, 1, 64), [100], [60])
    want = attend(case)
    page, within = divmod(80, 16)
    row = int(case.batch.page_table[0, page]) * 16 + within
    case.k_pool[row] = torch.nan
    case.v_pool[row] = torch.nan
    got = attend(case)
    assert torch.equal(got[:40], want[:40]) and got[40:].isnan().all()


def test_unsupported_shapes_are_refused_with_a_reason() -> None:
    for heads, dtype in (
        (Heads(2, 1, 40), torch.float32),
        (Heads(193, 1, 64), torch.float32),
        (Heads(2, 1, 64), torch.float16),
    ):
        with pytest.raises(OpsUnavailable, match="no form for"):
            ATTENTION.get("cpu")(AttentionShape(heads, 1.0, (None,), dtype, CPU))


def test_an_output_is_made_if_none_is_given() -> None:
    case = paged(Heads(2, 1, 64), [5], [5])
    backend = ATTENTION.get("cpu")(AttentionShape(case.heads, 0.1, (None,), torch.float32, CPU))
    backend.plan(case.batch)
    got = backend.attend(0, case.q, case.k_pool, case.v_pool)
    assert torch.equal(got, attend(case))
