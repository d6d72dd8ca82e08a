"""This file tells how much processor time the threads have used that compute for a worker.

The time of the whole process would not do: its loop goes on while a forward waits for ever. A
thread counts from the first time that it says so, until it ends. It does not know what they do.
"""

from __future__ import annotations

import threading
import time

GRAIN_NS = 1_000_000  # less is what a thread uses that looks now and then whether it may go on


class Effort:
    """Of a few threads, which stay the same."""

    def __init__(self) -> None:
        self._clocks: dict[int, int] = {}  # by thread: the number of its clock

    def count_me(self) -> None:
        """Counts the calling thread from now on. Idempotent."""
        ident = threading.get_ident()
        if ident not in self._clocks:
            self._clocks[ident] = time.pthread_getcpuclockid(ident)

    def spent(self) -> int:
        """A number that changes while any of them computes. From any thread."""
        total_ns = 0
        for clock in tuple(self._clocks.values()):
            try:
                total_ns += time.clock_gettime_ns(clock)
            except OSError:  # that thread has ended
                continue
        return total_ns // GRAIN_NS
