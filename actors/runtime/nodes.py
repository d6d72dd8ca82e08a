"""This file keeps the root's view of the other nodes: launch, hello, heartbeats, death.

It does not know actors or supervisors: `Events` hears of a node's death once. Laws: at most one
incarnation of a node lives, and the next is given work only when the one before has let go of what
it held, or needs nothing of it; its death is told once, after its links are fenced; a root whose
own loop lags accuses nobody, and nobody is accused who had no core; killing waits for nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import Any

import msgspec

from actors.runtime import spec
from actors.runtime.cores import OwnProcess, Use, is_starved
from actors.runtime.launch import Launched, Launcher, LaunchFailed, Mortal, death_of
from actors.runtime.node import START_PATIENCE, Node
from messages.system import Beat, Cause, Halt, NodeDown, NodeUp, Reason

HELLO_S = 15.0  # from the launch to the link
HALT_S = 2.0  # from `Halt` to the kill
LEAVE_S = 10.0  # for one that is dead to give back what it held
ENOUGH = 0.25  # of `hang_s`: with so much of a core a loop that turns would have been heard
STARVED_PATIENCE = 10.0  # without it, a node may be silent for so many times `hang_s`
LOST_LINK_S = 0.05  # for the launcher's news of a death to overtake the link's


class Outpost:
    """One node other than the root's, over all its lives."""

    def __init__(self, place: spec.Node) -> None:
        self.place = place
        self.incarnation = 0
        self.launched: Launched | None = None
        self.linked: asyncio.Future[None] | None = None
        self.ended: asyncio.Future[None] | None = None  # done once its death has been dealt with
        self.leaving: list[asyncio.Future[Reason]] = []  # of lives known to be dead: `exited`
        self.is_ready = False  # may be given work
        self.is_known = False  # has been given some: its death must be told
        self.beat_s = 0.0
        self.lag_s = 0.0
        self.use: Use | None = None  # of the cores, when it was first missed
        self.verdict: Reason | None = None  # why we killed it
        self.is_suspect = False  # a link to it is lost
        self.lock = asyncio.Lock()


class Nodes:
    """All nodes but the root's own."""

    def __init__(
        self,
        root: Node,
        places: tuple[spec.Node, ...],
        launcher: Callable[[spec.NodeKind], Launcher],
        greet: Callable[[str], None],
        died: Callable[[str, int, Reason], None],
    ) -> None:
        self.root = root
        self.log = root.log
        self.outposts = {place.name: Outpost(place) for place in places}
        assert root.name not in self.outposts, f"{root.name} is the root's own name"
        self._launcher = launcher
        self._greet = greet  # tells a new node all that it must know
        self._died = died
        self._is_closing = False
        self._calm_ticks = 0

    async def ensure(self, name: str) -> None:
        """Brings the node to life if it isn't. Raises LaunchFailed."""
        if name == self.root.name:
            return
        outpost = self.outposts.get(name)
        if outpost is None:
            raise LaunchFailed(Reason(Cause.NOBODY, f"the tree names no node {name!r}"))
        async with outpost.lock:
            if not outpost.is_ready:
                await self._launch(name, outpost)

    async def _launch(self, name: str, outpost: Outpost) -> None:
        root = self.root
        assert root.transport is not None
        if outpost.ended is not None:  # killed perhaps, but its end has not been told yet
            await asyncio.wait([outpost.ended], timeout=HALT_S)
        outpost.incarnation += 1
        incarnation = outpost.incarnation
        outpost.verdict = None
        outpost.is_suspect = False
        boot = msgspec.structs.replace(
            root.boot,
            name=name,
            incarnation=incarnation,
            root_endpoint=root.transport.endpoint,
        )
        launched = await self._launcher(outpost.place.kind).launch(boot)
        outpost.launched = launched
        outpost.linked = root.loop.create_future()
        outpost.ended = root.loop.create_future()
        death_of(launched).add_done_callback(
            lambda died: self._exited(name, incarnation, died.result())
        )
        root.peers.connect(name, incarnation, launched.endpoint)
        try:
            async with asyncio.timeout(HELLO_S):
                await outpost.linked
            if not (isinstance(launched, Mortal) and launched.is_hot):
                await self._until_left(name, outpost.leaving)
        except TimeoutError:
            outpost.verdict = Reason(Cause.HUNG, f"node {name} did not answer the hello")
            launched.kill()
            raise LaunchFailed(outpost.verdict) from None
        except asyncio.CancelledError:
            launched.kill()
            raise
        if death_of(launched).done():
            raise LaunchFailed(death_of(launched).result())
        outpost.is_ready = outpost.is_known = True
        outpost.beat_s = root.time()
        self._introduce(name, outpost)
        self.log.info("node up", peer=name, incarnation=incarnation, pid=launched.pid)

    async def _until_left(self, name: str, leaving: list[asyncio.Future[Reason]]) -> None:
        """Who has died a moment ago may still hold memory that the next one needs."""
        ending = [exited for exited in leaving if not exited.done()]
        if ending:
            _, late = await asyncio.wait(ending, timeout=LEAVE_S)
            if late:
                self.log.error("a dead process does not end", peer=name, waited_s=LEAVE_S)

    def _introduce(self, name: str, outpost: Outpost) -> None:
        """Tells the new node of all actors and nodes, and the other nodes of it."""
        peers = self.root.peers
        assert outpost.launched is not None
        self._greet(name)
        for other_name, other in self.outposts.items():
            if other_name != name and other.is_ready and other.launched is not None:
                peers.control(
                    other_name, NodeUp(name, outpost.incarnation, outpost.launched.endpoint)
                )
                peers.control(name, NodeUp(other_name, other.incarnation, other.launched.endpoint))

    def pid(self, name: str) -> int:
        """The process of a node; 0 while it has none."""
        outpost = self.outposts.get(name)
        if outpost is None:
            return self.root.pid
        return outpost.launched.pid if outpost.launched is not None else 0

    def incarnation(self, name: str) -> int:
        outpost = self.outposts.get(name)
        return outpost.incarnation if outpost is not None else self.root.address.incarnation

    def ready_names(self) -> list[str]:
        return [name for name, outpost in self.outposts.items() if outpost.is_ready]

    def kill(self, name: str, reason: Reason) -> None:
        """Ends a node now; `exited` will tell when it has."""
        outpost = self.outposts.get(name)
        if outpost is not None and outpost.launched is not None:
            if not outpost.launched.exited.done() and outpost.verdict is None:
                outpost.verdict = reason
                outpost.is_ready = False
                self.log.error("node killed", peer=name, detail=reason.detail)
            outpost.launched.kill()

    def kill_process(self, name: str, reason: Reason) -> bool:
        """Ends a node that is a process of its own; threads can't be ended. Whether it is one."""
        outpost = self.outposts.get(name)
        if outpost is None or outpost.place.kind is not spec.NodeKind.PROCESS:
            return False
        self.kill(name, reason)
        return True

    # News

    def link_up(self, name: str, incarnation: int) -> None:
        outpost = self.outposts.get(name)
        if outpost is not None and outpost.incarnation == incarnation and outpost.linked:
            if not outpost.linked.done():
                outpost.linked.set_result(None)

    def link_lost(self, name: str, incarnation: int, reason: Reason) -> None:
        """A link is lost; whoever can't be reached is as good as dead, and is made so."""
        outpost = self.outposts.get(name)
        if outpost is None or outpost.incarnation != incarnation or self._is_closing:
            return
        outpost.is_suspect = True
        if reason.cause is Cause.HUNG:
            self.kill(name, reason)
            return
        self.root.loop.call_later(LOST_LINK_S, self._kill_unless_dead, name, incarnation, reason)

    def quarrel(self, reporter: str, name: str, incarnation: int, reason: Reason) -> None:
        """Two nodes lost each other. One must go, for messages between them are lost; the other's
        report of the same is then no news."""
        told = self.outposts.get(reporter)
        if told is not None and told.launched is not None and not told.is_suspect:
            detail = f"its link to node {reporter} was lost: {reason.detail}"
            self.link_lost(name, incarnation, Reason(Cause.UNREACHABLE, detail))

    def _kill_unless_dead(self, name: str, incarnation: int, reason: Reason) -> None:
        outpost = self.outposts[name]
        if outpost.incarnation == incarnation and not self._is_closing:
            if outpost.launched is not None and not outpost.launched.exited.done():
                self.kill(name, reason)

    def beat(self, name: str, beat: Beat) -> None:
        outpost = self.outposts.get(name)
        if outpost is not None:
            outpost.beat_s = self.root.time()
            outpost.lag_s = beat.lag_s

    def tick(self, lag_s: float) -> None:
        """Looks for nodes whose loops make no progress."""
        hang_s = self.root.boot.hang_s
        for name, outpost in self.outposts.items():
            if isinstance(outpost.launched, OwnProcess) and self.root.transport is not None:
                # It is judged here alone: its link does not know what it has had of the cores.
                self.root.transport.be_patient(name, START_PATIENCE)
        if lag_s > self.root.boot.heartbeat_s:  # beats may be waiting in our own inbox
            self._calm_ticks = 0
            for outpost in self.outposts.values():  # nor could they be heard meanwhile
                outpost.beat_s = min(self.root.time(), outpost.beat_s + lag_s)
            return
        self._calm_ticks += 1
        if self._calm_ticks < 2:
            return
        now_s = self.root.time()
        for name, outpost in self.outposts.items():
            silent_s = now_s - outpost.beat_s
            if not outpost.is_ready or silent_s < 2 * self.root.boot.heartbeat_s:
                outpost.use = None
                continue
            factor = START_PATIENCE if self.root.starting.get(name) else 1.0
            is_spared = silent_s < hang_s * STARVED_PATIENCE and self._is_starved(outpost)
            if silent_s > hang_s * factor and not is_spared:
                detail = f"the loop of node {name} made no progress for {hang_s * factor:g} s"
                self.kill(name, Reason(Cause.HUNG, detail))

    def _is_starved(self, outpost: Outpost) -> bool:
        """Silent since two heartbeats for want of a core."""
        if not isinstance(outpost.launched, OwnProcess):
            return False
        now = outpost.launched.use()
        if outpost.use is None:
            outpost.use = now
        return is_starved(outpost.use, now, ENOUGH * self.root.boot.hang_s)

    def _exited(self, name: str, incarnation: int, reason: Reason) -> None:
        outpost = self.outposts[name]
        if outpost.incarnation != incarnation:
            return
        was_known, outpost.is_known, outpost.is_ready = outpost.is_known, False, False
        assert outpost.launched is not None and outpost.ended is not None
        leaving = [*outpost.leaving, outpost.launched.exited]
        outpost.leaving = [exited for exited in leaving if not exited.done()]
        outpost.launched = None
        outpost.ended.set_result(None)
        self.root.peers.disconnect(name, incarnation)
        for other in self.ready_names():
            self.root.peers.control(other, NodeDown(name, incarnation))
        verdict = outpost.verdict
        if verdict is not None:
            reason = Reason(
                verdict.cause,
                verdict.detail,
                reason.exit_code,
                reason.signal,
                reason.last_lines or verdict.last_lines,
            )
        if outpost.linked is not None and not outpost.linked.done():
            outpost.linked.set_exception(LaunchFailed(reason))
        elif was_known:
            self._died(name, incarnation, reason)

    # The end

    async def close(self) -> None:
        """Halts all nodes; kills those that don't end in time."""
        self._is_closing = True
        pending: list[asyncio.Future[Any]] = []
        for name, outpost in self.outposts.items():
            if outpost.launched is not None:
                self.root.peers.control(name, Halt())
                pending.append(outpost.launched.exited)
            pending += [exited for exited in outpost.leaving if not exited.done()]
        if not pending:
            return
        _, late = await asyncio.wait(pending, timeout=HALT_S)
        if late:
            for outpost in self.outposts.values():
                if outpost.launched is not None:
                    outpost.launched.kill()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(asyncio.wait(late), HALT_S)
