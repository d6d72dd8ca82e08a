"""Goal: the decisions of a supervisor, for every strategy. Method: the examples of the rules, and
random deaths against a dull count."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from actors.runtime.restart import Again, Child, GiveUp, Leave, Restarts
from actors.runtime.spec import Restart, Strategy

P, T, X = Restart.PERMANENT, Restart.TRANSIENT, Restart.TEMPORARY


def restarts(
    strategy: Strategy = Strategy.ONE_FOR_ONE,
    kinds: tuple[Restart, ...] = (P, P, P),
    *,
    restarts_max: int = 5,
    window_s: float = 30.0,
    seed: int = 0,
) -> Restarts:
    children = [Child(name, kind) for name, kind in zip("abcdef", kinds, strict=False)]
    return Restarts(
        children,
        strategy,
        restarts_max=restarts_max,
        window_s=window_s,
        backoff_first_s=0.1,
        backoff_max_s=1.0,
        rng=random.Random(seed),
    )


@pytest.mark.parametrize(
    ("strategy", "stops", "starts"),
    [
        (Strategy.ONE_FOR_ONE, (), ("b",)),
        (Strategy.ONE_FOR_ALL, ("c", "a"), ("a", "b", "c")),
        (Strategy.REST_FOR_ONE, ("c",), ("b", "c")),
    ],
)
def test_whom_each_strategy_restarts(
    strategy: Strategy, stops: tuple[str, ...], starts: tuple[str, ...]
) -> None:
    assert restarts(strategy).died({"b"}, {"b"}, 0.0) == Again(stops, starts, 0.0)


def test_a_transient_child_is_restarted_only_after_an_abnormal_end() -> None:
    memory = restarts(kinds=(T, P))
    assert memory.died({"a"}, set(), 0.0) == Leave()
    assert restarts(kinds=(T, P)).died({"a"}, {"a"}, 0.0) == Again((), ("a",), 0.0)


def test_a_permanent_child_is_restarted_after_a_normal_end_too() -> None:
    assert restarts().died({"a"}, set(), 0.0) == Again((), ("a",), 0.0)


def test_a_temporary_child_stops_with_its_siblings_and_stays_away() -> None:
    memory = restarts(Strategy.ONE_FOR_ALL, (P, X, P))
    assert memory.died({"a"}, {"a"}, 0.0) == Again(("c", "b"), ("a", "c"), 0.0)
    memory.check()


def test_a_finished_child_is_not_restarted_with_its_siblings() -> None:
    memory = restarts(Strategy.ONE_FOR_ALL, (P, T, P))
    assert memory.died({"b"}, set(), 0.0) == Leave()
    assert memory.died({"a"}, {"a"}, 1.0) == Again(("c",), ("a", "c"), 0.0)


def test_deaths_of_one_moment_count_once() -> None:
    memory = restarts(restarts_max=1)
    assert memory.died({"a", "c"}, {"a", "c"}, 0.0) == Again((), ("a", "c"), 0.0)
    assert isinstance(memory.died({"a"}, {"a"}, 1.0), GiveUp)


def test_rest_for_one_goes_from_the_first_of_several_dead() -> None:
    memory = restarts(Strategy.REST_FOR_ONE, (P, P, P, P))
    assert memory.died({"d", "b"}, {"d", "b"}, 0.0) == Again(("c",), ("b", "c", "d"), 0.0)


def test_waits_double_up_to_the_limit_with_jitter_from_the_seed() -> None:
    delays = []
    for seed in (1, 1, 2):
        memory = restarts(restarts_max=10, seed=seed)
        found = [memory.died({"a"}, {"a"}, float(i)) for i in range(7)]
        delays.append([d.delay_s for d in found if isinstance(d, Again)])
    assert delays[0] == delays[1] != delays[2]
    assert delays[0][0] == 0.0
    for delay_s, full_s in zip(delays[0][1:], (0.1, 0.2, 0.4, 0.8, 1.0, 1.0), strict=True):
        assert full_s / 2 <= delay_s <= full_s


@given(
    st.sampled_from(list(Strategy)),
    st.lists(st.sampled_from([P, T, X]), min_size=1, max_size=5),
    st.lists(
        st.tuples(st.sets(st.integers(0, 4), min_size=1), st.booleans(), st.floats(0, 8)),
        max_size=20,
    ),
)
def test_random_deaths_keep_the_laws(
    strategy: Strategy,
    kinds: list[Restart],
    deaths: list[tuple[set[int], bool, float]],
) -> None:
    memory = restarts(strategy, tuple(kinds), restarts_max=3, window_s=10.0)
    now_s = 0.0
    alive = set(memory.order)
    happened: list[float] = []
    for indexes, is_abnormal, wait_s in deaths:
        now_s += wait_s
        dead = {memory.order[i % len(kinds)] for i in indexes} & alive
        if not dead:
            continue
        alive -= dead
        decision = memory.died(dead, dead if is_abnormal else set(), now_s)
        memory.check()
        recent = [t for t in happened if t > now_s - 10.0]
        match decision:
            case Leave():
                assert all(memory.children[n].restart is not P for n in dead)
            case Again(stops, starts, delay_s):
                assert len(recent) < 3
                assert (delay_s == 0.0) == (not recent)
                assert set(stops) <= alive
                assert list(starts) == [n for n in memory.order if n in starts]
                assert list(stops) == [n for n in reversed(memory.order) if n in stops]
                assert all(memory.children[n].restart is not X or n in alive for n in starts)
                alive = (alive - set(stops)) | set(starts)
                happened.append(now_s)
            case GiveUp():
                assert len(recent) == 3
                return
        permanent = {n for n in memory.order if memory.children[n].restart is P}
        assert permanent <= alive


def test_a_clock_that_loses_its_last_bit_does_not_go_back() -> None:
    core = restarts()
    for now_s in (9.993533899304799, 9.9935338993048, 9.993533899304794):
        core.died({"a"}, {"a"}, now_s)
        core.check()
    assert len(core.times) == 3
