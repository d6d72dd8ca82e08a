"""Goal: supervision does what `restart.py` decides, on real nodes, whatever the order of events.
Method: small trees on a simulated loop; every actor's laws are checked after each step."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from actors.runtime.simulation import SimFabric
from actors.runtime.spec import Node, NodeKind
from actors.runtime.supervisor import StartFailed
from actors.runtime.system import System
from messages.system import Cause, RestartAsked
from tests.runtime.players import Add, Crash, Relay, Settings, Sleep
from tests.runtime.stage import Restart, Strategy, Supervisor, child, play, tree

pytestmark = pytest.mark.sim(seeds=4)


async def settle(seconds: float = 0.05) -> None:
    await asyncio.sleep(seconds)


async def test_one_for_one_restarts_the_dead_child_alone() -> None:
    async with play(tree(child("a"), child("b"), child("c"))) as p:
        await p.crash("b")
        assert [p.incarnation(x) for x in "abc"] == [1, 2, 1]
        assert p.state("b") == "running"


async def test_who_has_not_been_started_yet_is_shown_on_every_node() -> None:
    slow = child("b", node="n", arguments={"settings": Settings(start_s=5.0)})
    fabric = SimFabric()
    nodes = tuple(Node(name=name, kind=NodeKind.PROCESS) for name in "nm")
    system = System(tree(child("a"), slow, child("c", node="m")), nodes=nodes, fabric=fabric)
    starting = asyncio.ensure_future(system.start())
    await settle(1)
    for node in (system.node, fabric.nodes["n"].node):
        found = [(row.path, row.state, row.incarnation) for row in node.rows.all()]
        assert found == [("a", "running", 1), ("b", "starting", 1), ("c", "pending", 0)]
    await starting
    assert {row.state for row in system.actors()} == {"running"}
    await system.stop()


async def test_one_for_all_restarts_all() -> None:
    root = tree(child("a"), child("b"), child("c"), strategy=Strategy.ONE_FOR_ALL)
    async with play(root) as p:
        await p.crash("b")
        assert [p.incarnation(x) for x in "abc"] == [2, 2, 2]


async def test_rest_for_one_restarts_the_dead_child_and_those_after_it() -> None:
    root = tree(child("a"), child("b"), child("c"), strategy=Strategy.REST_FOR_ONE)
    async with play(root) as p:
        await p.crash("b")
        assert [p.incarnation(x) for x in "abc"] == [1, 2, 2]


async def test_a_temporary_child_is_not_restarted() -> None:
    async with play(tree(child("a", restart=Restart.TEMPORARY), child("b"))) as p:
        await p.crash("a")
        await settle(1)
        assert (p.incarnation("a"), p.state("a")) == (1, "failed")
        assert p.state("b") == "running"


async def test_the_first_restart_is_immediate_and_later_ones_back_off() -> None:
    async with play(tree(child("a"), backoff_first_s=1.0)) as p:
        await p.crash("a", 0.01)
        assert p.incarnation("a") == 2
        await p.crash("a", 0.4)
        assert p.state("a") == "restarting"
        await settle(0.7)
        assert (p.incarnation("a"), p.state("a")) == (3, "running")


async def test_too_many_restarts_end_the_system_with_the_last_reason() -> None:
    async with play(tree(child("a"), child("b"), restarts_max=2, window_s=60)) as p:
        for _ in range(3):
            await p.crash("a", 5)
        reason = await p.system.wait()
        assert reason.cause is Cause.CRASHED
        assert "as told" in reason.detail
        assert p.actor("b") is None, "everything is stopped before the system says that it is over"


async def test_restarts_in_a_quiet_time_are_forgotten() -> None:
    async with play(tree(child("a"), restarts_max=2, window_s=10)) as p:
        for _ in range(6):
            await p.crash("a", 6)
        assert (p.incarnation("a"), p.state("a")) == (7, "running")


async def test_what_is_slow_to_start_and_dies_at_once_is_given_up_as_well() -> None:
    slow = {"settings": Settings(start_s=20.0)}
    async with play(tree(child("a", arguments=slow), restarts_max=2, window_s=10)) as p:
        for incarnation in (1, 2, 3):
            assert (p.incarnation("a"), p.state("a")) == (incarnation, "running")
            await p.crash("a", 25)
        assert (await p.system.wait()).detail.startswith("3 deaths within 10 s in root")


async def test_the_time_in_which_a_sibling_starts_is_not_a_quiet_one() -> None:
    slow = {"settings": Settings(start_s=8.0)}
    root = tree(child("a"), child("b", arguments=slow), restarts_max=2, window_s=10)
    async with play(root) as p:
        await p.crash("b", 1)
        await p.crash("a", 11)  # 4 of them with all up
        await p.crash("b", 11)
        assert (await p.system.wait()).cause is Cause.CRASHED


async def test_a_storm_in_a_branch_ends_the_system_within_the_restarts_of_both() -> None:
    branch = Supervisor(name="g", children=(child("a"),), restarts_max=3)
    deaths = 0
    async with play(tree(branch, child("c"), restarts_max=2)) as p:
        while p.system.local("c") is not None and deaths < 100:
            deaths += 1
            await p.crash("g/a", 1.5)
        await p.system.wait()
    assert deaths == 3 + 2 + 1


async def test_a_branch_that_gives_up_is_restarted_by_its_own_supervisor() -> None:
    branch = Supervisor(name="g", children=(child("a"), child("b")), restarts_max=1, window_s=60)
    async with play(tree(branch, child("c"))) as p:
        await p.crash("g/a", 1)
        assert [p.incarnation("g/a"), p.incarnation("g/b")] == [2, 1]
        await p.crash("g/a", 1)
        assert [p.incarnation("g/a"), p.incarnation("g/b")] == [3, 2]
        assert p.incarnation("c") == 1


async def test_a_child_that_fails_to_start_again_counts_as_a_death() -> None:
    async with play(tree(child("a", arguments={"settings": Settings()}), restarts_max=3)) as p:
        leaf = p.system.leaves["a"]
        object.__setattr__(leaf, "child", child("a", arguments={"settings": Settings(fails=True)}))
        await p.crash("a", 5)
        reason = await p.system.wait()
        assert "does not start" in reason.detail


@pytest.mark.parametrize("path", ["a", "g/b"])
async def test_a_restart_that_fails_as_nobody_foresaw_is_given_up(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    branch = Supervisor(name="g", children=(child("b"),))

    async def fail(leaf: object) -> None:
        raise ValueError("not foreseen")

    async with play(tree(child("a"), branch, child("c"))) as p:
        monkeypatch.setattr(p.system, "start_leaf", fail)
        await p.crash(path)
        reason = await p.system.wait()
        assert "not foreseen" in reason.detail
        assert p.actor("c") is None


async def test_children_start_in_order_each_after_the_one_before_is_ready() -> None:
    slow = {"settings": Settings(start_s=3.0)}
    async with play(tree(child("a", arguments=slow), child("b"))) as p:
        assert asyncio.get_running_loop().time() >= 3.0
        assert p.actor("b").context.notes["a"] == b"ready"


async def test_children_that_start_together_do_not_wait_for_each_other() -> None:
    slow = {"settings": Settings(start_s=3.0)}
    pair = Supervisor(
        name="pair",
        children=(child("a", arguments=slow), child("b", arguments=slow)),
        starts_together=True,
    )
    async with play(tree(pair, child("c"))) as p:
        assert asyncio.get_running_loop().time() < 6.0
        assert {"pair/a", "pair/b"} <= set(p.actor("c").context.notes)


async def test_of_children_that_start_together_one_that_fails_ends_the_others() -> None:
    fabric = SimFabric()
    failing = child("b", arguments={"settings": Settings(fails=True)})
    pair = Supervisor(name="pair", children=(child("a"), failing), starts_together=True)
    system = System(tree(pair), fabric=fabric)
    with pytest.raises(StartFailed, match="pair/b: RuntimeError: does not start"):
        await system.start()
    assert system.local("pair/a") is None
    assert not fabric.hub.transports


async def test_a_failed_start_leaves_nothing_behind() -> None:
    fabric = SimFabric()
    root = tree(child("a"), child("b", arguments={"settings": Settings(fails=True)}))
    system = System(root, fabric=fabric)
    with pytest.raises(StartFailed, match="b: RuntimeError: does not start"):
        await system.start()
    assert system.local("a") is None
    assert not fabric.hub.transports


async def test_a_start_that_takes_too_long_fails() -> None:
    slow = child("a", arguments={"settings": Settings(start_s=100)}, start_timeout_s=2.0)
    system = System(tree(slow), fabric=SimFabric())
    with pytest.raises(StartFailed, match="not ready after 2 s"):
        await system.start()
    assert asyncio.get_running_loop().time() < 5


async def test_stop_goes_in_reverse_order_and_forces_who_does_not_end() -> None:
    async with play(tree(child("a", "Caller"), child("b", stop_grace_s=1.0))) as p:
        a = p.actor("a")
        p.tell("b", Sleep(100))
        await settle()
        began_s = asyncio.get_running_loop().time()
        await p.system.stop()
        assert a.stopped is not None
        assert asyncio.get_running_loop().time() - began_s == pytest.approx(1.0, abs=0.1)
        assert (await p.system.wait()).cause is Cause.STOPPED


async def test_a_restart_in_place_keeps_the_mailbox_but_not_the_message_that_killed() -> None:
    async with play(tree(child("a"), child("b", "Caller"))) as p:
        for message in (Sleep(1), Add(1), Crash(), Add(10), Add(100)):
            p.tell("a", message)
        await settle(0.5)
        p.tell("b", Relay("a", 1000))
        await settle(2)
        assert p.incarnation("a") == 2
        assert p.actor("a").n == 1110


async def test_a_stopped_sibling_does_not_get_old_messages_in_its_next_life() -> None:
    root = tree(child("x"), child("a"), strategy=Strategy.ONE_FOR_ALL)
    async with play(root) as p:
        p.tell("a", Sleep(1))
        p.tell("a", Add(1))
        await settle(0.1)
        await p.crash("x", 10)
        assert (p.incarnation("a"), p.actor("a").n) == (2, 0)


async def test_two_deaths_of_one_moment_count_once() -> None:
    root = tree(child("a", node="n"), child("b", node="n"), child("c"), restarts_max=1)
    async with play(root, "n") as p:
        p.fabric.kill("n")
        await settle(5)
        assert [p.incarnation(x) for x in "abc"] == [2, 2, 1]
        assert [p.state(x) for x in "abc"] == ["running"] * 3


async def test_a_factory_that_does_not_exist_is_a_failed_start() -> None:
    system = System(tree(child("a", "NoSuchActor")), fabric=SimFabric())
    with pytest.raises(StartFailed, match="not built"):
        await system.start()


async def test_actors_that_would_wait_for_each_other_are_refused_when_wired() -> None:
    from tests.runtime.players import Text

    def waiter(name: str, peer: str) -> Any:
        return child(name, "Waiter", arguments={"peer": Text(peer)})

    system = System(tree(waiter("a", "b"), waiter("b", "a")), fabric=SimFabric())
    with pytest.raises(StartFailed, match="would wait for each other: a -> b -> a"):
        await system.start()


async def test_check_failing_is_a_crash() -> None:
    async with play(tree(child("a"))) as p:
        loop = asyncio.get_running_loop()
        loop.after_step = None  # type: ignore[attr-defined]
        p.tell("a", Add(-5))
        await settle()
        assert p.incarnation("a") == 2


async def test_every_life_is_told_its_end_once_however_it_ends() -> None:
    async with play(tree(child("a", "Caller"))) as p:
        first = p.actor("a")
        await p.crash("a")
        second = p.actor("a")
        await p.system.stop()
        assert first is not second
        assert (first.ended_count, first.stopped) == (1, None)
        assert second.ended_count == 1 and second.stopped is not None


async def test_a_restart_that_is_asked_for_is_no_death_however_often() -> None:
    root = tree(child("a"), child("b"), child("c"), strategy=Strategy.REST_FOR_ONE, restarts_max=1)
    async with play(root) as p:
        for lives in range(2, 6):
            p.system.report("main", RestartAsked("b"))
            await settle()
            assert [p.incarnation(x) for x in "abc"] == [1, lives, lives]
            assert [p.state(x) for x in "abc"] == ["running"] * 3
        p.system.report("main", RestartAsked("nobody"))
        p.system.report("main", RestartAsked("b"))
        p.system.report("main", RestartAsked("c"))  # while they restart: void
        await settle()
        assert [p.incarnation(x) for x in "abc"] == [1, 6, 6]
