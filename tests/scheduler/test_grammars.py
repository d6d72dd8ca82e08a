"""Requests that wait for their grammar: asked for once, refused in time, never lost."""

from __future__ import annotations

from typing import Any

import msgspec
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from actors.runtime.testkit import Cell
from actors.scheduler.actor import Scheduler
from actors.scheduler.grammars import INFLIGHT_MAX, RESUMED_FACTOR, Grammars
from messages.config import CacheConfig, Paths, SchedulerConfig
from messages.detokenizer import Tail, Tokens
from messages.gateway import Unknown
from messages.scheduler import Cancel, Compiled, Outcome, Poll, Submit
from messages.types import Fault, FinishReason, Grammar, Problem
from messages.worker import Compile, Facts
from tests.scheduler.make import GATEWAY, make_submit

PATHS = Paths()
FACTS = Facts("m", 100, 64, 16, 64, (2,), "float32", "cpu")


def grammar(name: str = "g") -> Grammar:
    return Grammar("regex", name, param="regex")


def constrained(name: str = "r", text: str = "g", attempt: int = 1) -> Submit:
    return msgspec.structs.replace(make_submit(name, attempt=attempt), grammar=grammar(text))


class World:
    """A scheduler alone; what it says to each peer."""

    def __init__(self, **config: Any) -> None:
        settled = SchedulerConfig(running_max=4, prefill_budget=64, **config)
        self.actor = Scheduler(settled, CacheConfig(), PATHS)
        notes = {PATHS.worker: msgspec.msgpack.encode(FACTS)}
        self.cell = Cell(self.actor, path=PATHS.scheduler, notes=notes)
        self.cell.start()

    def tell(self, message: Any) -> None:
        self.cell.tell(message)
        self.actor.check()

    def sent(self, kind: type) -> list[Any]:
        return [message for _, message in self.cell.sent if isinstance(message, kind)]

    def ends(self) -> list[Tail]:
        return [row for tokens in self.sent(Tokens) for row in tokens.rows if row.finish]


def test_a_request_goes_on_when_its_grammar_is_ready() -> None:
    world = World()
    world.tell(constrained("a"))
    world.tell(constrained("b"))
    (ask,) = world.sent(Compile)
    assert ask.grammar == grammar()
    assert not world.actor.schedule.live
    world.tell(make_submit("free"))
    assert list(world.actor.schedule.live) == ["free"]
    world.tell(Compiled(ask.number))
    assert list(world.actor.schedule.live) == ["free", "a", "b"]
    world.tell(constrained("c"))
    assert "c" in world.actor.schedule.live and len(world.sent(Compile)) == 1
    assert not world.ends()


def test_a_wrong_grammar_is_refused_and_not_asked_for_again() -> None:
    world = World()
    world.tell(constrained("a"))
    world.tell(Compiled(world.sent(Compile)[0].number, Outcome.WRONG, "it is wrong"))
    world.tell(constrained("b"))
    for name, end in zip("ab", world.ends(), strict=True):
        assert end.request == name and end.finish is FinishReason.ERROR and end.problem
        assert (end.problem.fault, end.problem.param) == (Fault.INVALID, "regex")
    assert len(world.sent(Compile)) == 1


def test_a_grammar_that_takes_too_long_refuses_those_who_wait_and_nobody_else() -> None:
    """B099."""
    world = World(grammar_timeout_s=5.0)
    for index in range(INFLIGHT_MAX + 1):
        world.tell(constrained(f"slow{index}", f"slow{index}"))
    assert len(world.sent(Compile)) == INFLIGHT_MAX
    world.tell(Compiled(1, Outcome.LATE))
    (end,) = world.ends()
    assert end.request == "slow0" and end.problem is not None
    assert (end.problem.code, end.problem.fault) == ("grammar_timeout", Fault.INVALID)
    assert len(world.sent(Compile)) == INFLIGHT_MAX + 1
    world.tell(constrained("again", "slow0"))  # it may be ready by now
    assert world.actor.grammars.attempt_of("again") == 1


def test_the_time_of_others_and_of_a_silent_worker_is_nobodys_fault() -> None:
    world = World(grammar_timeout_s=5.0)
    for index in range(INFLIGHT_MAX):
        world.tell(constrained(f"asked{index}", f"{index}"))
    world.tell(constrained("waits", "w"))
    world.tell(constrained("resumed", "w", attempt=2))
    world.cell.advance(6.0)
    world.actor.check()
    (end,) = world.ends()
    assert end.request == "waits" and end.problem and end.problem.fault is Fault.OVERLOADED
    assert end.problem.retry_after_s, "it never had its turn"
    world.cell.advance(5.0 * RESUMED_FACTOR)
    assert {end.request for end in world.ends()} == {"waits", "resumed"}
    world.actor.check()


def test_who_has_not_waited_long_asks_again_where_there_was_no_turn() -> None:
    world = World(grammar_timeout_s=5.0)
    world.tell(constrained("old", "0"))
    world.tell(constrained("resumed", "0", attempt=2))
    for index in range(1, INFLIGHT_MAX + 1):
        world.tell(constrained(f"r{index}", f"{index}"))
    world.cell.advance(4.9)
    world.tell(constrained("new", "0"))
    world.cell.advance(0.1)
    world.tell(Compiled(1, Outcome.NO_TURN))
    assert [end.request for end in world.ends()] == ["r4", "old"]
    assert all(end.problem and end.problem.fault is Fault.OVERLOADED for end in world.ends())
    assert [ask.grammar.text for ask in world.sent(Compile)] == ["0", "1", "2", "3", "0"]
    assert world.sent(Compile)[-1] == Compile(1, grammar("0"))
    world.tell(Compiled(2))
    world.tell(Compiled(1))
    assert list(world.actor.schedule.live) == ["r1", "resumed", "new"]


def test_a_cancel_or_a_newer_attempt_ends_the_wait() -> None:
    world = World()
    world.tell(constrained("a"))
    world.tell(Cancel("a", 2))  # of an attempt that is not known
    world.tell(constrained("a", attempt=2))
    world.tell(Cancel("a", 2))
    ends = [(end.request, end.attempt, end.finish) for end in world.ends()]
    assert ends == [("a", 1, FinishReason.ABORT), ("a", 2, FinishReason.ABORT)]
    world.tell(Compiled(world.sent(Compile)[0].number))
    assert not world.actor.schedule.live


def test_who_waits_for_a_grammar_is_known_to_whoever_asks() -> None:
    world = World()
    world.tell(constrained("a", attempt=2))
    world.tell(Poll((("a", 2), ("a", 1), ("b", 1)), GATEWAY))
    (unknown,) = world.sent(Unknown)
    assert unknown.rows == (("a", 1), ("b", 1))


def test_who_waits_counts_against_the_queue() -> None:
    world = World(queued_max=2)
    for name in "abc":
        world.tell(constrained(name))
    (end,) = world.ends()
    assert end.request == "c" and end.problem and end.problem.fault is Fault.OVERLOADED


def test_who_was_let_in_before_is_not_refused_for_those_who_wait() -> None:
    world = World(queued_max=2)
    for name in "abcd":
        world.tell(constrained(name, name, attempt=2))
    assert not world.ends()
    assert len(world.actor.grammars) == 4


def test_nothing_is_kept_of_those_who_leave_before_their_grammar_has_its_turn() -> None:
    world = World()
    for index in range(INFLIGHT_MAX + 300):
        world.tell(constrained(f"r{index}", f"{index}"))
        world.tell(Cancel(f"r{index}", 1))
    world.actor.check()
    world.tell(constrained("honest", "h"))
    for number in range(1, INFLIGHT_MAX + 1):
        world.tell(Compiled(number))
    assert world.sent(Compile)[-1].grammar.text == "h"
    assert len(world.sent(Compile)) == INFLIGHT_MAX + 1


def test_nothing_is_kept_for_a_gateway_that_is_lost() -> None:
    world = World()
    world.tell(constrained("a"))
    world.actor.grammars.take_of(GATEWAY)
    assert len(world.actor.grammars) == 0
    world.actor.check()


class Waiting(RuleBasedStateMachine):
    """Against a dict of who waits for what, since when."""

    def __init__(self) -> None:
        super().__init__()
        self.grammars = Grammars(5.0)
        self.waiting: dict[str, tuple[str, float, int]] = {}
        self.asked: dict[int, str] = {}
        self.known: dict[str, bool] = {}
        self.now_s = 0.0
        self.count = 0

    def collect(self) -> None:
        for ask in self.grammars.asks:
            assert ask.grammar.text not in self.asked.values(), "asked for twice"
            self.asked[ask.number] = ask.grammar.text
        self.grammars.asks.clear()

    def late(self) -> set[str]:
        return {
            name
            for name, (_, since_s, attempt) in self.waiting.items()
            if self.now_s - since_s >= (5.0 if attempt == 1 else 5.0 * RESUMED_FACTOR)
        }

    @rule(text=st.sampled_from("abcdefghij"), attempt=st.integers(1, 3))
    def submit(self, text: str, attempt: int) -> None:
        verdict = self.grammars.judge(grammar(text))
        if text in self.known:
            assert isinstance(verdict, Problem) is not self.known[text]
            return
        assert verdict is False
        self.count += 1
        name = f"r{self.count}"
        self.grammars.hold(constrained(name, text, attempt), self.now_s)
        self.waiting[name] = (text, self.now_s, attempt)
        self.collect()

    @rule(nth=st.integers(0, 9), outcome=st.sampled_from(Outcome))
    def answer(self, nth: int, outcome: Outcome) -> None:
        if not self.asked:
            return
        number = sorted(self.asked)[nth % len(self.asked)]
        text = self.asked.pop(number)
        found = {
            submit.request: problem
            for submit, problem in self.grammars.compiled(
                Compiled(number, outcome, "no"), self.now_s
            )
        }
        late = self.late()
        gone = {
            name
            for name, (waited, _, _) in self.waiting.items()
            if waited == text and (outcome is not Outcome.NO_TURN or name in late)
        }
        assert set(found) == gone
        wanted = {
            Outcome.READY: None,
            Outcome.WRONG: "invalid_grammar",
            Outcome.LATE: "grammar_timeout",
            Outcome.NO_TURN: "queue_full",
        }[outcome]
        assert all((problem and problem.code) == wanted for problem in found.values())
        for name in gone:
            del self.waiting[name]
        if outcome in (Outcome.READY, Outcome.WRONG):
            self.known[text] = outcome is Outcome.READY
        self.collect()

    @rule(nth=st.integers(0, 9))
    def leave(self, nth: int) -> None:
        if self.waiting:
            name = sorted(self.waiting)[nth % len(self.waiting)]
            assert self.grammars.attempt_of(name) == self.waiting[name][2]
            assert self.grammars.take(name).request == name
            del self.waiting[name]

    @rule(seconds=st.floats(0.1, 20.0))
    def pass_time(self, seconds: float) -> None:
        self.now_s += seconds
        asked = self.asked.values()
        late = {name for name in self.late() if self.waiting[name][0] not in asked}
        found = self.grammars.expire(self.now_s)
        assert {submit.request for submit, _ in found} == late
        assert all(problem.fault is Fault.OVERLOADED for _, problem in found)
        for name in late:
            del self.waiting[name]

    @invariant()
    def laws(self) -> None:
        self.grammars.check()
        assert len(self.grammars) == len(self.waiting)


Waiting.TestCase.settings = settings(max_examples=60, stateful_step_count=30)
test_waiting = Waiting.TestCase
