"""This file is what `Runner.launch` returns: a step on its way, or one that has run already; and
what is said of rows that failed. It does not know how steps are run.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from kernels.batch import StepOutput

NOT_NUMBERS = "the model's output for this sequence is not a number"
FAILED_BEFORE = "an earlier step of this sequence has failed"


class Flight(Protocol):
    """A launched step."""

    def wait(self) -> None:
        """Sleeps until `result` would not wait. May be called by another thread than the one that
        launches; changes nothing."""
        ...

    def result(self) -> StepOutput:
        """Waits for the step."""
        ...


@dataclass(frozen=True, slots=True)
class Landed:
    """A step that ran at its launch."""

    output: StepOutput

    def wait(self) -> None:
        return

    def result(self) -> StepOutput:
        return self.output
