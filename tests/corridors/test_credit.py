"""Goal: a slow taker pauses a sender on another node and never overflows, over every transport,
whoever dies and whatever is lost. Method: a real system whose taker takes when the test says so;
the law of credits is asserted over both ends of each stream, after each step where the loop has
steps.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from actors.runtime.simloop import SimLoop
from messages.base import Lane
from messages.system import Cause, Drain
from tests.corridors.kinds import KINDS, zmq_ipc
from tests.corridors.pacing import COUNT_MAX, WINDOW, Go, Works, works
from tests.runtime.players import Crash

SEEDS = 3
CASES = [
    pytest.param(kind, seed, id=f"{kind.__name__}-{seed}")
    for kind in KINDS
    for seed in range(1 if kind is zmq_ipc else SEEDS)
]
Play = Callable[[Works], Awaitable[None]]


def play(kind: Any, seed: int, scenario: Play, *, loses: bool = False) -> None:
    """Memory on a loop with virtual time and the seed's order; sockets on a real one."""

    async def run() -> None:
        async with works(kind, random.Random(seed) if loses else None) as w:
            await scenario(w)

    factory = asyncio.new_event_loop if kind is zmq_ipc else lambda: SimLoop(seed)
    with asyncio.Runner(loop_factory=factory) as runner:
        runner.run(run())


def let(w: Works, count: int) -> None:
    for _ in range(count):
        w.actor("gate").open.release()


@pytest.mark.parametrize(("kind", "seed"), CASES)
def test_a_slow_taker_pauses_the_sender_and_bounds_what_is_under_way(kind: Any, seed: int) -> None:
    async def scenario(w: Works) -> None:
        w.tell("pump", Go(60))
        await w.until(lambda: w.is_paused("pump"))
        # One in the taker's hands, for which no credit has come yet; one is held, for the pause.
        stream = w.life("pump").streams["gate"]
        assert (stream.account.spent, len(stream.held)) == (WINDOW, 1)
        gate = w.actor("gate")
        for taken in range(1, 60 - WINDOW - 1):  # then all have been granted
            let(w, 1)
            await w.until(lambda taken=taken: len(gate.got) == taken)
            await w.until(lambda: w.is_paused("pump"))
            assert stream.account.spent <= taken + 1 + WINDOW
        let(w, 60)
        await w.until(lambda: len(gate.got) == 60)
        assert gate.got == list(range(1, 61))
        assert w.actor("pump").refused == []

    play(kind, seed, scenario)


@pytest.mark.parametrize(("kind", "seed"), CASES)
def test_urgent_lanes_do_not_wait_for_credit(kind: Any, seed: int) -> None:
    async def scenario(w: Works) -> None:
        pump = w.actor("pump")
        w.tell("pump", Go(20))
        await w.until(lambda: w.is_paused("pump"))
        w.tell("other", Crash())
        await w.until(lambda: pump.seen == ["up 1", "down 1", "up 2"])
        assert w.is_paused("pump")
        w.life("pump").put_urgent(Lane.CONTROL, Drain(1.0))
        await w.until(lambda: str(w.life("pump").state) == "draining")
        await w.system.stop()

    play(kind, seed, scenario)


@pytest.mark.parametrize(("kind", "seed"), CASES)
def test_a_turn_that_sends_too_much_is_held_once_over_and_then_refused(
    kind: Any, seed: int
) -> None:
    async def scenario(w: Works) -> None:
        w.tell("pump", Go(2 * WINDOW + 5, at_once=2 * WINDOW + 5))
        pump, gate = w.actor("pump"), w.actor("gate")
        await w.until(lambda: len(pump.refused) == 5)
        assert pump.refused == [Cause.FULL] * 5
        let(w, 2 * WINDOW)
        await w.until(lambda: len(gate.got) == 2 * WINDOW)
        assert gate.got == list(range(1, 2 * WINDOW + 1))

    play(kind, seed, scenario)


@pytest.mark.parametrize(("kind", "seed"), CASES)
def test_each_sender_has_a_window_of_its_own(kind: Any, seed: int) -> None:
    async def scenario(w: Works) -> None:
        gate = w.actor("gate")
        w.tell("pump", Go(20))
        w.tell("pump2", Go(20))
        await w.until(lambda: w.is_paused("pump") and w.is_paused("pump2"))
        mailbox = w.life("gate").mailbox
        await w.until(lambda: len(mailbox) + len(mailbox.parked) == 2 * WINDOW - 1)
        assert len(mailbox) == COUNT_MAX
        let(w, 40)
        await w.until(lambda: len(gate.got) == 40)
        assert sorted(gate.got) == list(range(1, 41))
        assert w.actor("pump").refused == w.actor("pump2").refused == []

    play(kind, seed, scenario)


@pytest.mark.parametrize(("kind", "seed"), CASES)
def test_a_taker_that_crashes_returns_what_was_held_and_its_next_life_grants_anew(
    kind: Any, seed: int
) -> None:
    async def scenario(w: Works) -> None:
        w.tell("pump", Go(WINDOW + 1))
        await w.until(lambda: w.is_paused("pump"))
        first = w.actor("gate")
        w.life("gate").crash(ValueError("as told"))
        await w.until(lambda: w.is_up("gate", 2))
        assert not w.is_paused("pump")
        # In its hands; held for it at the sender; and what was still on its way.
        assert {Cause.ABANDONED, Cause.NOBODY} >= set(w.actor("pump").refused)
        gate = w.actor("gate")
        w.tell("pump", Go(20))
        let(w, 40)
        await w.until(lambda: bool(gate.got) and gate.got[-1] == WINDOW + 21)
        assert first.got == []
        assert gate.got[-20:] == list(range(WINDOW + 2, WINDOW + 22))
        assert len(gate.got) + len(w.actor("pump").refused) == WINDOW + 21
        assert w.life("pump").streams["gate"].account.incarnation == 2

    play(kind, seed, scenario)


@pytest.mark.parametrize(("kind", "seed"), CASES)
@pytest.mark.parametrize("node", ["g", "p"])
def test_the_death_of_either_node_ends_the_stream_and_the_next_life_begins_one(
    node: str, kind: Any, seed: int
) -> None:
    async def scenario(w: Works) -> None:
        w.tell("pump", Go(WINDOW + 1))
        await w.until(lambda: w.is_paused("pump"))
        w.fabric.nodes[node].kill()
        lost = ("gate",) if node == "g" else ("pump", "pump2")
        await w.until(lambda: all(w.is_up(path, 2) for path in lost))
        assert not w.is_paused("pump")
        gate = w.actor("gate")
        w.tell("pump", Go(30))
        let(w, 60)
        await w.until(lambda: bool(gate.got) and gate.got[-1] == WINDOW + 31)
        assert gate.got[-30:] == list(range(WINDOW + 2, WINDOW + 32))
        assert [a.incarnation for a in w.life("gate").inflows] == [2 if node == "p" else 1]

    play(kind, seed, scenario)


@pytest.mark.parametrize(("kind", "seed"), CASES)
def test_a_link_that_is_cut_pauses_nobody_for_good(kind: Any, seed: int) -> None:
    async def scenario(w: Works) -> None:
        w.tell("pump", Go(WINDOW + 1))
        await w.until(lambda: w.is_paused("pump"))
        w.fabric.nodes["g"].transport.disconnect("p")
        await w.until(lambda: w.is_up("gate", 2) or w.is_up("pump", 2))
        await w.until(lambda: w.is_up("gate", 2) or w.is_up("pump2", 2))
        await w.until(lambda: not w.is_paused("pump"))
        gate, begun = w.actor("gate"), w.actor("pump").last
        w.tell("pump", Go(30))
        let(w, 60)
        await w.until(lambda: bool(gate.got) and gate.got[-1] == begun + 30)
        assert gate.got[-30:] == list(range(begun + 1, begun + 31))

    play(kind, seed, scenario)


@pytest.mark.parametrize(("kind", "seed"), CASES)
def test_a_sender_that_crashes_loses_what_it_held_and_its_next_life_has_the_window(
    kind: Any, seed: int
) -> None:
    async def scenario(w: Works) -> None:
        gate = w.actor("gate")
        w.tell("pump", Go(WINDOW + 1))
        await w.until(lambda: w.is_paused("pump"))
        for life in range(2, 6):
            w.life("pump").crash(ValueError("as told"))
            await w.until(lambda life=life: w.is_up("pump", life))
            w.tell("pump", Go(WINDOW + 1))
            await w.until(lambda: w.is_paused("pump"))
        # What dead lives have sent waits within the bound of those without credit.
        mailbox = w.life("gate").mailbox
        await w.until(lambda: len(mailbox.parked) <= COUNT_MAX + WINDOW)
        let(w, 1000)
        await w.until(lambda: bool(gate.got) and gate.got[-1] == 5 * (WINDOW + 1))
        assert gate.got == sorted(set(gate.got))

    play(kind, seed, scenario)


@pytest.mark.parametrize(("kind", "seed"), CASES)
def test_losses_of_messages_and_of_grants_slow_a_stream_and_never_stop_it(
    kind: Any, seed: int
) -> None:
    async def scenario(w: Works) -> None:
        gate = w.actor("gate")
        count = 20 if kind is zmq_ipc else 200
        let(w, count)
        w.tell("pump", Go(count))
        await w.until(lambda: w.actor("pump").last == count and not w.is_paused("pump"))
        assert sum(transport.lost_count for transport in w.fabric.transports)
        assert gate.got == sorted(set(gate.got))
        assert w.actor("pump").refused == []

    play(kind, seed, scenario, loses=True)


@pytest.mark.parametrize(("kind", "seed"), CASES)
def test_an_idle_stream_costs_nothing(kind: Any, seed: int) -> None:
    async def scenario(w: Works) -> None:
        gate = w.actor("gate")
        let(w, 100)
        w.tell("pump", Go(50))
        await w.until(lambda: len(gate.got) == 50)
        count = w.notice_count()
        assert count <= 50 / (WINDOW // 2) + 2, "a grant for each batch, not for each message"
        assert w.life("pump").streams["gate"].alarm is None
        if kind is not zmq_ipc:
            await asyncio.sleep(100)
            assert w.notice_count() == count

    play(kind, seed, scenario)
