"""This file starts and ends actors on a node, as the root says.

It does not know why. Laws: two lives of one path never overlap on a node; a mailbox outlives a
crash only until the root says what becomes of the path; what is in it then either goes to the next
incarnation or back to its senders; nothing of a life that has ended is kept from the collector.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
from typing import TYPE_CHECKING, Any

from actors.runtime.codec import decode_arguments, load_factory
from actors.runtime.crew import Crew
from actors.runtime.life import Life, release
from actors.runtime.live import LiveContext
from actors.runtime.mailbox import Envelope, Mailbox
from messages.base import Address, Lane
from messages.system import (
    Cause,
    Drain,
    DrainActor,
    Exited,
    KillActor,
    Reason,
    StartActor,
    State,
    Stop,
    StopActor,
)

if TYPE_CHECKING:
    from actors.runtime.node import Node


class Host:
    """The node's actors."""

    def __init__(self, node: Node, prepared: dict[str, Any]) -> None:
        self.node = node
        self.prepared = prepared  # for the first life of each path
        self.kept: dict[str, tuple[Address, Mailbox]] = {}
        self._starting: dict[str, asyncio.Task[None]] = {}
        self._drains: dict[str, Drain] = {}  # for who is being built: the first it is told
        self._loaded: set[str] = set()  # factories
        self._is_frozen = False
        self._has_ended = False  # one of its lives
        self._imports: Crew | None = None

    def obey(self, message: Any) -> None:
        match message:
            case StartActor():
                self.start(message)
            case StopActor(path, incarnation, grace_s):
                if (life := self._life(path, incarnation)) is not None:
                    if life.state is State.STARTING:
                        life.end(Reason(Cause.STOPPED, "while it started"))
                    else:
                        life.put_urgent(Lane.CONTROL, Stop(grace_s))
                else:
                    self._cancel_start(path, incarnation, Reason(Cause.STOPPED))
            case DrainActor(path, incarnation, grace_s):
                if (life := self._life(path, incarnation)) is not None:
                    life.put_urgent(Lane.CONTROL, Drain(grace_s))
                elif path in self._starting:
                    self._drains[path] = Drain(grace_s)
            case KillActor(path, incarnation, reason):
                if (life := self._life(path, incarnation)) is not None:
                    life.end(reason)
                else:
                    self._cancel_start(path, incarnation, reason)
            case _:
                raise AssertionError(f"the root says {message!r}")

    def _life(self, path: str, incarnation: int) -> Life | None:
        life = self.node.lives.get(path)
        return life if life is not None and life.address.incarnation == incarnation else None

    def freeze(self) -> None:
        """Full collections pass by what there is now, most of it modules: they would look at some
        80,000 objects, and hold the loop up for 30 ms and more. Only for a process that is ours
        alone, since what is garbage by now stays until a life of this node ends."""
        if not self._has_ended:
            gc.freeze()
            self._is_frozen = True

    def _unfreeze(self) -> None:
        self._has_ended = True
        if self._is_frozen:
            gc.unfreeze()
            self._is_frozen = False

    def start(self, order: StartActor, arguments: dict[str, Any] | None = None) -> None:
        """Starts one incarnation; `arguments` by reference where the root shares our memory."""
        name = f"{order.path}#{order.incarnation} import"
        task = self.node.loop.create_task(self._start(order, arguments), name=name)
        self._starting[order.path] = task

    def _cancel_start(self, path: str, incarnation: int, reason: Reason) -> None:
        task = self._starting.pop(path, None)
        self._drains.pop(path, None)
        if task is not None:
            task.cancel()
            address = Address(self.node.name, path, incarnation)
            self.node.report(Exited(address, reason))

    async def _start(self, order: StartActor, arguments: dict[str, Any] | None) -> None:
        node = self.node
        address = Address(node.name, order.path, order.incarnation)
        try:
            factory = await self._import(order.factory)
            if node.out_of_memory is not None and order.factory not in self._loaded:
                self._loaded.add(order.factory)
                self.freeze()
            if arguments is None:
                arguments = decode_arguments(factory, order.arguments)
            actor = factory(**arguments)
            actor.prepared = self.prepared.pop(order.path, None)
        except Exception as error:
            self._starting.pop(order.path, None)
            self._drains.pop(order.path, None)
            detail = f"{type(error).__name__}: {error}"
            node.report(Exited(address, Reason(Cause.CRASHED, f"not built: {detail}"[:500])))
            return
        self._starting.pop(order.path, None)
        assert order.path not in node.lives, f"two lives of {order.path}"
        kept = self.kept.pop(order.path, None)
        if kept is not None and not order.keeps_mailbox:
            self._return_all(kept[0], kept[1], Cause.NOBODY)
            kept = None
        mailbox = kept[1] if kept is not None else Mailbox(actor.mailbox)
        life = Life(node, actor, node.entry(order.path), address, mailbox)
        actor.context = LiveContext(life)
        node.lives[order.path] = life
        drain = self._drains.pop(order.path, None)
        if drain is not None:
            life.put_urgent(Lane.CONTROL, drain)
        life.start()

    async def _import(self, factory: str) -> Any:
        """In a thread: importing a device library takes seconds, and the pulse must go on."""
        if self.node.runs_inline:
            return load_factory(factory)
        done: asyncio.Future[Any] = self.node.loop.create_future()

        def deliver(result: Any) -> None:
            with contextlib.suppress(asyncio.InvalidStateError):
                if isinstance(result, Exception):
                    done.set_exception(result)
                else:
                    done.set_result(result)

        if self._imports is None:
            name = f"{self.node.name}.imports"
            self._imports = Crew(name, 1, self.node.loop.call_soon_threadsafe)
        self._imports.run(lambda: load_factory(factory), deliver)
        return await done

    def life_ended(self, life: Life, reason: Reason, in_hand: Envelope | None) -> None:
        """Keeps the mailbox of a crash for the next incarnation; else sends all of it back."""
        node = self.node
        path = life.address.path
        del node.lives[path]
        self._unfreeze()
        node.flusher.life_ended(life)
        if in_hand is not None and not in_hand.own and in_hand.question is None:
            node.undelivered(in_hand, life.address, Cause.ABANDONED)
        if reason.cause is Cause.CRASHED:
            lost = life.mailbox.keep_for_next_life()
            self.kept[path] = (life.address, life.mailbox)
            self._return(lost, life.address, Cause.NOBODY)
        else:
            self._return_all(life.address, life.mailbox, Cause.STOPPED)

    def forget(self, path: str) -> None:
        """There will be no next incarnation: what waits for it goes back."""
        kept = self.kept.pop(path, None)
        if kept is not None:
            self._return_all(kept[0], kept[1], Cause.NOBODY)

    def close(self) -> None:
        for task in self._starting.values():
            task.cancel()
        self._starting.clear()
        if self._imports is not None:
            self._imports.close()
        for path in list(self.kept):
            self.forget(path)

    def _return_all(self, address: Address, mailbox: Mailbox, cause: Cause) -> None:
        self._return(mailbox.empty(), address, cause)

    def _return(self, envelopes: list[Envelope], address: Address, cause: Cause) -> None:
        for envelope in envelopes:
            release(envelope)
            if envelope.sender is not None and not envelope.own:
                self.node.undelivered(envelope, address, cause)
