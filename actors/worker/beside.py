"""This file is the part of a worker that compiles grammars beside its steps: its handlers and their
timer. `compiles.py` decides; how a grammar is compiled is the room's own (`compile`).
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass

from actors.runtime import Context
from actors.worker import compiles
from actors.worker.compiles import Answer, Compiles, Job
from messages.worker import Compile


@dataclass(frozen=True, slots=True)
class LookAtGrammars:
    """Look whether one takes too long."""


class CompilesBeside:
    """To be mixed into an actor that takes `Compile` and, for itself, `LookAtGrammars`."""

    context: Context

    def __init__(self, timeout_s: float) -> None:
        self.compiles = Compiles(compiles.THREADS)
        self.compile_look_s = timeout_s / compiles.LOOKS

    @abstractmethod
    def compile(self, job: Job) -> None:
        """Begins to; `compiled` is to be called when it is over."""

    def on_compile(self, message: Compile) -> None:
        asker = self.context.sender
        assert asker is not None, "a question without a sender cannot be answered"
        if not self.compiles:
            self.context.start_timer("grammars", LookAtGrammars(), every_s=self.compile_look_s)
        self.compiles.ask(message, asker)
        self._begin()

    def compiled(self, job: Job, problem: str) -> None:
        """`problem`: what is wrong with the grammar, in words for the client, or nothing."""
        self._answer(self.compiles.over(job, problem))
        self._begin()
        if not self.compiles:
            self.context.cancel_timer("grammars")

    def on_look_at_grammars(self, message: LookAtGrammars) -> None:
        self._answer(self.compiles.look())

    def _begin(self) -> None:
        for job in self.compiles.begin():
            self.compile(job)

    def _answer(self, answers: list[Answer]) -> None:
        for asker, compiled in answers:
            self.context.ref(asker).tell(compiled)
