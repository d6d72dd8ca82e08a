"""Goal: what an actor may do to the world works the same simulated and in earnest."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from actors.runtime.spec import Supervisor
from actors.runtime.system import System
from messages.system import Cause
from tests.runtime.players import Add, Sleep, Work
from tests.runtime.stage import child, play, tree

DEADLINE_S = 20.0


async def labour(how: str, *children: Any) -> tuple[Any, int, Any]:
    """A labourer at work on a simulated loop; what it and its place in the tree are like after a
    minute: incarnation and last exit."""
    async with play(tree(*children, child("w", "Labourer"))) as p:
        actor = p.actor("w")
        p.tell("w", Work(how))
        await asyncio.sleep(60)
        leaf = p.system.leaves["w"]
        return actor, leaf.incarnation, leaf.last_exit


@pytest.mark.sim(seeds=2)
@pytest.mark.parametrize(
    ("how", "result"), [("offload", 42), ("offload fails", -1), ("in_thread", 42)]
)
async def test_simulated_offloading_gives_its_result_as_a_message(how: str, result: int) -> None:
    actor, incarnation, _ = await labour(how)
    assert (actor.results, incarnation) == ([result], 1)


@pytest.mark.sim(seeds=2)
@pytest.mark.parametrize(
    ("how", "detail"),
    [("in_thread fails", "ZeroDivisionError"), ("spawn fails", "spawned and failed")],
)
async def test_what_fails_beside_a_handler_is_the_actors_crash(how: str, detail: str) -> None:
    _, incarnation, last_exit = await labour(how)
    assert incarnation == 2
    assert detail in last_exit.detail


@pytest.mark.sim(seeds=2)
async def test_timers_are_messages() -> None:
    actor, *_ = await labour("timers")
    assert actor.results[:6] == [1, 1, 2, 1, 1, 1]
    assert len(actor.results) <= 7, "the sixth tick is at the very end"


@pytest.mark.sim(seeds=1)
async def test_chance_is_a_function_of_seed_path_life_and_purpose() -> None:
    first, *_ = await labour("chance")
    again, *_ = await labour("chance")
    assert first.results == again.results
    assert first.results[0] != first.results[1]


@pytest.mark.sim(seeds=2)
async def test_counts_are_flushed_once_and_an_idle_node_flushes_nothing() -> None:
    async with play(tree(child("metrics", "Meter"), child("w", "Labourer"))) as p:
        p.tell("w", Work("count"))
        p.tell("w", Work("count"))
        await asyncio.sleep(60)
        (flush,) = p.actor("metrics").flushes
        assert [(c.name, c.labels, c.increase) for c in flush.counters] == [
            ("tests_total", (("kind", "x"),), 4)
        ]


@pytest.mark.sim(seeds=2)
async def test_handlers_are_counted_in_all_lives_of_their_actor() -> None:
    async with play(tree(child("metrics", "Meter"), child("w", "Labourer"))) as p:
        for _ in range(3):
            p.tell("w", Work("count"))
        await asyncio.sleep(0.1)
        await p.crash("w", 1)
        p.tell("w", Work("count"))
        await asyncio.sleep(60)
        found = [
            sum(h.counts)
            for flush in p.actor("metrics").flushes
            for h in flush.histograms
            if (h.name, h.labels) == ("histrio_handler_seconds", (("actor", "w"),))
        ]
        assert sum(found) == 4


@pytest.mark.sim(seeds=2)
async def test_when_nothing_waits_any_more_that_is_said_once() -> None:
    async with play(tree(child("metrics", "Meter"), child("c"))) as p:
        p.tell("c", Sleep(3.0))
        p.tell("c", Add(1))
        p.system.node.tally.count("tests_total", 1, ())
        await asyncio.sleep(60)
        depths = [
            gauge.value
            for flush in p.actor("metrics").flushes
            for gauge in flush.gauges
            if (gauge.name, gauge.labels) == ("histrio_mailbox_depth", (("actor", "c"),))
        ]
        assert depths == [1, 0]
        assert len(p.actor("metrics").flushes) <= 6, "an idle node flushes nothing"


@pytest.mark.sim(seeds=2)
async def test_counts_wait_for_metrics_to_come_back() -> None:
    async with play(tree(child("metrics", "Meter"), child("w", "Labourer"))) as p:
        for _ in range(2):
            p.system.node.lives["metrics"].crash(ValueError("as told"))
            await asyncio.sleep(0.01)
        assert p.state("metrics") == "restarting"
        p.tell("w", Work("count"))
        await asyncio.sleep(60)
        names = [c.name for f in p.actor("metrics").flushes for c in f.counters]
        assert names.count("tests_total") == 1
        assert "histrio_restarts_total" in names


@pytest.mark.sim(seeds=2)
@pytest.mark.parametrize("place", ["main", "n"])
async def test_an_exact_ref_never_reaches_a_later_life(place: str) -> None:
    nodes = () if place == "main" else (place,)
    async with play(tree(child("c", node=place), child("w", "Labourer")), *nodes) as p:
        p.tell("w", Work("remember"))
        await asyncio.sleep(0.1)
        p.tell("w", Add(1))
        await asyncio.sleep(0.1)
        assert p.actor("c").n == 1
        await p.crash("c", 1)
        p.tell("w", Add(1))
        await asyncio.sleep(0.1)
        assert (p.actor("c").n, p.actor("w").results) == (0, [Cause.NOBODY])


async def until(condition: Any) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while not condition():  # noqa: ASYNC110 - threads make no event here
            await asyncio.sleep(0.005)


async def test_threads_do_the_work_on_a_real_loop() -> None:
    system = System(Supervisor(name="root", children=(child("w", "Labourer"),)))
    await system.start()
    actor: Any = system.local("w")
    for how in ("offload", "in_thread", "offload fails"):
        system.tell("w", Work(how))
    await until(lambda: sorted(actor.results) == [-1, 42, 42])
    system.tell("w", Work("in_thread fails"))
    await until(lambda: system.local("w") not in (actor, None))
    await system.stop()
