"""This file holds a whole system on one loop: its nodes are objects, their links seeded weather,
and killing one is a power cut.

It does not know the loop; with `SimLoop` a run is a function of its seed. Law: a killed node says
nothing more, to anyone; only its launcher tells that it is dead.
"""

from __future__ import annotations

import asyncio
from typing import Any

import structlog

from actors.runtime.launch import Launched, Launcher
from actors.runtime.node import Node
from actors.runtime.spec import NodeKind
from actors.runtime.transport.base import Transport
from actors.runtime.transport.memory import MemoryHub, MemoryTransport, Weather
from messages.system import Cause, NodeBoot, Reason

SIGKILL = 9
FIRST_PID = 1000


class SimNode:
    """One life of a simulated node."""

    def __init__(self, boot: NodeBoot, transport: MemoryTransport, pid: int, log: Any) -> None:
        self.pid = pid
        self.endpoint = transport.endpoint
        self.transport = transport
        loop = asyncio.get_running_loop()
        self.exited: asyncio.Future[Reason] = loop.create_future()
        self.node = Node(boot, transport=transport, log=log)
        self.node.pid = pid
        self._waiting = loop.create_task(self._wait(), name=f"node {boot.name}")

    async def _wait(self) -> None:
        reason = await self.node.wait()
        await self.node.close()
        self._exited(Reason(Cause.EXITED, reason.detail, exit_code=0))

    def kill(self) -> None:
        """A power cut: nothing is sent any more, its actors are gone at once."""
        if self.exited.done():
            return
        self._waiting.cancel()
        self.transport.vanish()
        self.node.halt(Reason(Cause.EXITED, "power cut"))
        self._exited(Reason(Cause.EXITED, "killed by SIGKILL", signal=SIGKILL))

    def _exited(self, reason: Reason) -> None:
        if not self.exited.done():
            self.exited.set_result(reason)


class SimFabric:
    """Give it to `System(fabric=...)`. `nodes` are those alive now, by name."""

    def __init__(
        self, *, encodes: bool = True, weather: Weather | None = None, log: Any = None
    ) -> None:
        self.run = "simulation"
        self.run_dir = ""
        self.hub = MemoryHub(encodes=encodes, weather=weather)
        self.nodes: dict[str, SimNode] = {}
        self.launch_count = 0
        self._log = log or structlog.get_logger()

    def transport(self, name: str, incarnation: int) -> Transport:
        return MemoryTransport(self.hub, name, incarnation)

    def launcher(self, kind: NodeKind) -> Launcher:
        return self

    async def launch(self, boot: NodeBoot) -> Launched:
        self.launch_count += 1
        transport = MemoryTransport(self.hub, boot.name, boot.incarnation)
        sim = SimNode(boot, transport, FIRST_PID + self.launch_count, self._log)
        await sim.node.start()
        self.nodes[boot.name] = sim
        return sim

    def kill(self, name: str) -> None:
        """As `kill -9` of the node's process."""
        self.nodes[name].kill()

    def check(self) -> None:
        """Asserts the laws of all actors of all living nodes."""
        for sim in self.nodes.values():
            if not sim.exited.done():
                sim.node.check()

    def close(self) -> None:
        self.hub.transports.clear()
