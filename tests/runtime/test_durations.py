"""This file tests the counts of handlers' durations against a sorted list."""

from __future__ import annotations

from math import ceil

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from actors.runtime.durations import BOUNDS_S, LEAST_S, TOTAL_MAX, Durations

WITHIN = 1 / 16 + 1e-9

runs = st.lists(
    st.tuples(st.just(0.0) | st.floats(1e-9, 1e4), st.integers(1, 64)), min_size=1, max_size=60
)


@settings(deadline=None)
@given(runs, st.floats(0.01, 1.0), st.floats(0.01, 1.0))
def test_quantiles_are_near_those_of_the_list(
    added: list[tuple[float, int]], one: float, other: float
) -> None:
    durations = Durations()
    every: list[float] = []
    for each_s, count in added:
        durations.add(each_s, count)
        every += [each_s] * count
        durations.check()
    every.sort()
    shares = sorted((one, other))
    for share, found in zip(shares, durations.quantiles(*shares), strict=True):
        assert found == pytest.approx(
            every[ceil(share * len(every)) - 1] + LEAST_S, rel=WITHIN, abs=0
        )


def test_without_any_there_is_no_quantile() -> None:
    assert Durations().quantiles(0.5, 0.99) == [None, None]


def test_what_is_long_past_is_forgotten() -> None:
    durations = Durations()
    durations.add(1.0, TOTAL_MAX)
    for _ in range(16 * TOTAL_MAX // 64):
        durations.add(0.001, 64)
        durations.check()
    assert durations.quantiles(1.0) == [pytest.approx(0.001, rel=WITHIN)]


def test_one_run_of_more_than_all_that_is_kept_leaves_something() -> None:
    durations = Durations()
    durations.add(1.0, 5 * TOTAL_MAX)
    durations.check()
    assert durations.total > 0


@settings(deadline=None)
@given(st.lists(runs | st.none(), max_size=8), st.integers(1, 2 * TOTAL_MAX))
def test_each_is_taken_once_also_where_it_is_halved(
    steps: list[list[tuple[float, int]] | None], many: int
) -> None:
    durations = Durations()
    counts, total_s, added_s, added = [0] * (len(BOUNDS_S) + 1), 0.0, 0.0, 0

    def take() -> None:
        nonlocal total_s
        found = durations.take()
        if found is not None:
            counts[:] = map(sum, zip(counts, found.counts, strict=True))
            total_s += found.total
        assert durations.take() is None

    for step in steps:
        for each_s, count in step or ():
            durations.add(each_s, count * many)
            added, added_s = added + count * many, added_s + each_s * count * many
            durations.check()
        if step is None:
            take()
    take()
    assert sum(counts) == added
    assert total_s == pytest.approx(added_s)


@pytest.mark.parametrize("bound", range(1, len(BOUNDS_S)))
def test_a_duration_is_taken_below_the_least_bound_that_it_does_not_exceed(bound: int) -> None:
    durations = Durations()
    durations.add((BOUNDS_S[bound - 1] + BOUNDS_S[bound]) / 2, 3)
    found = durations.take()
    assert found is not None and found.counts.index(3) == bound
