"""This file is the one suite over every transport: each keeps what `transport/base.py` promises."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from messages.system import Halt, StopActor
from tests.corridors.kinds import KINDS, WINDOW_COUNT, Make, Seat


class House:
    """The nodes of one test."""

    def __init__(self, make: Make) -> None:
        self._make = make
        self.seats: list[Seat] = []

    async def seat(self, node: str, incarnation: int = 1) -> Seat:
        seat = Seat(node, incarnation, self._make(node, incarnation))
        self.seats.append(seat)
        await seat.transport.start(seat)
        return seat

    async def pair(self) -> tuple[Seat, Seat]:
        a, b = await self.seat("a"), await self.seat("b")
        await join(a, b)
        return a, b


async def join(a: Seat, b: Seat) -> None:
    a.connect(b)
    b.connect(a)
    await a.until(lambda: (b.node, b.incarnation) in a.links)
    await b.until(lambda: (a.node, a.incarnation) in b.links)


@pytest.fixture(params=KINDS, ids=lambda kind: kind.__name__)
async def house(request: pytest.FixtureRequest) -> AsyncIterator[House]:
    async with request.param() as make:
        house = House(make)
        yield house
        for seat in house.seats:
            await seat.transport.close()


def stop(number: int) -> StopActor:
    return StopActor(f"replica/{number}", number, 0.5)


async def test_a_link_is_up_once_at_both_ends(house: House) -> None:
    a, b = await house.pair()
    assert a.links == [("b", 1)] and b.links == [("a", 1)]


async def test_a_link_that_one_end_wants_is_not_up(house: House) -> None:
    a, b = await house.seat("a"), await house.seat("b")
    a.connect(b)
    assert not a.send(b, 1, Halt())
    b.connect(a)
    await a.until(lambda: bool(a.links))
    assert a.send(b, 2, Halt())
    await b.until(lambda: bool(b.arrived))
    assert b.from_node("a") == [2]


async def test_messages_arrive_both_ways_in_order_as_they_were_sent(house: House) -> None:
    a, b = await house.pair()
    for number in range(100):
        assert a.send(b, number, stop(number))
        assert b.send(a, number, stop(-number))
    await a.until(lambda: len(a.arrived) == 100)
    await b.until(lambda: len(b.arrived) == 100)
    assert b.from_node("a") == a.from_node("b") == list(range(100))
    assert [message for _, _, message in b.arrived] == [stop(number) for number in range(100)]
    assert [message for _, _, message in a.arrived] == [stop(-number) for number in range(100)]


async def test_send_to_a_stranger_is_refused(house: House) -> None:
    a, b = await house.seat("a"), await house.seat("b")
    assert not a.send(b, 1, Halt())


async def test_a_full_window_refuses_at_once_and_what_was_taken_arrives(house: House) -> None:
    a, b = await house.pair()
    taken = 0
    while a.send(b, taken, Halt()):  # b does not run meanwhile
        taken += 1
        assert taken <= WINDOW_COUNT
    assert taken == WINDOW_COUNT
    await b.until(lambda: len(b.arrived) == taken)
    assert b.from_node("a") == list(range(taken))


async def test_a_window_opens_again(house: House) -> None:
    a, b = await house.pair()
    sent = 0
    while sent < WINDOW_COUNT * 5:
        if a.send(b, sent, Halt()):
            sent += 1
        else:
            await asyncio.sleep(0)
    await b.until(lambda: len(b.arrived) == sent)
    assert b.from_node("a") == list(range(sent))


async def test_a_large_message_arrives_whole(house: House) -> None:
    a, b = await house.pair()
    message = StopActor("x" * (1 << 20), 1, 0.0)
    assert a.send(b, 1, message)
    await b.until(lambda: bool(b.arrived))
    assert b.arrived[0][2] == message


async def test_headers_travel_with_their_messages(house: House) -> None:
    a, b = await house.pair()
    now_s = asyncio.get_running_loop().time()
    assert a.send(b, 5, Halt(), by_s=now_s + 50)
    await b.until(lambda: bool(b.arrived))
    header = b.arrived[0][1]
    assert str(header.target) == "b/x#1" and str(header.sender) == "a/y#1"
    assert header.question == 5
    assert header.deadline_s is not None and now_s + 49 < header.deadline_s < now_s + 80


async def test_a_receiver_may_answer_within_the_call(house: House) -> None:
    a, b = await house.pair()
    b.on_arrive = lambda node, number: b.send(a, number, Halt())
    for number in range(50):
        assert a.send(b, number, Halt())
    await a.until(lambda: len(a.arrived) == 50)
    assert a.from_node("b") == list(range(50))


async def test_disconnect_tells_the_peer_alone_and_ends_both_ways(house: House) -> None:
    a, b = await house.pair()
    a.transport.disconnect("b")
    await b.until(lambda: ("a", None) in b.links)
    assert a.links == [("b", 1)]
    assert not a.send(b, 1, Halt()) and not b.send(a, 1, Halt())
    a.transport.disconnect("b")
    assert b.links.count(("a", None)) == 1


async def test_a_link_can_be_made_again(house: House) -> None:
    a, b = await house.pair()
    assert a.send(b, 1, Halt())
    await b.until(lambda: bool(b.arrived))
    a.transport.disconnect("b")
    await b.until(lambda: ("a", None) in b.links)
    a.links.clear()
    b.links.clear()
    await join(a, b)
    assert a.send(b, 2, Halt()) and b.send(a, 3, Halt())
    await b.until(lambda: len(b.arrived) == 2)
    await a.until(lambda: bool(a.arrived))
    assert b.from_node("a") == [1, 2] and a.from_node("b") == [3]


async def test_connect_twice_changes_nothing(house: House) -> None:
    a, b = await house.pair()
    a.connect(b)
    assert a.send(b, 1, Halt())
    await b.until(lambda: bool(b.arrived))
    assert a.links == [("b", 1)] and b.links == [("a", 1)]


async def test_close_tells_the_peers_and_ends_everything(house: House) -> None:
    a, b = await house.pair()
    await a.transport.close()
    await b.until(lambda: ("a", None) in b.links)
    assert not a.send(b, 1, Halt()) and not b.send(a, 1, Halt())
    await a.transport.close()


async def test_a_later_life_gets_nothing_that_was_sent_to_an_earlier(house: House) -> None:
    a, b = await house.pair()
    for number in range(5):
        assert a.send(b, number, Halt())
    await b.transport.close()
    later = await house.seat("b", 2)
    a.transport.disconnect("b")
    await join(a, later)
    assert a.send(later, 9, Halt())
    await later.until(lambda: bool(later.arrived))
    assert later.from_node("a") == [9]


async def test_an_earlier_life_is_not_heard_after_a_later(house: House) -> None:
    a, b = await house.pair()
    later = await house.seat("b", 2)
    for number in range(5):
        b.send(a, number, Halt())  # on their way when a turns to the later life
    a.transport.disconnect("b")
    heard = len(a.arrived)
    await join(a, later)
    assert later.send(a, 9, Halt())
    await a.until(lambda: 9 in a.from_node("b"))
    assert a.from_node("b")[heard:] == [9]


async def test_a_life_that_does_not_exist_yet_is_not_up(house: House) -> None:
    a, b = await house.seat("a"), await house.seat("b")
    a.transport.connect("b", 2, b.transport.endpoint)  # another life's number
    b.connect(a)
    c = await house.seat("c")
    await join(a, c)
    await join(b, c)
    assert not a.send(b, 1, Halt())
    assert ("b", 2) not in a.links and ("b", 1) not in a.links


async def test_links_do_not_touch_each_other(house: House) -> None:
    a, b = await house.pair()
    c = await house.seat("c")
    await join(a, c)
    await join(b, c)
    while a.send(b, 0, Halt()):  # one window is full
        pass
    for number in range(20):
        assert a.send(c, number, Halt())
        assert c.send(a, number, Halt())
    await b.transport.close()
    await a.until(lambda: ("b", None) in a.links and len(a.from_node("c")) == 20)
    await c.until(lambda: ("b", None) in c.links and len(c.from_node("a")) == 20)
    assert a.send(c, 20, Halt())
    await c.until(lambda: len(c.from_node("a")) == 21)
    assert c.from_node("a") == list(range(21))
