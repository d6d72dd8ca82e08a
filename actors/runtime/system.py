"""This file is the system: the root node, the supervision tree over it, and the nodes it starts.

It does not know any room; the tree is data (`spec.py`). Laws: children start in order, each after
the one before it is ready; every death is published once to all nodes; when the root supervisor
gives up everything has been stopped, and `wait` returns why.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Coroutine
from pathlib import Path
from typing import Any, NoReturn

import msgspec
import structlog

from actors.runtime import spec
from actors.runtime.actor import Actor
from actors.runtime.child import SWITCH_S
from actors.runtime.clock import rng_for
from actors.runtime.fabric import Fabric, fabric_for
from actors.runtime.launch import LaunchFailed
from actors.runtime.node import Node
from actors.runtime.nodes import Nodes
from actors.runtime.preload import encoded, preloads_of
from actors.runtime.restart import Child, Restarts
from actors.runtime.supervisor import Branch, Leaf, StartFailed
from actors.runtime.wiring import wait_cycle
from messages.base import Address, Message
from messages.system import (
    ActorRow,
    Beat,
    Cause,
    DrainActor,
    Drained,
    Entries,
    Exited,
    KillActor,
    Known,
    LinkLost,
    Look,
    NodeBoot,
    Ready,
    Reason,
    RestartAsked,
    StartActor,
    State,
    StopActor,
)

MAIN = "main"
KILL_S = 1.0  # from `KillActor` to killing its node

__all__ = ["MAIN", "StartFailed", "System"]


class System:
    """Runs one tree. Made on the loop that will be the root's; `start`, then `stop`."""

    def __init__(
        self,
        tree: spec.Supervisor,
        *,
        nodes: tuple[spec.Node, ...] = (),
        seed: int = 0,
        run_dir: Path | None = None,
        encode_always: bool = False,
        heartbeat_s: float = 0.25,
        hang_s: float = 2.0,
        log: Any = None,
        log_dir: Path | None = None,
        log_level: str = "info",
        log_terminal: bool = True,
        log_file_bytes_max: int = 16 << 20,
        log_files_max: int = 4,
        check: bool = False,
        fabric: Fabric | None = None,
        spares: bool = False,
        spare_after_s: float = 10.0,
    ) -> None:
        self.loop = asyncio.get_running_loop()
        self.log = (log or structlog.get_logger()).bind(node=MAIN)
        preloads = preloads_of(tree, nodes) if spares else None
        self.fabric = fabric or fabric_for(
            nodes, run_dir, heartbeat_s, hang_s, self.log, preloads, spare_after_s
        )
        boot = NodeBoot(
            MAIN,
            1,
            self.fabric.run,
            self.fabric.run_dir,
            root=MAIN,
            root_incarnation=1,
            root_endpoint="",
            seed=seed,
            heartbeat_s=heartbeat_s,
            hang_s=hang_s,
            encode_always=encode_always,
            check=check,
            log_dir=str(log_dir or ""),
            log_level=log_level,
            log_terminal=log_terminal,
            log_file_bytes_max=log_file_bytes_max,
            log_files_max=log_files_max,
        )
        transport = self.fabric.transport(MAIN, 1) if nodes else None
        self.node = Node(boot, transport=transport, log=self.log, office=self)
        self.nodes = Nodes(self.node, nodes, self.fabric.launcher, self._greet, self._node_died)
        self.root = Branch(tree, "", None, self)
        self.root.gave_up = self._gave_up
        self.leaves = {leaf.path: leaf for leaf in self.root.leaves()}
        self._life_nodes: dict[str, int] = {}  # the node incarnation each leaf lives on
        self._starting: dict[str, asyncio.Future[Ready | Reason]] = {}
        self._ends: dict[str, asyncio.Future[None]] = {}  # who waits for a leaf's death
        self._drains: dict[str, asyncio.Future[None]] = {}
        self._drained: set[str] = set()  # names whose turn to drain has come
        self._drain_until_s = 0.0
        self._peers: dict[str, tuple[str, ...]] = {}
        self._credits: dict[str, int] = {}  # of those that make senders wait
        self._ended: asyncio.Future[Reason] = self.loop.create_future()
        self._is_stopped = False

    # Life

    async def start(self) -> None:
        """Starts all children in order. Raises StartFailed, and leaves nothing behind."""
        await self.node.start()
        for leaf in self.leaves.values():
            self._publish(leaf, State.PENDING)
        try:
            await self.root.start(self)
        except BaseException:
            await self._close()
            raise

    async def drain(self, grace_s: float) -> None:
        """Lets each actor finish, the last started first. Returns at the latest after `grace_s`.

        Those of one name finish together: while one front end did, the next would take new work.
        One that is just being (re)started, or will be, is told before it runs, takes no work, and
        is not waited for.
        """
        self._drain_until_s = self.loop.time() + grace_s
        for name in dict.fromkeys(leaf.name for leaf in reversed(self.leaves.values())):
            left_s = self._drain_until_s - self.loop.time()
            if left_s <= 0:
                return
            self._drained.add(name)
            alike = [leaf for leaf in self.leaves.values() if leaf.name == name and leaf.is_alive]
            running = [leaf for leaf in alike if leaf.path not in self._starting]
            for leaf in running:
                self._drains[leaf.path] = self.loop.create_future()
                self._publish(leaf, State.DRAINING)
            for leaf in alike:
                self._order_drain(leaf)
            await self._await_drained(running, left_s)

    def _order_drain(self, leaf: Leaf) -> None:
        left_s = max(0.0, self._drain_until_s - self.loop.time())
        self._control(leaf, DrainActor(leaf.path, leaf.incarnation, left_s))

    async def _await_drained(self, leaves: list[Leaf], left_s: float) -> None:
        if leaves:
            await asyncio.wait([self._drains[leaf.path] for leaf in leaves], timeout=left_s)
        for leaf in leaves:
            if not self._drains.pop(leaf.path).done():
                self.log.warning("not drained", path=leaf.path, grace_s=left_s)

    async def stop(self) -> None:
        """Stops all actors in reverse start order, then the nodes. Idempotent."""
        if self._is_stopped:
            return
        await self.root.stop(self, Reason(Cause.STOPPED))
        await self._close()

    async def _close(self) -> None:
        self._is_stopped = True
        await self.nodes.close()
        await self.node.close()
        self.fabric.close()
        if not self._ended.done():
            self._ended.set_result(Reason(Cause.STOPPED))

    async def wait(self) -> Reason:
        """Returns when it was stopped, or when the root supervisor gave up (then call `stop`)."""
        return await asyncio.shield(self._ended)

    def _gave_up(self, reason: Reason) -> None:
        if not self._ended.done():
            self._ended.set_result(reason)

    def freeze(self) -> None:
        """To be called once started, where this process is the system's alone: the root's loop is
        the one that sees deaths, and nothing may hold it up for long."""
        sys.setswitchinterval(SWITCH_S)
        self.node.host.freeze()

    # Looking

    def local(self, path: str) -> Actor | None:
        """The actor itself, when it lives on the root's node."""
        return self.node.local(path)

    def actors(self) -> list[ActorRow]:
        return self.node.rows.all()

    def tell(self, path: str, message: Message, *, request: str | None = None) -> None:
        """Sends from outside of any actor; nobody is told when it doesn't arrive."""
        self.node.route(None, self.node.entry(path), message, None, request, None)

    def check(self) -> None:
        """Asserts the laws of every actor on the root's node."""
        self.node.check()

    # What supervisors ask (their Stage)

    def restarts_for(self, branch: Branch) -> Restarts:
        settings = branch.spec
        return Restarts(
            [Child(name, child.restart) for name, child in branch.children.items()],
            settings.strategy,
            restarts_max=settings.restarts_max,
            window_s=settings.window_s,
            backoff_first_s=settings.backoff_first_s,
            backoff_max_s=settings.backoff_max_s,
            rng=rng_for(self.node.seed, "restart", branch.path),
        )

    async def start_leaf(self, leaf: Leaf) -> None:
        child = leaf.child
        try:
            await self.nodes.ensure(child.node)
        except LaunchFailed as failed:
            leaf.last_exit = failed.reason
            self._publish(leaf, State.FAILED)
            raise StartFailed(leaf.path, failed.reason) from failed
        outcome: asyncio.Future[Ready | Reason] = self.loop.create_future()
        self._starting[leaf.path] = outcome
        node_incarnation = self.nodes.incarnation(child.node)
        is_in_place = self._life_nodes.get(leaf.path) == node_incarnation
        self._life_nodes[leaf.path] = node_incarnation
        leaf.is_alive = True
        if leaf.restarts_count:
            self.node.tally.count("histrio_restarts_total", 1, (("actor", leaf.path),))
        self._publish(leaf, State.STARTING)
        crashed = leaf.last_exit is not None and leaf.last_exit.cause is Cause.CRASHED
        self._order_start(leaf, keeps_mailbox=is_in_place and crashed)
        if leaf.name in self._drained:
            self._order_drain(leaf)
        try:
            await asyncio.wait([outcome], timeout=child.start_timeout_s)
            if not outcome.done():
                detail = f"not ready after {child.start_timeout_s:g} s"
                await self._kill(leaf, Reason(Cause.HUNG, detail))
        finally:
            self._starting.pop(leaf.path, None)
        result = outcome.result() if outcome.done() else leaf.last_exit
        if not isinstance(result, Ready):
            raise StartFailed(leaf.path, result or Reason(Cause.HUNG))
        self._peers[leaf.path] = result.peers
        if result.makes_wait:
            self._credits[leaf.path] = result.credits
        circle = wait_cycle(self._peers, self._credits)
        if circle is not None:
            reason = Reason(Cause.CRASHED, "would wait for each other: " + " -> ".join(circle))
            await self._kill(leaf, reason)
            raise StartFailed(leaf.path, reason)
        self._publish(leaf, State.RUNNING, result.note)
        if leaf.name in self._drained:
            self._publish(leaf, State.DRAINING)

    def _order_start(self, leaf: Leaf, *, keeps_mailbox: bool) -> None:
        child = leaf.child
        order = StartActor(
            leaf.path,
            leaf.incarnation,
            child.factory,
            keeps_mailbox=keeps_mailbox,
            restarts=leaf.restarts_count,
        )
        if child.node == MAIN and not self.node.encode_always:
            self.node.host.start(order, dict(child.arguments))
            return
        arguments = encoded(child)
        order = msgspec.structs.replace(order, arguments=arguments)
        self._control(leaf, order)

    async def stop_leaf(self, leaf: Leaf, reason: Reason) -> None:
        self._publish(leaf, State.STOPPING)
        self._control(leaf, StopActor(leaf.path, leaf.incarnation, leaf.child.stop_grace_s))
        await self._await_end(leaf, leaf.child.stop_grace_s)
        if leaf.is_alive:
            await self._kill(leaf, Reason(Cause.HUNG, "did not stop in time"))

    async def _kill(self, leaf: Leaf, reason: Reason) -> None:
        """Ends a leaf by force: by its node, or with its node when that doesn't answer."""
        self._ends.setdefault(leaf.path, self.loop.create_future())
        self._control(leaf, KillActor(leaf.path, leaf.incarnation, reason))
        await self._await_end(leaf, KILL_S)
        if leaf.is_alive and leaf.child.node != MAIN:
            self.nodes.kill(leaf.child.node, reason)
            await self._await_end(leaf, KILL_S)

    async def _await_end(self, leaf: Leaf, timeout_s: float) -> None:
        if not leaf.is_alive:
            return
        ended = self._ends.setdefault(leaf.path, self.loop.create_future())
        await asyncio.wait([ended], timeout=timeout_s)

    def settle(self, leaf: Leaf, reason: Reason) -> None:
        """The leaf is dead and will not be restarted."""
        is_stopped = reason.cause is Cause.STOPPED
        self._publish(leaf, State.STOPPED if is_stopped else State.FAILED)

    # News (the root node's Office)

    def report(self, node: str, message: Any) -> None:
        match message:
            case Ready(address):
                starting = self._starting.get(address.path)
                if starting is not None and not starting.done():
                    if self._is_present(node, address):
                        starting.set_result(message)
            case Exited(address, reason):
                if self._is_present(node, address):
                    self._leaf_died(self.leaves[address.path], reason)
            case Drained(address):
                drained = self._drains.get(address.path)
                if drained is not None and not drained.done():
                    drained.set_result(None)
            case Beat(_, rows):
                self.nodes.beat(node, message)
                self.node.rows.heard(node, rows)
            case Look():
                self.node.peers.control(node, self.node.rows.seen_from(node))
            case RestartAsked(path):
                leaf = self.leaves.get(path)
                if leaf is not None:
                    self.log.warning("restart asked for", actor=path)
                    leaf.parent.restart_child(leaf.name)
            case LinkLost(name, incarnation, reason):
                self.nodes.quarrel(node, name, incarnation, reason)

    def link_up(self, node: str, incarnation: int) -> None:
        self.nodes.link_up(node, incarnation)

    def link_lost(self, node: str, incarnation: int, reason: Reason) -> None:
        self.nodes.link_lost(node, incarnation, reason)

    def tick(self, lag_s: float) -> None:
        self.nodes.tick(lag_s)

    def _is_present(self, node: str, address: Address) -> bool:
        """Whether a report is about a life that is thought alive, and from where that lives."""
        leaf = self.leaves.get(address.path)
        if leaf is None or not leaf.is_alive or leaf.child.node != node:
            return False
        return leaf.incarnation == address.incarnation

    def _node_died(self, name: str, incarnation: int, reason: Reason) -> None:
        known = {"peer": name, "incarnation": incarnation, "detail": reason.detail}
        if self._is_stopped:
            self.log.info("node ended", **known)
        else:
            known |= {"cause": str(reason.cause), "last_lines": reason.last_lines}
            self.log.error("node died", **known)
        for leaf in self.leaves.values():
            if leaf.is_alive and leaf.child.node == name:
                if self._life_nodes.get(leaf.path) == incarnation:
                    self._leaf_died(leaf, reason)

    def _leaf_died(self, leaf: Leaf, reason: Reason) -> None:
        leaf.is_alive = False
        leaf.last_exit = reason
        ended = self._ends.pop(leaf.path, None)
        for waiting in (ended, self._drains.get(leaf.path)):
            if waiting is not None and not waiting.done():
                waiting.set_result(None)
        if reason.cause is not Cause.STOPPED:
            self.log.error(
                "actor died",
                actor=leaf.path,
                incarnation=leaf.incarnation,
                cause=str(reason.cause),
                detail=reason.detail,
                last_lines=reason.last_lines,
            )
        labels = (("actor", leaf.path), ("cause", str(reason.cause)))
        self.node.tally.count("histrio_deaths_total", 1, labels)
        is_over = False
        if reason.cause in (Cause.HUNG, Cause.BROKEN) and ended is None:  # it has said so itself
            is_killed = self.nodes.kill_process(leaf.child.node, reason)
            is_over = reason.cause is Cause.BROKEN and not is_killed
        starting = self._starting.get(leaf.path)
        if starting is not None and not starting.done():
            self._publish(leaf, State.FAILED)
            starting.set_result(reason)
            return
        if ended is not None:  # somebody asked for it
            self._publish(leaf, State.STOPPED)
            return
        if is_over:
            detail = f"{leaf.path} can't go on in this process: {reason.detail}"
            self._publish(leaf, State.FAILED)
            self.root.spoil(Reason(Cause.BROKEN, detail[:500]))
            return
        self._publish(leaf, State.RESTARTING)
        leaf.parent.died(leaf.name, reason)

    # To the nodes

    def _control(self, leaf: Leaf, message: Any) -> None:
        if leaf.child.node == MAIN:
            self.node.obey(message)
        else:
            self.node.peers.control(leaf.child.node, message)

    def _publish(self, leaf: Leaf, state: State, note: bytes = b"") -> None:
        """Tells every node where one actor stands."""
        known = Known(
            leaf.path,
            leaf.child.node,
            leaf.incarnation,
            state,
            leaf.restarts_count,
            self.nodes.pid(leaf.child.node),
            note or self._note(leaf),
            leaf.last_exit,
            self._credits.get(leaf.path, 0),
        )
        self.node.learn(known)
        for name in self.nodes.ready_names():
            if not self.node.peers.control(name, Entries((known,))):
                self.nodes.kill(name, Reason(Cause.UNREACHABLE, "takes no orders"))

    def _note(self, leaf: Leaf) -> bytes:
        """The last one, while there is no newer: see `Notes`."""
        known = self.node.entry(leaf.path).known
        return known.note if known is not None else b""

    def _greet(self, name: str) -> None:
        known = (self.node.entry(path).known for path in self.leaves)
        self.node.peers.control(name, Entries(tuple(k for k in known if k is not None)))


def run(main: Coroutine[Any, Any, int]) -> NoReturn:
    """Runs a program whose result is an exit code, and ends the process with it: neither do stuck
    threads hold up the end, nor does the interpreter take back signal handlers on its way out."""
    code = asyncio.run(main)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
