"""This file keeps the asks of one node that wait for their outcome.

It does not know how questions travel. Laws: each question has exactly one outcome; the first
counts, and what comes later for the same number finds nobody.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, NamedTuple

from actors.runtime.context import Died, Outcome, Rejected
from messages.base import Address
from messages.system import Cause, Reason

if TYPE_CHECKING:
    from actors.runtime.life import Life


class Question(NamedTuple):
    asker: Life
    target: Address
    answer: asyncio.Future[Outcome]


class Questions:
    """By number; numbers are never used again on this node."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._open: dict[int, Question] = {}
        self._last = 0

    def __len__(self) -> int:
        return len(self._open)

    def open(self, asker: Life, target: Address) -> tuple[int, asyncio.Future[Outcome]]:
        self._last += 1
        answer: asyncio.Future[Outcome] = self._loop.create_future()
        self._open[self._last] = Question(asker, target, answer)
        return self._last, answer

    def close(self, number: int) -> None:
        self._open.pop(number, None)

    def find(self, number: int | None, asker: Address) -> Question | None:
        """The question that an answer is for, if it is still wanted by just this asker."""
        question = self._open.get(number) if number is not None else None
        return question if question is not None and question.asker.address == asker else None

    def resolve(self, number: int, outcome: Outcome) -> None:
        question = self._open.pop(number, None)
        if question is not None and not question.answer.done():
            question.answer.set_result(outcome)

    def target_died(self, address: Address, reason: Reason) -> None:
        for number, question in list(self._open.items()):
            if question.target == address:
                self.resolve(number, Died(reason))

    def asker_died(self, asker: Life) -> None:
        """A task that outlives it does not wait for an answer that would find nobody."""
        for number, question in list(self._open.items()):
            if question.asker is asker:
                self.resolve(number, Rejected(Cause.STOPPED))
