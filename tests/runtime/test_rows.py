"""Goal: whoever looks, on whichever node, sees what all actors do; who is dead or silent does not
look alive; nothing is said for it while nobody looks. Method: simulated nodes, a virtual clock."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from actors.runtime.node import Node
from actors.runtime.system import System
from messages.system import ActorRow, Look, Seen
from tests.runtime.nodes import until
from tests.runtime.players import Add, Sleep
from tests.runtime.stage import Play, Supervisor, child, play, tree

pytestmark = pytest.mark.sim(seeds=4)


def house(**fields: Any) -> Supervisor:
    """An actor at the root, one that works elsewhere, and two who look."""
    lookers = (child("x", "Caller", node="f"), child("y", "Caller", node="g"))
    return tree(child("a"), child("c", node="n"), *lookers, **fields)


async def look(p: Play, viewer: str = "x") -> dict[str, ActorRow]:
    rows = await p.actor(viewer).context.look(timeout_s=1.0)
    return {row.path: row for row in rows}


def node_of(p: Play, name: str) -> Node:
    return p.fabric.nodes[name].node


def counted(
    monkeypatch: pytest.MonkeyPatch, owner: type, name: str, kind: type[Any], at: int
) -> list[Any]:
    """All messages of a kind that the method `name` is called with from now on, at that place."""
    found: list[Any] = []
    plain: Callable[..., Any] = getattr(owner, name)

    def noted(self: Any, *arguments: Any) -> Any:
        if isinstance(arguments[at], kind):
            found.append(arguments[at])
        return plain(self, *arguments)

    monkeypatch.setattr(owner, name, noted)
    return found


async def test_who_looks_sees_what_actors_on_all_nodes_do() -> None:
    async with play(house(), "n", "f", "g") as p:
        for _ in range(3):
            p.tell("a", Add(1))
        for _ in range(5):
            p.tell("c", Add(1))
        p.tell("c", Sleep(30))
        for _ in range(2):
            p.tell("c", Add(1))
        await asyncio.sleep(2)
        for viewer in ("x", "y"):
            rows = await look(p, viewer)
            found = rows["c"]
            assert (found.handled_count, found.busy_with, found.mailbox_depth) == (6, "Sleep", 2)
            assert found.age_s is not None and 1.0 < found.busy_s + found.age_s <= 2.0
            assert found.handle_p50_s is not None and found.handle_p99_s is not None
            assert rows["a"].handled_count == 3 and rows["a"].handle_p50_s is not None
            assert [rows[path].node for path in "acxy"] == ["main", "n", "f", "g"]
            assert all(row.age_s is not None and row.age_s < 0.5 for row in rows.values())
            assert rows[viewer].age_s == 0.0
        at_root = {row.path: row for row in p.system.actors()}
        assert (at_root["c"].handled_count, at_root["c"].busy_with) == (6, "Sleep")


async def test_nothing_is_asked_while_nobody_looks_and_once_a_heartbeat_however_many_do(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    looks = counted(monkeypatch, System, "report", Look, 1)
    answers = counted(monkeypatch, Node, "obey", Seen, 0)
    async with play(house(), "n", "f", "g") as p:
        for _ in range(20):
            p.tell("c", Add(1))
            await asyncio.sleep(0.5)
        assert not looks and not answers
        for _ in range(50):  # ten in each of five heartbeats
            await asyncio.gather(*(look(p) for _ in range(10)))
            await asyncio.sleep(0.025)
        assert 5 <= len(looks) <= 6 and len(answers) == len(looks)
        assert all(row.path != "x" for answer in answers for row in answer.rows)
        assert len(answers[0].rows) == 3


async def test_a_root_that_does_not_answer_is_not_waited_for_and_rows_get_old(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with play(house(), "n", "f", "g") as p:
        loop = asyncio.get_running_loop()
        p.tell("c", Add(1))
        await asyncio.sleep(1)
        assert (await look(p))["c"].handled_count == 1
        p.tell("c", Add(1))
        await asyncio.sleep(1)
        report = p.system.report
        held: list[str] = []

        def busy(node: str, message: Any) -> None:
            held.append(node) if isinstance(message, Look) else report(node, message)

        monkeypatch.setattr(p.system, "report", busy)
        began_s = loop.time()
        first, second = await asyncio.gather(look(p), look(p))
        assert 1.0 <= loop.time() - began_s < 1.1
        assert first["c"].handled_count == second["c"].handled_count == 1
        age_s = first["c"].age_s
        assert age_s is not None and 2.0 <= age_s < 2.6
        assert first["x"].age_s == 0.0 and first["c"].state == "running"
        blind = (await look(p, "y"))["c"]  # who has never been told anything
        assert (blind.handled_count, blind.age_s, blind.state) == (0, None, "running")
        monkeypatch.setattr(p.system, "report", report)
        assert held == ["f", "g"]  # one question each, which is still open
        for name in held:
            report(name, Look())
        await asyncio.sleep(0.1)
        assert (await look(p))["c"].handled_count == (await look(p, "y"))["c"].handled_count == 2


async def test_what_is_dead_does_not_look_alive_nor_like_its_next_life() -> None:
    async with play(house(backoff_first_s=5.0), "n", "f", "g") as p:
        p.fabric.kill("n")  # the next life follows at once, the one after that in five seconds
        await asyncio.sleep(1)
        for _ in range(5):
            p.tell("c", Add(1))
        p.tell("c", Sleep(30))
        await asyncio.sleep(1)
        before = (await look(p))["c"]
        assert (before.incarnation, before.handled_count, before.busy_with) == (2, 6, "Sleep")
        p.fabric.kill("n")
        await asyncio.sleep(0.1)
        at_root = {row.path: row for row in p.system.actors()}["c"]
        for dead in ((await look(p))["c"], (await look(p, "y"))["c"], at_root):
            assert (dead.state, dead.incarnation, dead.age_s) == ("restarting", 2, None)
            assert (dead.handled_count, dead.busy_with, dead.handle_p50_s) == (0, None, None)
            assert dead.last_exit is not None and dead.last_exit.signal == 9
        await until(lambda: p.incarnation("c") == 3)
        fresh = {row.path: row for row in p.system.actors()}["c"]  # no heartbeat of it has come
        assert (fresh.incarnation, fresh.handled_count, fresh.age_s) == (3, 0, None)
        await asyncio.sleep(1)
        p.tell("c", Add(1))
        await asyncio.sleep(1)
        after = (await look(p))["c"]
        assert (after.state, after.incarnation, after.restarts) == ("running", 3, 2)
        assert (after.handled_count, after.busy_with) == (1, None)


async def test_a_node_that_is_silent_is_shown_as_of_its_time() -> None:
    async with play(house(), "n", "f", "g", hang_s=60.0) as p:
        p.tell("c", Sleep(100))
        await asyncio.sleep(1)
        pulse = node_of(p, "n")._pulse
        assert pulse is not None
        pulse.cancel()
        await asyncio.sleep(20)
        rows = await look(p)
        silent, other = rows["c"].age_s, rows["y"].age_s
        assert silent is not None and 19.0 < silent < 21.0
        assert other is not None and other < 0.5
        assert rows["c"].busy_s < 1.5  # as it said, not as it would be by now


async def test_a_row_is_said_again_when_its_heartbeat_did_not_go(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with play(house(), "n", "f", "g") as p:
        await asyncio.sleep(1)
        peers = node_of(p, "n").peers
        with monkeypatch.context() as patch:
            patch.setattr(peers, "beat", lambda name, message: False)
            p.tell("c", Add(1))
            await asyncio.sleep(1)
        await asyncio.sleep(1)
        assert (await look(p))["c"].handled_count == 1


async def test_a_node_speaks_for_none_but_itself() -> None:
    async with play(house(), "n", "f", "g") as p:
        p.tell("c", Add(1))
        await asyncio.sleep(1)
        row = (await look(p))["c"]
        p.system.node.rows.heard("g", (ActorRow("c", "n", 1, row.state, 1, 0, handled_count=7),))
        found = {row.path: row for row in p.system.actors()}["c"]
        assert (found.handled_count, found.node) == (1, "n")
