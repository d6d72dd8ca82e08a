"""This file is the seam of tool-call parsers: what they say, and what every one of them keeps.

A parser is a state machine over the text of one answer: `feed` takes what has come, `flush` is
called once at the end. It does not know chunks of the API, ids or tokens; whoever writes the answer
gives the ids. Chunks of text are where the network cut it, and mean nothing.

Laws, tested for every format: joined events are the same however the text is cut; a call's `Start`
comes before its `Arguments`, and indices are 0, 1, 2 …; what is no call comes out as text, and
nothing of it is lost but blanks beside calls and the format's own markers; `feed` never raises.
A call that is cut off is a call as soon as its name is known, and text before that.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

from actors.gateway.tools.scan import ObjectScan
from kernels.registry import Registry


class Text(NamedTuple):
    """Text for the reader."""

    text: str


class Start(NamedTuple):
    """A call begins."""

    call: int  # 0, 1, 2 …
    name: str


class Arguments(NamedTuple):
    """More of a call's arguments: JSON text as the model wrote it."""

    call: int  # 0, 1, 2 …
    text: str


Event = Text | Start | Arguments


class ToolParser(Protocol):
    """Reads one answer."""

    def feed(self, text: str) -> list[Event]: ...

    def flush(self) -> list[Event]: ...


class Signature(NamedTuple):
    """A tool that may be called, and the schema of its arguments."""

    name: str
    schema: dict[str, Any]


class Tag(NamedTuple):
    """A place in an answer where the model is held to something: `begin`, then what keeps to the
    schema (None: nothing), then `end`. Markers may be special tokens."""

    trigger: str  # what `begin` begins with; text is free up to the next trigger
    begin: str
    schema: Any = None
    end: str = ""


class Tags(NamedTuple):
    """How calls are written. With `is_first` an answer is calls from its beginning, or it begins
    with none of the triggers and is free: `prefixes` may stand before the first call, one of
    `between` stands between two."""

    tags: Sequence[Tag]
    is_first: bool = False
    prefixes: tuple[str, ...] = ("",)
    between: tuple[str, ...] = ()


class ToolFormat(NamedTuple):
    """An entry of the registry."""

    make: Callable[[Sequence[str]], ToolParser]  # given the names of the request's tools
    shows_special: bool = False  # its markers are special tokens: they must be left in the text
    short_ids: bool = False  # its templates take ids of nine letters and digits only
    # How to hold a model that chooses to call to its tools; None: that cannot be done.
    tags: Callable[[Sequence[Signature]], Tags] | None = None


TOOL_PARSERS: Registry[ToolFormat] = Registry("tool_parser", "actors.gateway.tools")


class Machine:
    """What the parsers share: a buffer of unread text, and the events made of it.

    A format has `run(is_end)`: it reads as much of `buffer` as it can decide on, all of it at the
    end. What it decides may depend on the text read so far and on nothing else.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self.names = frozenset(names)
        self.buffer = ""
        self.call_count = 0
        self._events: list[Event] = []
        self._blank = ""  # at the end of the text said so far: dropped if a call follows
        self._is_after_call = False
        self._object: OpenObject | None = None

    def feed(self, text: str) -> list[Event]:
        self.buffer += text
        self.run(False)
        return self._take()

    def flush(self) -> list[Event]:
        self.run(True)
        assert not self.buffer, f"{self.buffer[:80]!r} was left unread"
        if self._blank and not self._is_after_call:
            self._events.append(Text(self._blank))
            self._blank = ""
        return self._take()

    def run(self, is_end: bool) -> None:
        raise NotImplementedError

    def say(self, text: str) -> None:
        """Text for the reader; blanks wait for what follows."""
        if self._is_after_call:
            text = text.lstrip()
            if not text:
                return
            self._is_after_call = False
        text = self._blank + text
        body = text.rstrip()
        self._blank = text[len(body) :]
        if body:
            self._events.append(Text(body))

    def start(self, name: str) -> None:
        """A call begins; `arguments` belong to it until the next one."""
        self._blank = ""
        self._is_after_call = True
        self._events.append(Start(self.call_count, name))
        self.call_count += 1

    def arguments(self, text: str) -> None:
        if text:
            self._events.append(Arguments(self.call_count - 1, text))

    @property
    def is_after_call(self) -> bool:
        """Nothing but blanks since the last call."""
        return self._is_after_call

    def say_until(self, markers: Sequence[str], is_end: bool) -> str | None:
        """Says the text up to the first of `markers`, and takes the marker off the buffer. None:
        there is none yet, and what may be the beginning of one stays in the buffer."""
        text, marker = self.read_until(markers, is_end)
        if text:
            self.say(text)
        return marker

    def read_until(self, markers: Sequence[str], is_end: bool) -> tuple[str, str | None]:
        """The same, but the text is returned."""
        text, marker, self.buffer = split(self.buffer, markers, is_end)
        return text, marker

    def skip_blanks(self) -> bool:
        """False: nothing else is there yet."""
        self.buffer = self.buffer.lstrip()
        return bool(self.buffer)

    # One JSON object that is a call

    def open_object(self, raw: str) -> None:
        """The buffer stands at a `{`. `raw`: the markers before it, said if it is no call."""
        self._object = OpenObject(raw)

    def run_object(self, is_end: bool, *, is_known: bool = False) -> bool:
        """Reads on in the open object; True when it is over. With `is_known` an object whose name
        is none of the request's tools is no call."""
        open_object = self._object
        assert open_object is not None
        scan = open_object.scan
        used = scan.feed(self.buffer)
        open_object.raw += self.buffer[:used]
        self.buffer = self.buffer[used:]
        name = scan.name
        if (
            name is not None
            and not open_object.has_started
            and (scan.has_arguments or scan.is_done)
        ):
            if is_known and name not in self.names:
                scan.is_broken = True
            else:
                open_object.has_started = True
                self.start(name)
        if open_object.has_started:
            self.arguments(scan.take_arguments())
        if not (scan.is_done or scan.is_broken or is_end):
            return False
        if not open_object.has_started:
            self.say(open_object.raw)
        self._object = None
        return True

    @property
    def is_in_object(self) -> bool:
        return self._object is not None

    def _take(self) -> list[Event]:
        events, self._events = self._events, []
        return events


class OpenObject:
    """A JSON object that may turn out to be a call."""

    __slots__ = ("has_started", "raw", "scan")

    def __init__(self, raw: str) -> None:
        self.raw = raw
        self.scan = ObjectScan()
        self.has_started = False


def split(text: str, markers: Sequence[str], is_end: bool) -> tuple[str, str | None, str]:
    """Text before the first marker, the marker, the rest. Without a marker the rest is what may
    become one: the longest end of the text that begins one, none at the end of all."""
    first: tuple[int, str] | None = None
    for marker in markers:
        place = text.find(marker)
        if place >= 0 and (first is None or place < first[0]):
            first = (place, marker)
    if first is not None:
        place, marker = first
        # Another marker may have begun before this one: it cannot be complete, or it were first.
        return text[:place], marker, text[place + len(marker) :]
    if is_end:
        return text, None, ""
    held = max((begun(text, marker) for marker in markers), default=0)
    return text[: len(text) - held], None, text[len(text) - held :]


def begun(text: str, marker: str) -> int:
    """How many characters at the end of `text` may be the beginning of `marker`."""
    for count in range(min(len(marker) - 1, len(text)), 0, -1):
        if text.endswith(marker[:count]):
            return count
    return 0
