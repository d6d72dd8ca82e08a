"""This file is one node: an event loop's actors, its replica of the directory, and its links.

It does not know supervision: it starts, stops and kills what the root node says (`host.py`), and
tells the root what ended. The root's own node is the same, with the root's office beside it.

Laws: nothing is delivered to a later incarnation than it was meant for; a user message that does
not arrive is counted once, and its sender is told; only the root node gives orders.
"""

from __future__ import annotations

import asyncio
import math
import os
from collections.abc import Callable
from typing import Any, Protocol

import structlog

from actors.runtime.actor import Actor
from actors.runtime.arrivals import Arrivals
from actors.runtime.clock import clock_of
from actors.runtime.codec import (
    Body,
    encode,
    kind_of,
)
from actors.runtime.context import Rejected
from actors.runtime.directory import Change, Entry, Notes
from actors.runtime.flush import METRICS_PATH, Flusher
from actors.runtime.host import Host
from actors.runtime.letters import DeadLetters, Letter
from actors.runtime.life import Life
from actors.runtime.mailbox import Envelope
from actors.runtime.peers import Peers
from actors.runtime.questions import Questions
from actors.runtime.recorder import Event, Recorder
from actors.runtime.rows import Rows
from actors.runtime.streams import Streams
from actors.runtime.tally import Tally
from actors.runtime.transport.base import Transport
from messages.base import Address, Header, Lane, Message
from messages.system import (
    Beat,
    Cause,
    Down,
    Drained,
    Entries,
    Exited,
    Halt,
    Known,
    LinkLost,
    NodeBoot,
    NodeDown,
    NodeUp,
    Ready,
    Reason,
    Seen,
    State,
    Undelivered,
    Up,
)

START_PATIENCE = 30.0  # a node that starts an actor may be silent for so many times `hang_s`
TURN_MAX = 64  # messages one actor handles before others get the loop


class Office(Protocol):
    """What the root's node hands on: reports of actors, and the life of links."""

    def report(self, node: str, message: Any) -> None: ...

    def link_up(self, node: str, incarnation: int) -> None: ...

    def link_lost(self, node: str, incarnation: int, reason: Reason) -> None: ...

    def tick(self, lag_s: float) -> None: ...


class Node:
    """Everything here runs on one loop, the one that is running when it is made."""

    def __init__(
        self,
        boot: NodeBoot,
        *,
        transport: Transport | None = None,
        log: Any = None,
        office: Office | None = None,
        prepared: dict[str, Any] | None = None,
        out_of_memory: Callable[[], None] | None = None,
        recorder: Recorder | None = None,
    ) -> None:
        """`prepared`: by path, what actors' `prepare` gave in this process before the node was.
        `out_of_memory` ends the process, where this node is alone in it. `recorder`: where another
        process will want to know what this one did last."""
        self.boot = boot
        self.name = boot.name
        self.address = Address(boot.name, "", boot.incarnation)
        self.seed = boot.seed
        self.pid = os.getpid()
        self.loop = asyncio.get_running_loop()
        self.time: Callable[[], float] = clock_of(self.loop)
        self.runs_inline: bool = getattr(self.loop, "is_simulated", False)
        self.encode_always = boot.encode_always
        self.checks = boot.check
        self.turn_max = 1 if self.runs_inline else TURN_MAX
        self.log = (log or structlog.get_logger()).bind(node=boot.name)
        self.office = office
        self.out_of_memory = out_of_memory
        self.transport = transport
        self.recorder = recorder
        self.peers = Peers(self.address, transport, self._went if recorder is not None else None)
        self.entries: dict[str, Entry] = {}
        self.notes = Notes(self.entries)
        self.lives: dict[str, Life] = {}
        self.letters = DeadLetters()
        self.starting: dict[str, set[str]] = {}  # by node: what starts there just now
        self.flusher = Flusher(self)
        self.tally = Tally(self.flusher.soon)
        self.questions = Questions(self.loop)
        self.streams = Streams(self)
        self.rows = Rows(self)
        self.ended: asyncio.Future[Reason] = self.loop.create_future()
        self.loop_lag_s = 0.0
        self.host = Host(self, prepared or {})
        self.arrivals = Arrivals(self)
        self._reports: list[Any] = []  # to our own office
        self._pulse: asyncio.TimerHandle | None = None
        self.is_halted = False

    # Its own life

    async def start(self) -> None:
        """Binds the transport and calls the root. Returns once bound."""
        if self.transport is not None:
            await self.transport.start(self)
            if self.office is None:
                # The root alone judges who hangs; its own death is seen by other means.
                self.transport.be_patient(self.boot.root, math.inf)
                self.peers.connect(
                    self.boot.root, self.boot.root_incarnation, self.boot.root_endpoint
                )
            self._beat(self.loop.time())

    async def wait(self) -> Reason:
        """Returns when the root said to halt, or is lost. Everything of the node has ended."""
        return await self.ended

    def halt(self, reason: Reason) -> None:
        """Kills what is left. Waits for nothing."""
        if self.is_halted:
            return
        self.is_halted = True
        for life in list(self.lives.values()):
            life.end(reason)
        self.host.close()
        self.flusher.close()
        if self._pulse is not None:
            self._pulse.cancel()
        if not self.ended.done():
            self.ended.set_result(reason)

    async def close(self) -> None:
        """Halts, and frees the transport."""
        self.halt(Reason(Cause.STOPPED))
        if self.transport is not None:
            await self.transport.close()

    # Sending

    def entry(self, path: str) -> Entry:
        """The directory's place for a path, also before anything is known of it."""
        entry = self.entries.get(path)
        if entry is None:
            entry = self.entries[path] = Entry(path)
        return entry

    def route(
        self,
        sender: Life | None,
        target: Any,
        message: Any,
        deadline_s: float | None,
        request: str | None,
        question: int | None,
    ) -> None:
        """What `Life.send` does not do itself: other nodes, nobody, and encoding for debugging."""
        me = sender.address if sender is not None else None
        envelope = Envelope(message, me, deadline_s, question, request, target.is_exact)
        life: Life | None = target.life
        if life is not None:
            self.arrivals.deliver(
                life, envelope, encode(message) if self.encode_always else message, sender
            )
            return
        address: Address | None = target.address
        if address is None:
            known = self.entry(target.path).known
            dead = Address(known.node, known.path, known.incarnation) if known else None
            self.undelivered(envelope, dead or Address("", target.path, 0), Cause.NOBODY)
            return
        if address.node == self.name:
            self.undelivered(envelope, address, Cause.NOBODY)
            return
        if sender is not None and target.path in sender.peer_paths:
            known = self.entry(target.path).known
            if known is not None and known.credits:
                self.streams.send(sender, envelope, address, known.credits)
                return
        header = Header(
            address, me, Lane.USER, deadline_s, question, False, request, target.is_exact
        )
        if not self.peers.send(address.node, header, message):
            has_link = self.peers.is_up(address.node)
            self.undelivered(envelope, address, Cause.FULL if has_link else Cause.UNREACHABLE)

    def _went(self, header: Header, body: Any) -> None:
        self.note(Event.WENT, header, type(body).__name__)

    def note(self, event: Event, header: Header, kind: str) -> None:
        """Records what crosses from one node to another."""
        if self.recorder is not None:
            sender = header.sender.path if header.sender is not None else ""
            target = header.target.path
            self.recorder.note(
                event, header.lane, self.time(), target, sender, kind, header.request
            )

    # Arriving (the node as its transport sees it)

    def arrive(self, node: str, header: Header, body: Body) -> None:
        if not self.is_halted:
            self.arrivals.arrive(node, header, body)

    def obey(self, message: Any) -> None:
        """Does what the root says."""
        match message:
            case Entries(rows):
                for known in rows:
                    self.learn(known)
            case NodeUp(name, incarnation, endpoint):
                if self.transport is not None:
                    self.transport.be_patient(name, math.inf)
                self.peers.connect(name, incarnation, endpoint)
            case NodeDown(name, incarnation):
                self.peers.disconnect(name, incarnation)
            case Seen(seen):
                self.rows.told(seen)
            case Halt():
                self.halt(Reason(Cause.STOPPED))
            case _:
                self.host.obey(message)

    def link_up(self, node: str, incarnation: int) -> None:
        if self.peers.link_up(node, incarnation) and self.office is not None:
            self.office.link_up(node, incarnation)

    def link_down(self, node: str, reason: Reason) -> None:
        incarnation = self.peers.link_down(node)
        if incarnation is None or self.is_halted:
            return
        if self.office is not None:
            self.office.link_lost(node, incarnation, reason)
        elif node == self.boot.root:
            self.log.error("root lost", detail=reason.detail)
            self.halt(Reason(Cause.UNREACHABLE, "the root node is lost"))
        else:
            self.report(LinkLost(node, incarnation, reason))

    # The directory

    def learn(self, known: Known) -> None:
        """Takes one change of the directory and tells whoever watches."""
        entry = self.entry(known.path)
        self._be_patient_while_starting(known)
        self.streams.learn(known)
        for change, address, reason in entry.update(known):
            message: Any = Up(address)
            if change is Change.DOWN:
                assert reason is not None
                message = Down(address, reason)
                self.questions.target_died(address, reason)
            for life in list(entry.watchers):
                life.put_urgent(Lane.SUPERVISION, message)
            if change is Change.UP and known.path == METRICS_PATH and self.tally.is_dirty:
                self.flusher.soon()
        if known.state in (State.STOPPED, State.FAILED):
            self.host.forget(known.path)

    def _be_patient_while_starting(self, known: Known) -> None:
        starting = self.starting.setdefault(known.node, set())
        was_starting = bool(starting)
        if known.state is State.STARTING:
            starting.add(known.path)
        else:
            starting.discard(known.path)
        if self.office is None or self.transport is None or known.node == self.name:
            return
        if bool(starting) != was_starting:
            self.transport.be_patient(known.node, START_PATIENCE if starting else 1.0)

    def watch(self, life: Life, path: str) -> None:
        entry = self.entry(path)
        if life in entry.watchers:
            return
        entry.watchers.append(life)
        life.watches.append(entry)
        if entry.seen_up and entry.address is not None:
            life.put_urgent(Lane.SUPERVISION, Up(entry.address))
        elif entry.last_down is not None:
            life.put_urgent(Lane.SUPERVISION, Down(*entry.last_down))

    # Asks

    def answer(self, life: Life, asked: Envelope, message: Message) -> None:
        """Sends the reply to an ask."""
        asker, number = asked.sender, asked.question
        assert asker is not None and number is not None
        if asker.node != self.name:
            header = Header(asker, life.address, question=number, is_answer=True)
            if not self.peers.send(asker.node, header, message):
                self.dropped(Envelope(message, life.address), asker, Cause.UNREACHABLE)
            return
        header = Header(asker, life.address, question=number, is_answer=True)
        self.arrivals.take_answer(header, encode(message) if self.encode_always else message)

    # What did not arrive

    def undelivered(self, envelope: Envelope, target: Address, cause: Cause) -> None:
        """Counts a user message, and tells its sender."""
        self.dropped(envelope, target, cause)
        sender, number = envelope.sender, envelope.question
        if sender is None:
            return
        kind = kind_of(envelope.body)
        notice = Undelivered(target, kind, cause, envelope.request)
        if sender.node == self.name:
            if number is not None:
                self.questions.resolve(number, Rejected(cause))
                return
            life = self.lives.get(sender.path)
            if life is not None and life.address == sender and life.wants_undelivered:
                life.put_urgent(Lane.SUPERVISION, notice)
            return
        header = Header(
            sender, target, Lane.SUPERVISION, question=number, is_answer=number is not None
        )
        self.peers.send(sender.node, header, notice)

    def dropped(self, envelope: Envelope, target: Address, cause: Cause = Cause.FULL) -> None:
        """Counts a message that nobody is told of."""
        kind = kind_of(envelope.body)
        path = target.path
        letter = Letter(self.time(), cause, kind, path, envelope.sender, envelope.request)
        self.tally.count("histrio_dead_letters_total", 1, (("cause", str(cause)), ("kind", kind)))
        count = self.letters.add(letter)
        if count:
            about = {"request": envelope.request} if envelope.request else {}
            self.log.warning(
                "not delivered",
                cause=str(cause),
                kind=kind,
                target=str(target),
                sender=str(envelope.sender or ""),
                count=count,
                **about,
            )

    # What lives tell

    def life_started(self, life: Life, note: bytes) -> None:
        life.entry.life = life
        life.entry.address = life.address
        window = life.mailbox.spec.window
        peers = tuple(sorted(life.peer_paths))
        self.report(Ready(life.address, note, peers, window > 0, window))

    def life_drained(self, life: Life) -> None:
        self.report(Drained(life.address))

    def life_ended(self, life: Life, reason: Reason, in_hand: Envelope | None) -> None:
        self.questions.asker_died(life)
        self.streams.sender_ended(life)
        self.host.life_ended(life, reason, in_hand)
        self.report(Exited(life.address, reason))

    def report(self, message: Any) -> None:
        """To the root."""
        if self.office is not None:
            self._reports.append(message)
            if len(self._reports) == 1:
                self.loop.call_soon(self._hand_reports)
        elif not self.is_halted and not self.peers.control(self.boot.root, message):
            self.halt(Reason(Cause.UNREACHABLE, "the root node takes no reports"))

    def _hand_reports(self) -> None:
        """In order, and never from within what is reported."""
        assert self.office is not None
        reports, self._reports = self._reports, []
        for message in reports:
            self.office.report(self.name, message)

    # Its pulse: only where there are other nodes

    def _beat(self, due_s: float) -> None:
        now_s = self.time()
        self.loop_lag_s = max(0.0, now_s - due_s)
        self.peers.flush()
        if self.office is not None:
            self.office.tick(self.loop_lag_s)
        else:
            changed = self.rows.changed()
            if self.peers.beat(self.boot.root, Beat(self.loop_lag_s, changed)):
                self.rows.said(changed)
        next_s = now_s + self.boot.heartbeat_s
        self._pulse = self.loop.call_at(next_s, self._beat, next_s)

    # For the root and for tests

    def local(self, path: str) -> Actor | None:
        life = self.lives.get(path)
        return life.actor if life is not None else None

    def check(self) -> None:
        """Runs every actor's `check`, and those of the mailboxes and the streams between them."""
        self.streams.check()
        for life in self.lives.values():
            life.mailbox.check()
            if life.state is not State.STARTING and life.current is None:
                life.actor.check()
