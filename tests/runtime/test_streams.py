"""Goal: what is particular to streams with credits, beside what `tests/corridors/test_credit.py`
shows over every transport: deadlines, questions, what can't be read, a link that takes nothing."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from actors.runtime.context import Died, Rejected, Reply, TimedOut
from actors.runtime.mailbox import Full, MailboxSpec
from actors.runtime.simulation import SimFabric
from actors.runtime.spec import Child, Node, NodeKind
from actors.runtime.supervisor import StartFailed
from actors.runtime.system import System
from actors.runtime.transport.memory import Weather
from messages.system import Cause, Undelivered
from tests.runtime.players import Add, Ask, Crash, Relay, Sleep, Text, Total, WaitingCounter, Watch
from tests.runtime.stage import Play, child, play, tree

pytestmark = pytest.mark.sim(seeds=3)

WINDOW = 2  # of WaitingCounter


class TightCounter(WaitingCounter):
    mailbox = MailboxSpec(count_max=2, bytes_max=200, full=Full.WAIT)


def cast() -> Any:
    """A counter `c` that makes wait on node n, a caller `a` with the root."""
    caller = child("a", "Caller", arguments={"peer": Text("c")})
    root = tree(child("c", "WaitingCounter", node="n"), caller)
    return play(root, "n", weather=Weather(3, delay_s_max=0.01))


async def settle(seconds: float = 0.1) -> None:
    await asyncio.sleep(seconds)


def undelivered(p: Play) -> list[tuple[str, Cause]]:
    return [(n.kind, n.cause) for n in p.actor("a").seen if isinstance(n, Undelivered)]


def is_paused(p: Play) -> bool:
    return p.system.node.lives["a"].blocked_count > 0


def test_a_window_is_what_the_mailbox_says_and_else_its_bound() -> None:
    assert MailboxSpec(count_max=7, full=Full.WAIT).window == 7
    assert MailboxSpec(count_max=7, full=Full.WAIT, credits=3).window == 3
    assert MailboxSpec(count_max=7).window == 0


async def test_what_expires_in_the_mailbox_gives_its_credit_back() -> None:
    async with cast() as p:
        p.tell("c", Sleep(1))
        await settle()
        now_s = asyncio.get_running_loop().time()
        p.tell("a", Relay("c", 1, times=WINDOW, deadline_s=now_s + 0.5))
        await settle(2)
        p.tell("a", Relay("c", 10, times=3 * WINDOW - 2))
        await settle(2)
        assert (p.actor("c").n, is_paused(p)) == (10 * (3 * WINDOW - 2), False)
        assert undelivered(p) == [("Add", Cause.EXPIRED)] * WINDOW


async def test_what_expires_while_it_is_held_is_not_sent() -> None:
    async with cast() as p:
        p.tell("c", Sleep(2))
        await settle()
        now_s = asyncio.get_running_loop().time()
        p.tell("a", Relay("c", 1, times=2 * WINDOW, deadline_s=now_s + 1))
        await settle()
        assert is_paused(p)
        await settle(1.6)
        assert not is_paused(p), "it stops waiting once nobody wants it any more"
        stream = p.system.node.lives["a"].streams["c"]
        assert stream.account.spent == WINDOW
        await settle(2)
        assert undelivered(p) == [("Add", Cause.EXPIRED)] * 2 * WINDOW
        assert p.actor("c").n == 0


async def test_a_question_waits_for_credit_like_a_message() -> None:
    async with cast() as p:
        p.tell("c", Add(5))
        p.tell("c", Sleep(1))
        await settle()
        p.tell("a", Relay("c", 1, times=WINDOW))
        p.tell("a", Ask("c", "sum", timeout_s=30))
        p.tell("a", Ask("c", "sum", timeout_s=30))
        await settle(3)
        assert p.actor("a").outcomes == [Reply(Total(5 + WINDOW))] * 2


@pytest.mark.parametrize(("timeout_s", "outcome"), [(0.2, TimedOut), (30.0, Rejected)])
async def test_a_held_question_has_one_outcome(timeout_s: float, outcome: Any) -> None:
    async with cast() as p:
        p.tell("c", Sleep(1))
        p.tell("c", Crash())
        await settle()
        p.tell("a", Relay("c", 1, times=WINDOW))
        p.tell("a", Ask("c", "sum", timeout_s))
        await settle(0.5)
        p.tell("a", Watch("c"))
        await settle(3)
        (got,) = p.actor("a").outcomes
        assert isinstance(got, outcome) and not isinstance(got, Died)
        assert not is_paused(p)


async def test_what_cannot_be_read_gives_its_credit_back() -> None:
    async with cast() as p:
        life = p.system.node.lives["a"]
        for _ in range(3 * WINDOW):
            life.send(p.system.node.entry("c"), Total(1))  # not in the counter's union
            await settle()
        assert undelivered(p) == [("Total", Cause.UNREADABLE)] * 3 * WINDOW
        p.tell("a", Relay("c", 1, times=WINDOW))
        await settle()
        assert (p.actor("c").n, is_paused(p)) == (WINDOW, False)


async def test_what_would_never_fit_is_refused_and_gives_its_credit_back() -> None:
    caller = child("a", "Caller", arguments={"peer": Text("c")})
    tight = Child(name="c", factory=f"{__name__}:TightCounter", node="n")
    async with play(tree(tight, caller), "n") as p:
        for _ in range(3 * WINDOW):
            p.system.node.lives["a"].send(p.system.node.entry("c"), Text("x" * 300))
            await settle()
        assert undelivered(p) == [("Text", Cause.FULL)] * 3 * WINDOW
        p.tell("a", Relay("c", 1, times=WINDOW))
        await settle()
        assert (p.actor("c").n, is_paused(p)) == (WINDOW, False)


async def test_a_link_that_takes_nothing_pauses_the_sender_until_it_does() -> None:
    async with cast() as p:
        transport = p.system.node.transport
        transport.count_max, count_max = 0, transport.count_max
        p.tell("a", Relay("c", 1))
        p.tell("a", Watch("c"))
        await settle(5)
        assert (p.actor("a").seen, is_paused(p)) == ([], True)
        transport.count_max = count_max
        await settle(1)
        assert (p.actor("c").n, is_paused(p)) == (1, False)
        assert undelivered(p) == []


async def test_a_late_grant_of_an_earlier_life_is_fenced_and_counted() -> None:
    async with cast() as p:
        address = p.system.node.entry("c").address
        assert address is not None
        p.tell("a", Relay("c", 1))
        await p.crash("c", 1)
        p.tell("a", Relay("c", 1))
        await settle()
        life = p.system.node.lives["a"]
        account = life.streams["c"].account
        before = (account.granted, account.left)
        p.system.node.streams.granted(life, address, 3)
        assert (account.granted, account.left) == before
        assert account.stale_count == 1
        assert p.system.node.tally.counters["histrio_stale_credits_total", ()] == 1


async def test_who_is_no_actor_sends_without_credit_and_is_refused_past_the_bound() -> None:
    async with cast() as p:
        p.tell("c", Sleep(1))
        await settle()
        for _ in range(6):
            p.tell("c", Add(1))
        await settle(3)
        assert p.actor("c").n == 4, "two wait, two are parked"


async def test_a_circle_over_two_nodes_is_refused_when_it_is_wired() -> None:
    def waiter(name: str, peer: str, node: str) -> Any:
        return child(name, "Waiter", node=node, arguments={"peer": Text(peer)})

    root = tree(waiter("a", "b", "n"), waiter("b", "a", "m"))
    places = tuple(Node(name=name, kind=NodeKind.PROCESS) for name in "nm")
    system = System(root, nodes=places, fabric=SimFabric())
    with pytest.raises(StartFailed, match="would wait for each other: a -> b -> a"):
        await system.start()
