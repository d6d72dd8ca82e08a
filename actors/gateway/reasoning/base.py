"""This file is the seam of reasoning parsers: they tell what a model thinks from what it answers.

A parser is a state machine over the text of one answer, as the tool parsers are (`tools/base.py`);
what it takes for the answer is what a tool parser gets to read.
Laws, tested for every format: joined events are the same however the text is cut; nothing is lost
but the format's markers and blanks beside them; `feed` never raises.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

from actors.gateway.tools.base import Text
from kernels.registry import Registry


class Reasoning(NamedTuple):
    """What the model thinks."""

    text: str


Event = Reasoning | Text


class ReasoningParser(Protocol):
    """Reads one answer."""

    def feed(self, text: str) -> list[Event]: ...

    def flush(self) -> list[Event]: ...

    @property
    def is_thinking(self) -> bool | None:
        """Whether what has been read ends inside of a reasoning, its markers included; None while
        that depends on what follows. Only a marker changes it, and markers begin with `<`."""


class ReasoningFormat(NamedTuple):
    """An entry of the registry."""

    make: Callable[[], ReasoningParser]
    begin: str = ""  # what begins the reasoning, where the answer writes it itself
    end: str = ""  # what ends the reasoning: a constraint of the answer begins after it
    shows_special: bool = False  # its markers are special tokens: they must be left in the text
    # The answer begins inside of it, since the template has written the beginning.
    is_open: bool = False


REASONING_PARSERS: Registry[ReasoningFormat] = Registry(
    "reasoning_parser", "actors.gateway.reasoning"
)
