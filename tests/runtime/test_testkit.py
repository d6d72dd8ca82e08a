"""Goal: a Cell shows a room's tests all that an actor does, and fails where a node would."""

from __future__ import annotations

from typing import Any

import pytest

from actors.runtime import Actor, Ref, Reply, TimedOut
from actors.runtime.testkit import Cell
from messages.base import Address, Message
from messages.system import Cause
from tests.runtime.players import (
    Add,
    Ask,
    Caller,
    Counter,
    Labourer,
    Relay,
    Settings,
    Sleep,
    Sum,
    Total,
    Watch,
    Work,
)


def test_what_is_sent_can_be_taken() -> None:
    cell = Cell(Caller())
    cell.start()
    cell.tell(Relay("c", 3, times=2))
    assert cell.requests == ["r1", "r1"]
    assert cell.take() == [("c", Add(3)), ("c", Add(3))]
    assert cell.take() == []


def test_start_gives_the_note_and_answers_are_kept() -> None:
    cell = Cell(Counter(Settings(start=4)))
    assert cell.start() == b"ready"
    cell.tell(Sum(), Address("n", "asker", 1))
    assert cell.replies == [Total(4)]


def test_asks_are_answered_by_the_test() -> None:
    cell = Cell(Caller())
    cell.answer = lambda path, message: Reply(Total(9)) if path == "c" else TimedOut(1.0)
    cell.tell(Ask("c"))
    cell.tell(Ask("d"))
    assert cell.actor.outcomes == [Reply(Total(9)), TimedOut(1.0)]  # type: ignore[attr-defined]


def test_an_answer_that_the_actor_does_not_declare_fails() -> None:
    cell = Cell(Caller())
    cell.answer = lambda path, message: Reply(Add(9))
    with pytest.raises(AssertionError, match="not in `answers`"):
        cell.tell(Ask("c"))


def test_watches_and_lives_are_the_tests_to_play() -> None:
    cell = Cell(Caller(), peers_up=["c"])
    cell.tell(Watch("c"))
    cell.down("c")
    cell.up("c")
    seen: list[Any] = cell.actor.seen  # type: ignore[attr-defined]
    assert seen == [("up", 1), ("down", 1, Cause.CRASHED), ("up", 2)]


def test_a_peer_that_is_not_up_is_undelivered() -> None:
    cell = Cell(Caller(), peers_up=[])
    cell.tell(Relay("c", 1))
    (notice,) = cell.actor.seen  # type: ignore[attr-defined]
    assert (notice.cause, notice.kind, notice.request) == (Cause.NOBODY, "Add", "r1")
    assert cell.take() == []


def test_timers_fire_as_time_is_advanced() -> None:
    cell = Cell(Labourer())
    cell.tell(Work("timers"))
    cell.advance(31)
    assert cell.actor.results == [1, 1, 2, 1]  # type: ignore[attr-defined]
    assert (cell.now_s, cell.timer_count) == (31.0, 1)
    cell.stop()
    assert cell.timer_count == 0


def test_offloaded_work_is_done_inline_and_comes_as_a_message() -> None:
    cell = Cell(Labourer())
    cell.tell(Work("offload"))
    cell.tell(Work("in_thread"))
    cell.tell(Work("offload fails"))
    assert cell.actor.results == [42, 42, -1]  # type: ignore[attr-defined]


def test_counts_can_be_looked_at() -> None:
    cell = Cell(Labourer())
    cell.tell(Work("count"))
    assert cell.counters == {"tests_total": 2}


def test_what_an_actor_does_not_accept_fails() -> None:
    with pytest.raises(AssertionError, match="does not accept"):
        Cell(Caller()).tell(Add(1))


def test_a_handler_that_really_waits_fails() -> None:
    with pytest.raises((AssertionError, RuntimeError)):
        Cell(Counter()).tell(Sleep(1))


def test_a_message_that_cannot_travel_fails() -> None:
    class Loose(Message, frozen=True):
        thing: Any

    class Sender(Actor):
        accepts = Add

        def on_add(self, message: Add) -> None:
            peer: Ref[Loose] = self.context.peer("p")
            peer.tell(Loose(object()))

    with pytest.raises(TypeError):
        Cell(Sender()).tell(Add(1))


def test_a_broken_law_of_the_actor_fails() -> None:
    with pytest.raises(AssertionError):
        Cell(Counter()).tell(Add(-1))
