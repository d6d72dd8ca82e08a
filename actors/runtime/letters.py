"""This file keeps what was not delivered: the last ones, and counts by reason, kind and target.

It does not know how to log or send. Law: each undelivered message is counted exactly once, and at
most one line for each (reason, kind) and interval is due, which says how many it stands for.
"""

from __future__ import annotations

from collections import Counter, deque
from typing import NamedTuple

from messages.base import Address
from messages.system import Cause

RING_LEN = 256
LINE_INTERVAL_S = 10.0
SERIES_MAX = 1024


class Letter(NamedTuple):
    at_s: float
    cause: Cause
    kind: str
    target: str
    sender: Address | None
    request: str | None


class DeadLetters:
    """Of one node."""

    def __init__(self) -> None:
        self.ring: deque[Letter] = deque(maxlen=RING_LEN)
        self.counts: Counter[tuple[Cause, str, str]] = Counter()
        self.total = 0
        self._line_s: dict[tuple[Cause, str], float] = {}
        self._unsaid: Counter[tuple[Cause, str]] = Counter()

    def add(self, letter: Letter) -> int:
        """Counts one. Returns how many a log line should speak of now; 0: no line is due."""
        self.ring.append(letter)
        self.total += 1
        key = (letter.cause, letter.kind, letter.target)
        if key in self.counts or len(self.counts) < SERIES_MAX:
            self.counts[key] += 1
        line = (letter.cause, letter.kind)
        self._unsaid[line] += 1
        last_s = self._line_s.get(line)
        if last_s is not None and letter.at_s - last_s < LINE_INTERVAL_S:
            return 0
        self._line_s[line] = letter.at_s
        return self._unsaid.pop(line)
