"""This file is the stage of the credit suite: a pump, a gate that takes one message when the test
says so, and a system of three nodes on one loop over any transport."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

import structlog

from actors.runtime import Actor, Full, MailboxSpec, Ref
from actors.runtime.launch import Launched, Launcher
from actors.runtime.node import Node
from actors.runtime.simloop import SimLoop
from actors.runtime.spec import Child, NodeKind, Supervisor
from actors.runtime.spec import Node as Place
from actors.runtime.system import System
from actors.runtime.transport.base import Transport
from messages.base import Address, Header, Message
from messages.system import Cause, Down, NodeBoot, Reason, Undelivered, Up
from tests.corridors.kinds import Make
from tests.runtime.nodes import until

COUNT_MAX, WINDOW = 3, 6
SILENT = structlog.wrap_logger(structlog.ReturnLogger(), processors=[])


class Item(Message, frozen=True):
    number: int


class Go(Message, frozen=True):
    """Send so many, `at_once` in each turn."""

    count: int
    at_once: int = 1


class Gate(Actor):
    """Takes an item when the test has let one through."""

    accepts = Item
    mailbox = MailboxSpec(count_max=COUNT_MAX, full=Full.WAIT, credits=WINDOW)

    def __init__(self) -> None:
        self.open = asyncio.Semaphore(0)
        self.got: list[int] = []

    async def on_item(self, message: Item) -> None:
        await self.open.acquire()
        self.got.append(message.number)


class Pump(Actor):
    """Sends numbered items, and goes on by a message to itself, which waits while it is paused."""

    accepts = Go
    last = 0  # of all lives

    def __init__(self) -> None:
        self.refused: list[Cause] = []
        self.seen: list[str] = []

    async def on_start(self) -> bytes:
        self.gate: Ref[Item] = self.context.peer("gate")
        self.context.watch("other")
        return b""

    def on_go(self, message: Go) -> None:
        for _ in range(min(message.count, message.at_once)):
            Pump.last += 1
            self.gate.tell(Item(Pump.last))
        left = message.count - message.at_once
        if left > 0:
            self.context.start_timer("go", Go(left, message.at_once), after_s=0.0)

    def on_undelivered(self, notice: Undelivered) -> None:
        self.refused.append(notice.cause)

    def on_up(self, up: Up) -> None:
        self.seen.append(f"up {up.address.incarnation}")

    def on_down(self, down: Down) -> None:
        self.seen.append(f"down {down.address.incarnation}")


class Lossy:
    """A transport that loses some of what streams send, each way, and counts their notices."""

    def __init__(self, inner: Transport, rng: random.Random | None) -> None:
        self.inner = inner
        self.rng = rng
        self.notice_count = 0
        self.lost_count = 0

    def send(self, node: str, header: Header, body: Any) -> bool:
        is_notice = type(body).__name__ in ("Credits", "CreditsAsked")
        self.notice_count += is_notice
        if self.rng is not None and (is_notice or header.credit) and self.rng.random() < 0.3:
            self.lost_count += 1
            return True
        return self.inner.send(node, header, body)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


class LoopNode:
    """One life of a node on the test's own loop."""

    def __init__(self, boot: NodeBoot, transport: Lossy) -> None:
        loop = asyncio.get_running_loop()
        self.pid = 1000 + boot.incarnation
        self.transport = transport
        self.exited: asyncio.Future[Reason] = loop.create_future()
        self.node = Node(boot, transport=transport, log=SILENT)
        self._waiting = loop.create_task(self._wait())

    @property
    def endpoint(self) -> str:
        return self.transport.endpoint

    async def _wait(self) -> None:
        await self.node.wait()
        await self.node.close()
        if not self.exited.done():
            self.exited.set_result(Reason(Cause.EXITED, exit_code=0))

    def kill(self) -> None:
        if not self.exited.done():
            self.node.halt(Reason(Cause.EXITED, "killed"))
            self.exited.set_result(Reason(Cause.EXITED, "killed by SIGKILL", signal=9))


class LoopFabric:
    """Nodes of a system on one loop, over the transports that `make` makes."""

    def __init__(self, make: Make, rng: random.Random | None) -> None:
        self.run = "r"
        self.run_dir = ""
        self.nodes: dict[str, LoopNode] = {}
        self.transports: list[Lossy] = []
        self._make = make
        self._rng = rng

    def transport(self, name: str, incarnation: int) -> Lossy:
        transport = Lossy(self._make(name, incarnation), self._rng)
        self.transports.append(transport)
        return transport

    def launcher(self, kind: NodeKind) -> Launcher:
        return self

    async def launch(self, boot: NodeBoot) -> Launched:
        one = LoopNode(boot, self.transport(boot.name, boot.incarnation))
        await one.node.start()
        self.nodes[boot.name] = one
        return one

    def close(self) -> None:
        pass


class Works:
    """The running system, and the law of credits over both ends of each stream."""

    def __init__(self, system: System, fabric: LoopFabric) -> None:
        self.system = system
        self.fabric = fabric

    def actor(self, path: str) -> Any:
        for one in self.fabric.nodes.values():
            if (actor := one.node.local(path)) is not None:
                return actor
        return None

    def life(self, path: str) -> Any:
        for one in self.fabric.nodes.values():
            if (life := one.node.lives.get(path)) is not None:
                return life
        return None

    def tell(self, path: str, message: Message) -> None:
        self.system.tell(path, message)

    def notice_count(self) -> int:
        return sum(transport.notice_count for transport in self.fabric.transports)

    def is_up(self, path: str, incarnation: int) -> bool:
        """In service, as every node knows."""
        nodes = [self.system.node, *(one.node for one in self.fabric.nodes.values())]
        address = [node.entry(path).address for node in nodes]
        return all(a is not None and a.incarnation == incarnation for a in address)

    def is_paused(self, path: str) -> bool:
        life = self.life(path)
        return life is not None and life.blocked_count > 0

    async def until(self, condition: Callable[[], bool]) -> None:
        def holds() -> bool:
            self.check()
            return condition()

        await until(holds)

    def check(self) -> None:
        for one in self.fabric.nodes.values():
            if one.exited.done():
                continue
            one.node.check()
            for life in one.node.lives.values():
                for stream in life.streams.values():
                    self._check_stream(life.address, stream)

    def _check_stream(self, sender: Address, stream: Any) -> None:
        taker = self.life(stream.address.path)
        if taker is None or taker.address != stream.address:
            return
        inflow = taker.inflows.get(sender)
        if inflow is None:
            assert stream.account.spent <= WINDOW
            return
        account, allowance = stream.account, inflow.allowance
        assert account.granted <= allowance.told, "more than was granted"
        taken = allowance.arrived - allowance.waiting
        assert account.spent - taken <= WINDOW, "more under way than the window"
        assert taker.mailbox.bounded_count <= COUNT_MAX


@asynccontextmanager
async def works(
    kind: Callable[[], AbstractAsyncContextManager[Make]], rng: random.Random | None = None
) -> AsyncIterator[Works]:
    """`pump` and `pump2` on node p, `gate` on g, `other` with the root; the law after each step of
    a simulated loop, and whenever the test looks."""
    module = "tests.corridors.pacing"
    root = Supervisor(
        name="root",
        children=(
            Child(name="other", factory="tests.runtime.players:Counter"),
            Child(name="gate", factory=f"{module}:Gate", node="g"),
            Child(name="pump", factory=f"{module}:Pump", node="p"),
            Child(name="pump2", factory=f"{module}:Pump", node="p"),
        ),
        restarts_max=50,
    )
    Pump.last = 0
    places = tuple(Place(name=name, kind=NodeKind.PROCESS) for name in ("g", "p"))
    async with kind() as make:
        fabric = LoopFabric(make, rng)
        system = System(root, nodes=places, fabric=fabric, log=SILENT, hang_s=60.0)
        await system.start()
        stage = Works(system, fabric)
        loop = asyncio.get_running_loop()
        if isinstance(loop, SimLoop):
            loop.after_step = stage.check
        await stage.until(lambda: stage.is_up("gate", 1) and stage.is_up("pump2", 1))
        try:
            yield stage
        finally:
            if isinstance(loop, SimLoop):
                loop.after_step = None
            await system.stop()
            for transport in fabric.transports:
                await transport.close()
