"""Requests that wait for their grammar: asked for once, refused in time, never lost."""

from __future__ import annotations

from typing import Any

import msgspec
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from actors.runtime.testkit import Cell
from actors.scheduler.actor import Scheduler
from actors.scheduler.grammars import INFLIGHT_MAX, Grammars
from messages.config import CacheConfig, Paths, SchedulerConfig
from messages.detokenizer import Tail, Tokens
from messages.gateway import Unknown
from messages.scheduler import Cancel, Compiled, Poll, Submit
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
    world.tell(Compiled(world.sent(Compile)[0].number, "it is wrong"))
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
    world.cell.advance(6.0)
    world.actor.check()
    assert len(world.ends()) == INFLIGHT_MAX + 1
    ends = {end.request: end.problem for end in world.ends()}
    last = ends.pop(f"slow{INFLIGHT_MAX}")
    assert last is not None and last.fault is Fault.OVERLOADED, "it never had its turn"
    assert all(problem and problem.code == "grammar_timeout" for problem in ends.values())
    world.tell(Compiled(1))  # late: the next one is asked for
    assert len(world.sent(Compile)) == INFLIGHT_MAX + 1
    world.tell(constrained("again", "slow0"))
    assert list(world.actor.schedule.live) == ["again"]


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
        self.waiting: dict[str, tuple[str, float]] = {}
        self.asked: dict[int, str] = {}
        self.asked_s: dict[str, float] = {}
        self.known: dict[str, bool] = {}
        self.now_s = 0.0
        self.count = 0

    def collect(self) -> None:
        for ask in self.grammars.asks:
            assert ask.grammar.text not in self.asked.values(), "asked for twice"
            self.asked[ask.number] = ask.grammar.text
            self.asked_s[ask.grammar.text] = self.now_s
        self.grammars.asks.clear()

    @rule(text=st.sampled_from("abcdefg"))
    def submit(self, text: str) -> None:
        verdict = self.grammars.judge(grammar(text))
        if text in self.known:
            assert isinstance(verdict, Problem) is not self.known[text]
            return
        assert verdict is False
        self.count += 1
        name = f"r{self.count}"
        self.grammars.hold(constrained(name, text), self.now_s)
        self.waiting[name] = (text, self.now_s)
        self.collect()

    @rule(nth=st.integers(0, 9), good=st.booleans())
    def answer(self, nth: int, good: bool) -> None:
        if not self.asked:
            return
        number = sorted(self.asked)[nth % len(self.asked)]
        text = self.asked.pop(number)
        submits, problem = self.grammars.compiled(
            Compiled(number, "" if good else "no"), self.now_s
        )
        assert (problem is None) is good
        gone = [name for name, (waited, _) in self.waiting.items() if waited == text]
        assert [submit.request for submit in submits] == gone
        for name in gone:
            del self.waiting[name]
        self.known[text] = good
        self.collect()

    @rule(nth=st.integers(0, 9))
    def leave(self, nth: int) -> None:
        if self.waiting:
            name = sorted(self.waiting)[nth % len(self.waiting)]
            assert self.grammars.attempt_of(name) == 1
            assert self.grammars.take(name).request == name
            del self.waiting[name]

    @rule(seconds=st.floats(0.1, 4.0))
    def pass_time(self, seconds: float) -> None:
        self.now_s += seconds
        late = {
            name: Fault.INVALID if text in self.asked.values() else Fault.OVERLOADED
            for name, (text, since_s) in self.waiting.items()
            if self.now_s - max(since_s, self.asked_s.get(text, since_s)) >= 5.0
        }
        found = self.grammars.expire(self.now_s)
        assert {submit.request: problem.fault for submit, problem in found} == late
        for name in late:
            del self.waiting[name]

    @invariant()
    def laws(self) -> None:
        self.grammars.check()
        assert len(self.grammars) == len(self.waiting)


Waiting.TestCase.settings = settings(max_examples=60, stateful_step_count=30)
test_waiting = Waiting.TestCase
