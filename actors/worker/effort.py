"""This file tells how much processor time the threads have used that compute for a worker, and the
programs that they wait for (a kernel's compiler is one).

The time of the whole process would not do: its loop goes on while a forward waits for ever. A
thread counts from the first time that it says so, until it ends. It does not know what they do.
"""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

GRAIN_NS = 1_000_000  # less is what a thread uses that looks now and then whether it may go on
TICK_NS = 1_000_000_000 // os.sysconf("SC_CLK_TCK")


class Effort:
    """Of a few threads, which stay the same."""

    def __init__(self) -> None:
        self._clocks: dict[int, tuple[int, int]] = {}  # by thread: its clock, its number in /proc

    def count_me(self) -> None:
        """Counts the calling thread from now on. Idempotent."""
        ident = threading.get_ident()
        if ident not in self._clocks:
            self._clocks[ident] = time.pthread_getcpuclockid(ident), threading.get_native_id()

    def spent(self) -> int:
        """A number that changes while any of them computes, or what it has started. From any
        thread."""
        total_ns = 0
        for clock, thread in tuple(self._clocks.values()):
            try:
                total_ns += time.clock_gettime_ns(clock)
            except OSError:  # that thread has ended
                continue
            total_ns += started_ns(Path(f"/proc/self/task/{thread}"))
        return total_ns // GRAIN_NS


def started_ns(task: Path) -> int:
    """Processor time of the processes that a thread has started, and of those that these have."""
    try:
        children = (task / "children").read_text().split()
    except OSError:  # it has ended, or the system keeps no such list
        return 0
    total_ns = 0
    for child in children:
        process = Path("/proc", child)
        try:
            # The name may hold anything; state and what follows stand behind its last bracket.
            fields = (process / "stat").read_text().rpartition(")")[2].split()
            tasks = list((process / "task").iterdir())
        except OSError:
            continue
        total_ns += (int(fields[11]) + int(fields[12])) * TICK_NS
        total_ns += sum(started_ns(each) for each in tasks)
    return total_ns
