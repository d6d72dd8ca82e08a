"""Goal: nodes come to life, are watched by their heartbeats, die and come back; and none is accused
wrongly. Method: simulated nodes; a stuck loop is a pulse that stops."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest

from actors.runtime import host, system
from actors.runtime.cores import Use
from actors.runtime.launch import LaunchFailed
from actors.runtime.simloop import SimLoop
from actors.runtime.simulation import SimFabric
from actors.runtime.spec import Node, NodeKind
from actors.runtime.supervisor import StartFailed
from actors.runtime.system import System
from actors.runtime.transport.memory import Weather
from messages.system import Cause, NodeBoot, Reason
from tests.runtime.players import Add, Relay, Settings, Sleep, Watch
from tests.runtime.stage import Strategy, child, play, tree

pytestmark = pytest.mark.sim(seeds=4)


async def test_all_that_lives_on_a_lost_node_is_restarted_on_its_next_incarnation() -> None:
    root = tree(
        child("x", node="n"),
        child("y", node="n"),
        child("z", node="m"),
        child("a", "Caller"),
        strategy=Strategy.REST_FOR_ONE,
    )
    async with play(root, "n", "m") as p:
        p.fabric.kill("n")
        await asyncio.sleep(1)
        assert [p.incarnation(x) for x in "xyza"] == [2, 2, 2, 2]
        assert p.fabric.nodes["n"].node.address.incarnation == 2
        assert p.fabric.nodes["m"].node.address.incarnation == 1


async def test_two_nodes_speak_to_each_other_also_after_one_was_lost() -> None:
    root = tree(child("c", node="n"), child("a", "Caller", node="m"))
    async with play(root, "n", "m", weather=Weather(1, delay_s_max=0.02)) as p:
        p.tell("a", Relay("c", 1))
        await asyncio.sleep(0.2)
        assert p.actor("c").n == 1
        p.fabric.kill("n")
        await asyncio.sleep(1)
        p.tell("a", Relay("c", 5))
        await asyncio.sleep(0.2)
        assert p.actor("c").n == 5


async def test_a_node_whose_loop_makes_no_progress_is_killed_as_hung() -> None:
    async with play(tree(child("c", node="n"), child("a", "Caller")), "n") as p:
        p.tell("a", Watch("c"))
        await asyncio.sleep(0.1)
        pulse = p.fabric.nodes["n"].node._pulse
        assert pulse is not None
        pulse.cancel()
        await asyncio.sleep(5)
        assert p.actor("a").seen == [("up", 1), ("down", 1, Cause.HUNG), ("up", 2)]


async def test_a_node_that_is_silent_for_want_of_a_core_is_spared_until_it_has_had_one() -> None:
    async with play(tree(child("c", node="n"), child("a", "Caller")), "n") as p:
        p.tell("a", Watch("c"))
        await asyncio.sleep(0.1)
        launched = p.fabric.nodes["n"]
        had = Use(all_s=1.0, loop_s=1.0, wants=True, loop_wants=True)
        launched.use = lambda: had  # type: ignore[attr-defined]
        assert launched.node._pulse is not None
        launched.node._pulse.cancel()
        await asyncio.sleep(10)
        assert p.actor("a").seen == [("up", 1)]
        had = Use(all_s=9.0, loop_s=9.0, wants=True, loop_wants=True)
        await asyncio.sleep(2)
        assert p.actor("a").seen == [("up", 1), ("down", 1, Cause.HUNG), ("up", 2)]


async def test_a_node_that_is_starved_for_too_long_is_killed_all_the_same() -> None:
    async with play(tree(child("c", node="n"), child("a", "Caller")), "n") as p:
        p.tell("a", Watch("c"))
        await asyncio.sleep(0.1)
        launched = p.fabric.nodes["n"]
        launched.use = lambda: Use(wants=True, loop_wants=True)  # type: ignore[attr-defined]
        assert launched.node._pulse is not None
        launched.node._pulse.cancel()
        await asyncio.sleep(100)
        assert p.actor("a").seen == [("up", 1), ("down", 1, Cause.HUNG), ("up", 2)]


async def test_a_long_handler_that_waits_is_busy_not_dead() -> None:
    async with play(tree(child("c", node="n")), "n") as p:
        p.tell("c", Sleep(60))
        await asyncio.sleep(30)
        assert (p.incarnation("c"), p.state("c")) == (1, "running")


async def test_a_root_whose_own_loop_lagged_accuses_nobody() -> None:
    async with play(tree(child("c", node="n")), "n") as p:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, SimLoop)
        loop._now_s += 20.0  # the whole process was stopped
        await asyncio.sleep(5)
        assert p.incarnation("c") == 1


async def test_a_node_is_not_silent_while_the_root_could_not_hear() -> None:
    """Its silence before and after does count."""
    async with play(tree(child("c", node="n")), "n") as p:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, SimLoop)
        pulse = p.fabric.nodes["n"].node._pulse
        assert pulse is not None
        pulse.cancel()
        loop.jump(20.0)
        await asyncio.sleep(p.system.node.boot.hang_s - 0.5)
        assert p.incarnation("c") == 1
        await asyncio.sleep(5)
        assert p.incarnation("c") == 2


async def test_a_cut_link_costs_the_node_its_life_and_its_actors_move_on() -> None:
    async with play(tree(child("c", node="n"), child("a", "Caller")), "n") as p:
        p.tell("a", Watch("c"))
        await asyncio.sleep(0.1)
        p.fabric.hub.cut("main", "n")
        await asyncio.sleep(2)
        assert p.actor("a").seen[:1] == [("up", 1)]
        assert [s[0] for s in p.actor("a").seen] == ["up", "down", "up"]
        assert p.fabric.nodes["n"].node.address.incarnation == 2


async def test_a_cut_between_two_other_nodes_is_judged_by_the_root() -> None:
    root = tree(child("c", node="n"), child("a", "Caller", node="m"))
    async with play(root, "n", "m") as p:
        p.fabric.hub.cut("n", "m")
        await asyncio.sleep(10)
        assert p.incarnation("c") + p.incarnation("a") == 3, "one of the two, not both"
        p.tell("a", Relay("c", 3))
        await asyncio.sleep(0.2)
        assert p.actor("c").n == 3


async def test_a_node_that_cannot_be_launched_fails_the_start() -> None:
    class Broken(SimFabric):
        async def launch(self, boot: NodeBoot) -> None:  # type: ignore[override]
            raise LaunchFailed(Reason(Cause.EXITED, "exit code 3", exit_code=3))

    system = System(
        tree(child("c", node="n")),
        nodes=(Node(name="n", kind=NodeKind.PROCESS),),
        fabric=Broken(),
    )
    with pytest.raises(StartFailed, match="c: exit code 3"):
        await system.start()


async def test_a_node_that_loses_the_root_ends_itself() -> None:
    async with play(tree(child("c", node="n")), "n") as p:
        sim = p.fabric.nodes["n"]
        sim.node.link_down("main", Reason(Cause.UNREACHABLE, "gone"))
        await asyncio.sleep(0.01)
        assert sim.node.lives == {}
        assert (await sim.node.wait()).cause is Cause.UNREACHABLE


async def test_an_idle_system_does_nothing_but_beat() -> None:
    async with play(tree(child("c", node="n"), child("a", "Caller")), "n") as p:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, SimLoop)
        await asyncio.sleep(10)
        before = loop.step_count
        await asyncio.sleep(100)
        # Two pulses and one beat's way (a hand-over at the root) each quarter of a second.
        assert loop.step_count - before <= 4 * 100 * 4
    async with play(tree(child("c"))) as p:
        await asyncio.sleep(10)
        before = loop.step_count
        await asyncio.sleep(1000)
        assert loop.step_count - before <= 4, "with one node nothing ticks at all"
        p.tell("c", Add(1))


async def test_only_the_root_gives_orders() -> None:
    from messages.base import Address, Header, Lane
    from messages.system import Halt, KillActor

    root = tree(child("c", node="n"), child("a", "Caller", node="m"))
    async with play(root, "n", "m") as p:
        node = p.fabric.nodes["n"].node
        header = Header(node.address, sender=Address("m", "", 1), lane=Lane.CONTROL)
        node.arrive("m", header, Halt())
        node.arrive("m", header, KillActor("c", 1, Reason(Cause.STOPPED)))
        to_actor = Header(Address("n", "c", 1), sender=Address("m", "", 1), lane=Lane.KILL)
        node.arrive("m", to_actor, Add(1))
        await asyncio.sleep(0.1)
        assert (p.incarnation("c"), p.actor("c").n) == (1, 0)


async def test_a_node_that_loads_may_be_silent_for_longer() -> None:
    slow = {"settings": Settings(start_s=20.0)}
    root = tree(child("c", node="n"), child("d", node="n", arguments=slow), child("a", "Caller"))
    fabric = SimFabric()
    system = System(root, nodes=(Node(name="n", kind=NodeKind.PROCESS),), fabric=fabric)
    starting = asyncio.ensure_future(system.start())
    await asyncio.sleep(1)
    pulse = fabric.nodes["n"].node._pulse
    assert pulse is not None
    pulse.cancel()
    await starting
    assert fabric.launch_count == 1, "silent for 19 s, but it was loading"
    await asyncio.sleep(3)
    assert fabric.launch_count == 2, "silent for 2 s, and it was not"
    await system.stop()


async def test_work_for_a_node_that_is_being_killed_goes_to_its_next_life() -> None:
    root = tree(child("c", node="n"), child("d", node="n"), restarts_max=2)
    async with play(root, "n") as p:
        p.system.nodes.kill("n", Reason(Cause.HUNG, "for the test"))
        await p.system.nodes.ensure("n")
        await asyncio.sleep(1)
        assert [p.incarnation(x) for x in "cd"] == [2, 2]
        assert p.fabric.launch_count == 2


async def test_watchers_on_every_node_hear_the_same() -> None:
    root = tree(
        child("c", node="n"),
        child("a", "Caller", node="m"),
        child("b", "Caller", node="n"),
        child("r", "Caller"),
        strategy=Strategy.ONE_FOR_ONE,
    )
    async with play(root, "n", "m", weather=Weather(5, delay_s_max=0.05)) as p:
        for path in "abr":
            p.tell(path, Watch("c"))
        await asyncio.sleep(0.5)
        await p.crash("c", 1)
        expected = [("up", 1), ("down", 1, Cause.CRASHED), ("up", 2)]
        assert [p.actor(path).seen for path in "abr"] == [expected] * 3


async def test_a_report_about_an_actor_of_another_node_changes_nothing() -> None:
    from messages.base import Address
    from messages.system import Exited

    async with play(tree(child("c", node="n"), child("a", "Caller", node="m")), "n", "m") as p:
        p.system.report("m", Exited(Address("n", "c", 1), Reason(Cause.CRASHED, "a lie")))
        await asyncio.sleep(1)
        assert (p.incarnation("c"), p.state("c")) == (1, "running")


async def test_what_was_frozen_is_the_collectors_again_once_a_life_has_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[str] = []
    fake = SimpleNamespace(
        freeze=lambda: asked.append("freeze"), unfreeze=lambda: asked.append("unfreeze")
    )
    monkeypatch.setattr(host, "gc", fake)
    monkeypatch.setattr(system.sys, "setswitchinterval", lambda seconds: None)
    async with play(tree(child("c"))) as p:
        p.system.freeze()
        assert asked == ["freeze"]
        await p.crash("c", 1.0)
        p.system.freeze()  # what the life that has ended was may be garbage in circles
        assert asked == ["freeze", "unfreeze"]
