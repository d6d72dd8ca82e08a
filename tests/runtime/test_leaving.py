"""Goal: the news of a death waits for nothing, and the next life's work for the memory of the dead.
Method: simulated nodes that are seen to die before their process has ended."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from actors.runtime.launch import Launched
from actors.runtime.nodes import LEAVE_S
from actors.runtime.simulation import SimFabric, SimNode
from actors.runtime.spec import Node, NodeKind
from actors.runtime.system import System
from messages.system import Cause, NodeBoot, Reason
from tests.runtime.players import Watch
from tests.runtime.stage import Play, child, tree

pytestmark = pytest.mark.sim(seeds=4)

ONLINE = ("up", 1)
LOST = ("down", 1, Cause.EXITED)


class SlowEnd(SimNode):
    """Dies at once when it is killed; its process ends when the test says so."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.dying: asyncio.Future[Reason] = asyncio.get_running_loop().create_future()
        self.is_hot = False

    def kill(self) -> None:
        if not self.dying.done():
            super().kill()

    def _exited(self, reason: Reason) -> None:
        if not self.dying.done():
            self.dying.set_result(reason)

    def leave(self) -> None:
        self.exited.set_result(self.dying.result())


class SlowFabric(SimFabric):
    """Gives such nodes; `lives` are all that there have been."""

    def __init__(self, *, hot: bool) -> None:
        super().__init__()
        self.hot = hot
        self.lives: list[SlowEnd] = []

    async def launch(self, boot: NodeBoot) -> Launched:
        self.launch_count += 1
        transport = self.transport(boot.name, boot.incarnation)
        life = SlowEnd(boot, transport, self.launch_count, self._log)
        life.is_hot = self.hot
        await life.node.start()
        self.nodes[boot.name] = life
        self.lives.append(life)
        return life


@asynccontextmanager
async def play(*, hot: bool = False) -> AsyncIterator[tuple[Play, SlowFabric]]:
    """`c` on the node `n`, whose first life has died by the time that this is told to `a`."""
    fabric = SlowFabric(hot=hot)
    places = (Node(name="n", kind=NodeKind.PROCESS),)
    system = System(tree(child("c", node="n"), child("a", "Caller")), nodes=places, fabric=fabric)
    await system.start()
    p = Play(system, fabric)
    p.tell("a", Watch("c"))
    await asyncio.sleep(0.1)
    fabric.kill("n")
    await asyncio.sleep(0.1)
    yield p, fabric
    stopped = asyncio.ensure_future(system.stop())
    await asyncio.sleep(0.1)
    for life in fabric.lives:
        if not life.exited.done():
            life.leave()
    await stopped


async def test_a_death_is_told_at_once_and_the_next_life_works_when_the_process_has_ended() -> None:
    async with play() as (p, fabric):
        assert p.actor("a").seen == [ONLINE, LOST]
        assert fabric.launch_count == 2, "what can be done meanwhile is done"
        await asyncio.sleep(LEAVE_S - 1)
        assert p.state("c") == "restarting" and p.actor("c") is None
        fabric.lives[0].leave()
        await asyncio.sleep(0.1)
        assert p.actor("a").seen == [ONLINE, LOST, ("up", 2)]


async def test_who_has_all_that_it_needs_does_not_wait_for_the_dead() -> None:
    async with play(hot=True) as (p, _):
        assert p.actor("a").seen == [ONLINE, LOST, ("up", 2)]


async def test_a_process_that_never_ends_is_waited_for_only_so_long() -> None:
    async with play() as (p, _):
        assert p.actor("c") is None
        await asyncio.sleep(LEAVE_S)
        assert p.actor("a").seen == [ONLINE, LOST, ("up", 2)]


async def test_a_life_that_dies_while_it_waits_for_the_dead_is_followed_by_another() -> None:
    async with play() as (p, fabric):
        fabric.kill("n")
        await asyncio.sleep(0.1)
        fabric.lives[0].leave()
        await asyncio.sleep(5)
        assert fabric.launch_count == 3
        assert p.actor("c") is None, "the second is still there"
        fabric.lives[1].leave()
        await asyncio.sleep(0.1)
        assert p.state("c") == "running"


async def test_the_end_waits_for_those_who_have_not_ended() -> None:
    async with play(hot=True) as (p, fabric):
        stopped = asyncio.ensure_future(p.system.stop())
        await asyncio.sleep(1)
        fabric.lives[1].leave()
        await asyncio.sleep(0.1)
        assert not stopped.done(), "the first is still there"
        fabric.lives[0].leave()
        await stopped
