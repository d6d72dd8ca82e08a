"""This file holds those who wait, and the seam of policies that say who is next.

It does not know pages, slots or steps. The order of arrival (within a priority; a higher number
goes first) is the queue's own; a policy picks from the first `WINDOW` of it, so that its cost does
not grow with the queue.

To add a policy: a class with the methods of `SchedulePolicy`, registered in `POLICIES` (built-in
here, or the entry point `histrio.schedule` of an installed package). It may rely on the window
being in order of arrival and not empty. It must keep: whoever was retracted goes before those who
arrived later, and nobody is overtaken without bound.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence
from typing import Protocol

from actors.scheduler.request import Request
from kernels.registry import Registry

WINDOW = 32
OVERTAKEN_MAX = 32


class SchedulePolicy(Protocol):
    """Which of the waiting requests is admitted next."""

    wants_match: bool  # whether `Request.match_len` has to be fresh before `pick`

    def pick(self, window: Sequence[Request]) -> int:
        """An index into `window`."""


POLICIES: Registry[type[SchedulePolicy]] = Registry("schedule")


@POLICIES.register("fcfs")
class FirstCome:
    """First come, first served."""

    wants_match = False

    def pick(self, window: Sequence[Request]) -> int:
        return 0


@POLICIES.register("lpm")
class LongestPrefix:
    """Longest cached prefix first: what is in the cache is used before it is evicted.

    The head of the queue goes first all the same when it was retracted, when it has been overtaken
    `OVERTAKEN_MAX` times, or when its priority is higher than the others'.
    """

    wants_match = True

    def pick(self, window: Sequence[Request]) -> int:
        head = window[0]
        if head.was_retracted or head.overtaken_count >= OVERTAKEN_MAX:
            return 0
        best = 0
        for index, request in enumerate(window):
            if request.priority != head.priority or request.was_retracted:
                break
            if request.match_len > window[best].match_len:
                best = index
        return best


class Queue:
    """Waiting requests in order of seniority. The number of them is bounded by its owner."""

    def __init__(self, policy: SchedulePolicy) -> None:
        self.policy = policy
        self._waiting: list[Request] = []

    def __len__(self) -> int:
        return len(self._waiting)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._waiting)

    def push(self, request: Request) -> None:
        """Puts it where its seniority says: a request that comes back is not last."""
        insort(self._waiting, request, key=_seniority)

    def remove(self, request: Request) -> bool:
        """Whether it was there."""
        index = bisect_left(self._waiting, request.seniority, key=_seniority)
        if index < len(self._waiting) and self._waiting[index] is request:
            del self._waiting[index]
            return True
        return False

    def window(self) -> list[Request]:
        """Those whom the policy chooses from."""
        return self._waiting[:WINDOW]

    def pop(self) -> Request:
        """Takes out the next one, as the policy says; those it overtakes remember that."""
        window = self.window()
        index = self.policy.pick(window)
        assert 0 <= index < len(window), f"the policy picked {index} of {len(window)}"
        for passed in window[:index]:
            passed.overtaken_count += 1
        return self._waiting.pop(index)

    def check(self) -> None:
        """Asserts the laws."""
        order = [request.seniority for request in self._waiting]
        assert order == sorted(order), "the queue is out of order"
        assert len(set(order)) == len(order), "two requests arrived at once"


def _seniority(request: Request) -> tuple[int, int]:
    return request.seniority
