"""This file is an event loop on which time is virtual and order is a function of a seed.

It does not know actors. Whoever runs on it sees `loop.time()` jump to the next timer when nothing
is ready, and any of the ready callbacks run next: all that asyncio leaves open is decided by the
seed, so that a run is replayed by it. What would reach outside (sockets, threads, signals,
processes) raises `Escape`.

Laws: one callback a step; a timer never runs before its time; nothing ready and nothing due is a
`Deadlock`; more steps than `steps_max` is an error that shows the last ones.
"""

from __future__ import annotations

import asyncio
import heapq
import random
from asyncio import events
from collections import deque
from collections.abc import Callable
from contextvars import Context
from typing import Any, NoReturn

STEPS_MAX = 5_000_000
LAST_STEPS = 50


class Deadlock(RuntimeError):
    """All tasks wait, and nothing will ever wake one."""


class Escape(RuntimeError):
    """Something reached for the world outside of the simulation."""


class StepsExceeded(RuntimeError):
    """The simulation does not come to an end."""


class SimLoop(asyncio.BaseEventLoop):
    """Use as `loop_factory` of `asyncio.Runner`, or by the fixtures of `tests/conftest.py`."""

    is_simulated = True

    def __init__(
        self,
        seed: int = 0,
        *,
        shuffles: bool = True,
        steps_max: int = STEPS_MAX,
        after_step: Callable[[], None] | None = None,
        holds: Callable[[events.Handle], bool] | None = None,
    ) -> None:
        super().__init__()
        self.seed = seed
        self.steps_max = steps_max
        self.after_step = after_step
        self.holds = holds  # takes a step away, for as long as its owner is stopped; see `release`
        self.step_count = 0
        self.last_steps: deque[tuple[float, events.Handle]] = deque(maxlen=LAST_STEPS)
        self._rng = random.Random(seed) if shuffles else None
        self._now_s = 0.0
        self._timers: list[tuple[float, int, events.TimerHandle]] = []
        self._timer_count = 0
        self._ready: deque[events.Handle]
        self._stopping: bool

    # Time

    def time(self) -> float:
        return self._now_s

    def jump(self, seconds: float) -> None:
        """The whole machine stood still for so long: all that was due meanwhile is late."""
        self._now_s += seconds

    def call_later(  # type: ignore[override]
        self,
        delay: float,
        callback: Callable[..., Any],
        *args: Any,
        context: Context | None = None,
    ) -> events.TimerHandle:
        return self.call_at(self._now_s + max(delay, 0.0), callback, *args, context=context)

    def call_at(  # type: ignore[override]
        self,
        when: float,
        callback: Callable[..., Any],
        *args: Any,
        context: Context | None = None,
    ) -> events.TimerHandle:
        self._check_closed()  # type: ignore[attr-defined]
        handle = events.TimerHandle(when, callback, args, self, context)
        self._timer_count += 1
        heapq.heappush(self._timers, (when, self._timer_count, handle))
        handle._scheduled = True  # type: ignore[attr-defined]
        return handle

    def timers(self) -> list[events.TimerHandle]:
        """Those that are still to come, the next one first."""
        return [handle for _, _, handle in sorted(self._timers) if not handle._cancelled]

    def _timer_handle_cancelled(self, handle: events.TimerHandle) -> None:
        """Cancelled timers are dropped when their time comes."""

    # Steps

    def _run_once(self) -> None:
        """Steps until the loop is to stop: asyncio's own round about each would cost as much as
        many a step does."""
        while True:
            self._step()
            if self._stopping:
                return

    def _step(self) -> None:
        """One callback, or none where the next one is cancelled or held."""
        ready, timers = self._ready, self._timers
        while timers and timers[0][2]._cancelled:
            heapq.heappop(timers)
        if not ready:
            if timers:
                self._now_s = max(self._now_s, timers[0][0])
            elif not self._stopping:
                raise Deadlock(self._describe("every task waits for ever"))
        now_s = self._now_s
        while timers and timers[0][0] <= now_s:
            timer = heapq.heappop(timers)[2]
            timer._scheduled = False  # type: ignore[attr-defined]
            if not timer._cancelled:
                ready.append(timer)
        if not ready:
            return
        if self._rng is not None and len(ready) > 1:
            # Uniform: each task has one ready callback at most, so its own order is kept, and no
            # task is starved for ever.
            ready.rotate(-self._rng.randrange(len(ready)))
        handle = ready.popleft()
        if handle._cancelled or (self.holds is not None and self.holds(handle)):
            return
        self.step_count += 1
        if self.step_count > self.steps_max:
            limit = self.steps_max
            self.steps_max += limit  # so that what is cancelled now can still end,
            ready.appendleft(handle)  # this one too
            raise StepsExceeded(self._describe(f"more than {limit} steps"))
        self.last_steps.append((now_s, handle))
        handle._run()
        if self.after_step is not None:
            self.after_step()

    def release(self, handle: events.Handle) -> None:
        """Gives back a step that `holds` has taken away."""
        self._ready.append(handle)

    def _describe(self, what: str) -> str:
        steps = "\n  ".join(f"{at_s:.6f} {_name_of(h)}" for at_s, h in self.last_steps)
        return f"{what} (seed {self.seed}, {self._now_s:g} s); the last steps:\n  {steps}"

    # What would escape

    def _process_events(self, event_list: Any) -> None:
        """There are no events from outside."""

    def _write_to_self(self) -> None:
        """Nobody sleeps in a selector."""

    def call_soon_threadsafe(self, *_: Any, **__: Any) -> NoReturn:  # type: ignore[override]
        raise Escape("call_soon_threadsafe: no thread but one takes part in a simulation")

    def run_in_executor(self, *_: Any, **__: Any) -> NoReturn:  # type: ignore[override]
        raise Escape("run_in_executor")

    def add_reader(self, *_: Any) -> NoReturn:  # type: ignore[override]
        raise Escape("add_reader")

    def add_writer(self, *_: Any) -> NoReturn:  # type: ignore[override]
        raise Escape("add_writer")

    def add_signal_handler(self, *_: Any) -> NoReturn:  # type: ignore[override]
        raise Escape("add_signal_handler")

    async def create_connection(self, *_: Any, **__: Any) -> NoReturn:
        raise Escape("create_connection")

    async def create_server(self, *_: Any, **__: Any) -> NoReturn:
        raise Escape("create_server")

    async def create_datagram_endpoint(self, *_: Any, **__: Any) -> NoReturn:
        raise Escape("create_datagram_endpoint")

    async def subprocess_exec(self, *_: Any, **__: Any) -> NoReturn:
        raise Escape("subprocess_exec")

    async def subprocess_shell(self, *_: Any, **__: Any) -> NoReturn:
        raise Escape("subprocess_shell")

    async def getaddrinfo(self, *_: Any, **__: Any) -> NoReturn:
        raise Escape("getaddrinfo")

    async def shutdown_default_executor(self, *_: Any, **__: Any) -> None:
        """There is none."""


def _name_of(handle: events.Handle) -> str:
    """The task whose step it was, or the callback."""
    callback = getattr(handle, "_callback", None)
    owner = getattr(callback, "__self__", None)
    if isinstance(owner, asyncio.Task):
        return f"task {owner.get_name()}: {owner.get_coro()!r}"[:300]
    return repr(callback or handle)[:300]
