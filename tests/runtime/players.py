"""Actors and messages for the tests of the runtime."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec

from actors.runtime import Actor, Full, MailboxSpec, Ref
from messages.base import Address, Message
from messages.system import Down, Drain, Flush, Reason, Undelivered, Up


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

    def __init__(self, peer: Text = NOBODY) -> None:
        self.peer_path = peer.text
        self.seen: list[Any] = []
        self.outcomes: list[Any] = []
        self.stopped: Reason | None = None
        self.ended_count = 0

    async def on_start(self) -> bytes:
        if self.peer_path:
            self.context.peer(self.peer_path)
        return b""

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

    def on_end(self) -> None:
        self.ended_count += 1
        if self.stopped is None:
            raise RuntimeError("a failing end harms nobody")


class SlowDrainer(Counter):
    """Finishes two seconds after it was told to drain."""

    private = Total

    def on_drain(self, message: Drain) -> None:
        self.context.start_timer("done", Total(0), after_s=2.0)

    def on_total(self, message: Total) -> None:
        self.context.drained()


class Diarist(Counter):
    """Writes down between which texts it was told to drain."""

    def on_drain(self, message: Drain) -> None:
        self.texts.append("drain")
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


class Worked(Message, frozen=True):
    result: int


class Work(Message, frozen=True):
    """Compute in a thread; "offload", "in_thread", "spawn", or the same failing."""

    how: str


class Labourer(Actor):
    """Uses all of its context that leaves the loop or comes back by itself."""

    accepts = Work | Add
    private = Worked
    answers = Total

    def __init__(self) -> None:
        self.results: list[Any] = []
        self.exact: Ref[Any] | None = None

    async def on_work(self, message: Work) -> None:
        context = self.context
        match message.how:
            case "offload":
                context.offload(lambda: 6 * 7, self.keep)
            case "offload fails":
                context.offload(lambda: 1 // 0, self.keep)
            case "in_thread":
                self.results.append(await context.in_thread(lambda: 6 * 7))
            case "in_thread fails":
                await context.in_thread(lambda: 1 // 0)
            case "spawn fails":
                context.spawn(self.fail(), name="failing")
            case "timers":
                context.start_timer("every", Worked(1), every_s=10.0)
                context.start_timer("once", Worked(2), after_s=25.0)
                context.start_timer("never", Worked(3), after_s=30.0)
                context.cancel_timer("never")
            case "chance":
                self.results.append(context.rng("a").random())
                self.results.append(context.rng("b").random())
            case "count":
                context.count("tests_total", 2, kind="x")
            case "remember":
                address = context.peer("c").address
                assert address is not None
                self.exact = context.ref(address)

    def keep(self, result: int | Exception) -> Worked:
        return Worked(-1 if isinstance(result, Exception) else result)

    async def fail(self) -> None:
        raise ValueError("spawned and failed")

    def on_worked(self, message: Worked) -> None:
        self.results.append(message.result)

    def on_add(self, message: Add) -> None:
        assert self.exact is not None
        self.exact.tell(message)

    def on_undelivered(self, notice: Undelivered) -> None:
        self.results.append(notice.cause)


class Meter(Actor):
    """Stands for the room of metrics."""

    accepts = Flush

    def __init__(self) -> None:
        self.flushes: list[Flush] = []

    def on_flush(self, message: Flush) -> None:
        self.flushes.append(message)


class Break(Message, frozen=True):
    """What the process has can't be used any more."""


class Brittle(Counter):
    """Depends on something that its process has once."""

    accepts = Add | Text | Crash | Sum | Sleep | Silent | Break

    def on_break(self, message: Break) -> None:
        self.context.broken("the device is lost")
