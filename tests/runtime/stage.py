"""Builds small systems for the tests of supervision, on one simulated loop."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from actors.runtime.simloop import SimLoop
from actors.runtime.simulation import SimFabric
from actors.runtime.spec import Child, Node, NodeKind, Restart, Strategy, Supervisor
from actors.runtime.system import System
from actors.runtime.transport.memory import Weather

PLAYERS = "tests.runtime.players"


def child(name: str, kind: str = "Counter", **fields: Any) -> Child:
    return Child(name=name, factory=f"{PLAYERS}:{kind}", **fields)


def tree(*children: Child | Supervisor, **fields: Any) -> Supervisor:
    return Supervisor(name="root", children=children, **fields)


class Play:
    """A running system and short words for what tests do with it."""

    def __init__(self, system: System, fabric: SimFabric) -> None:
        self.system = system
        self.fabric = fabric

    def actor(self, path: str) -> Any:
        """The actor now at a path, on whichever node."""
        for node in [self.system.node, *(sim.node for sim in self.fabric.nodes.values())]:
            if (actor := node.local(path)) is not None:
                return actor
        return None

    def tell(self, path: str, message: Any) -> None:
        self.system.tell(path, message)

    def incarnation(self, path: str) -> int:
        known = self.system.node.entry(path).known
        return known.incarnation if known is not None else 0

    def state(self, path: str) -> str:
        known = self.system.node.entry(path).known
        return str(known.state) if known is not None else ""

    async def crash(self, path: str, seconds: float = 0.05) -> None:
        from tests.runtime.players import Crash

        self.tell(path, Crash())
        await asyncio.sleep(seconds)


@asynccontextmanager
async def play(
    root: Supervisor,
    *nodes: str,
    weather: Weather | None = None,
    encodes: bool = True,
    **options: Any,
) -> AsyncIterator[Play]:
    """Starts the tree with simulated nodes of these names, every law checked after each step."""
    fabric = SimFabric(encodes=encodes, weather=weather)
    places = tuple(Node(name=name, kind=NodeKind.PROCESS) for name in nodes)
    system = System(root, nodes=places, fabric=fabric, check=True, **options)
    loop = asyncio.get_running_loop()
    assert isinstance(loop, SimLoop)

    def check() -> None:
        system.check()
        fabric.check()

    await system.start()
    loop.after_step = check
    try:
        yield Play(system, fabric)
    finally:
        loop.after_step = None
        await system.stop()


__all__ = ["Child", "Play", "Restart", "Strategy", "Supervisor", "child", "play", "tree"]
