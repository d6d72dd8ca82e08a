"""This file keeps the keyed timers of one actor. A timer's end is a message, never a callback into
the actor, so that it waits its turn like everything else.

It does not know the loop: `call_later` and the delivery are given. Law: a tick of an earlier
generation (replaced or cancelled after it was put into the mailbox) is never handled.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, Protocol


class Alarm(Protocol):
    def cancel(self) -> None: ...


class Timer:
    __slots__ = ("alarm", "every_s", "generation", "is_waiting", "message")

    def __init__(self, generation: int, message: Any, every_s: float | None) -> None:
        self.generation = generation
        self.message = message
        self.every_s = every_s
        self.is_waiting = False  # its tick is in the mailbox
        self.alarm: Alarm | None = None


class Timers:
    """`deliver(message, (key, generation))` puts a tick into the owner's mailbox."""

    def __init__(
        self,
        call_later: Callable[[float, Callable[[], None]], Alarm],
        deliver: Callable[[Any, tuple[Hashable, int]], None],
    ) -> None:
        self._call_later = call_later
        self._deliver = deliver
        self._timers: dict[Hashable, Timer] = {}
        self._generation = 0
        self._is_closed = False

    def __len__(self) -> int:
        return len(self._timers)

    def start(
        self, key: Hashable, message: Any, *, after_s: float | None, every_s: float | None
    ) -> None:
        """Starts a timer, replacing one with the same key."""
        if self._is_closed:  # what a dead actor's tasks still ask for
            return
        assert (after_s is None) != (every_s is None), "one of after_s and every_s"
        self.cancel(key)
        self._generation += 1
        timer = Timer(self._generation, message, every_s)
        self._timers[key] = timer
        self._arm(key, timer, after_s if after_s is not None else every_s or 0.0)

    def _arm(self, key: Hashable, timer: Timer, delay_s: float) -> None:
        timer.alarm = self._call_later(delay_s, lambda: self._fire(key, timer))

    def _fire(self, key: Hashable, timer: Timer) -> None:
        if self._timers.get(key) is not timer:
            return
        if timer.every_s is not None:
            self._arm(key, timer, timer.every_s)
        if not timer.is_waiting:  # a slow actor gets one tick, not a backlog of them
            timer.is_waiting = True
            self._deliver(timer.message, (key, timer.generation))

    def accept(self, tick: tuple[Hashable, int]) -> bool:
        """Called when a tick's turn comes: whether it is still wanted."""
        key, generation = tick
        timer = self._timers.get(key)
        if timer is None or timer.generation != generation:
            return False
        timer.is_waiting = False
        if timer.every_s is None:
            del self._timers[key]
        return True

    def cancel(self, key: Hashable) -> None:
        """Ends a timer. Nothing happens when there is none."""
        timer = self._timers.pop(key, None)
        if timer is not None and timer.alarm is not None:
            timer.alarm.cancel()

    def close(self) -> None:
        """Ends all timers; none starts any more."""
        self._is_closed = True
        for key in list(self._timers):
            self.cancel(key)
