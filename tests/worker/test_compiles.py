"""Grammars that a worker compiles: few at once, each question answered once, none for ever."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from actors.runtime.testkit import Cell
from actors.worker.actor import Worker
from actors.worker.compiles import LOOKS, THREADS, Compiles, Job
from messages.base import Address
from messages.config import CacheConfig, ModelConfig, Paths, SchedulerConfig, WorkerConfig
from messages.scheduler import Compiled, Outcome
from messages.types import Grammar
from messages.worker import Compile

ASKER = Address("engine", "replica/scheduler", 1)


def ask(number: int) -> Compile:
    return Compile(number, Grammar("regex", f"{number}"))


def look(compiles: Compiles, times: int) -> list[tuple[int, Outcome]]:
    answers = [answer.compiled for _ in range(times) for answer in compiles.look()]
    compiles.check()
    return [(answer.number, answer.outcome) for answer in answers]


def over(compiles: Compiles, job: Job, problem: str = "") -> list[Compiled]:
    return [answer.compiled for answer in compiles.over(job, problem)]


def test_a_grammar_is_late_by_its_own_time_only() -> None:
    compiles = Compiles(2)
    for number in (1, 2, 3):
        compiles.ask(ask(number), ASKER)
    first, second = compiles.begin()
    assert not look(compiles, LOOKS)
    assert over(compiles, second) == [Compiled(2)]
    (third,) = compiles.begin()
    assert third.grammar == ask(3).grammar
    assert look(compiles, LOOKS) == [(1, Outcome.LATE)]
    assert look(compiles, 1) == [(3, Outcome.LATE)]
    assert not over(compiles, first) and not over(compiles, third), "they were answered"
    assert not len(compiles)


def test_who_finds_no_thread_is_told_so_and_its_grammar_is_not_blamed() -> None:
    compiles = Compiles(1)
    for number in (1, 2):
        compiles.ask(ask(number), ASKER)
    (slow,) = compiles.begin()
    assert look(compiles, LOOKS + 1) == [(1, Outcome.LATE), (2, Outcome.NO_TURN)]
    assert compiles.running == [slow] and not compiles.waiting
    compiles.ask(ask(3), ASKER)
    assert not compiles.begin(), "what is late still has its thread"
    over(compiles, slow)
    (third,) = compiles.begin()
    assert over(compiles, third, "wrong") == [Compiled(3, Outcome.WRONG, "wrong")]


def test_who_asks_for_what_is_late_waits_for_it_with_a_time_of_its_own() -> None:
    compiles = Compiles(2)
    compiles.ask(ask(1), ASKER)
    (slow,) = compiles.begin()
    assert look(compiles, LOOKS + 1) == [(1, Outcome.LATE)]
    for number in (2, 3):
        compiles.ask(Compile(number, slow.grammar), ASKER)
    assert not compiles.begin(), "a grammar takes one thread"
    assert not look(compiles, LOOKS)
    assert over(compiles, slow) == [Compiled(2), Compiled(3)]


class Machine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.compiles = Compiles(THREADS)
        self.count = 0
        self.running: list[Job] = []
        self.answers: Counter[int] = Counter()

    def begin(self) -> None:
        self.running += self.compiles.begin()

    @rule(text=st.sampled_from("abcdef"))
    def ask(self, text: str) -> None:
        self.count += 1
        self.compiles.ask(Compile(self.count, Grammar("regex", text)), ASKER)
        self.begin()

    @rule(nth=st.integers(0, 3), problem=st.sampled_from(["", "no"]))
    def over(self, nth: int, problem: str) -> None:
        if self.running:
            job = self.running.pop(nth % len(self.running))
            self.answers.update(answer.number for answer in over(self.compiles, job, problem))
            self.begin()

    @rule(times=st.integers(1, LOOKS))
    def look(self, times: int) -> None:
        self.answers.update(number for number, _ in look(self.compiles, times))

    @invariant()
    def laws(self) -> None:
        self.compiles.check()
        assert all(count == 1 for count in self.answers.values())

    def teardown(self) -> None:
        """However it ends, each question has one answer."""
        while len(self.compiles):
            self.over(0, "")
        assert set(self.answers) == set(range(1, self.count + 1))
        self.laws()


Machine.TestCase.settings = settings(max_examples=60, stateful_step_count=30)
test_compiles = Machine.TestCase


def test_a_worker_answers_for_a_grammar_that_its_thread_is_not_through_with(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = SchedulerConfig(grammar_timeout_s=4.0)
    worker = Worker(ModelConfig(), CacheConfig(), config, WorkerConfig(), Paths())
    cell = Cell(worker)
    jobs: list[tuple[Callable[[], Any], Callable[[Any], Any]]] = []  # threads, none of which ends
    monkeypatch.setattr(
        type(worker.context), "offload", lambda _, work, then, lane: jobs.append((work, then))
    )
    worker.grammars = SimpleNamespace(compile=lambda grammar: "")  # type: ignore[assignment]

    def end() -> None:
        work, then = jobs.pop(0)
        cell.tell(then(work()))

    def answers() -> list[Any]:
        return [message for _, message in cell.take()]

    for number in (1, 2, 3):
        cell.tell(ask(number), ASKER)
    assert len(jobs) == THREADS
    cell.advance(3.9)
    assert not answers()
    cell.advance(1.2)
    late = [Compiled(1, Outcome.LATE), Compiled(2, Outcome.LATE)]
    assert answers() == [*late, Compiled(3, Outcome.NO_TURN)]
    end()
    end()
    assert not answers() and not jobs
    cell.tell(ask(9), ASKER)
    cell.advance(3.9)
    end()
    assert answers() == [Compiled(9)]
    assert not worker.compiles
