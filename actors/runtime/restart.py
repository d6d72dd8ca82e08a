"""This file decides what a supervisor does when children died: whom to stop, whom to start, when.

It does not know actors, clocks or chance: time is an argument and the jitter's stream is given.

Laws: no more than `restarts_max` restarts within any `window_s` seconds; the first restart of a
quiet window is immediate, later ones wait twice as long each, up to a limit; stops go in reverse
start order, starts in start order; a temporary child never starts again.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Collection, Sequence
from typing import NamedTuple

from actors.runtime.spec import Restart, Strategy


class Leave(NamedTuple):
    """Nobody is restarted."""


class Again(NamedTuple):
    """Stop `stops` in this order, wait, start `starts` in this order."""

    stops: tuple[str, ...]
    starts: tuple[str, ...]
    delay_s: float


class GiveUp(NamedTuple):
    """Too many restarts: the supervisor stops its children and dies itself."""

    restarts_count: int
    window_s: float


Decision = Leave | Again | GiveUp


class Child(NamedTuple):
    name: str
    restart: Restart


class Restarts:
    """The memory of one supervisor, over all its lives: one that was restarted because it gave up
    gives up again with the next death, while the window lasts."""

    def __init__(
        self,
        children: Sequence[Child],
        strategy: Strategy,
        *,
        restarts_max: int,
        window_s: float,
        backoff_first_s: float,
        backoff_max_s: float,
        rng: random.Random,
    ) -> None:
        self.children = {c.name: c for c in children}
        assert len(self.children) == len(children), "two children with one name"
        self.order = tuple(c.name for c in children)
        self.strategy = strategy
        self.restarts_max = restarts_max
        self.window_s = window_s
        self.backoff_first_s = backoff_first_s
        self.backoff_max_s = backoff_max_s
        self.rng = rng
        self.finished: set[str] = set()  # ended for good: not restarted by a sibling's death
        self.times: deque[float] = deque()  # of restarts within the window

    def begin_again(self) -> None:
        """All children are started."""
        self.finished.clear()

    def died(self, dead: Collection[str], abnormal: Collection[str], now_s: float) -> Decision:
        """Decides for children that died together; `abnormal` are those that didn't just stop.

        Counts as one restart, however many died.
        """
        assert dead and set(abnormal) <= set(dead) <= set(self.children), (dead, abnormal)
        triggers = {name for name in dead if self._is_restarted(name, name in abnormal)}
        self.finished |= set(dead) - triggers
        if not triggers:
            return Leave()
        if self.times:  # a clock that is the difference of two may lose the last bit
            now_s = max(now_s, self.times[-1])
        self._forget_before(now_s - self.window_s)
        if len(self.times) >= self.restarts_max:
            return GiveUp(len(self.times), self.window_s)
        delay_s = self._delay_s(len(self.times))
        self.times.append(now_s)
        affected = self.affected(triggers)
        stops = tuple(n for n in reversed(affected) if n not in dead and n not in self.finished)
        self.finished |= {n for n in stops if self.children[n].restart is Restart.TEMPORARY}
        starts = tuple(n for n in affected if n not in self.finished)
        return Again(stops, starts, delay_s)

    def _is_restarted(self, name: str, is_abnormal: bool) -> bool:
        match self.children[name].restart:
            case Restart.PERMANENT:
                return True
            case Restart.TRANSIENT:
                return is_abnormal
            case Restart.TEMPORARY:
                return False

    def affected(self, triggers: Collection[str]) -> tuple[str, ...]:
        """Who is restarted when these are, in start order."""
        match self.strategy:
            case Strategy.ONE_FOR_ONE:
                return tuple(n for n in self.order if n in triggers)
            case Strategy.ONE_FOR_ALL:
                return self.order
            case Strategy.REST_FOR_ONE:
                first = min(self.order.index(n) for n in triggers)
                return self.order[first:]

    def _forget_before(self, limit_s: float) -> None:
        while self.times and self.times[0] <= limit_s:
            self.times.popleft()

    def _delay_s(self, recent_count: int) -> float:
        if recent_count == 0:
            return 0.0
        full_s = min(self.backoff_first_s * 2.0 ** (recent_count - 1), self.backoff_max_s)
        return full_s * self.rng.uniform(0.5, 1.0)

    def check(self) -> None:
        assert len(self.times) <= self.restarts_max, (self.times, self.restarts_max)
        assert list(self.times) == sorted(self.times), self.times
        assert all(self.times[-1] - t < self.window_s for t in self.times), self.times
        assert self.finished <= set(self.children)
