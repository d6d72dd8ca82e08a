"""This file is an actor's own threads for work that would hold up its loop.

It does not know actors: results go back through the given `hand_over`. The threads are daemons and
are never joined: one that is stuck in foreign code must not keep the process from ending. Idle
threads wait on a queue and cost nothing.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Any

Job = tuple[Callable[[], Any], Callable[[Any], None], bool]


class Crew:
    """`threads` threads that take jobs in order."""

    def __init__(self, name: str, threads: int, hand_over: Callable[..., Any]) -> None:
        self._name = name
        self._threads_max = threads
        self._threads: list[threading.Thread] = []
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._hand_over = hand_over  # loop.call_soon_threadsafe
        self._idle = threading.Semaphore(0)
        self._kept: tuple[Callable[[Any], None], Any] | None = None
        self._is_closed = False

    def run(
        self, work: Callable[[], Any], then: Callable[[Any], None], *, keeps: bool = False
    ) -> None:
        """Queues `work`; `then` gets its result or its exception, on the loop. `keeps`: where
        another job waits already, what comes of this one is kept until that one calls `let_go`, or
        ends. Only with one thread."""
        assert not self._is_closed, f"{self._name} is closed"
        assert not keeps or self._threads_max == 1, f"{self._name} has no order"
        if not self._idle.acquire(blocking=False) and len(self._threads) < self._threads_max:
            thread = threading.Thread(
                target=self._serve, name=f"{self._name}-{len(self._threads)}", daemon=True
            )
            self._threads.append(thread)
            thread.start()
        self._jobs.put((work, then, keeps))

    def let_go(self) -> None:
        """Called by a job: the loop may have what came of the one before it."""
        kept, self._kept = self._kept, None
        if kept is not None:
            self._deliver(*kept)

    def close(self) -> None:
        """Ends the threads after their present job. Jobs that wait are dropped."""
        self._is_closed = True
        while True:
            try:
                self._jobs.get_nowait()
            except queue.Empty:
                break
        for _ in self._threads:
            self._jobs.put(None)

    def _serve(self) -> None:
        while True:
            job = self._jobs.get()
            if job is None or self._is_closed:
                self._kept = None
                return
            work, then, keeps = job
            result: Any
            try:
                result = work()
            except Exception as error:
                result = error
            del work, job
            self._idle.release()
            self.let_go()
            if keeps and not self._jobs.empty():
                self._kept = then, result
            elif not self._deliver(then, result):
                return
            del result, then

    def _deliver(self, then: Callable[[Any], None], result: Any) -> bool:
        """False: the loop is closed, nobody is left to want it."""
        try:
            self._hand_over(then, result)
        except RuntimeError:
            return False
        return True
