"""This file is one life of one actor: its turns on the event loop, from start to death.

It does not know supervision: it reports its end to the node, once. A turn is bounded in messages
and in time and then lets others run; a handler that waits gives its turn back by itself. Messages
of one kind that follow each other in a turn are a run: timed and recorded together, which costs the
single message no more than a comparison.

Laws: one message at a time; nothing is handled after the end; a crash takes only the message in
hand with it; a life ends exactly once.
"""

from __future__ import annotations

import asyncio
import traceback
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from actors.runtime.actor import Actor, union_members
from actors.runtime.codec import Decoder
from actors.runtime.crew import Crew
from actors.runtime.directory import Entry
from actors.runtime.durations import Durations
from actors.runtime.mailbox import TAKEN, USER, Envelope, Mailbox, Put, give_back
from actors.runtime.recorder import Event, Recorder
from actors.runtime.streams import Inflow, Stream
from actors.runtime.timers import Timers
from messages.base import Address, Lane
from messages.system import (
    Cause,
    Down,
    Drain,
    Reason,
    State,
    Stop,
    Undelivered,
    Up,
)

if TYPE_CHECKING:
    from actors.runtime.node import Node

DETAIL_CHARS_MAX = 500
TRACE_LINES_MAX = 12
TURN_S = 0.005  # so long may a turn be, and one message more
HANDLED = int(Event.HANDLED)  # bound once, as `TAKEN` and `USER`: a record is made in each turn


class Life:
    """What runs an actor. `send` is the hot path of the whole runtime."""

    __slots__ = (  # more than the thirty attributes that instances share keys for
        "accepted",
        "actor",
        "address",
        "answer_decoder",
        "answers",
        "blocked_count",
        "busy_since_s",
        "crews",
        "current",
        "current_kind",
        "decoder",
        "durations",
        "entry",
        "handled_count",
        "handlers",
        "inflows",
        "is_awake",
        "is_dead",
        "is_drained",
        "jobs",
        "loop",
        "mailbox",
        "node",
        "peer_paths",
        "recorder",
        "run_first",
        "run_number",
        "run_since_s",
        "spawned",
        "state",
        "streams",
        "task",
        "time",
        "timers",
        "waits",
        "wants_drain",
        "wants_undelivered",
        "watches",
    )

    def __init__(
        self, node: Node, actor: Actor, entry: Entry, address: Address, mailbox: Mailbox
    ) -> None:
        self.node = node
        self.loop = node.loop
        self.actor = actor
        self.entry = entry
        self.address = address
        self.mailbox = mailbox
        self.state = State.STARTING
        self.is_awake = True  # not woken before it has started
        self.is_dead = False
        self.blocked_count = 0  # messages of ours that wait for room elsewhere
        self.handled_count = 0
        self.busy_since_s = 0.0
        self.current: Envelope | None = None
        self.current_kind: str | None = None  # of what is not an envelope: on_start, on_stop
        self.task: asyncio.Task[None] | None = None
        self.spawned: dict[asyncio.Task[Any], None] = {}  # ordered, unlike a set of objects
        self.crews: dict[str, Crew] = {}
        self.waits: dict[asyncio.Future[Any], None] = {}  # for what crews do
        self.jobs: dict[int, tuple[str, float]] = {}  # offloaded: lane, since
        self.watches: list[Entry] = []
        self.peer_paths: set[str] = set()  # named while it started: those that may make it wait
        self.streams: dict[str, Stream] = {}  # to mailboxes of other nodes that make it wait
        self.inflows: dict[Address, Inflow] = {}  # of senders there, where its own does
        self.is_drained = False
        self.accepted = frozenset(union_members(actor.accepts))
        self.decoder = Decoder(actor.accepts)
        self.answers = frozenset(union_members(actor.answers))
        self.answer_decoder = Decoder(actor.answers) if actor.answers is not None else None
        self.time = node.time
        self.durations = Durations()
        self.recorder = node.recorder
        self.run_first = 0  # `handled_count` when the messages began that are a run
        self.run_since_s = 0.0
        self.run_number = 0  # of its record
        self.handlers: dict[type, Callable[[Any], Any]] = {
            member: getattr(actor, row.method) for member, row in actor.handlers.items()
        }
        self.timers = Timers(self._call_later, self.tell_itself)
        self.wants_undelivered = type(actor).on_undelivered is not Actor.on_undelivered
        self.wants_drain = type(actor).on_drain is not Actor.on_drain

    def _call_later(self, delay_s: float, ring: Callable[[], None]) -> asyncio.TimerHandle:
        return self.loop.call_later(delay_s, ring)

    # Sending

    def send(
        self,
        target: Any,
        message: Any,
        deadline_s: float | None = None,
        request: str | None = None,
        question: int | None = None,
    ) -> None:
        """Puts a message into a local mailbox, or hands it to the node."""
        life: Life | None = target.life
        node = self.node
        if life is None or node.encode_always:
            node.route(self, target, message, deadline_s, request, question)
            return
        envelope = Envelope(message, self.address, deadline_s, question, request, target.is_exact)
        if type(message) not in life.accepted:
            node.undelivered(envelope, life.address, Cause.UNREADABLE)
            return
        put = life.mailbox.put(envelope, self.time())  # as `put`, in line: this is the hot path
        if put is not TAKEN:
            life._put_not_taken(put, envelope, self)
        if not life.is_awake:
            life.wake()

    def put(self, envelope: Envelope, sender: Life | None) -> None:
        """Takes a user message; what full means is this actor's choice."""
        put = self.mailbox.put(envelope, self.time())
        if put is not Put.TAKEN:
            self._put_not_taken(put, envelope, sender)
        self.wake()

    def _put_not_taken(self, put: Put, envelope: Envelope, sender: Life | None) -> None:
        match put:
            case Put.REFUSED:
                give_back(envelope)
                self.node.undelivered(envelope, self.address, Cause.FULL)
            case Put.DROPPED:
                self.node.dropped(envelope, self.address)
            case Put.WAITING:
                path = self.address.path
                if sender is not None and sender is not self and path in sender.peer_paths:
                    envelope.parked_by = sender
                    sender.blocked_count += 1
            case Put.OVERFLOWED:
                self.node.undelivered(envelope, self.address, Cause.FULL)
                self.crash(OverflowError(f"mailbox full: {type(envelope.body).__name__}"))

    def put_urgent(self, lane: Lane, message: Any) -> None:
        envelope = Envelope(message)
        if self.mailbox.put_urgent(lane, envelope, self.node.time()) is Put.REFUSED:
            self.node.dropped(envelope, self.address)
        self.wake()

    def tell_itself(self, message: Any, tick: tuple[Any, int] | None = None) -> None:
        """Timers and results of offloaded work: never refused."""
        if self.is_dead:
            return
        assert type(message) in self.handlers, f"{message!r} has no handler"
        self.mailbox.put(Envelope(message, self.address, own=True, tick=tick), self.node.time())
        self.wake()

    def wake(self) -> None:
        if not self.is_awake:
            self.is_awake = True
            self.loop.call_soon(self.turn)

    def unblock(self) -> None:
        """One message of ours that waited for room has got it."""
        self.blocked_count -= 1
        if self.blocked_count == 0 and self.state is not State.STARTING:
            self.wake()

    # Starting

    def start(self) -> None:
        self.current_kind = "on_start"
        self.busy_since_s = now_s = self.time()
        number = self.note(Lane.CONTROL, now_s, "on_start")
        self.task = self.loop.create_task(self._start(number), name=f"{self.address} start")

    async def _start(self, number: int) -> None:
        try:
            note = await self.actor.on_start()
        except asyncio.CancelledError:
            self._cancelled()
            raise
        except Exception as error:
            self.crash(error)
            return
        self.task = None
        self.current_kind = None
        self.ended(number, self.busy_since_s)
        if self.is_dead:
            return
        self.state = State.RUNNING
        self.node.life_started(self, note)
        self.loop.call_soon(self.turn)

    # Handling

    def turn(self) -> None:
        """Handles messages until there are none, one waits, or it is the others' turn."""
        mailbox = self.mailbox
        node = self.node
        context = self.actor.context
        time = self.time
        handlers = self.handlers
        kind: Any = None  # of the messages that are a run
        until_s = time() + TURN_S
        try:
            for _ in range(node.turn_max):
                if self.is_dead:
                    return
                if self.blocked_count and not mailbox.urgent_count:
                    self.is_awake = False
                    return
                now_s = time()
                taken = mailbox.take(now_s)
                if mailbox.expired:
                    self._report_expired()
                if mailbox.parked:
                    self._unpark()
                    taken = taken or mailbox.take(now_s)
                if taken is None:
                    self.is_awake = False
                    return
                lane, envelope = taken
                if lane is not USER:
                    if self._handle_urgent(lane, envelope.body, now_s):
                        return
                    continue
                if envelope.tick is not None and not self.timers.accept(envelope.tick):
                    continue
                self.current = envelope
                self.busy_since_s = now_s
                context.sender = envelope.sender
                body = envelope.body
                if type(body) is not kind:
                    if kind is not None:
                        self._end_run(now_s)
                    kind = type(body)
                    handler = handlers[kind]
                    self.run_since_s = now_s
                    self.run_first = self.handled_count
                    if self.recorder is not None:
                        self._record(self.recorder, envelope, now_s)
                try:
                    waits = handler(body)
                except Exception as error:
                    self.crash(error)
                    return
                self.handled_count += 1
                if waits is not None:
                    self._handle_waiting(waits)
                    return
                self.current = None
                if node.checks:
                    self._check()
                if now_s >= until_s:
                    break
            self.loop.call_soon(self.turn)
        finally:
            if kind is not None and self.task is None:
                self._end_run(time())

    def _record(self, recorder: Recorder, envelope: Envelope, now_s: float) -> None:
        sender = envelope.sender
        self.run_number = recorder.note(
            HANDLED,
            USER,
            now_s,
            self.address.path,
            "" if sender is None else sender.path,
            type(envelope.body).__name__,
            envelope.request,
        )

    def _end_run(self, now_s: float) -> None:
        """Messages of one kind have been handled; none where the first one's handler raised."""
        count = self.handled_count - self.run_first
        if count and not self.is_dead:
            took_s = now_s - self.run_since_s
            self.durations.add(took_s / count, count)
            if self.recorder is not None:
                self.recorder.ended(self.run_number, took_s, count)

    def note(self, lane: Lane, now_s: float, kind: str, event: Event = Event.HANDLED) -> int:
        """Records the beginning of what is not a message of a sender's. 0: there is no recorder."""
        if self.recorder is None:
            return 0
        return self.recorder.note(event, lane, now_s, self.address.path, "", kind)

    def ended(self, number: int, since_s: float) -> None:
        if self.recorder is not None:
            self.recorder.ended(number, self.time() - since_s, 1)

    def _check(self) -> None:
        try:
            self.actor.check()
            self.mailbox.check()
        except AssertionError as error:
            self.crash(error)

    def _handle_waiting(self, waits: Any) -> None:
        assert asyncio.iscoroutine(waits), f"a handler returned {waits!r}"
        if self.is_dead:
            waits.close()
            return
        self.task = self.loop.create_task(self._finish(waits), name=str(self.address))

    async def _finish(self, waits: Any) -> None:
        try:
            await waits
        except asyncio.CancelledError:
            self._cancelled()
            raise
        except Exception as error:
            self.crash(error)
            return
        self.task = None
        self.current = None
        if not self.is_dead:
            self._end_run(self.time())
            self.loop.call_soon(self.turn)

    def _cancelled(self) -> None:
        """A handler was cancelled: by the end of this life, or by its own doing."""
        if not self.is_dead:
            self.end(Reason(Cause.CRASHED, "a handler was cancelled"))

    def _handle_urgent(self, lane: Lane, message: Any, now_s: float) -> bool:
        """Returns whether it is not this turn's business any more."""
        actor = self.actor
        number = self.note(lane, now_s, type(message).__name__)
        try:
            match message:
                case Stop():
                    self.state = State.STOPPING
                    self.current_kind = "on_stop"
                    self.busy_since_s = now_s
                    self.task = self.loop.create_task(self._stop(), name=f"{self.address} stop")
                    return True
                case Drain():
                    self.state = State.DRAINING
                    actor.on_drain(message)
                    if not self.wants_drain:
                        self.drained()
                case Up():
                    actor.on_up(message)
                case Down():
                    actor.on_down(message)
                case Undelivered():
                    actor.on_undelivered(message)
                case _:
                    raise AssertionError(f"no such message in an urgent lane: {message!r}")
        except Exception as error:
            self.crash(error)
            return True
        self.ended(number, now_s)
        return False

    def drained(self) -> None:
        if not self.is_drained and not self.is_dead:
            self.is_drained = True
            self.node.life_drained(self)

    async def _stop(self) -> None:
        try:
            await self.actor.on_stop(Reason(Cause.STOPPED))
        except asyncio.CancelledError:
            self._cancelled()
            raise
        except Exception as error:
            self.crash(error)
            return
        self.task = None
        self.end(Reason(Cause.STOPPED))

    def _report_expired(self) -> None:
        expired = list(self.mailbox.expired)
        self.mailbox.expired.clear()
        for envelope in expired:
            self.node.undelivered(envelope, self.address, Cause.EXPIRED)

    def _unpark(self) -> None:
        for envelope in self.mailbox.unpark():
            release(envelope)

    # Ending

    def crash(self, error: BaseException) -> None:
        """Ends this life for a bug: its own, or one found by `check`."""
        if self.is_dead:
            return
        if isinstance(error, MemoryError) and self.state is not State.STARTING:
            # Another life here would want for memory too. At the start it is the settings' fault.
            if self.node.out_of_memory is not None:
                self.node.out_of_memory()
        trace = traceback.format_exception(error)
        lines = [line for block in trace for line in block.rstrip().split("\n")]
        self.end(
            Reason(
                Cause.CRASHED,
                f"{type(error).__name__}: {error}"[:DETAIL_CHARS_MAX],
                last_lines=tuple(lines[-TRACE_LINES_MAX:]),
            )
        )

    def end(self, reason: Reason) -> None:
        """Kills: waits for nothing. What it holds is freed, who watches is told by the root."""
        if self.is_dead:
            return
        self.is_dead = True
        self.state = State.STOPPED if reason.cause is Cause.STOPPED else State.FAILED
        if self.entry.life is self:
            self.entry.life = None
            self.entry.address = None
        self.timers.close()
        for crew in self.crews.values():
            crew.close()
        for wait in tuple(self.waits):  # jobs that waited are dropped: a task would wait for ever
            wait.cancel()
        for entry in self.watches:
            if self in entry.watchers:
                entry.watchers.remove(self)
        for task in [self.task, *self.spawned]:
            if task is not None and not task.done() and task is not _current_task():
                task.cancel()
        try:
            self.actor.on_end()
        except Exception:
            self.node.log.exception("on_end failed", actor=str(self.address))
        in_hand, self.current = self.current, None
        self.node.life_ended(self, reason, in_hand)


def release(envelope: Envelope) -> None:
    """A parked message was moved or thrown away: its sender may go on."""
    sender, envelope.parked_by = envelope.parked_by, None
    if sender is not None:
        sender.unblock()


def _current_task() -> asyncio.Task[Any] | None:
    try:
        return asyncio.current_task()
    except RuntimeError:
        return None
