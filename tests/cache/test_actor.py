"""Goal: the cache answers one life of one scheduler, and outlives it without losing a page."""

from __future__ import annotations

import msgspec
import pytest

from actors.cache.actor import Cache
from actors.runtime.testkit import Cell
from messages.base import Address
from messages.cache import Acquire, Candidate, Commit, Probe, Release, Reserve, Return
from messages.config import CacheConfig, Paths
from messages.scheduler import Acquired, Deferred, Freed, Granted, Probed
from messages.system import Cause, Down, Reason
from messages.types import pack, unpack
from messages.worker import Facts

PATHS = Paths()
FIRST = Address("engine", PATHS.scheduler, 1)
SECOND = Address("engine", PATHS.scheduler, 2)


def make_cell(page_count: int = 16, **config: object) -> Cell:
    facts = Facts("none", 64, 1000, 4, page_count, (), "none", "none")
    cell = Cell(
        Cache(msgspec.convert(config, CacheConfig), PATHS),
        path=PATHS.cache,
        notes={PATHS.worker: msgspec.msgpack.encode(facts)},
    )
    cell.start()
    return cell


def pages_by_state(cell: Cell) -> dict[str, float]:
    return {
        dict(labels)["state"]: value
        for (name, labels), value in cell.context.tally.gauges.items()
        if name == "histrio_pages"
    }


def test_each_question_has_one_answer_to_the_scheduler() -> None:
    cell = make_cell()
    cell.tell(Acquire("a", 1, pack(range(10))), FIRST)
    ((target, acquired),) = cell.take()
    assert target == str(FIRST)
    assert isinstance(acquired, Acquired)
    assert len(unpack(acquired.pages)) == 3
    cell.tell(Acquire("b", 1, pack(range(10))), FIRST)
    cell.tell(Commit("a", 1, 8), FIRST)
    cell.tell(Probe((Candidate(pack(range(10))), Candidate(pack([9] * 10)))), FIRST)
    cell.tell(Reserve(2), FIRST)
    answers = [message for _, message in cell.take()]
    assert answers[0] == Deferred("b", 1, "a")
    assert answers[1] == Probed(pack([8, 0]))
    assert isinstance(answers[2], Granted)
    assert len(answers) == 3


def test_gauges_add_up_to_the_pool_and_follow_it() -> None:
    cell = make_cell()
    assert pages_by_state(cell) == {"free": 16, "leased": 0, "cached": 0, "reserved": 0}
    cell.tell(Acquire("a", 1, pack(range(10))), FIRST)
    cell.tell(Reserve(2), FIRST)
    assert pages_by_state(cell) == {"free": 11, "leased": 3, "cached": 0, "reserved": 2}
    (granted,) = [m for _, m in cell.take() if isinstance(m, Granted)]
    spent, kept = unpack(granted.pages)
    cell.tell(Release("a", 1, pack(range(14)), pack([spent])), FIRST)
    assert pages_by_state(cell) == {"free": 12, "leased": 0, "cached": 3, "reserved": 1}
    cell.tell(Return(pack([kept])), FIRST)
    assert pages_by_state(cell) == {"free": 13, "leased": 0, "cached": 3, "reserved": 0}


def test_freed_is_told_once_to_whoever_lacked_pages() -> None:
    cell = make_cell(page_count=4)
    cell.tell(Acquire("a", 1, pack(range(16))), FIRST)
    cell.tell(Acquire("b", 1, pack(range(50, 60))), FIRST)
    cell.tell(Reserve(1), FIRST)
    cell.take()
    cell.tell(Release("a", 1, pack(range(16))), FIRST)
    assert cell.take() == [(str(FIRST), Freed(4))]
    cell.tell(Acquire("c", 1, pack(range(4))), FIRST)
    cell.tell(Release("c", 1, b""), FIRST)
    assert [type(message) for _, message in cell.take()] == [Acquired]


@pytest.mark.parametrize("is_death_seen", [True, False])
def test_a_dead_schedulers_leases_end_and_its_prefixes_stay(is_death_seen: bool) -> None:
    cell = make_cell()
    cell.tell(Acquire("a", 1, pack(range(10))), FIRST)
    cell.tell(Commit("a", 1, 9), FIRST)
    cell.tell(Reserve(3), FIRST)
    cell.take()
    if is_death_seen:
        cell.actor.on_down(Down(FIRST, Reason(Cause.CRASHED)))
        assert pages_by_state(cell) == {"free": 14, "leased": 0, "cached": 2, "reserved": 0}
        cell.tell(Commit("a", 1, 10), FIRST)  # was in the mailbox behind the news
    cell.tell(Acquire("a", 2, pack(range(10))), SECOND)
    ((target, acquired),) = cell.take()
    assert target == str(SECOND)
    assert isinstance(acquired, Acquired)
    assert acquired.cached_len == 8
    assert pages_by_state(cell) == {"free": 13, "leased": 3, "cached": 0, "reserved": 0}
    cell.tell(Release("a", 1, pack(range(10))), FIRST)
    cell.tell(Return(pack([15])), FIRST)
    assert pages_by_state(cell)["leased"] == 3, "a dead scheduler's words count for nothing"


def test_without_prefix_cache_nothing_is_kept() -> None:
    cell = make_cell(prefix_cache=False)
    for attempt in range(2):
        cell.tell(Acquire("a", attempt, pack(range(10))), FIRST)
        cell.tell(Commit("a", attempt, 10), FIRST)
        cell.tell(Release("a", attempt, pack(range(10))), FIRST)
        ((_, acquired),) = cell.take()
        assert isinstance(acquired, Acquired)
        assert acquired.cached_len == 0
    assert pages_by_state(cell) == {"free": 16, "leased": 0, "cached": 0, "reserved": 0}


def test_an_unknown_eviction_policy_names_those_there_are() -> None:
    with pytest.raises(LookupError, match="fifo, lfu, lru"):
        make_cell(eviction="random")
