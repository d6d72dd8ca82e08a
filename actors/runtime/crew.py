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

Job = tuple[Callable[[], Any], Callable[[Any], None]]


class Crew:
    """`threads` threads that take jobs in order."""

    def __init__(self, name: str, threads: int, hand_over: Callable[..., Any]) -> None:
        self._name = name
        self._threads_max = threads
        self._threads: list[threading.Thread] = []
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._hand_over = hand_over  # loop.call_soon_threadsafe
        self._idle = threading.Semaphore(0)
        self._is_closed = False

    def run(self, work: Callable[[], Any], then: Callable[[Any], None]) -> None:
        """Queues `work`; `then` gets its result or its exception, on the loop."""
        assert not self._is_closed, f"{self._name} is closed"
        if not self._idle.acquire(blocking=False) and len(self._threads) < self._threads_max:
            thread = threading.Thread(
                target=self._serve, name=f"{self._name}-{len(self._threads)}", daemon=True
            )
            self._threads.append(thread)
            thread.start()
        self._jobs.put((work, then))

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
                return
            work, then = job
            result: Any
            try:
                result = work()
            except Exception as error:
                result = error
            del work, job
            self._idle.release()
            try:
                self._hand_over(then, result)
            except RuntimeError:  # the loop is closed: nobody is left to want the result
                return
            del result, then
