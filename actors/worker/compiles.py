"""This file decides which grammars are compiled now, which wait for a thread, and which are late.

It does not know engines, threads or clocks: it is told when a compilation is over, and asked at
regular looks, of which it counts how many a compilation has lasted. So the time of a process that
was stopped, or that of a message on its way, is not taken for a grammar's.

Laws: no more than `threads` grammars are compiled at once, none of them twice, in the order in
which they came; each question is answered once: when its grammar is ready or wrong, or late, or
when it found no thread in time. What is late goes on in its thread, since it can't be stopped, and
takes that place until it is over; who asks for it meanwhile waits for it there.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

from messages.base import Address
from messages.scheduler import Compiled, Outcome
from messages.types import Grammar
from messages.worker import Compile

THREADS = 2  # a grammar that is slow does not stop all others
LOOKS = 8  # within the time that a compilation may take


class Answer(NamedTuple):
    asker: Address
    compiled: Compiled


class Question:
    """One that is not answered."""

    __slots__ = ("asker", "looks", "number")

    def __init__(self, asker: Address, number: int) -> None:
        self.asker = asker
        self.number = number
        self.looks = 0  # since its grammar began to be compiled, or to wait

    def answer(self, outcome: Outcome, problem: str = "") -> Answer:
        return Answer(self.asker, Compiled(self.number, outcome, problem))


class Job:
    """One grammar, and who is to hear of it."""

    __slots__ = ("grammar", "questions")

    def __init__(self, grammar: Grammar) -> None:
        self.grammar = grammar
        self.questions: list[Question] = []

    def late(self, outcome: Outcome) -> list[Answer]:
        """At a look: the answers of those for whom it is one too many."""
        for question in self.questions:
            question.looks += 1
        late = [question for question in self.questions if question.looks > LOOKS]
        self.questions = [question for question in self.questions if question.looks <= LOOKS]
        return [question.answer(outcome) for question in late]


class Compiles:
    """Of one worker. The owner looks while there are any, every eighth of the time that a
    compilation may take."""

    def __init__(self, threads: int) -> None:
        self.threads = threads
        self.running: list[Job] = []
        self.waiting: deque[Job] = deque()

    def __len__(self) -> int:
        return len(self.running) + len(self.waiting)

    def ask(self, message: Compile, asker: Address) -> None:
        jobs = (*self.running, *self.waiting)
        job = next((job for job in jobs if job.grammar == message.grammar), None)
        if job is None:
            job = Job(message.grammar)
            self.waiting.append(job)
        job.questions.append(Question(asker, message.number))

    def begin(self) -> list[Job]:
        """What is to be compiled from now on."""
        begun = []
        while self.waiting and len(self.running) < self.threads:
            job = self.waiting.popleft()
            for question in job.questions:
                question.looks = 0
            self.running.append(job)
            begun.append(job)
        return begun

    def over(self, job: Job, problem: str) -> list[Answer]:
        """The job's thread is free."""
        self.running.remove(job)
        outcome = Outcome.WRONG if problem else Outcome.READY
        return [question.answer(outcome, problem) for question in job.questions]

    def look(self) -> list[Answer]:
        """Who is told now that it takes too long."""
        late = [answer for job in self.running for answer in job.late(Outcome.LATE)]
        late += [answer for job in self.waiting for answer in job.late(Outcome.NO_TURN)]
        self.waiting = deque(job for job in self.waiting if job.questions)
        return late

    def check(self) -> None:
        """Asserts the laws."""
        assert len(self.running) <= self.threads, f"{len(self.running)} are compiled at once"
        jobs = [*self.running, *self.waiting]
        assert len({job.grammar for job in jobs}) == len(jobs), "a grammar is compiled twice"
        assert all(job.questions for job in self.waiting), "one waits for nobody"
        questions = [question for job in jobs for question in job.questions]
        assert all(question.looks <= LOOKS for question in questions), "a late one was not told"
        if self.waiting:
            assert len(self.running) == self.threads, "one waits, and a thread is free"
