"""Goal: simulated links delay, lose and reorder as their seed says, and only as far as allowed."""

from __future__ import annotations

import asyncio

import pytest

from actors.runtime.simloop import SimLoop
from actors.runtime.transport.memory import MemoryHub, MemoryTransport, Weather
from messages.base import Address, Header, Message
from messages.system import Halt, Reason


class Ear:
    """Hears and remembers, with the time."""

    def __init__(self) -> None:
        self.heard: list[tuple[str, int, float]] = []
        self.downs: list[str] = []

    def arrive(self, node: str, header: Header, body: Message | bytes | memoryview) -> None:
        assert header.question is not None
        self.heard.append((node, header.question, asyncio.get_running_loop().time()))

    def link_up(self, node: str, incarnation: int) -> None:
        pass

    def link_down(self, node: str, reason: Reason) -> None:
        self.downs.append(node)


async def talk(weather: Weather | None, count: int = 100) -> tuple[Ear, MemoryHub]:
    """Two nodes tell a third."""
    hub = MemoryHub(weather=weather)
    ears = {name: Ear() for name in "abc"}
    transports = {name: MemoryTransport(hub, name, 1) for name in "abc"}
    for name, transport in transports.items():
        await transport.start(ears[name])
    for one, other in (("a", "c"), ("c", "a"), ("b", "c"), ("c", "b")):
        transports[one].connect(other, 1, transports[other].endpoint)
    await asyncio.sleep(1)
    for n in range(count):
        for name in "ab":
            header = Header(Address("c", "x", 1), question=n)
            assert transports[name].send("c", header, Halt())
        await asyncio.sleep(0.01)
    await asyncio.sleep(10)
    return ears["c"], hub


def run(weather: Weather | None) -> list[tuple[str, int, float]]:
    with asyncio.Runner(loop_factory=lambda: SimLoop(3)) as runner:
        return runner.run(talk(weather))[0].heard


def test_delays_reorder_pairs_but_never_one_pairs_messages() -> None:
    heard = run(Weather(1, delay_s_max=0.5))
    for name in "ab":
        assert [n for node, n, _ in heard if node == name] == list(range(100))
    assert [node for node, _, _ in heard] != ["a", "b"] * 100
    assert len({at_s for _, _, at_s in heard}) > 10


def test_losses_follow_the_seed_and_are_counted() -> None:
    weather = Weather(1, drop_rate=0.2)
    heard = run(weather)
    assert len(heard) == 200 - weather.dropped_count
    assert 20 < weather.dropped_count < 60
    assert heard == run(Weather(1, drop_rate=0.2))
    assert heard != run(Weather(2, drop_rate=0.2))
    for name in "ab":
        numbers = [n for node, n, _ in heard if node == name]
        assert numbers == sorted(set(numbers))


@pytest.mark.sim(seeds=2)
async def test_a_cut_link_is_told_at_both_ends_and_what_was_under_way_is_lost() -> None:
    hub = MemoryHub(weather=Weather(1, delay_s_max=0.5))
    ears = (Ear(), Ear())
    one, other = MemoryTransport(hub, "a", 1), MemoryTransport(hub, "b", 1)
    await one.start(ears[0])
    await other.start(ears[1])
    one.connect("b", 1, other.endpoint)
    other.connect("a", 1, one.endpoint)
    await asyncio.sleep(2)
    assert one.send("b", Header(Address("b", "x", 1), question=1), Halt())
    hub.cut("a", "b")
    await asyncio.sleep(2)
    assert (ears[0].downs, ears[1].downs, ears[1].heard) == (["b"], ["a"], [])
    assert not one.send("b", Header(Address("b", "x", 1), question=2), Halt())
