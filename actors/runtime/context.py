"""This file is all that an actor can do to the world: send, ask, watch, wait for a time, compute
elsewhere, count.

It does not know how: the node's `life.py` and the test kit's `Cell` each complete `Context`. Law:
nothing here blocks or raises for the state of a peer; that comes back as a message.
"""

from __future__ import annotations

import asyncio
import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine, Hashable, Mapping
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

from actors.runtime.tally import Tally
from actors.runtime.timers import Timers
from messages.base import Address, Message
from messages.system import ActorRow, Cause, Labels, Reason

M = TypeVar("M", contravariant=True)
T = TypeVar("T")


class Reply(NamedTuple):
    """The asked actor answered."""

    message: Any


class Rejected(NamedTuple):
    """The question did not arrive: certainly nothing happened."""

    cause: Cause


class Died(NamedTuple):
    """The asked actor died with the question: it may have acted on it."""

    reason: Reason


class TimedOut(NamedTuple):
    """Nobody answered in time: unknown whether the question was acted on."""

    after_s: float


Outcome = Reply | Rejected | Died | TimedOut


class Target(Protocol):
    """Where a message goes: a path (any incarnation) or an exact address."""

    @property
    def path(self) -> str: ...

    @property
    def address(self) -> Address | None: ...


class Exact(NamedTuple):
    """One incarnation and no other."""

    address: Address

    @property
    def path(self) -> str:
        return self.address.path


class Send(Protocol):
    def __call__(
        self,
        target: Any,
        message: Any,
        deadline_s: float | None = None,
        request: str | None = None,
        question: int | None = None,
    ) -> None: ...


class Ref(Generic[M]):
    """Whom one can tell something: an actor that accepts `M`."""

    __slots__ = ("_send", "target")

    def __init__(self, send: Send, target: Target) -> None:
        self._send = send
        self.target = target

    def tell(
        self, message: M, *, deadline_s: float | None = None, request: str | None = None
    ) -> None:
        """Sends and forgets; what can't be delivered comes back to `on_undelivered`.

        `deadline_s` is a time of `context.now_s`, after which nobody wants the message any more.
        """
        self._send(self.target, message, deadline_s, request)

    @property
    def path(self) -> str:
        return self.target.path

    @property
    def address(self) -> Address | None:
        """The incarnation in service, or None."""
        return self.target.address

    def __repr__(self) -> str:
        return f"Ref({self.path})"


class Context(ABC):
    """Given to an actor before `on_start`. Valid for one incarnation."""

    address: Address
    log: Any  # a bound structlog logger
    sender: Address | None = None  # of the message being handled
    notes: Mapping[str, bytes]  # Ready notes of the actors started earlier, by path
    tally: Tally
    timers: Timers

    # Others

    @abstractmethod
    def send(
        self,
        target: Any,
        message: Any,
        deadline_s: float | None = None,
        request: str | None = None,
        question: int | None = None,
    ) -> None:
        """What `Ref.tell` calls."""

    @abstractmethod
    def peer(self, path: str) -> Ref[Any]:
        """Follows the path's incarnations. Annotate it: `self.cache: Ref[cache.In] = ...`.

        Call it in `on_start`: one that is named later is sent to all the same, but its full mailbox
        doesn't make this actor wait (Full.WAIT), since nobody has looked for a circle of them.
        """

    def ref(self, address: Address) -> Ref[Any]:
        """Exactly this incarnation: nothing reaches a later one."""
        return Ref(self.send, Exact(address))

    @abstractmethod
    def reply(self, message: Message) -> None:
        """Answers the ask being handled. For a message that was told, a message to its sender."""

    @abstractmethod
    async def ask(self, ref: Ref[M], message: M, *, timeout_s: float) -> Outcome:
        """Sends and waits; nothing else is handled meanwhile. Never raises for the peer's state."""

    @abstractmethod
    def watch(self, path: str) -> None:
        """From now on `on_up` and `on_down` for every incarnation of the path, each once; at once
        for the present one, or for the last one when it is dead."""

    @abstractmethod
    def actors(self) -> list[ActorRow]:
        """The whole tree as this node knows it: where all are, and what its own actors do."""

    @abstractmethod
    async def look(self, *, timeout_s: float) -> list[ActorRow]:
        """The whole tree with what all actors do, as the root has last heard it; where it does not
        answer in time, as it was said before (`age_s`)."""

    @abstractmethod
    def ask_restart(self, path: str) -> None:
        """An operator wants a new life of `path`: it is stopped and started, and those that its
        supervisor restarts with it. Does nothing for a path that is none."""

    # Itself

    def start_timer(
        self,
        key: Hashable,
        message: Any,
        *,
        after_s: float | None = None,
        every_s: float | None = None,
    ) -> None:
        """Tells itself `message` once or again and again. The same key replaces the timer."""
        self.timers.start(key, message, after_s=after_s, every_s=every_s)

    def cancel_timer(self, key: Hashable) -> None:
        """Ends the timer; a tick already in the mailbox is not handled either."""
        self.timers.cancel(key)

    @abstractmethod
    def now_s(self) -> float:
        """The loop's clock."""

    @abstractmethod
    def rng(self, purpose: str) -> random.Random:
        """A stream of its own for (run seed, path, incarnation, purpose)."""

    @abstractmethod
    def spawn(self, coro: Coroutine[Any, Any, T], *, name: str) -> asyncio.Task[T]:
        """Runs beside the handlers; ends with the actor; its crash is the actor's crash."""

    @abstractmethod
    def offload(
        self,
        work: Callable[[], T],
        then: Callable[[T | Exception], Any],
        *,
        lane: str = "default",
        keeps: bool = False,
    ) -> None:
        """Runs `work` in a thread of the actor; `then(result)` is told to the actor itself. With
        `keeps`, in a lane of one thread, not before the next job there calls `let_go`, or ends, if
        one waits already."""

    @abstractmethod
    def let_go(self, *, lane: str = "default") -> None:
        """Called from within a job: what came of the one before it is told now."""

    @abstractmethod
    async def in_thread(self, work: Callable[[], T], *, lane: str = "default") -> T:
        """Runs `work` in a thread of the actor and waits; nothing else is handled meanwhile."""

    @abstractmethod
    def drained(self) -> None:
        """After `on_drain`: nothing is left to finish. Only for actors that have an `on_drain`."""

    @abstractmethod
    def hung(self, detail: str) -> None:
        """Ends the actor as one that makes no progress; a process of its own ends with it, since
        what hangs in it (a thread) can't be ended otherwise."""

    @abstractmethod
    def broken(self, detail: str) -> None:
        """Ends the actor as one that can't live in this process any more, nor can a next life of it
        (a device's context that is lost, say). A process of its own ends with it, and the next life
        gets a new one; where it shares a process with the root, all ends."""

    @abstractmethod
    def crash(self, error: BaseException) -> None:
        """Ends the actor as if a handler had raised."""

    # Metrics

    def count(self, name: str, increase: float = 1, **labels: str) -> None:
        self.tally.count(name, increase, labels_of(labels))

    def gauge(self, name: str, value: float, **labels: str) -> None:
        self.tally.gauge(name, value, labels_of(labels))

    def observe(
        self, name: str, value: float, *, bounds: tuple[float, ...], times: int = 1, **labels: str
    ) -> None:
        """`times`: how many had this value."""
        self.tally.observe(name, value, bounds, labels_of(labels), times)


def labels_of(labels: Mapping[str, str]) -> Labels:
    return tuple(sorted(labels.items())) if labels else ()
