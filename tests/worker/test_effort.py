"""A thread that computes is told from one that waits, whatever else its process does."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from actors.worker.effort import GRAIN_NS, Effort


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
