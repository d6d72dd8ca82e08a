"""This file merges the log lines of several processes by time, and chooses among them.

It does not know files or clocks: pieces of bytes come in, whole lines go out. A half-written line
waits for its rest. What is no log line (a crash may have cut it) is shown as it is, where it stood.
"""

from __future__ import annotations

import heapq
from typing import Any, NamedTuple

import msgspec

from messages.log import LogLine

LEVELS = ("debug", "info", "warning", "error", "critical")

REQUEST_KEYS = ("request", "client_request")  # our id, and the one that a client has given


class Line(NamedTuple):
    """One line of a log. `fields` has all its keys, `raw` is the line as it was written."""

    timestamp: str
    fields: dict[str, Any]
    raw: bytes


class Splitter:
    """Cuts the bytes of one file, or of one after the other, into lines."""

    def __init__(self, source: str) -> None:
        self._source = source
        self._half = b""
        self._timestamp = ""  # of the line before, for those that have none

    def feed(self, data: bytes) -> list[Line]:
        """The lines that this piece completes."""
        *whole, self._half = (self._half + data).split(b"\n")
        return [self._parse(raw) for raw in whole if raw.strip()]

    def flush(self) -> list[Line]:
        """Nothing more will come of what is half there."""
        half, self._half = self._half, b""
        return [self._parse(half)] if half.strip() else []

    def _parse(self, raw: bytes) -> Line:
        try:
            line = msgspec.json.decode(raw, type=LogLine)
            fields = msgspec.json.decode(raw, type=dict[str, Any])
        except (msgspec.MsgspecError, RecursionError, ValueError):
            text = raw.decode(errors="replace")
            fields = {
                "timestamp": self._timestamp,
                "level": "warning",
                "event": text,
                "node": self._source,
            }
            return Line(self._timestamp, fields, raw)
        self._timestamp = line.timestamp
        return Line(line.timestamp, fields, raw)


class Choice(msgspec.Struct, frozen=True, kw_only=True):
    """Which lines to show. An absent condition lets all pass."""

    request: str | None = None
    actor: str | None = None
    level: str = "debug"  # the least

    def takes(self, line: Line) -> bool:
        fields = line.fields
        level = fields.get("level")
        if level in LEVELS and LEVELS.index(level) < LEVELS.index(self.level):
            return False
        if self.request is not None and not any(
            is_part(fields.get(key), self.request) for key in REQUEST_KEYS
        ):
            return False
        return self.actor is None or is_part(fields.get("actor"), self.actor)


def is_part(name: object, whole: str) -> bool:
    """Whether `name` is `whole` or a part of it: `replica/worker` of `replica`, `r7-1` of `r7`."""
    if not isinstance(name, str) or not name.startswith(whole):
        return False
    return len(name) == len(whole) or not name[len(whole)].isalnum()


class Merge:
    """Lines of several sources, given out by time.

    Sources are read one after the other, so a line that is newer than the beginning of a round may
    have an older one behind it that was not yet read: it is held until the next round.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[str, int, Line]] = []
        self._count = 0

    def add(self, lines: list[Line]) -> None:
        for line in lines:
            self._count += 1
            heapq.heappush(self._heap, (line.timestamp, self._count, line))

    def take(self, before: str | None = None) -> list[Line]:
        """The lines up to `before` (all, without), in order of time; each once."""
        lines: list[Line] = []
        while self._heap and (before is None or self._heap[0][0] <= before):
            lines.append(heapq.heappop(self._heap)[2])
        return lines
