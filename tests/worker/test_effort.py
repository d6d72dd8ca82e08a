"""A thread that computes is told from one that waits, whatever else its process does. What it has
started, and waits for, computes for it."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from actors.worker.effort import GRAIN_NS, TICK_NS, Effort

# Says that it waits; computes for a few ticks at each line that it is given.
PROGRAM = """
import sys, time
for _ in iter(lambda: print(flush=True) or sys.stdin.readline(), ""):
    end = time.process_time_ns() + 3 * int(sys.argv[1])
    while time.process_time_ns() < end:
        pass
"""


def burn() -> None:
    """More processor time of this thread than the grain."""
    end_ns = time.thread_time_ns() + 3 * GRAIN_NS
    while time.thread_time_ns() < end_ns:
        pass


class Thread:
    """Does one job after the other, of those that it is given."""

    def __init__(self, effort: Effort) -> None:
        self.effort = effort
        self.jobs: list[Callable[[], None]] = []
        self.turn, self.done = threading.Semaphore(0), threading.Semaphore(0)
        self.thread = threading.Thread(target=self.serve)
        self.thread.start()

    def serve(self) -> None:
        self.effort.count_me()
        while True:
            self.done.release()
            self.turn.acquire()
            if not self.jobs:
                return
            self.jobs.pop()()

    def run(self, job: Callable[[], None]) -> None:
        self.jobs.append(job)
        self.turn.release()
        self.done.acquire()


def test_only_what_the_counted_threads_compute_counts() -> None:
    effort = Effort()
    assert effort.spent() == 0
    first, second = Thread(effort), Thread(effort)
    for thread in (first, second):
        thread.done.acquire()
    waiting = effort.spent()
    burn()  # as a loop does, beside a forward that stands still
    assert effort.spent() == waiting
    first.run(burn)
    seen = effort.spent()
    assert seen > waiting
    second.run(burn)
    assert effort.spent() > seen
    for thread in (first, second):
        thread.turn.release()
        thread.thread.join()
    effort.spent()  # of threads that have ended: no error


def test_a_thread_counts_once() -> None:
    effort = Effort()
    for _ in range(3):
        effort.count_me()
    burn()
    own = time.thread_time_ns() // GRAIN_NS
    assert own - 1 <= effort.spent() <= time.thread_time_ns() // GRAIN_NS + 1


@pytest.mark.parametrize("depth", [0, 1])
def test_a_program_that_a_thread_waits_for_computes_for_it(depth: int) -> None:
    """As a kernel's compiler does, which may start another one."""
    if not Path(f"/proc/self/task/{threading.get_native_id()}/children").exists():
        pytest.skip("this system does not say who has started a process")
    effort = Effort()
    effort.count_me()
    command = [sys.executable, "-c", PROGRAM, str(TICK_NS)]
    for _ in range(depth):
        outer = "import subprocess, sys; subprocess.run(sys.argv[1:])"
        command = [sys.executable, "-c", outer, *command]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdin is not None and child.stdout is not None
        child.stdout.readline()
        waiting = effort.spent()
        assert effort.spent() - waiting <= TICK_NS // GRAIN_NS
        child.stdin.write(b"\n")
        child.stdin.flush()
        child.stdout.readline()
        assert effort.spent() >= waiting + 2 * TICK_NS // GRAIN_NS
        child.stdin.close()
    effort.spent()  # of a program that has ended: no error
