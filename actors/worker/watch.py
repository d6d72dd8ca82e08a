"""This file judges whether a forward goes on, by a number that changes while it computes.

It does not know threads, kernels or clocks: it is asked at regular looks, and counts those at which
the number stood still. So a process that was itself stopped for a while, and looks late, does not
take its own absence for the forward's.

Law: what changes the number between two looks is never called hung, however long it takes; a quiet
that ended by itself once is not called one again before it is several times as long.
"""

from __future__ import annotations

LOOKS = 8  # within the time after which quiet is a hang
FACTOR = 4  # times longer than the longest quiet that was none


class Watch:
    """Of one worker."""

    def __init__(self, hang_s: float) -> None:
        self.look_s = hang_s / LOOKS
        self._limit = LOOKS - 1  # quiet looks; what stopped may have done so just after a look
        self._seen = 0
        self._quiet = 0

    def begin(self, progress: int) -> None:
        """A forward begins."""
        self._seen = progress
        self._quiet = 0

    def look(self, progress: int) -> float | None:
        """How long it has stood still, once that is too long."""
        if progress != self._seen:
            self._seen = progress
            self._limit = max(self._limit, FACTOR * self._quiet)
            self._quiet = 0
            return None
        self._quiet += 1
        return self._quiet * self.look_s if self._quiet >= self._limit else None
