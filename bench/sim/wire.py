"""This file carries frames between simulated nodes, and does to them what networks do.

It does not know actors. The transport is the real one of processes with its links, sessions,
acknowledgements and heartbeats; only the sockets are replaced, by a wire that delays, loses,
repeats, clogs and cuts by a seed.

Laws: frames of one pair of nodes keep their order; with all trouble switched off nothing is lost;
whatever is done is a function of the seed, and is counted.
"""

from __future__ import annotations

import asyncio
import contextvars
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import zmq

from actors.runtime.clock import rng_for
from actors.runtime.link import Gone, Limits, Outgoing
from actors.runtime.pulse import Pulse
from actors.runtime.transport.base import Inbound
from actors.runtime.transport.routes import Route
from actors.runtime.transport.zmq import Peer, ZmqTransport
from messages.system import Cause, Reason

Pair = tuple[str, str]  # from, to
RUN_DIR = Path("/sim")
TOKEN = b"simulated"


class Trouble:
    """What the wire does at the moment. Rates are for each frame."""

    def __init__(self, *, drop: float = 0.0, repeat: float = 0.0, delay_s: float = 0.0) -> None:
        self.drop = drop
        self.repeat = repeat
        self.delay_s = delay_s  # mean of an exponential
        self.clogged: dict[Pair, float] = {}  # nothing arrives before
        self.cut: dict[Pair, float] = {}  # what is sent before is lost

    def heal(self) -> None:
        self.drop = self.repeat = 0.0
        self.clogged.clear()
        self.cut.clear()


class Wire:
    """All pipes of one world."""

    def __init__(self, seed: int, trouble: Trouble, tell: Callable[[str, str, list[bytes]], None]):
        self.trouble = trouble
        self.fired: Counter[str] = Counter()
        self.transports: dict[str, SimTransport] = {}
        self._tell = tell  # of each frame that arrives, for the chain of events
        self._rng = rng_for(seed, "network")
        self._last_s: dict[tuple[str, str, bool], float] = {}

    def drawn(self) -> float:
        """A number that tells how much chance was used."""
        return self._rng.random()

    def carry(self, source: SimTransport, path: Path, name: bytes, parts: list[bytes]) -> None:
        """Takes one frame; it arrives later, perhaps. No parts: a heartbeat."""
        target = self.transports.get(f"ipc://{path}")
        if target is None:
            return  # the node is dead
        loop, trouble, rng = source.loop, self.trouble, self._rng
        pair = (source.identity.node, target.identity.node)
        now_s = loop.time()
        if trouble.cut.get(pair, 0.0) > now_s:
            self.fired["frame cut off"] += 1
            return
        if rng.random() < trouble.drop:
            self.fired["frame dropped"] += 1
            return
        copies = 1
        if rng.random() < trouble.repeat:
            self.fired["frame repeated"] += 1
            copies = 2
        key = (*pair, not parts)
        for _ in range(copies):
            due_s = now_s + (rng.expovariate(1.0 / trouble.delay_s) if trouble.delay_s else 0.0)
            due_s = max(due_s, self._last_s.get(key, 0.0), trouble.clogged.get(pair, 0.0))
            self._last_s[key] = due_s
            loop.call_at(due_s, self._arrive, target, name, parts, context=target.context)

    def _arrive(self, target: SimTransport, name: bytes, parts: list[bytes]) -> None:
        if target.is_closed:
            return
        if parts:
            self._tell(name.decode(), target.identity.node, parts)
        target.take(name, parts)


class SimPipe:
    """In the place of a DEALER."""

    def __init__(self, name: bytes) -> None:
        self.name = name


class SimTransport(ZmqTransport):
    """The transport of one simulated node."""

    def __init__(
        self,
        wire: Wire,
        node: str,
        incarnation: int,
        *,
        heartbeat_s: float,
        hang_s: float,
        context: contextvars.Context,
        limits: Limits | None = None,
    ) -> None:
        super().__init__(
            node,
            incarnation,
            run="simulation",
            run_dir=RUN_DIR,
            token=TOKEN,
            heartbeat_s=heartbeat_s,
            hang_s=hang_s,
            limits=limits,
        )
        self.wire = wire
        self.context = context
        self.loop = asyncio.get_running_loop()
        self.is_closed = False

    async def start(self, inbound: Inbound) -> None:
        self._inbound = inbound
        self._loop = self.loop
        self.wire.transports[self.endpoint] = self
        self._pulse = Pulse(beat_s=self._heartbeat_s, hang_s=self._hang_s, now_s=self.loop.time())
        self._ticker = self.loop.call_later(self._heartbeat_s, self._tick)

    def connect(self, node: str, incarnation: int, endpoint: str) -> None:
        path = Path(endpoint.removeprefix("ipc://"))
        peer = self._peers.get(node)
        if peer is not None:
            link = peer.link
            if link.peer_incarnation == incarnation and link.reason is None and peer.path == path:
                return
            self._end(node, Reason(Cause.UNREACHABLE, "fenced by a later life"))
        self._begin(node, incarnation, path)

    def _open_pipes(self, peer: Peer) -> None:
        self._close_pipes(peer)
        me = self.identity
        name = Route(me.node, me.incarnation, next(self._pipe)).name
        pipe: Any = SimPipe(name)
        pipe.path = peer.path
        peer.dealer = peer.beat = pipe

    def _close_pipes(self, peer: Peer, linger_ms: int = 0) -> None:
        peer.dealer = peer.beat = None
        peer.stuck = None

    def _transmit(self, dealer: Any, outgoing: Outgoing) -> bool:
        frame, body = outgoing
        parts = [self._encoder.encode(frame)]
        if body is not None:
            parts.append(body)
        if not self.is_closed:
            self.wire.carry(self, dealer.path, dealer.name, parts)
        return True

    def take(self, name: bytes, parts: list[bytes]) -> None:
        """One frame is here."""
        if parts:
            self._take([zmq.Frame(part) for part in (name, *parts)])
            return
        route = self._routes.read(name)
        peer = None if route is None else self._peers.get(route.node)
        if route is None or peer is None or route.pipe != peer.pipe_in:
            self._refuse("beat")
        elif route.incarnation == peer.link.peer_incarnation:
            self._pulse.hear(route.node, self.loop.time())

    def _tick(self) -> None:
        self._ticker = self.loop.call_later(self._heartbeat_s, self._tick)
        for node, peer in list(self._peers.items()):
            if peer.link.is_up and peer.beat is not None:
                pipe: Any = peer.beat
                self.wire.carry(self, pipe.path, pipe.name, [])
            self._flush(node, peer)
        for node in self._pulse.tick(self.loop.time()):
            reason = Reason(Cause.HUNG, f"no heartbeat for {self._hang_s:g} s")
            self._fall(node, self._peers[node], Gone(reason))

    async def close(self) -> None:
        if self.is_closed:
            return
        for node in list(self._peers):
            self.disconnect(node)
        self.vanish()

    def vanish(self) -> None:
        """Ends as a power cut does: nobody is told."""
        self.is_closed = True
        for peer in self._peers.values():
            if peer.timer is not None:
                peer.timer.cancel()
        self._peers.clear()
        if self._ticker is not None:
            self._ticker.cancel()
        self.wire.transports.pop(self.endpoint, None)
