"""Goal: the same tree does the same wherever its actors are put. Method: one scenario (ask, crash,
restart in place, watch, drain, stop) on real loops in every placement."""

from __future__ import annotations

import asyncio
import math
import os
import signal
import threading
from typing import Any

import pytest

from actors.runtime import life, process
from actors.runtime.context import Reply
from actors.runtime.spec import Node, NodeKind
from actors.runtime.system import System
from messages.system import ActorRow, Cause
from tests.runtime.nodes import DEADLINE_S, until
from tests.runtime.players import Add, Ask, Break, Crash, Total, Watch
from tests.runtime.stage import child, tree

PLACEMENTS = ("inline", "encoded", "threads", "processes")


def row_of(system: System, path: str) -> ActorRow:
    return next(row for row in system.actors() if row.path == path)


def system_for(placement: str, kind: str = "Counter", **options: Any) -> System:
    kinds = {"threads": NodeKind.THREAD, "processes": NodeKind.PROCESS}
    nodes = (Node(name="n", kind=kinds[placement]),) if placement in kinds else ()
    root = tree(child("c", kind, node="n" if nodes else "main"), child("a", "Caller"))
    options = {"hang_s": DEADLINE_S, **options}
    return System(root, nodes=nodes, encode_always=placement == "encoded", **options)


@pytest.mark.parametrize("placement", PLACEMENTS)
async def test_a_tree_does_the_same_wherever_its_actors_are(placement: str) -> None:
    system = system_for(placement)
    await system.start()
    caller: Any = system.local("a")
    system.tell("a", Watch("c"))
    system.tell("c", Add(5))
    system.tell("a", Ask("c", timeout_s=DEADLINE_S))
    await until(lambda: len(caller.outcomes) == 1)
    system.tell("c", Crash())
    await until(lambda: len(caller.seen) == 3)
    system.tell("c", Add(7))
    system.tell("a", Ask("c", timeout_s=DEADLINE_S))
    await until(lambda: len(caller.outcomes) == 2)
    assert caller.outcomes == [Reply(Total(5)), Reply(Total(7))]
    assert caller.seen == [("up", 1), ("down", 1, Cause.CRASHED), ("up", 2)]
    rows = {row.path: row for row in system.actors()}
    assert (rows["c"].incarnation, rows["c"].restarts, rows["c"].state) == (2, 1, "running")
    assert (rows["c"].pid == rows["a"].pid) == (placement != "processes")
    await system.drain(DEADLINE_S)
    await system.stop()
    assert (await system.wait()).cause is Cause.STOPPED
    assert caller.stopped is not None


@pytest.mark.parametrize("placement", PLACEMENTS)
async def test_who_can_not_live_in_its_process_gets_another_or_all_ends(placement: str) -> None:
    system = system_for(placement, "Brittle")
    await system.start()
    pid = {row.path: row.pid for row in system.actors()}["c"]
    system.tell("c", Break())
    if placement == "processes":
        await until(lambda: row_of(system, "c").incarnation == 2)
        await until(lambda: row_of(system, "c").state == "running")
        found = row_of(system, "c")
        assert found.pid != pid and found.last_exit is not None
        assert found.last_exit.cause is Cause.BROKEN
        assert row_of(system, "a").incarnation == 1
    else:
        async with asyncio.timeout(DEADLINE_S):
            reason = await system.wait()
        assert reason.cause is Cause.BROKEN
        assert reason.detail == "c can't go on in this process: the device is lost"
        assert row_of(system, "c").incarnation == 1 and row_of(system, "a").state == "stopped"
    await system.stop()


async def test_a_restart_for_which_there_is_no_process_is_tried_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    system = system_for("processes")
    await system.start()
    spawn_child = process.spawn_child
    refused: list[str] = []

    def refuse_once(node: str, *rest: Any) -> process.ChildProcess:
        if not refused:
            refused.append(node)
            raise BlockingIOError(11, "Resource temporarily unavailable")
        return spawn_child(node, *rest)

    monkeypatch.setattr(process, "spawn_child", refuse_once)
    os.kill(row_of(system, "c").pid, signal.SIGKILL)
    await until(lambda: row_of(system, "c").incarnation > 1)
    await until(lambda: row_of(system, "c").state == "running")
    assert refused == ["n"]
    await system.stop()


class Standing(asyncio.SelectorEventLoop):
    """A loop that may be said to have stood still."""

    stood_s = 0.0

    def time(self) -> float:
        return super().time() + self.stood_s


@pytest.mark.parametrize("placement", ["threads", "processes"])
def test_a_root_that_was_stuck_kills_nobody_and_is_left_by_nobody(placement: str) -> None:
    async def run() -> None:
        system = system_for(placement, heartbeat_s=0.05)
        lags: list[float] = []
        tick = system.nodes.tick

        def seen(lag_s: float) -> None:
            lags.append(lag_s)
            tick(lag_s)

        system.nodes.tick = seen  # type: ignore[method-assign]
        await system.start()
        loop = asyncio.get_running_loop()
        assert isinstance(loop, Standing)
        loop.stood_s = 10 * DEADLINE_S  # nobody else may be silent for as long
        await until(lambda: max(lags, default=0.0) > DEADLINE_S)
        caller: Any = system.local("a")
        for _ in range(3):
            count = len(caller.outcomes), len(lags) + 3
            system.tell("a", Ask("c", timeout_s=DEADLINE_S))
            await until(lambda count=count: len(caller.outcomes) > count[0])  # type: ignore[misc]
            await until(lambda count=count: len(lags) > count[1])  # type: ignore[misc]
        assert caller.outcomes == [Reply(Total(0))] * 3
        assert {row.incarnation for row in system.actors()} == {1}
        await system.stop()

    with asyncio.Runner(loop_factory=Standing) as runner:
        runner.run(run())


async def test_threads_of_nodes_end_with_the_system() -> None:
    before = threading.active_count()
    for _ in range(3):
        system = system_for("threads")
        await system.start()
        await system.stop()
    await until(lambda: threading.active_count() <= before + 1)


@pytest.mark.parametrize(("turn_s", "expected"), [(math.inf, "xxxyyy"), (0.0, "xyxyxy")])
async def test_a_turn_whose_time_is_up_leaves_the_rest_for_the_next_one(
    turn_s: float, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(life, "TURN_S", turn_s)
    system = System(tree(child("x"), child("y")))
    await system.start()
    order: list[str] = []
    for path in "xy":
        handlers = system.node.lives[path].handlers
        handlers[Add] = lambda message, path=path: order.append(path)
    for path in expected:
        system.tell(path, Add(1))
    await until(lambda: len(order) == len(expected))
    assert "".join(order) == expected
    await system.stop()
