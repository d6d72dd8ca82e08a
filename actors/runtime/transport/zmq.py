"""This file carries messages between processes over ZMQ ipc sockets. The only importer of zmq.

It does not know actors, nor what makes a link correct (`link.py`): it moves frames. A node binds
one ROUTER, its inbox, and has one DEALER for each peer; what A sends to B always goes from A's
DEALER to B's inbox, so that a pair has one pipe each way. Heartbeats have sockets of their own,
which bulk cannot delay.

Laws: no send waits; what ZMQ does not take stays in the link's window, which is bounded; each
routing id is used once (`node#incarnation/pipe`), since a ROUTER ignores a second connection with
the id of the first; a frame counts only if it comes by the pipe of the last valid hello; bytes that
are no frame of a known peer are refused and counted, and change nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
from pathlib import Path

import msgspec
import zmq

from actors.runtime import rundir
from actors.runtime.frame import AnyFrame, Hello, Identity
from actors.runtime.link import Arrived, Counts, Event, Gone, Limits, Link, Outgoing, Up
from actors.runtime.pulse import Pulse
from actors.runtime.schema import hash_messages
from actors.runtime.transport.base import Inbound
from actors.runtime.transport.routes import Route, Routes
from messages.base import Header, Message
from messages.system import Cause, Reason

BATCH_MAX = 128  # messages read before other callbacks of the loop get their turn
COPY_BYTES_MAX = 65_536  # a larger body is handed to ZMQ, and by ZMQ to the decoder, uncopied
SLACK_BYTES = 1 << 20  # a frame's header, beside the largest body of the window
BULK_HWM = 1000
BEAT_HWM = 4
LINGER_MS = 50  # so long may a last Bye keep a closed socket's pipe
FRESH_PIPE_PROBES = 3  # unanswered so often, the pipe is replaced
TROUBLES = ("resent", "duplicate", "gap", "early", "stale", "refused", "full", "lost")

# As plain ints: an enum's `&` and `|` cost as much as a small message's decoding.
READABLE, WRITABLE = int(zmq.POLLIN), int(zmq.POLLOUT)
NO_WAIT, MORE_NO_WAIT = int(zmq.DONTWAIT), int(zmq.DONTWAIT | zmq.SNDMORE)


class Peer:
    """What the transport holds for one peer: the link, its sockets, and a frame ZMQ didn't take."""

    def __init__(self, link: Link, path: Path) -> None:
        self.link = link
        self.path = path
        self.dealer: zmq.Socket[bytes] | None = None
        self.beat: zmq.Socket[bytes] | None = None
        self.pipe_in: int | None = None  # the peer's, once its hello has come by it
        self.stuck: Outgoing | None = None
        self.timer: asyncio.TimerHandle | None = None
        self.replaced_at_probe = 0


class ZmqTransport:
    """The transport of one node. All of it runs on the loop that calls `start`."""

    def __init__(
        self,
        node: str,
        incarnation: int,
        *,
        run: str,
        run_dir: Path,
        token: bytes,
        heartbeat_s: float = 0.25,
        hang_s: float = 2.0,
        limits: Limits | None = None,
    ) -> None:
        """Raises ValueError when `run_dir` is too long a name for a socket."""
        self.identity = Identity(
            node=node, incarnation=incarnation, run=run, token=token, schema=hash_messages()
        )
        self.counts = Counts()  # of all links together
        self.refused: dict[str, int] = {}  # frames that were not taken, by why
        self.limits = limits or Limits()
        self._path = rundir.socket_path(run_dir, node, incarnation)
        self._heartbeat_s = heartbeat_s
        self._hang_s = hang_s
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(AnyFrame)
        self._peers: dict[str, Peer] = {}
        self._routes = Routes()
        self._session = itertools.count(1)
        self._pipe = itertools.count(1)
        self._lock_fd: int | None = None
        self._bound: list[zmq.Socket[bytes]] = []
        self._ticker: asyncio.TimerHandle | None = None
        self._is_draining = False  # a further batch of the inbox is scheduled

    @property
    def endpoint(self) -> str:
        return f"ipc://{self._path}"

    @property
    def pulse_late_count(self) -> int:
        """How often this node's loop was too late to accuse a peer of hanging."""
        return self._pulse.late_count

    async def start(self, inbound: Inbound) -> None:
        """Binds. Raises FileExistsError when another process has this node's socket."""
        rundir.check_owner(self._path)
        self._lock_fd = rundir.lock_pid_file(self._pid_path)
        if self._lock_fd is None:
            raise FileExistsError(f"{self._path} is bound by another process")
        self._inbound = inbound
        self._loop = asyncio.get_running_loop()
        # Made here, in the process that uses it: a context does not survive a fork.
        self._context = zmq.Context()
        try:
            self._inbox = self._bind(self._path, BULK_HWM)
            self._beats = self._bind(rundir.beat_path(self._path), BEAT_HWM * 64)
        except zmq.ZMQError:
            await self.close()
            raise
        self._loop.add_reader(_fd(self._inbox), self._read_inbox)
        self._loop.add_reader(_fd(self._beats), self._read_beats)
        self._pulse = Pulse(beat_s=self._heartbeat_s, hang_s=self._hang_s, now_s=self._loop.time())
        self._ticker = self._loop.call_later(self._heartbeat_s, self._tick)

    @property
    def _pid_path(self) -> Path:
        return self._path.with_name(self._path.name + ".pid")

    def _bind(self, path: Path, hwm: int) -> zmq.Socket[bytes]:
        socket = self._context.socket(zmq.ROUTER)
        self._bound.append(socket)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        socket.setsockopt(zmq.RCVHWM, hwm)
        socket.setsockopt(zmq.SNDHWM, hwm)
        socket.setsockopt(zmq.MAXMSGSIZE, self.limits.bytes_max + SLACK_BYTES)
        socket.setsockopt(zmq.HANDSHAKE_IVL, 2000)
        umask = os.umask(0o177)
        try:
            socket.bind(f"ipc://{path}")
        finally:
            os.umask(umask)
        return socket

    # Links.

    def connect(self, node: str, incarnation: int, endpoint: str) -> None:
        """Starts the link to `node`; one to another incarnation of it is ended (see `disconnect`).

        Raises ValueError for an endpoint that is not ipc, and PermissionError for one that others
        than this user could have bound.
        """
        scheme, _, name = endpoint.partition("://")
        if scheme != "ipc":
            raise ValueError(f"not an ipc endpoint: {endpoint}")
        path = Path(name)
        rundir.check_owner(path)
        peer = self._peers.get(node)
        if peer is not None:
            link = peer.link
            if link.peer_incarnation == incarnation and link.reason is None and peer.path == path:
                return
            self._end(node, Reason(cause=Cause.UNREACHABLE, detail="fenced by a later life"))
        self._begin(node, incarnation, path)

    def _begin(self, node: str, incarnation: int, path: Path) -> Peer:
        link = Link(
            self.identity,
            node,
            incarnation,
            session=next(self._session),
            now_s=self._loop.time(),
            limits=self.limits,
            counts=self.counts,
        )
        peer = self._peers[node] = Peer(link, path)
        self._open_pipes(peer)
        self._flush(node, peer)
        return peer

    def _open_pipes(self, peer: Peer) -> None:
        """New sockets with a new routing id, whatever became of the ones before."""
        self._close_pipes(peer)
        me = self.identity
        name = Route(me.node, me.incarnation, next(self._pipe)).name
        peer.dealer = self._dial(name, peer.path, BULK_HWM)
        peer.beat = self._dial(name, rundir.beat_path(peer.path), BEAT_HWM)
        self._loop.add_reader(_fd(peer.dealer), self._writable, peer)

    def _dial(self, name: bytes, path: Path, hwm: int) -> zmq.Socket[bytes]:
        socket = self._context.socket(zmq.DEALER)
        socket.setsockopt(zmq.ROUTING_ID, name)
        socket.setsockopt(zmq.LINGER, 0)
        # Nothing is queued for a connection that isn't there: it would go to a successor.
        socket.setsockopt(zmq.IMMEDIATE, 1)
        socket.setsockopt(zmq.SNDHWM, hwm)
        socket.setsockopt(zmq.RCVHWM, 1)
        socket.setsockopt(zmq.MAXMSGSIZE, 4096)  # an inbox never answers by this pipe
        socket.setsockopt(zmq.RECONNECT_IVL, 20)
        socket.setsockopt(zmq.RECONNECT_IVL_MAX, 1000)
        socket.setsockopt(zmq.HANDSHAKE_IVL, 2000)
        socket.connect(f"ipc://{path}")
        return socket

    def _close_pipes(self, peer: Peer, linger_ms: int = 0) -> None:
        if peer.dealer is not None:
            self._loop.remove_reader(_fd(peer.dealer))
            peer.dealer.close(linger_ms)
            peer.dealer = None
        if peer.beat is not None:
            peer.beat.close(0)
            peer.beat = None
        peer.stuck = None

    def disconnect(self, node: str) -> None:
        """Ends the link; `link_down` is not called. Does nothing where there is none."""
        self._end(node, Reason(cause=Cause.UNREACHABLE, detail="the peer ended the link"))

    def _end(self, node: str, reason: Reason) -> None:
        peer = self._peers.pop(node, None)
        if peer is None:
            return
        peer.link.close(reason)
        peer.stuck = None
        self._flush(node, peer)
        self._close_pipes(peer, LINGER_MS)
        if peer.timer is not None:
            peer.timer.cancel()
        self._pulse.drop(node)

    def _fall(self, node: str, peer: Peer, gone: Gone) -> None:
        """The link is down, by the peer's doing or by time. It stays so until `connect`, unless
        the peer has begun afresh."""
        was_current = self._peers.get(node) is peer
        if was_current:
            self._end(node, gone.reason)
            self._inbound.link_down(node, gone.reason)
        if gone.afresh and was_current and node not in self._peers:
            self._begin(node, peer.link.peer_incarnation, peer.path)

    # Sending.

    def send(self, node: str, header: Header, body: Message) -> bool:
        """Queues one message. False: no link, or its window is full, or the body is larger than
        the whole window; nothing was queued."""
        peer = self._peers.get(node)
        if peer is None:
            return False
        if not peer.link.send(header, self._encoder.encode(body), self._loop.time()):
            return False
        self._flush(node, peer)
        return True

    def _flush(self, node: str, peer: Peer) -> None:
        """Hands to ZMQ what the link has and ZMQ takes; the rest waits for `_writable`."""
        link = peer.link
        now_s = self._loop.time()
        while peer.dealer is not None:
            outgoing = peer.stuck or link.poll(now_s)
            if outgoing is None:
                break
            if not self._transmit(peer.dealer, outgoing):
                peer.stuck = outgoing
                break
            peer.stuck = None
        wake_s = link.wake_s()
        if wake_s is not None and (peer.timer is None or wake_s < peer.timer.when()):
            if peer.timer is not None:
                peer.timer.cancel()
            peer.timer = self._loop.call_at(wake_s, self._wake, node, peer)

    def _transmit(self, dealer: zmq.Socket[bytes], outgoing: Outgoing) -> bool:
        frame, body = outgoing
        encoded = self._encoder.encode(frame)
        try:
            if body is None:
                dealer.send(encoded, NO_WAIT)
            else:
                dealer.send(encoded, MORE_NO_WAIT)
                dealer.send(body, NO_WAIT, copy=len(body) < COPY_BYTES_MAX)
        except zmq.Again:
            return False
        return True

    def _writable(self, peer: Peer) -> None:
        # Reading EVENTS is what clears the descriptor.
        if peer.dealer is not None and _events(peer.dealer) & WRITABLE:
            self._flush(peer.link.peer, peer)

    def _wake(self, node: str, peer: Peer) -> None:
        peer.timer = None
        if self._peers.get(node) is not peer:
            return
        link = peer.link
        self._handle(node, peer, link.tick(self._loop.time()))
        if link.reason is None and link.probes_unanswered != peer.replaced_at_probe:
            peer.replaced_at_probe = link.probes_unanswered
            if link.probes_unanswered and link.probes_unanswered % FRESH_PIPE_PROBES == 0:
                self._open_pipes(peer)
                link.fresh_pipe()
        self._flush(node, peer)

    # Receiving.

    def _read_inbox(self) -> None:
        """Reads at most a batch. The descriptor tells only of changes, so whoever stops early must
        come back by himself."""
        if not self._is_draining:
            self._drain()

    def _drain(self) -> None:
        self._is_draining = True
        is_empty = False
        try:
            for _ in range(BATCH_MAX):
                if self._inbox.closed or not _events(self._inbox) & READABLE:
                    is_empty = True
                    return
                self._take(self._inbox.recv_multipart(NO_WAIT, copy=False))
        finally:
            self._is_draining = not is_empty
            if not is_empty:
                self._loop.call_soon(self._drain)

    def _take(self, frames: list[zmq.Frame]) -> None:
        if not 2 <= len(frames) <= 3:
            self._refuse("shape")
            return
        route = self._routes.read(frames[0].bytes)
        if route is None:
            self._refuse("route")
            return
        peer = self._peers.get(route.node)
        if peer is None or peer.link.peer_incarnation != route.incarnation:
            self._refuse("stranger")  # a peer not yet connected, or an earlier life of one
            return
        try:
            frame: AnyFrame = self._decoder.decode(frames[1].buffer)
        except (msgspec.MsgspecError, RecursionError, ValueError):
            self._refuse("unreadable")
            return
        body: bytes | memoryview | None = None
        if len(frames) == 3:
            body = frames[2].bytes if len(frames[2]) < COPY_BYTES_MAX else frames[2].buffer
        if isinstance(frame, Hello):
            self._take_hello(route, peer, frame)
        elif route.pipe != peer.pipe_in:
            self._refuse("pipe")
        else:
            self._handle(route.node, peer, peer.link.receive(frame, body, self._loop.time()))
            self._flush(route.node, peer)

    def _take_hello(self, route: Route, peer: Peer, hello: Hello) -> None:
        if peer.pipe_in is not None and route.pipe < peer.pipe_in:
            self._refuse("pipe")  # what is left of a pipe that the peer has replaced
            return
        link = peer.link
        before = self.counts.refused + self.counts.stale
        events = link.receive(hello, None, self._loop.time())
        if self.counts.refused + self.counts.stale == before:
            peer.pipe_in = route.pipe
        self._handle(route.node, peer, events)
        self._flush(route.node, peer)
        current = self._peers.get(route.node)
        if current is not None and current is not peer:
            self._take_hello(route, current, hello)  # begun afresh: this hello is the new one's

    def _handle(self, node: str, peer: Peer, events: tuple[Event, ...]) -> None:
        for event in events:
            match event:
                case Arrived(header, body):
                    self._inbound.arrive(node, header, body)
                case Up():
                    self._pulse.add(node, self._loop.time())
                    self._inbound.link_up(node, peer.link.peer_incarnation)
                case Gone():
                    self._fall(node, peer, event)

    def _refuse(self, why: str) -> None:
        self.refused[why] = self.refused.get(why, 0) + 1

    # Heartbeats.

    def be_patient(self, node: str, factor: float) -> None:
        self._pulse.be_patient(node, factor, self._loop.time())

    def _read_beats(self) -> None:
        now_s = self._loop.time()
        for _ in range(BATCH_MAX):
            if self._beats.closed or not _events(self._beats) & READABLE:
                return
            frames = self._beats.recv_multipart(NO_WAIT)
            route = self._routes.read(frames[0])
            peer = None if route is None else self._peers.get(route.node)
            if route is None or peer is None or route.pipe != peer.pipe_in:
                self._refuse("beat")
            elif route.incarnation == peer.link.peer_incarnation:
                self._pulse.hear(route.node, now_s)

    def _tick(self) -> None:
        """Once a heartbeat. Also reads what a missed edge of a descriptor may have left."""
        self._ticker = self._loop.call_later(self._heartbeat_s, self._tick)
        self._read_inbox()
        self._read_beats()
        for node, peer in list(self._peers.items()):
            if peer.link.is_up and peer.beat is not None:
                with contextlib.suppress(zmq.Again):  # it reads none: that is for it to answer
                    peer.beat.send(b"", NO_WAIT)
            self._flush(node, peer)
        for node in self._pulse.tick(self._loop.time()):
            peer = self._peers[node]
            reason = Reason(cause=Cause.HUNG, detail=f"no heartbeat for {self._hang_s:g} s")
            self._fall(node, peer, Gone(reason))

    def troubles(self) -> dict[str, int]:
        """Of all links together; `frame_*` are frames that belonged to none."""
        counts = {f"frame_{why}": count for why, count in self.refused.items()}
        for kind in TROUBLES:
            count = getattr(self.counts, kind)
            if count:
                counts[kind] = count
        return counts

    # The end.

    async def close(self) -> None:
        """Ends all links, frees sockets and paths. Idempotent."""
        if self._lock_fd is None:
            return
        for node in list(self._peers):
            self.disconnect(node)
        if self._ticker is not None:
            self._ticker.cancel()
        for socket in self._bound:
            self._loop.remove_reader(_fd(socket))
            socket.close(0)
        self._context.term()  # waits for a Bye on its way, LINGER_MS at most
        for path in (self._path, rundir.beat_path(self._path), self._pid_path):
            path.unlink(missing_ok=True)
        os.close(self._lock_fd)
        self._lock_fd = None

    def check(self) -> None:
        """Asserts the laws of every link."""
        for node, peer in self._peers.items():
            peer.link.check()
            assert peer.link.peer == node, (peer.link.peer, node)
            assert peer.link.reason is None, f"{node} is down and still listed"


def _fd(socket: zmq.Socket[bytes]) -> int:
    return int(socket.getsockopt(zmq.FD))


def _events(socket: zmq.Socket[bytes]) -> int:
    return int(socket.getsockopt(zmq.EVENTS))
