"""This file keeps the links of one node: which peers are up, and the control messages that wait.

It does not know actors. User messages that a link refuses go back to their sender at once; those to
a peer whose link is just being made wait here, bounded: the peer lives, and nobody would tell their
sender when to try again. Control messages (start, stop, who is where) must not be lost while a link
lives, so they wait as well. Laws: control messages to one incarnation of a peer arrive in order, or
the link is reported lost; user messages keep their order; what waits for a peer ends with it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from actors.runtime.transport.base import Transport
from messages.base import Address, Header, Lane, Message

CONTROL_MAX = 16_384
HELD_MAX = 4096  # as many as the window of a link takes


class Peer:
    __slots__ = ("held", "incarnation", "is_up", "name", "waiting")

    def __init__(self, name: str, incarnation: int) -> None:
        self.name = name
        self.incarnation = incarnation
        self.is_up = False
        self.waiting: deque[Message] = deque()  # control
        self.held: deque[tuple[Header, Message]] = deque()  # the users', until the link is up


class Peers:
    """Of one node. Without a transport (inline placement) there are none."""

    def __init__(
        self,
        me: Address,
        transport: Transport | None,
        told: Callable[[Header, Message], None] | None = None,
    ) -> None:
        """`told` hears of what actors send."""
        self._me = me
        self._transport = transport
        self._told = told
        self._peers: dict[str, Peer] = {}

    def connect(self, name: str, incarnation: int, endpoint: str) -> None:
        """Starts the link to one incarnation; an earlier one's is dropped, with what waits."""
        peer = self._peers.get(name)
        if peer is not None and peer.incarnation >= incarnation:
            return
        assert self._transport is not None
        if peer is not None:
            self._transport.disconnect(name)
        self._peers[name] = Peer(name, incarnation)
        self._transport.connect(name, incarnation, endpoint)

    def disconnect(self, name: str, incarnation: int) -> None:
        peer = self._peers.get(name)
        if peer is not None and peer.incarnation <= incarnation:
            del self._peers[name]
            if self._transport is not None:
                self._transport.disconnect(name)

    def incarnation(self, name: str) -> int | None:
        peer = self._peers.get(name)
        return peer.incarnation if peer is not None else None

    def link_up(self, name: str, incarnation: int) -> bool:
        """Returns whether it is news."""
        peer = self._peers.get(name)
        if peer is None or peer.incarnation != incarnation or peer.is_up:
            return False
        peer.is_up = True
        self._flush(peer)
        return True

    def link_down(self, name: str) -> int | None:
        """Returns the incarnation whose link is lost, if it is one of ours."""
        peer = self._peers.pop(name, None)
        return peer.incarnation if peer is not None else None

    def send(self, name: str, header: Header, body: Message) -> bool:
        peer = self._peers.get(name)
        if peer is None:
            return False
        assert self._transport is not None
        if peer.is_up and not peer.held:
            if not self._transport.send(name, header, body):
                return False
        elif len(peer.held) >= HELD_MAX:
            return False
        else:
            peer.held.append((header, body))
        if self._told is not None and header.lane is not Lane.CONTROL:
            self._told(header, body)
        return True

    def control(self, name: str, message: Message) -> bool:
        """Sends to the peer's node itself, now or as soon as it can. False: there is no such peer,
        or too much waits for it; then the peer is as good as lost."""
        peer = self._peers.get(name)
        if peer is None or len(peer.waiting) >= CONTROL_MAX:
            return False
        peer.waiting.append(message)
        self._flush(peer)
        return True

    def beat(self, name: str, message: Message) -> bool:
        """Sends what need not wait: the next one says it as well. Returns whether it went."""
        peer = self._peers.get(name)
        if peer is None or not peer.is_up or peer.waiting:
            return False
        return self.send(name, self._header(peer), message)

    def flush(self) -> None:
        """Tries again what links refused. Called with each heartbeat."""
        for peer in list(self._peers.values()):
            self._flush(peer)

    def is_up(self, name: str) -> bool:
        peer = self._peers.get(name)
        return peer is not None and peer.is_up

    def names(self) -> list[str]:
        return list(self._peers)

    def _flush(self, peer: Peer) -> None:
        if not peer.is_up or self._transport is None:
            return
        header = self._header(peer)
        while peer.waiting:
            if not self._transport.send(peer.name, header, peer.waiting[0]):
                return
            peer.waiting.popleft()
        while peer.held:
            if not self._transport.send(peer.name, *peer.held[0]):
                return
            peer.held.popleft()

    def _header(self, peer: Peer) -> Header:
        address = Address(peer.name, "", peer.incarnation)
        return Header(address, sender=self._me, lane=Lane.CONTROL)
