"""Goal: the small parts of the runtime keep their laws: timers, tally, dead letters, codec,
directory, crew, clock, names of pipes."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from actors.runtime.clock import rng_for
from actors.runtime.codec import (
    Decoder,
    Unreadable,
    decode_arguments,
    encode,
    kind_of,
    load_factory,
)
from actors.runtime.crew import Crew
from actors.runtime.directory import Change, Entry, Notes
from actors.runtime.letters import LINE_INTERVAL_S, RING_LEN, DeadLetters, Letter
from actors.runtime.tally import SERIES_MAX, Counted, Tally
from actors.runtime.timers import Timers
from actors.runtime.transport.routes import ROUTES_MAX, Route, Routes
from messages.base import Address
from messages.system import Cause, Known, Reason, State
from tests.runtime.nodes import DEADLINE_S
from tests.runtime.players import Add, Counter, Settings, Text

# Timers


class Alarms:
    """Alarms that ring when told."""

    def __init__(self) -> None:
        self.rings: list[tuple[float, Callable[[], None], list[bool]]] = []
        self.ticks: list[tuple[Any, tuple[Any, int]]] = []
        self.timers = Timers(self.call_later, lambda m, tick: self.ticks.append((m, tick)))

    def call_later(self, delay_s: float, ring: Callable[[], None]) -> Any:
        cancelled = [False]
        self.rings.append((delay_s, ring, cancelled))

        class Alarm:
            def cancel(self) -> None:
                cancelled[0] = True

        return Alarm()

    def ring(self) -> None:
        """All that were set before now and not cancelled."""
        rings, self.rings = self.rings, []
        for _, ring, cancelled in rings:
            if not cancelled[0]:
                ring()


def test_a_timer_once_is_gone_after_its_tick() -> None:
    alarms = Alarms()
    alarms.timers.start("k", "m", after_s=1.0, every_s=None)
    alarms.ring()
    ((message, tick),) = alarms.ticks
    assert message == "m" and alarms.timers.accept(tick)
    assert not alarms.timers.accept(tick) and len(alarms.timers) == 0


def test_a_tick_of_a_replaced_timer_is_not_handled() -> None:
    alarms = Alarms()
    alarms.timers.start("k", "old", after_s=1.0, every_s=None)
    alarms.ring()
    alarms.timers.start("k", "new", after_s=1.0, every_s=None)
    assert not alarms.timers.accept(alarms.ticks[0][1])
    alarms.ring()
    assert alarms.timers.accept(alarms.ticks[1][1])


def test_a_tick_of_a_cancelled_timer_is_not_handled() -> None:
    alarms = Alarms()
    alarms.timers.start("k", "m", after_s=1.0, every_s=None)
    alarms.ring()
    alarms.timers.cancel("k")
    assert not alarms.timers.accept(alarms.ticks[0][1])


def test_a_slow_actor_gets_one_tick_not_a_backlog() -> None:
    alarms = Alarms()
    alarms.timers.start("k", "m", after_s=None, every_s=1.0)
    for _ in range(5):
        alarms.ring()
    assert len(alarms.ticks) == 1
    assert alarms.timers.accept(alarms.ticks[0][1])
    alarms.ring()
    assert len(alarms.ticks) == 2


# Tally


def test_a_tally_counts_each_thing_once_over_flushes() -> None:
    dirty: list[int] = []
    tally = Tally(lambda: dirty.append(1))
    assert not tally.is_dirty
    tally.count("a", 2, (("x", "1"),))
    tally.count("a", 3, (("x", "1"),))
    tally.gauge("g", 7, ())
    tally.observe("h", 0.5, (0.1, 1.0), ())
    tally.observe("h", 5.0, (0.1, 1.0), ())
    assert dirty == [1]
    flush = tally.take("n")
    assert [(c.name, c.increase) for c in flush.counters] == [("a", 5)]
    assert [(h.counts, h.total) for h in flush.histograms] == [((0, 1, 1), 5.5)]
    assert not tally.is_dirty
    assert tally.take("n").counters == ()
    tally.gauge("g", 1, ())
    assert dirty == [1, 1]


def test_what_others_have_counted_is_added_to_what_was_observed() -> None:
    tally = Tally()
    tally.observe("h", 0.5, (0.1, 1.0), ())
    tally.observe("h", 0.25, (0.1, 1.0), (), times=2)
    tally.add("h", Counted((2, 3, 4), 9.0), (0.1, 1.0), ())
    (found,) = tally.take("n").histograms
    assert (found.counts, found.total) == ((2, 6, 4), 10.0)


def test_a_label_without_bound_does_not_take_the_memory() -> None:
    tally = Tally()
    for n in range(SERIES_MAX + 10):
        tally.count("a", 1, (("x", str(n)),))
    assert len(tally.counters) == SERIES_MAX and tally.lost_count == 10


# Dead letters


def letter(at_s: float, cause: Cause = Cause.NOBODY, kind: str = "Add") -> Letter:
    return Letter(at_s, cause, kind, "path", None, None)


def test_one_line_for_each_kind_and_interval_says_for_how_many_it_stands() -> None:
    letters = DeadLetters()
    assert letters.add(letter(0.0)) == 1
    assert [letters.add(letter(i / 100)) for i in range(50)] == [0] * 50
    assert letters.add(letter(0.6, kind="Sum")) == 1
    assert letters.add(letter(LINE_INTERVAL_S)) == 51
    assert letters.counts[Cause.NOBODY, "Add", "path"] == 52
    assert letters.total == 53


def test_the_ring_keeps_the_last_ones() -> None:
    letters = DeadLetters()
    for n in range(RING_LEN + 5):
        letters.add(letter(float(n)))
    assert (len(letters.ring), letters.ring[0].at_s) == (RING_LEN, 5.0)


# Codec


@given(st.binary(max_size=200))
def test_whatever_bytes_come_only_unreadable_goes_out(body: bytes) -> None:
    try:
        assert isinstance(Decoder(Add | Text).decode(body), Add | Text)
    except Unreadable:
        pass
    assert len(kind_of(body)) <= 64


def test_bytes_nested_without_end_are_unreadable() -> None:
    nested = b"\x91" * 100_000 + b"\xc0"
    with pytest.raises(Unreadable):
        Decoder(Add).decode(nested)
    assert kind_of(nested) == "unreadable"


def test_a_message_of_another_union_is_unreadable() -> None:
    with pytest.raises(Unreadable, match="ValidationError"):
        Decoder(Add).decode(encode(Text("x")))


def test_the_tag_of_an_undecoded_message_can_be_read() -> None:
    assert kind_of(encode(Text("x"))) == kind_of(Text("x")) == "Text"
    assert kind_of(memoryview(encode(Add(1)))) == "Add"


def test_arguments_are_decoded_by_the_annotations_of_init() -> None:
    factory = load_factory("tests.runtime.players:Counter")
    assert factory is Counter
    arguments = {"settings": msgspec.msgpack.encode(Settings(start=3))}
    assert decode_arguments(factory, arguments) == {"settings": Settings(start=3)}


# Directory


def known(incarnation: int, state: State, reason: Reason | None = None) -> Known:
    return Known("p", "n", incarnation, state, last_exit=reason)


def test_each_life_is_up_once_and_down_once() -> None:
    entry = Entry("p")
    crashed = Reason(Cause.CRASHED)
    told = []
    for row in (
        known(1, State.STARTING),
        known(1, State.RUNNING),
        known(1, State.RUNNING),
        known(1, State.DRAINING),
        known(1, State.RESTARTING, crashed),
        known(1, State.RESTARTING, crashed),
        known(2, State.STARTING, crashed),
        known(2, State.RUNNING, crashed),
    ):
        told += [(change, address.incarnation) for change, address, _ in entry.update(row)]
    assert told == [(Change.UP, 1), (Change.DOWN, 1), (Change.UP, 2)]
    assert entry.address == Address("n", "p", 2)


def test_a_life_that_is_being_stopped_is_not_told_dead_of_what_the_one_before_it_died_of() -> None:
    entry = Entry("p")
    crashed = Reason(Cause.CRASHED)
    entry.update(known(2, State.RUNNING, crashed))
    changes = entry.update(known(2, State.STOPPING, crashed))
    assert [(change, reason) for change, _, reason in changes] == [
        (Change.DOWN, Reason(Cause.STOPPED))
    ]


def test_news_of_an_earlier_life_changes_nothing() -> None:
    entry = Entry("p")
    entry.update(known(2, State.RUNNING))
    assert entry.update(known(1, State.RESTARTING, Reason(Cause.CRASHED))) == []
    assert entry.address == Address("n", "p", 2)


def test_a_death_that_was_overtaken_by_the_next_life_is_told_first() -> None:
    entry = Entry("p")
    entry.update(known(1, State.RUNNING))
    changes = entry.update(known(2, State.RUNNING, Reason(Cause.CRASHED)))
    assert [(c, a.incarnation) for c, a, _ in changes] == [(Change.DOWN, 1), (Change.UP, 2)]


# Crew


def test_a_crew_runs_jobs_in_order_and_gives_back_exceptions() -> None:
    results: queue.Queue[Any] = queue.Queue()
    crew = Crew("c", 1, lambda then, result: then(result))

    def fail() -> None:
        raise ValueError("as told")

    for work in (lambda: 1, fail, lambda: 3):
        crew.run(work, results.put)
    first, second, third = (results.get(timeout=DEADLINE_S) for _ in range(3))
    assert (first, str(second), third) == (1, "as told", 3)
    crew.close()


def test_a_crew_starts_no_more_threads_than_it_needs() -> None:
    results: queue.Queue[Any] = queue.Queue()
    crew = Crew("c", 3, lambda then, result: then(result))
    for _ in range(5):
        crew.run(threading.get_ident, results.put)
        results.get(timeout=DEADLINE_S)
    assert 1 <= len(crew._threads) <= 3
    gate = threading.Event()
    for _ in range(6):
        crew.run(gate.wait, results.put)
    assert len(crew._threads) == 3
    gate.set()
    assert [results.get(timeout=DEADLINE_S) for _ in range(6)] == [True] * 6
    crew.close()


def test_what_is_kept_comes_when_the_next_job_lets_it_go_and_in_order() -> None:
    results: queue.Queue[Any] = queue.Queue()
    crew = Crew("c", 1, lambda then, result: then(result))
    gate, seen = threading.Event(), []

    def first() -> int:
        gate.wait()
        return 1

    def second() -> int:
        seen.append(results.empty())
        crew.let_go()
        seen.append(results.empty())
        crew.let_go()  # there is nothing left
        return 2

    def third() -> int:
        seen.append(results.empty())  # and lets nothing go: its end does
        return 3

    for work in (first, second, third):
        crew.run(work, results.put, keeps=True)
    gate.set()
    assert [results.get(timeout=DEADLINE_S) for _ in range(3)] == [1, 2, 3]
    assert seen[0] and not seen[1]
    crew.close()


def test_what_is_kept_waits_for_nobody_where_no_job_follows() -> None:
    results: queue.Queue[Any] = queue.Queue()
    crew = Crew("c", 1, lambda then, result: then(result))
    for number in range(3):
        crew.run(partial(int, number), results.put, keeps=True)
        assert results.get(timeout=DEADLINE_S) == number
    crew.close()


# Chance


def test_streams_of_different_names_are_different_and_repeat() -> None:
    assert rng_for(1, "a", 2).random() == rng_for(1, "a", 2).random()
    assert len({rng_for(1, "a", n).random() for n in range(100)}) == 100
    assert rng_for(1, "ab", "c").random() != rng_for(1, "a", "bc").random()


def test_the_note_of_a_peer_stays_known_while_it_is_restarted() -> None:
    entries = {"a": Entry("a")}
    notes = Notes(entries)
    assert "a" not in notes
    entries["a"].update(Known("a", "n", 1, State.STARTING))
    assert "a" not in notes and len(notes) == 0
    entries["a"].update(Known("a", "n", 1, State.RUNNING, note=b"one"))
    assert notes["a"] == b"one"
    entries["a"].update(Known("a", "n", 1, State.RESTARTING))
    entries["a"].update(Known("a", "n", 2, State.STARTING))
    assert notes["a"] == b"one" and list(notes) == ["a"]
    entries["a"].update(Known("a", "n", 2, State.RUNNING, note=b"two"))
    assert notes["a"] == b"two"
    late = {"a": Entry("a")}  # a node that comes while it is restarted is told of the last one
    late["a"].update(Known("a", "n", 3, State.STARTING, note=b"two"))
    assert Notes(late)["a"] == b"two"


# Names of pipes


@given(st.text(), st.integers(), st.integers())
def test_a_pipe_is_known_by_its_name(node: str, incarnation: int, pipe: int) -> None:
    route = Route(node, incarnation, pipe)
    assert Routes().read(route.name) == route


near = st.from_regex(rb"[^#]{0,3}#[ +0-9-]{0,4}/[ +0-9-]{0,4}", fullmatch=True)


@given(st.binary(max_size=30) | near)
def test_what_is_read_has_the_name_that_it_was_read_from(name: bytes) -> None:
    route = Routes().read(name)
    assert route is None or route.name == name


def test_names_that_others_choose_are_not_kept_without_end() -> None:
    routes = Routes()
    for pipe in range(3 * ROUTES_MAX):
        assert routes.read(Route("n", 1, pipe).name) == Route("n", 1, pipe)
        assert 0 < len(routes) <= ROUTES_MAX
