"""This file runs one actor synchronously, for the tests of its room: no loop, no node, no thread.

It does not know other actors: what is sent is collected, after an encode and decode through
msgpack, so that a message that cannot travel fails here. Time moves only by `advance`.
"""

from __future__ import annotations

import asyncio
import heapq
import random
import sys
from collections import deque
from collections.abc import Callable, Coroutine, Hashable, Iterable, Mapping
from typing import Any, TypeVar

import msgspec
import structlog

from actors.runtime.actor import Actor, union_members
from actors.runtime.clock import rng_for
from actors.runtime.context import Context, Exact, Outcome, Ref, Rejected, Reply
from actors.runtime.mailbox import Envelope
from actors.runtime.tally import Tally
from actors.runtime.timers import Timers
from messages.base import Address, Message
from messages.system import ActorRow, Cause, Down, Drain, Reason, Stop, Undelivered, Up

M = TypeVar("M", contravariant=True)
T = TypeVar("T")


class CellTarget:
    """A peer of the actor under test: up or not, as the test says."""

    def __init__(self, path: str, is_up: bool) -> None:
        self.path = path
        self.incarnation = 1 if is_up else 0
        self.is_up = is_up
        self.last_reason: Reason | None = None

    @property
    def address(self) -> Address | None:
        return Address("test", self.path, self.incarnation) if self.is_up else None


class CellAlarm:
    def __init__(self, at_s: float, ring: Callable[[], None]) -> None:
        self.at_s = at_s
        self.ring = ring
        self.is_cancelled = False

    def cancel(self) -> None:
        self.is_cancelled = True


class Cell:
    """Runs handlers to their end, one after another, and keeps what they did.

    `peers_up`: the paths in service; None is all of them. `answer` answers the actor's asks.
    """

    def __init__(
        self,
        actor: Actor,
        *,
        path: str = "actor",
        notes: Mapping[str, bytes] | None = None,
        peers_up: Iterable[str] | None = None,
        seed: int = 0,
    ) -> None:
        self.actor = actor
        self.now_s = 0.0
        self.sent: list[tuple[str, Message]] = []  # to a path, or to an address as text
        self.requests: list[str | None] = []  # beside `sent`: what each was sent about
        self.replies: list[Message] = []
        self.watched: set[str] = set()
        self.is_drained = False
        self.crashed: BaseException | None = None
        self.hung: str | None = None
        self.broken: str | None = None
        self.restarts_asked: list[str] = []
        self.answer: Callable[[str, Message], Outcome] = lambda path, message: Rejected(
            Cause.NOBODY
        )
        self.rows: list[ActorRow] = []
        self.peers: dict[str, CellTarget] = {}
        self._peers_up = None if peers_up is None else set(peers_up)
        self._own: deque[Envelope] = deque()
        self._undelivered: deque[Undelivered] = deque()
        self._alarms: list[tuple[float, int, CellAlarm]] = []
        self._alarm_count = 0
        self.address = Address("test", path, 1)
        self.context = CellContext(self, dict(notes or {}), seed)
        actor.context = self.context

    # Driving

    def start(self) -> bytes:
        """Runs `on_start`, with what it offloads inline; returns the note."""
        note = self._finish(self.actor.on_start())
        self._settle()
        return note

    def tell(
        self, message: Any, sender: Address | None = None, *, question: int | None = None
    ) -> None:
        """Handles one message to its end, then all that the actor told itself."""
        row = self.actor.handlers.get(type(message))
        assert row is not None, f"{type(self.actor).__name__} does not accept {message!r}"
        if not row.is_private:
            message = through_msgpack(message)
        self.context.sender = sender
        self.context.question = question
        self._run(getattr(self.actor, row.method), message)
        self.context.sender = None
        self.context.question = None
        self._settle()

    def drain(self, grace_s: float = 30.0) -> None:
        self._run(self.actor.on_drain, Drain(grace_s))
        self._settle()

    def stop(self, grace_s: float = 5.0) -> None:
        self._run(self.actor.on_stop, Reason(Cause.STOPPED, f"{Stop(grace_s).grace_s:g} s"))
        self.context.timers.close()
        self.actor.on_end()

    def up(self, path: str) -> Address:
        """A new incarnation of a peer is in service."""
        target = self.target(path)
        if not target.is_up:
            target.is_up = True
            target.incarnation += 1
        address = Address("test", path, target.incarnation)
        if path in self.watched:
            self._run(self.actor.on_up, Up(address))
            self._settle()
        return address

    def down(self, path: str, reason: Reason | None = None) -> None:
        """A peer dies."""
        target = self.target(path)
        target.is_up = False
        target.last_reason = reason or Reason(Cause.CRASHED)
        if path in self.watched:
            address = Address("test", path, target.incarnation)
            self._run(self.actor.on_down, Down(address, target.last_reason))
            self._settle()

    def undelivered(self, notice: Undelivered) -> None:
        self._run(self.actor.on_undelivered, notice)
        self._settle()

    def advance(self, seconds: float) -> None:
        """Moves time on, firing timers in order."""
        until_s = self.now_s + seconds
        while self._alarms and self._alarms[0][0] <= until_s:
            at_s, _, alarm = heapq.heappop(self._alarms)
            if alarm.is_cancelled:
                continue
            self.now_s = max(self.now_s, at_s)
            alarm.ring()
            self._settle()
        self.now_s = until_s

    # Looking

    def take(self) -> list[tuple[str, Message]]:
        """What was sent since the last `take`."""
        sent = list(self.sent)
        self.sent.clear()
        self.requests.clear()
        return sent

    @property
    def counters(self) -> dict[str, float]:
        """By name, summed over labels; `context.tally` has them apart."""
        sums: dict[str, float] = {}
        for (name, _), value in self.context.tally.counters.items():
            sums[name] = sums.get(name, 0.0) + value
        return sums

    @property
    def gauges(self) -> dict[str, float]:
        return {name: value for (name, _), value in self.context.tally.gauges.items()}

    @property
    def timer_count(self) -> int:
        return len(self.context.timers)

    # What the context calls

    def target(self, path: str) -> CellTarget:
        if path not in self.peers:
            is_up = self._peers_up is None or path in self._peers_up
            self.peers[path] = CellTarget(path, is_up)
        return self.peers[path]

    def send(self, target: Any, message: Any, request: str | None) -> None:
        message = through_msgpack(message)
        if not isinstance(target, Exact) and target.address is None:
            kind = type(message).__name__
            nobody = Address("test", target.path, target.incarnation)
            self._undelivered.append(Undelivered(nobody, kind, Cause.NOBODY, request))
            return
        name = str(target.address) if isinstance(target, Exact) else target.path
        self.sent.append((name, message))
        self.requests.append(request)

    def call_later(self, delay_s: float, ring: Callable[[], None]) -> CellAlarm:
        alarm = CellAlarm(self.now_s + delay_s, ring)
        self._alarm_count += 1
        heapq.heappush(self._alarms, (alarm.at_s, self._alarm_count, alarm))
        return alarm

    def tell_itself(self, message: Any, tick: tuple[Hashable, int] | None = None) -> None:
        assert type(message) in self.actor.handlers, f"{message!r} has no handler"
        self._own.append(Envelope(message, sender=self.address, own=True, tick=tick))

    def _settle(self) -> None:
        while self._own or self._undelivered:
            if self._undelivered:
                self._run(self.actor.on_undelivered, self._undelivered.popleft())
                continue
            envelope = self._own.popleft()
            if envelope.tick is not None and not self.context.timers.accept(envelope.tick):
                continue
            row = self.actor.handlers[type(envelope.body)]
            self.context.sender = self.address
            self._run(getattr(self.actor, row.method), envelope.body)
            self.context.sender = None
        self.actor.check()

    def _run(self, handler: Callable[[Any], Any], message: Any) -> None:
        result = handler(message)
        if asyncio.iscoroutine(result):
            self._finish(result)

    def _finish(self, coro: Coroutine[Any, Any, T]) -> T:
        """Drives a coroutine that never really waits."""
        try:
            coro.send(None)
        except StopIteration as end:
            value: T = end.value
            return value
        coro.close()
        raise AssertionError("the handler waits for something that a Cell can't give")


class CellContext(Context):
    """The context of an actor in a Cell."""

    def __init__(self, cell: Cell, notes: Mapping[str, bytes], seed: int) -> None:
        self.cell = cell
        self.address = cell.address
        # To stderr: what a bench prints on stdout is read by programs.
        self.log = structlog.wrap_logger(
            structlog.PrintLogger(sys.stderr),
            processors=[structlog.processors.LogfmtRenderer()],
            wrapper_class=structlog.make_filtering_bound_logger("info"),
        )
        self.notes = notes
        self.tally = Tally()
        self.timers = Timers(cell.call_later, cell.tell_itself)
        self.question: int | None = None
        self._seed = seed

    def send(
        self,
        target: Any,
        message: Any,
        deadline_s: float | None = None,
        request: str | None = None,
        question: int | None = None,
    ) -> None:
        self.cell.send(target, message, request)

    def peer(self, path: str) -> Ref[Any]:
        return Ref(self.send, self.cell.target(path))

    def reply(self, message: Message) -> None:
        self.cell.replies.append(through_msgpack(message))

    async def ask(self, ref: Ref[M], message: M, *, timeout_s: float) -> Outcome:
        outcome = self.cell.answer(ref.path, through_msgpack(message))
        if isinstance(outcome, Reply):
            answers = union_members(self.cell.actor.answers)
            assert type(outcome.message) in answers, f"{outcome.message!r} is not in `answers`"
        return outcome

    def watch(self, path: str) -> None:
        self.cell.watched.add(path)
        target = self.cell.target(path)
        if target.is_up:
            self.cell._run(self.cell.actor.on_up, Up(Address("test", path, target.incarnation)))
        elif target.last_reason is not None:
            address = Address("test", path, target.incarnation)
            self.cell._run(self.cell.actor.on_down, Down(address, target.last_reason))

    def actors(self) -> list[ActorRow]:
        return list(self.cell.rows)

    async def look(self, *, timeout_s: float) -> list[ActorRow]:
        return list(self.cell.rows)

    def ask_restart(self, path: str) -> None:
        self.cell.restarts_asked.append(path)

    def now_s(self) -> float:
        return self.cell.now_s

    def rng(self, purpose: str) -> random.Random:
        return rng_for(self._seed, self.address.path, self.address.incarnation, purpose)

    def spawn(self, coro: Coroutine[Any, Any, T], *, name: str) -> asyncio.Task[T]:
        coro.close()
        raise AssertionError(f"{name!r} needs a loop: test it on a node, not in a Cell")

    def offload(
        self,
        work: Callable[[], T],
        then: Callable[[T | Exception], Any],
        *,
        lane: str = "default",
        keeps: bool = False,
    ) -> None:
        assert lane in self.cell.actor.offload_threads, lane
        try:
            result: T | Exception = work()
        except Exception as error:
            result = error
        self.cell.tell_itself(then(result))

    def let_go(self, *, lane: str = "default") -> None:
        assert lane in self.cell.actor.offload_threads, lane  # each job is told of before the next

    async def in_thread(self, work: Callable[[], T], *, lane: str = "default") -> T:
        assert lane in self.cell.actor.offload_threads, lane
        return work()

    def drained(self) -> None:
        self.cell.is_drained = True

    def hung(self, detail: str) -> None:
        self.cell.hung = detail

    def broken(self, detail: str) -> None:
        self.cell.broken = detail

    def crash(self, error: BaseException) -> None:
        self.cell.crashed = error


def through_msgpack(message: Any) -> Any:
    """Encodes and decodes. Raises what the codec raises for a message that can't travel."""
    assert isinstance(message, Message), f"{message!r} is no Message"
    return msgspec.msgpack.decode(msgspec.msgpack.encode(message), type=type(message))
