"""This file carries messages between nodes of one process: by reference, encoded, or by seeded
weather.

It does not know actors. Nodes may share a loop (simulation) or have one each in a thread; hand-over
is a deque and a wake flag, so that a burst costs one wake-up. The link is up once both sides have
called `connect`.

Laws: those of `base.py`. Weather delays, loses and cuts, but never reorders one pair's messages and
never delivers twice; all of it is a function of its seed.
"""

from __future__ import annotations

import asyncio
import random
import threading
from collections import deque
from collections.abc import Mapping
from typing import Any, NamedTuple

from actors.runtime.clock import rng_for
from actors.runtime.codec import encode
from actors.runtime.sizes import size_of
from actors.runtime.transport.base import Inbound
from messages.base import Header, Message
from messages.system import Cause, Reason

DRAIN_MAX = 256  # items taken before the loop may do other things


class Pipe:
    """One direction of one session. `taken_*` is written by the receiver's thread only."""

    __slots__ = ("incarnation", "sender", "sent_bytes", "sent_count", "taken_bytes", "taken_count")

    def __init__(self, sender: str, incarnation: int) -> None:
        self.sender = sender
        self.incarnation = incarnation
        self.sent_count = 0
        self.sent_bytes = 0
        self.taken_count = 0
        self.taken_bytes = 0


class Hello(NamedTuple):
    pipe: Pipe
    to_incarnation: int


class Bye(NamedTuple):
    pipe: Pipe
    reason: Reason


class Item(NamedTuple):
    pipe: Pipe
    header: Header
    body: Message | bytes
    size_bytes: int


class Link:
    """This end's view of the link to one incarnation of a peer."""

    __slots__ = ("incarnation", "is_up", "out", "peer", "peer_pipe")

    def __init__(self, incarnation: int, peer: MemoryTransport | None, out: Pipe) -> None:
        self.incarnation = incarnation
        self.peer = peer
        self.out = out
        self.peer_pipe: Pipe | None = None
        self.is_up = False


class Weather:
    """Seeded trouble between the nodes of one loop. The streams of each pair are independent."""

    def __init__(
        self,
        seed: int,
        *,
        delay_s_max: float = 0.0,
        drop_rate: float = 0.0,
    ) -> None:
        self.seed = seed
        self.delay_s_max = delay_s_max
        self.drop_rate = drop_rate
        self.dropped_count = 0
        self._rngs: dict[tuple[str, str], random.Random] = {}
        self._last_s: dict[tuple[str, str], float] = {}

    def drops(self, source: str, target: str) -> bool:
        if self.drop_rate <= 0:
            return False
        is_dropped = self._rng(source, target).random() < self.drop_rate
        self.dropped_count += is_dropped
        return is_dropped

    def arrival_s(self, source: str, target: str, now_s: float) -> float:
        """When a message sent now is there: never before the pair's last one."""
        due_s = now_s
        if self.delay_s_max > 0:
            due_s += self._rng(source, target).uniform(0.0, self.delay_s_max)
        due_s = max(due_s, self._last_s.get((source, target), 0.0))
        self._last_s[source, target] = due_s
        return due_s

    def _rng(self, source: str, target: str) -> random.Random:
        pair = (source, target)
        if pair not in self._rngs:
            self._rngs[pair] = rng_for(self.seed, "weather", source, target)
        return self._rngs[pair]


class MemoryHub:
    """Where the nodes of one process find each other."""

    def __init__(self, *, encodes: bool = False, weather: Weather | None = None) -> None:
        self.encodes = encodes
        self.weather = weather
        self.transports: dict[str, MemoryTransport] = {}

    def cut(self, one: str, other: str, reason: Reason | None = None) -> None:
        """Cuts the link between two nodes: what is under way is lost, both ends are told."""
        why = reason or Reason(Cause.UNREACHABLE, "the link was cut")
        for transport in list(self.transports.values()):
            for name, peer in ((one, other), (other, one)):
                if transport.name == name:
                    transport.lose(peer, why)


class MemoryTransport:
    """The transport of one node."""

    def __init__(
        self,
        hub: MemoryHub,
        name: str,
        incarnation: int,
        *,
        count_max: int = 65_536,
        bytes_max: int = 256 << 20,
    ) -> None:
        self.hub = hub
        self.name = name
        self.incarnation = incarnation
        self.count_max = count_max
        self.bytes_max = bytes_max
        self.endpoint = f"memory://{name}#{incarnation}"
        self._inbound: Inbound | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread_id: int | None = None
        self._links: dict[str, Link] = {}
        self._heard: dict[str, Hello] = {}
        self._inbox: deque[Any] = deque()
        self._late: dict[str, deque[Any]] = {}
        self._is_woken = False
        self._is_closed = False

    async def start(self, inbound: Inbound) -> None:
        self._inbound = inbound
        self._loop = asyncio.get_running_loop()
        self._thread_id = threading.get_ident()
        self.hub.transports[self.endpoint] = self

    def connect(self, node: str, incarnation: int, endpoint: str) -> None:
        link = self._links.get(node)
        if link is not None:
            if link.incarnation == incarnation:
                return
            self.disconnect(node)
        peer = self.hub.transports.get(endpoint)
        pipe = Pipe(self.name, self.incarnation)
        link = self._links[node] = Link(incarnation, peer, pipe)
        if peer is None:
            assert self._loop is not None
            reason = Reason(Cause.UNREACHABLE, f"nobody at {endpoint}")
            self._loop.call_soon(self._lose_link, node, link, reason)
            return
        self._post(peer, Hello(pipe, incarnation))
        heard = self._heard.get(node)
        if heard is not None:
            self._agree(node, link, heard)

    def disconnect(self, node: str) -> None:
        self._end(node, Reason(Cause.UNREACHABLE, "disconnected"))

    def be_patient(self, node: str, factor: float) -> None:
        """Memory has no heartbeats: silence is never taken for death here."""

    def send(self, node: str, header: Header, body: Message) -> bool:
        link = self._links.get(node)
        if link is None or not link.is_up or link.peer is None:
            return False
        pipe = link.out
        carried = encode(body) if self.hub.encodes else body
        size_bytes = len(carried) if isinstance(carried, bytes) else size_of(carried)
        if (
            pipe.sent_count - pipe.taken_count >= self.count_max
            or pipe.sent_bytes - pipe.taken_bytes + size_bytes > self.bytes_max
        ):
            return False
        if self.hub.weather is not None and self.hub.weather.drops(self.name, node):
            return True
        pipe.sent_count += 1
        pipe.sent_bytes += size_bytes
        self._post(link.peer, Item(pipe, header, carried, size_bytes))
        return True

    def troubles(self) -> Mapping[str, int]:
        return {}  # nothing but a full window, of which the sender is told

    async def close(self) -> None:
        """Ends all links; the peers are told."""
        for node in list(self._links):
            self._end(node, Reason(Cause.UNREACHABLE, "closed"))
        self.vanish()

    def vanish(self) -> None:
        """Ends as a power cut does: nobody is told."""
        self._is_closed = True
        self._links.clear()
        self.hub.transports.pop(self.endpoint, None)

    def lose(self, node: str, reason: Reason) -> None:
        """Loses the link to a peer from outside; this node is told."""
        link = self._links.get(node)
        if link is not None:
            self._lose_link(node, link, reason)

    # Between transports

    def _post(self, peer: MemoryTransport, item: Any) -> None:
        weather = self.hub.weather
        if weather is None:
            peer.take(item)
            return
        loop = self._loop
        assert loop is not None and loop is peer._loop, "weather needs one loop for all nodes"
        due_s = weather.arrival_s(self.name, peer.name, loop.time())
        peer._late.setdefault(self.name, deque()).append(item)
        loop.call_at(due_s, peer.take_late, self.name)

    def take(self, item: Any) -> None:
        """Called by the sender, perhaps from its thread."""
        self._inbox.append(item)
        if self._is_woken:
            return
        self._is_woken = True
        loop = self._loop
        if loop is None or self._is_closed:
            return
        if self._thread_id == threading.get_ident():
            loop.call_soon(self._drain)
        else:
            try:
                loop.call_soon_threadsafe(self._drain)
            except RuntimeError:  # its loop is closed: a dead node takes nothing
                self._is_closed = True

    def take_late(self, sender: str) -> None:
        """Under `Weather`: the time of one message of a sender has come, so that of its first.
        (Timers of one time come in any order.)"""
        item = self._late[sender].popleft()
        if not self._is_closed:
            self._handle(item)

    def _drain(self) -> None:
        self._is_woken = False  # before taking: an append after the last look wakes again
        for _ in range(DRAIN_MAX):
            if not self._inbox:
                return
            item = self._inbox.popleft()
            if not self._is_closed:
                self._handle(item)
        if not self._is_woken:
            self._is_woken = True
            assert self._loop is not None
            self._loop.call_soon(self._drain)

    def _handle(self, item: Any) -> None:
        pipe: Pipe = item.pipe
        link = self._links.get(pipe.sender)
        assert self._inbound is not None
        match item:
            case Item(_, header, body, size_bytes):
                pipe.taken_count += 1
                pipe.taken_bytes += size_bytes
                if link is not None and link.peer_pipe is pipe:
                    self._inbound.arrive(pipe.sender, header, body)
            case Hello():
                if item.to_incarnation != self.incarnation:
                    return
                self._heard[pipe.sender] = item
                if link is not None:
                    self._agree(pipe.sender, link, item)
            case Bye(_, reason):
                heard = self._heard.get(pipe.sender)
                if heard is not None and heard.pipe is pipe:
                    del self._heard[pipe.sender]
                if link is not None and link.peer_pipe is pipe:
                    self._lose_link(pipe.sender, link, reason)

    def _agree(self, node: str, link: Link, hello: Hello) -> None:
        if link.incarnation != hello.pipe.incarnation or link.is_up:
            return
        link.is_up = True
        link.peer_pipe = hello.pipe
        assert self._inbound is not None
        self._inbound.link_up(node, link.incarnation)

    def _end(self, node: str, reason: Reason) -> None:
        link = self._links.pop(node, None)
        if link is not None:
            self._heard.pop(node, None)
            if link.peer is not None:
                self._post(link.peer, Bye(link.out, reason))

    def _lose_link(self, node: str, link: Link, reason: Reason) -> None:
        if self._links.get(node) is link:
            del self._links[node]
            self._heard.pop(node, None)
            assert self._inbound is not None
            self._inbound.link_down(node, reason)
