"""Actors and messages for the tests of the runtime."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec

from actors.runtime import Actor, Full, MailboxSpec, Ref
from messages.base import Address, Message
from messages.system import Down, Drain, Reason, Undelivered, Up


class Add(Message, frozen=True):
    n: int


class Text(Message, frozen=True):
    text: str


class Crash(Message, frozen=True):
    why: str = "as told"


class Sum(Message, frozen=True):
    """Asks for `Total`."""


class Total(Message, frozen=True):
    n: int


class Sleep(Message, frozen=True):
    """Holds the actor for so long."""

    seconds: float


class Silent(Message, frozen=True):
    """Asks for an answer that never comes."""


class Relay(Message, frozen=True):
    """Tell `n` to `path`, `times` times."""

    path: str
    n: int
    times: int = 1
    deadline_s: float | None = None


class Ask(Message, frozen=True):
    """Ask `path` with the kind of question."""

    path: str
    kind: str = "sum"
    timeout_s: float = 1.0


class Watch(Message, frozen=True):
    path: str


class Quit(Message, frozen=True):
    """End the supervisor's patience: crash at every start from now on."""


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    start: int = 0
    start_s: float = 0.0
    fails: bool = False


DEFAULTS = Settings()
NOBODY = Text("")


class Counter(Actor):
    """Adds up, answers, crashes when told."""

    accepts = Add | Text | Crash | Sum | Sleep | Silent

    def __init__(self, settings: Settings = DEFAULTS) -> None:
        self.settings = settings
        self.n = settings.start
        self.texts: list[str] = []
        self.senders: list[Address | None] = []

    async def on_start(self) -> bytes:
        if self.settings.start_s:
            await asyncio.sleep(self.settings.start_s)
        if self.settings.fails:
            raise RuntimeError("does not start")
        return b"ready"

    def on_add(self, message: Add) -> None:
        self.n += message.n
        self.senders.append(self.context.sender)

    def on_text(self, message: Text) -> None:
        self.texts.append(message.text)

    def on_crash(self, message: Crash) -> None:
        raise ValueError(message.why)

    def on_sum(self, message: Sum) -> None:
        self.context.reply(Total(self.n))

    async def on_sleep(self, message: Sleep) -> None:
        await asyncio.sleep(message.seconds)

    def on_silent(self, message: Silent) -> None:
        pass

    def check(self) -> None:
        assert self.n >= 0


class SmallCounter(Counter):
    mailbox = MailboxSpec(count_max=2)


class WaitingCounter(Counter):
    mailbox = MailboxSpec(count_max=2, full=Full.WAIT)


class BrittleCounter(Counter):
    mailbox = MailboxSpec(count_max=2, full=Full.FAIL)


class Caller(Actor):
    """Does to others what it is told, and remembers what came back."""

    accepts = Relay | Ask | Watch | Crash | Sleep
    answers = Total

    def __init__(self) -> None:
        self.seen: list[Any] = []
        self.outcomes: list[Any] = []
        self.stopped: Reason | None = None

    def on_relay(self, message: Relay) -> None:
        ref: Ref[Any] = self.context.peer(message.path)
        for _ in range(message.times):
            ref.tell(Add(message.n), deadline_s=message.deadline_s, request="r1")

    async def on_ask(self, message: Ask) -> None:
        question = {"sum": Sum(), "silent": Silent(), "crash": Crash(), "sleep": Sleep(60)}
        ref: Ref[Any] = self.context.peer(message.path)
        outcome = await self.context.ask(ref, question[message.kind], timeout_s=message.timeout_s)
        self.outcomes.append(outcome)

    def on_watch(self, message: Watch) -> None:
        self.context.watch(message.path)

    def on_crash(self, message: Crash) -> None:
        raise ValueError(message.why)

    async def on_sleep(self, message: Sleep) -> None:
        await asyncio.sleep(message.seconds)

    def on_up(self, up: Up) -> None:
        self.seen.append(("up", up.address.incarnation))

    def on_down(self, down: Down) -> None:
        self.seen.append(("down", down.address.incarnation, down.reason.cause))

    def on_undelivered(self, notice: Undelivered) -> None:
        self.seen.append(notice)

    async def on_stop(self, reason: Reason) -> None:
        self.stopped = reason


class SlowDrainer(Counter):
    """Finishes two seconds after it was told to drain."""

    private = Total

    def on_drain(self, message: Drain) -> None:
        self.context.start_timer("done", Total(0), after_s=2.0)

    def on_total(self, message: Total) -> None:
        self.context.drained()


class Waiter(Actor):
    """Tells its peer, which makes it wait; part of a circle when the peer does the same."""

    accepts = Add
    mailbox = MailboxSpec(count_max=2, full=Full.WAIT)

    def __init__(self, settings: Settings = DEFAULTS, peer: Text = NOBODY) -> None:
        self.peer_path = peer.text

    async def on_start(self) -> bytes:
        self.peer: Ref[Any] = self.context.peer(self.peer_path)
        return b""

    def on_add(self, message: Add) -> None:
        self.peer.tell(message)
