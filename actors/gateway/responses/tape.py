"""This file keeps the events of a response that is made in the background, for whoever streams it.

It does not know HTTP nor who reads. An event's number is its place. Laws: what a reader has taken
from place n on is events n, n + 1, … without a gap, to the end; after the end nothing is added; a
tape that would be longer than its limit is cut: it ends there, though the response goes on.
"""

from __future__ import annotations

EVENT_BYTES = 64  # what an event costs beside its text, about


class Tape:
    __slots__ = ("bytes_len", "bytes_max", "events", "is_cut", "is_over")

    def __init__(self, bytes_max: int) -> None:
        self.bytes_max = bytes_max
        self.bytes_len = 0
        self.events: list[bytes] = []
        self.is_over = False
        self.is_cut = False  # events are missing at the end

    def add(self, frames: bytes) -> None:
        """Whole events, as they are sent."""
        if self.is_cut:
            return
        assert not self.is_over, "an event after the end"
        for event in frames.split(b"\n\n")[:-1]:
            size = EVENT_BYTES + len(event)
            if self.bytes_len + size > self.bytes_max:
                self.is_cut = self.is_over = True
                return
            self.bytes_len += size
            self.events.append(event + b"\n\n")

    def end(self) -> None:
        self.is_over = True

    def take(self, place: int, bytes_max: int) -> tuple[bytes, int]:
        """Events from `place` on, at least one if there is one, and the place behind them."""
        taken: list[bytes] = []
        size = 0
        for event in self.events[place:]:
            if taken and size + len(event) > bytes_max:
                break
            taken.append(event)
            size += len(event)
        return b"".join(taken), place + len(taken)

    def check(self) -> None:
        total = sum(EVENT_BYTES - 2 + len(event) for event in self.events)
        assert self.bytes_len == total <= self.bytes_max, (self.bytes_len, total)
        assert self.is_over or not self.is_cut
        for number, event in enumerate(self.events):
            assert b'"sequence_number":%d,' % number in event, event
