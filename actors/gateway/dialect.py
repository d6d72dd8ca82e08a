"""This file says what a route that makes calls is, in whatever dialect: a row of one table.

It does not know HTTP nor any dialect. `read` turns a body into what is asked; `plain` and `stream`
write the answer from rows; `doors/generate.py` moves the bytes. Law: readers and writers are
functions of their arguments, chance and time included.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, Protocol

from actors.gateway.call import Call, Checked, Row
from actors.gateway.inputs import Limits
from messages.types import Problem

SSE = b"text/event-stream; charset=utf-8"
NDJSON = b"application/x-ndjson"
PING = b": ping\n\n"  # a comment, which readers of events skip


class Ready(Exception):
    """Raised by a reader: the body asks for nothing that has to be computed."""

    def __init__(self, body: bytes) -> None:
        super().__init__("ready")
        self.body = body


class Asked(Protocol):
    """What a reader makes of a body; its writers may know more of it."""

    @property
    def call(self) -> Call: ...

    @property
    def stream(self) -> bool: ...


class Head(NamedTuple):
    """What is the same all over an answer, and the clock of its times."""

    id: str
    created: int
    model: str
    begun_s: float = 0.0  # when the request came, by `now_s`
    now_s: Callable[[], float] = float  # Unix time; 0.0 where nobody needs it


def time_from(unix_s: float, now_s: Callable[[], float]) -> Callable[[], float]:
    """The Unix time as it goes on from here by a clock that nobody sets: `now_s`."""
    begin_s = now_s()
    return lambda: unix_s + (now_s() - begin_s)


class PlainWriter(Protocol):
    """Writes an answer that is one body. `body` raises Refused where there is none."""

    def add(self, rows: Iterable[Row]) -> None: ...

    def body(self, checked: Sequence[Checked]) -> bytes: ...


class StreamWriter(Protocol):
    """Writes a stream. Each method returns bytes to be sent as they are."""

    def write(self, rows: Iterable[Row]) -> bytes: ...

    def end(self, checked: Sequence[Checked]) -> bytes: ...

    def fail(self, problem: Problem) -> bytes: ...


Draw = Callable[[], int]


class Dialect(NamedTuple):
    """One route. `checked` are the prompts as the tokenizer saw them, where they were checked."""

    path: str
    prefix: str  # of the answers' ids
    read: Callable[[bytes, Limits, Draw, float], Asked]
    plain: Callable[[Any, Head, Sequence[Checked]], PlainWriter]
    stream: Callable[[Any, Head, Sequence[Checked]], StreamWriter] | None = None
    media: bytes = SSE
    ping: bytes = PING  # what its clients skip in a stream: a sign of life; empty: nothing is
    names: Callable[[Any], tuple[str, ...]] | None = None  # ids that the client gave to the call

    @property
    def needs_place(self) -> bool:
        """Whatever the body says: it asks for something to be generated, or is wrong."""
        return self.stream is not None and self.media == SSE
