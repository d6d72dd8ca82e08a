"""Goal: telling, asking and watching keep their promises on one node and between two.
Method: a caller and a counter, together or apart, on a simulated loop with late links."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from actors.runtime.context import Died, Rejected, Reply, TimedOut
from actors.runtime.transport.memory import Weather
from messages.system import Cause, Undelivered
from tests.runtime.players import Add, Ask, Crash, Relay, Settings, Sleep, Sum, Text, Total, Watch
from tests.runtime.stage import Play, Restart, Supervisor, child, play, tree

pytestmark = pytest.mark.sim(seeds=4)

TOGETHER, APART = "main", "n"


@pytest.fixture(params=[TOGETHER, APART])
def place(request: pytest.FixtureRequest) -> str:
    found: str = request.param
    return found


def cast(place: str, kind: str = "Counter", **fields: Any) -> Any:
    """A counter `c` (perhaps on another node) and a caller `a`."""
    caller = child("a", "Caller", arguments={"peer": Text("c")})
    root = tree(child("c", kind, node=place, **fields), caller)
    nodes = () if place == TOGETHER else (place,)
    return play(root, *nodes, weather=Weather(3, delay_s_max=0.01))


async def settle(seconds: float = 0.1) -> None:
    await asyncio.sleep(seconds)


def undelivered(p: Play) -> list[tuple[str, Cause]]:
    return [(n.kind, n.cause) for n in p.actor("a").seen if isinstance(n, Undelivered)]


async def test_messages_of_one_sender_arrive_in_order(place: str) -> None:
    async with cast(place) as p:
        for n in range(50):
            p.tell("c", Text(str(n)))
        await settle()
        assert p.actor("c").texts == [str(n) for n in range(50)]


async def test_the_sender_is_known(place: str) -> None:
    async with cast(place) as p:
        p.tell("a", Relay("c", 1))
        await settle()
        assert [str(s) for s in p.actor("c").senders] == ["main/a#1"]


async def test_an_ask_is_answered(place: str) -> None:
    async with cast(place) as p:
        p.tell("c", Add(7))
        await settle()
        p.tell("a", Ask("c"))
        await settle()
        assert p.actor("a").outcomes == [Reply(Total(7))]


async def test_an_ask_without_an_answer_times_out(place: str) -> None:
    async with cast(place) as p:
        p.tell("a", Ask("c", "silent", 0.5))
        await settle(1)
        assert p.actor("a").outcomes == [TimedOut(0.5)]


async def test_an_ask_that_kills_the_asked_says_died(place: str) -> None:
    async with cast(place) as p:
        p.tell("a", Ask("c", "crash", 30))
        await settle(1)
        (outcome,) = p.actor("a").outcomes
        assert isinstance(outcome, Died)
        assert outcome.reason.cause is Cause.CRASHED
        assert "as told" in outcome.reason.detail


async def test_an_ask_of_nobody_is_rejected(place: str) -> None:
    async with cast(place) as p:
        p.tell("a", Ask("nobody"))
        await settle()
        assert p.actor("a").outcomes == [Rejected(Cause.NOBODY)]


async def test_an_ask_into_a_full_mailbox_is_rejected(place: str) -> None:
    async with cast(place, "SmallCounter") as p:
        p.tell("c", Sleep(5))
        await settle()
        for _ in range(2):
            p.tell("c", Add(1))
        await settle()
        p.tell("a", Ask("c"))
        await settle()
        assert p.actor("a").outcomes == [Rejected(Cause.FULL)]


async def test_an_ask_whose_node_is_lost_says_died() -> None:
    async with cast(APART) as p:
        p.tell("a", Ask("c", "sleep", 30))
        await settle()
        p.fabric.kill("n")
        await settle(1)
        (outcome,) = p.actor("a").outcomes
        assert isinstance(outcome, Died) and outcome.reason.signal == 9


async def test_a_question_waiting_in_a_dead_actors_mailbox_is_rejected(place: str) -> None:
    async with cast(place) as p:
        p.tell("c", Sleep(1))
        p.tell("c", Crash())
        await settle()
        p.tell("a", Ask("c", "sum", 30))
        await settle(5)
        (outcome,) = p.actor("a").outcomes
        assert outcome == Rejected(Cause.NOBODY)


async def test_a_full_mailbox_tells_the_sender(place: str) -> None:
    async with cast(place, "SmallCounter") as p:
        p.tell("c", Sleep(5))
        await settle()
        p.tell("a", Relay("c", 1, times=3))
        await settle()
        assert undelivered(p) == [("Add", Cause.FULL)]
        assert p.actor("a").seen[0].request == "r1"


async def test_an_expired_message_is_dropped_when_its_turn_comes(place: str) -> None:
    async with cast(place) as p:
        now_s = asyncio.get_running_loop().time()
        p.tell("c", Sleep(5))
        p.tell("a", Relay("c", 1, deadline_s=now_s + 1))
        p.tell("a", Relay("c", 10, deadline_s=now_s + 60))
        await settle(6)
        assert p.actor("c").n == 10
        assert undelivered(p) == [("Add", Cause.EXPIRED)]


async def test_the_message_in_the_hands_of_the_dead_is_reported_abandoned(place: str) -> None:
    async with cast(place) as p:
        p.tell("a", Watch("c"))
        p.tell("c", Sleep(1))
        p.tell("a", Relay("c", 1))
        await settle()
        life = next(
            n.lives["c"]
            for n in [p.system.node, *(s.node for s in p.fabric.nodes.values())]
            if "c" in n.lives
        )
        life.crash(ValueError("from outside"))
        await settle()
        assert p.actor("a").seen == [("up", 1), ("down", 1, Cause.CRASHED), ("up", 2)]
        assert p.actor("c").n == 1


async def test_a_path_without_an_actor_is_undelivered_and_a_dead_letter(place: str) -> None:
    async with cast(place) as p:
        p.tell("a", Relay("nobody", 1))
        await settle()
        assert undelivered(p) == [("Add", Cause.NOBODY)]
        letters = p.system.node.letters
        assert letters.counts[Cause.NOBODY, "Add", "nobody"] == 1
        assert letters.ring[-1].request == "r1"


async def test_what_a_target_does_not_accept_is_unreadable(place: str) -> None:
    async with cast(place, "Caller") as p:
        p.tell("a", Relay("c", 1))
        await settle()
        assert undelivered(p) == [("Add", Cause.UNREADABLE)]
        assert p.state("c") == "running"


async def test_messages_to_a_stopped_actor_are_undelivered(place: str) -> None:
    async with cast(place, restart=Restart.TEMPORARY) as p:
        await p.crash("c", 0.1)
        p.tell("a", Relay("c", 1))
        await settle()
        assert undelivered(p) == [("Add", Cause.NOBODY)]


async def test_watching_tells_of_each_life_exactly_once(place: str) -> None:
    async with cast(place) as p:
        p.tell("a", Watch("c"))
        p.tell("a", Watch("c"))
        await settle()
        await p.crash("c", 1)
        await p.crash("c", 5)
        crashed = Cause.CRASHED
        assert p.actor("a").seen == [
            ("up", 1),
            ("down", 1, crashed),
            ("up", 2),
            ("down", 2, crashed),
            ("up", 3),
        ]


async def test_watching_the_dead_tells_of_the_death_at_once(place: str) -> None:
    async with cast(place, restart=Restart.TEMPORARY) as p:
        await p.crash("c", 1)
        p.tell("a", Watch("c"))
        await settle()
        assert p.actor("a").seen == [("down", 1, Cause.CRASHED)]


async def test_watching_a_lost_node_tells_how_it_died() -> None:
    async with cast(APART) as p:
        p.tell("a", Watch("c"))
        await settle()
        p.fabric.kill("n")
        await settle(2)
        assert p.actor("a").seen == [("up", 1), ("down", 1, Cause.EXITED), ("up", 2)]


async def test_a_full_mailbox_that_makes_wait_holds_up_the_sender_not_the_message(
    place: str,
) -> None:
    async with cast(place, "WaitingCounter") as p:
        p.tell("c", Sleep(1))
        await settle()
        p.tell("a", Relay("c", 1, times=4))
        p.tell("a", Watch("c"))
        await settle()
        assert p.actor("a").seen == [], "the sender waits"
        await settle(2)
        assert p.actor("c").n == 4
        assert p.actor("a").seen == [("up", 1)]
        assert undelivered(p) == []


async def test_who_was_not_wired_to_a_mailbox_is_not_held_up_by_it(place: str) -> None:
    root = tree(child("c", "WaitingCounter", node=place), child("a", "Caller"))
    async with play(root, *(() if place == TOGETHER else (place,))) as p:
        p.tell("c", Sleep(1))
        await settle()
        p.tell("a", Relay("c", 1, times=6))
        p.tell("a", Watch("c"))
        await settle()
        assert ("up", 1) in p.actor("a").seen, "nobody has looked for a circle"
        assert undelivered(p) == [("Add", Cause.FULL)] * 2, "two wait, two are parked"
        await settle(2)
        assert p.actor("c").n == 4


async def test_a_mailbox_that_must_not_overflow_crashes_its_owner() -> None:
    async with cast(TOGETHER, "BrittleCounter") as p:
        p.tell("c", Sleep(1))
        await settle()
        p.tell("a", Relay("c", 1, times=3))
        await settle()
        assert p.incarnation("c") == 2
        assert "mailbox full" in p.system.leaves["c"].last_exit.detail


async def test_drain_goes_from_the_last_to_the_first_and_waits_for_those_who_finish() -> None:
    root = tree(child("a"), child("b", "SlowDrainer"), child("c"))
    async with play(root) as p:
        began_s = asyncio.get_running_loop().time()
        await p.system.drain(30)
        assert asyncio.get_running_loop().time() - began_s == pytest.approx(2.0)
        assert [p.state(x) for x in "abc"] == ["draining"] * 3


async def test_actors_of_one_name_are_drained_together() -> None:
    fronts = [Supervisor(name=name, children=(child("a", "SlowDrainer"),)) for name in "012"]
    async with play(tree(child("b"), *fronts)) as p:
        began_s = asyncio.get_running_loop().time()
        await p.system.drain(3)
        assert asyncio.get_running_loop().time() - began_s == pytest.approx(2.0)
        assert [p.state(x) for x in ("0/a", "1/a", "2/a", "b")] == ["draining"] * 4


async def test_drain_ends_when_its_grace_is_over() -> None:
    async with play(tree(child("b", "SlowDrainer"))) as p:
        began_s = asyncio.get_running_loop().time()
        await p.system.drain(0.5)
        assert asyncio.get_running_loop().time() - began_s == pytest.approx(0.5)


async def test_drain_does_not_wait_for_an_actor_that_is_being_restarted() -> None:
    async with play(
        tree(child("a", arguments={"settings": Settings(start_s=20)}), child("b"))
    ) as p:
        p.tell("a", Crash("now"))
        await settle()
        assert p.state("a") == "starting"
        began_s = asyncio.get_running_loop().time()
        await p.system.drain(10)
        assert asyncio.get_running_loop().time() == pytest.approx(began_s)
        assert p.state("b") == "draining"
        await asyncio.sleep(30)
        assert p.state("a") == "draining"


@pytest.mark.parametrize("waits_s", [0.5, 10.0], ids=["before it dies", "while it starts"])
async def test_who_starts_in_a_drain_is_told_before_its_first_message(
    waits_s: float, place: str
) -> None:
    late = child("c", "Diarist", node=place, arguments={"settings": Settings(start_s=20)})
    nodes = () if place == TOGETHER else (place,)
    weather = Weather(3, delay_s_max=0.01)
    async with play(tree(late), *nodes, weather=weather) as p:
        for message in (Sleep(1), Crash(), Text("left in the mailbox")):
            p.tell("c", message)
        await asyncio.sleep(waits_s)
        await p.system.drain(60)
        await asyncio.sleep(30)
        assert p.incarnation("c") == 2
        assert p.actor("c").texts == ["drain", "left in the mailbox"]
        assert p.state("c") == "draining"


async def test_drain_does_not_wait_for_who_has_died_just_before() -> None:
    async with play(tree(child("c", "SlowDrainer", node="n")), "n") as p:
        began_s = asyncio.get_running_loop().time()
        p.fabric.nodes["n"].kill()
        await p.system.drain(10)
        assert asyncio.get_running_loop().time() == pytest.approx(began_s)


async def test_a_reply_to_an_asker_that_died_is_dropped_and_counted() -> None:
    async with cast(TOGETHER) as p:
        p.tell("c", Sleep(1))
        p.tell("a", Ask("c", "sum", 30))
        await settle()
        p.system.node.lives["a"].crash(ValueError("gone"))
        await settle(2)
        assert p.system.node.letters.counts[Cause.EXPIRED, "Total", "a"] == 1
        assert p.actor("a").outcomes == []


async def test_a_task_that_outlives_its_actor_does_not_wait_for_answers() -> None:
    loop = asyncio.get_running_loop()
    async with cast(TOGETHER) as p:
        context = p.actor("a").context
        p.tell("c", Sleep(10))
        ref = context.peer("c")
        waiting = loop.create_task(context.ask(ref, Sum(), timeout_s=30))
        await settle()
        began_s = loop.time()
        p.system.node.lives["a"].crash(ValueError("gone"))
        assert await waiting == Rejected(Cause.STOPPED)
        assert await context.ask(ref, Sum(), timeout_s=30) == Rejected(Cause.STOPPED)
        assert loop.time() - began_s < 1


async def test_a_task_that_outlives_its_actor_does_not_wait_for_its_threads() -> None:
    async with cast(TOGETHER) as p:
        context = p.actor("a").context
        context._node.runs_inline = False  # real threads: the first job holds up the second
        begun, over = threading.Event(), threading.Event()

        def work() -> None:
            begun.set()
            over.wait(10)

        waiting = [asyncio.create_task(context.in_thread(work)) for _ in range(2)]
        await settle()
        assert begun.wait(10)
        p.system.node.lives["a"].crash(ValueError("gone"))
        after = asyncio.create_task(context.in_thread(work))
        done, _ = await asyncio.wait([*waiting, after], timeout=5)
        assert len(done) == 3 and all(task.cancelled() for task in done)
        over.set()


async def test_rows_tell_what_an_actor_is_doing_and_for_how_long() -> None:
    async with cast(APART) as p:
        p.tell("c", Sleep(5))
        for _ in range(3):
            p.tell("c", Add(1))
        await settle(2)
        (row,) = [r for r in p.system.actors() if r.path == "c"]
        assert (row.busy_with, row.mailbox_depth, row.node, row.incarnation) == ("Sleep", 3, "n", 1)
        assert row.busy_s == pytest.approx(2, abs=0.5)
        assert row.pid == p.fabric.nodes["n"].pid


async def test_rows_tell_how_long_the_handlers_take(place: str) -> None:
    async with cast(place) as p:
        (row,) = [r for r in p.system.actors() if r.path == "c"]
        assert (row.handle_p50_s, row.handle_p99_s) == (None, None)
        for seconds in (*(2 * [0.01]), 4.0):
            p.tell("c", Sleep(seconds))
        await settle(6)
        (row,) = [r for r in p.system.actors() if r.path == "c"]
        assert row.handle_p50_s == pytest.approx(0.01, rel=0.1)
        assert row.handle_p99_s == pytest.approx(4, rel=0.1)


async def test_what_waits_for_room_is_not_lost_when_the_owner_crashes() -> None:
    async with cast(TOGETHER, "WaitingCounter") as p:
        p.tell("c", Sleep(1))
        p.tell("c", Crash())
        await settle()
        p.tell("a", Relay("c", 1, times=3))
        p.tell("a", Watch("c"))
        await settle(3)
        assert (p.incarnation("c"), p.actor("c").n) == (2, 3)
        assert [s[0] for s in p.actor("a").seen] == ["up"], "the sender goes on"
