"""Goal: what a node sends waits for the link, keeps its order, and goes to no later life."""

from __future__ import annotations

from typing import Any

from actors.runtime.peers import HELD_MAX, Peers
from messages.base import Address, Header, Message
from tests.runtime.players import Add

ME = Address("me", "", 1)


class Line:
    """A transport that takes what it is given, while it has room."""

    def __init__(self) -> None:
        self.sent: list[Any] = []
        self.room = 1 << 30

    def connect(self, node: str, incarnation: int, endpoint: str) -> None: ...

    def disconnect(self, node: str) -> None: ...

    def send(self, node: str, header: Header, body: Message) -> bool:
        if self.room <= 0:
            return False
        self.room -= 1
        self.sent.append(body)
        return True


def header() -> Header:
    return Header(Address("other", "adder", 1), ME)


def made() -> tuple[Peers, Line]:
    line = Line()
    peers = Peers(ME, line)  # type: ignore[arg-type]
    peers.connect("other", 1, "x")
    return peers, line


def test_messages_to_a_peer_that_is_being_connected_wait_for_the_link() -> None:
    peers, line = made()
    assert peers.send("other", header(), Add(1))
    assert peers.control("other", Add(2))
    assert peers.send("other", header(), Add(3))
    assert not line.sent
    peers.link_up("other", 1)
    assert line.sent == [Add(2), Add(1), Add(3)]  # orders first
    assert peers.send("other", header(), Add(4))
    assert line.sent[-1] == Add(4)


def test_messages_keep_their_order_when_the_line_takes_them_later() -> None:
    peers, line = made()
    for i in range(4):
        assert peers.send("other", header(), Add(i))
    line.room = 2
    peers.link_up("other", 1)
    line.room = 100
    assert peers.send("other", header(), Add(4))  # not before those that wait
    peers.flush()
    assert line.sent == [Add(i) for i in range(5)]


def test_what_waits_is_bounded_and_ends_with_its_peer() -> None:
    peers, line = made()
    for i in range(HELD_MAX):
        assert peers.send("other", header(), Add(i))
    assert not peers.send("other", header(), Add(0))
    peers.connect("other", 2, "y")  # a later life
    peers.link_up("other", 2)
    assert not line.sent
    assert not peers.send("nobody", header(), Add(0))


def test_a_heartbeat_does_not_wait_and_says_whether_it_went() -> None:
    peers, line = made()
    assert not peers.beat("nobody", Add(0))
    assert not peers.beat("other", Add(1))
    peers.link_up("other", 1)
    assert not line.sent
    assert peers.beat("other", Add(2))
    line.room = 0
    assert not peers.beat("other", Add(3))
    assert peers.control("other", Add(4))  # which waits
    line.room = 100
    assert not peers.beat("other", Add(5))  # nor does it overtake orders
    peers.flush()
    assert line.sent == [Add(2), Add(4)]
