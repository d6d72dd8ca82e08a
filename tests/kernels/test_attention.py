"""The torch backend against a dull model: one query at a time, in float64, over lists of keys."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kernels.attention.base import ATTENTION, AttentionBatch, AttentionShape
from kernels.ops.base import Heads

CPU = torch.device("cpu")
Row = tuple[int, int]  # (keys before this step, queries of this step)

rows_of_a_step = st.lists(
    st.tuples(st.integers(0, 300), st.integers(1, 40)), min_size=1, max_size=6
) | st.lists(st.tuples(st.integers(0, 150), st.just(1)), min_size=1, max_size=9)


class Case:
    """Random queries, keys and values, laid into a pool that is NaN elsewhere."""

    def __init__(self, rows: list[Row], heads: Heads, page_size: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.rows, self.heads, self.page_size = rows, heads, page_size

        def random(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator)

        self.q = [random(count, heads.query, heads.dim) for _, count in rows]
        self.k = [random(before + count, heads.kv, heads.dim) for before, count in rows]
        self.v = [random(before + count, heads.kv, heads.dim) for before, count in rows]
        page_counts = [-(-len(keys) // page_size) for keys in self.k]
        pages = torch.randperm(sum(page_counts) + 3, generator=generator)[3:].tolist()
        pool_shape = ((sum(page_counts) + 3) * page_size, heads.kv, heads.dim)
        self.k_pool = torch.full(pool_shape, torch.nan)
        self.v_pool = torch.full(pool_shape, torch.nan)
        self.page_table = torch.full((len(rows), max(page_counts) + 1), 10**6, dtype=torch.int32)
        for row, count in enumerate(page_counts):
            own, pages = pages[:count], pages[count:]
            self.page_table[row, :count] = torch.tensor(own, dtype=torch.int32)
            for position in range(len(self.k[row])):
                at = own[position // page_size] * page_size + position % page_size
                self.k_pool[at], self.v_pool[at] = self.k[row][position], self.v[row][position]

    def batch(self, chosen: list[int] | None = None) -> AttentionBatch:
        chosen = list(range(len(self.rows))) if chosen is None else chosen
        query_len = torch.tensor([self.rows[row][1] for row in chosen], dtype=torch.int32)
        kv_len = torch.tensor([sum(self.rows[row]) for row in chosen], dtype=torch.int32)
        start = torch.zeros(len(chosen) + 1, dtype=torch.int32)
        start[1:] = query_len.cumsum(0)
        return AttentionBatch(
            self.page_table[chosen],
            start,
            query_len,
            kv_len,
            self.page_size,
            int(query_len.max()),
            int(kv_len.max()),
        )

    def expected(self, window: int | None) -> Tensor:
        results = []
        group = self.heads.query // self.heads.kv
        for (before, count), q, k, v in zip(self.rows, self.q, self.k, self.v, strict=True):
            k, v = (each.double().repeat_interleave(group, 1) for each in (k, v))
            for nth in range(count):
                end = before + nth + 1
                begin = 0 if window is None else max(0, end - window)
                scores = torch.einsum("hd,khd->hk", q[nth].double(), k[begin:end])
                weights = (scores * self.heads.dim**-0.5).softmax(-1)
                results.append(torch.einsum("hk,khd->hd", weights, v[begin:end]))
        return torch.stack(results)


def attend(case: Case, window: int | None, chosen: list[int] | None = None) -> Tensor:
    shape = AttentionShape(case.heads, case.heads.dim**-0.5, (window,), torch.float32, CPU)
    attention = ATTENTION.get("torch")(shape)
    attention.plan(case.batch(chosen))
    chosen = list(range(len(case.rows))) if chosen is None else chosen
    q = torch.cat([case.q[row] for row in chosen])
    return attention.attend(0, q, case.k_pool, case.v_pool)


@settings(max_examples=40)
@given(
    rows=rows_of_a_step,
    heads=st.sampled_from([Heads(4, 2, 16), Heads(3, 1, 8), Heads(2, 2, 10)]),
    page_size=st.sampled_from([1, 3, 16, 200]),
    window=st.sampled_from([None, 1, 5, 130]),
    seed=st.integers(0, 1000),
)
def test_ragged_batches_are_exact(
    rows: list[Row], heads: Heads, page_size: int, window: int | None, seed: int
) -> None:
    case = Case(rows, heads, page_size, seed)
    got = attend(case, window)
    assert torch.allclose(got.double(), case.expected(window), atol=2e-5, rtol=1e-5)


@settings(max_examples=25)
@given(rows=rows_of_a_step, window=st.sampled_from([None, 7]), seed=st.integers(0, 1000))
def test_a_row_has_the_same_bits_alone(rows: list[Row], window: int | None, seed: int) -> None:
    case = Case(rows, Heads(4, 2, 16), 4, seed)
    together = attend(case, window).split([count for _, count in rows])
    for row, expected in enumerate(together):
        assert torch.equal(attend(case, window, [row]), expected)


@pytest.mark.parametrize("window", [None, 9])
def test_chunks_give_the_same_bits_as_the_whole(window: int | None) -> None:
    heads = Heads(4, 2, 16)
    whole = Case([(0, 150)], heads, 16, 1)
    expected = attend(whole, window)
    for begin, end in ((0, 1), (0, 17), (17, 90), (90, 91), (130, 150)):
        part = Case([(0, 150)], heads, 16, 1)
        part.rows, part.q = [(begin, end - begin)], [whole.q[0][begin:end]]
        assert torch.equal(attend(part, window), expected[begin:end])


def test_products_one_by_one_give_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case([(10, 20), (200, 1)], Heads(4, 2, 16), 16, 0)
    expected = attend(case, None)
    monkeypatch.setattr("kernels.ops.exact.bmm_is_placeless", lambda *a, **k: False)
    got = attend(case, None)
    assert torch.allclose(got, expected, atol=1e-6)


def test_a_broken_sequence_spoils_no_other() -> None:
    case = Case([(5, 3), (40, 2), (7, 1)], Heads(4, 2, 16), 4, 2)
    expected = attend(case, None)
    broken = int(case.page_table[1, 0]) * 4
    case.k_pool[broken] = torch.nan
    case.v_pool[broken] = torch.inf
    got = attend(case, None)
    assert torch.equal(got[:3], expected[:3]) and torch.equal(got[5:], expected[5:])
    assert not got[3:5].isfinite().all()


def test_out_is_written_and_returned() -> None:
    case = Case([(0, 5)], Heads(4, 2, 16), 4, 3)
    shape = AttentionShape(case.heads, 0.25, (None,), torch.float32, CPU)
    attention = ATTENTION.get("torch")(shape)
    attention.plan(case.batch())
    out = torch.full((5, 4, 16), torch.nan)
    got = attention.attend(0, case.q[0], case.k_pool, case.v_pool, out=out)
    assert got is out and torch.equal(out, attend(case, None))
