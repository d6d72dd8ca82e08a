"""This file is one end of a link between two nodes, as a state machine: order, resend, fencing.

It does not know sockets, clocks or actors: time is an argument, frames come in by `receive` and go
out by `poll`, and whoever owns it moves them. A link joins one incarnation of a node to one of
another, and one session of it: when either end starts afresh, both do.

Laws, asserted by `check` and by the tests over a lossy wire: a message is delivered at most once
and in order; nothing is delivered before both ends agree on who they are and which session this is;
the window never holds more than its limits; a link that is down stays down, and its window is
empty: what was sent to one life is never sent to the next.
"""

from __future__ import annotations

import hmac
from collections import deque

import msgspec

from actors.runtime.frame import (
    PROTOCOL,
    Ack,
    AnyFrame,
    Bye,
    Data,
    Hello,
    Identity,
    Probe,
    Stage,
)
from messages.base import Header
from messages.system import Cause, Reason

PROBES_MIN = 3  # without an answer, before a link is lost for it


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """Bounds and times of a link. Times double at each repetition, up to `repeat_s_max`."""

    count_max: int = 4096  # messages not yet acknowledged
    bytes_max: int = 64 << 20
    ack_every: int = 64  # messages; the timer serves the rest
    # Nobody waits for an ack, it only empties the window; sooner, it would be most of what an idle
    # node does. A probe is sent only when an ack is overdue.
    ack_s: float = 0.5
    hello_s: float = 0.05
    probe_s: float = 1.0
    repeat_s_max: float = 2.0
    stall_s: float = 30.0  # a window without progress for so long: the link is lost


class Counts(msgspec.Struct):
    """What happened, for metrics. Only ever grows."""

    sent: int = 0
    delivered: int = 0
    resent: int = 0
    duplicate: int = 0
    gap: int = 0
    early: int = 0  # data before the hello
    stale: int = 0  # hello of another life or session
    refused: int = 0  # hello with a wrong token, run, schema or protocol
    full: int = 0
    lost: int = 0  # in the window when the link went down; whether they arrived is unknown


class Item(msgspec.Struct, frozen=True, gc=False):
    seq: int
    header: Header
    body: bytes


class Up(msgspec.Struct, frozen=True):
    """Both ends agree."""


class Arrived(msgspec.Struct, frozen=True, gc=False):
    header: Header  # deadline on the receiver's clock
    body: bytes | memoryview


class Gone(msgspec.Struct, frozen=True):
    """The link is down. `afresh`: the peer has begun a new session, which deserves a new link."""

    reason: Reason
    afresh: bool = False


Event = Up | Arrived | Gone
Outgoing = tuple[AnyFrame, bytes | None]
BODY_OVERHEAD = 64  # bytes a message costs beside its body, so that empty ones count too


class Link:
    """One end. After `receive`, `send` or `tick`, call `poll` until it gives None."""

    def __init__(
        self,
        me: Identity,
        peer: str,
        peer_incarnation: int,
        *,
        session: int,
        now_s: float,
        limits: Limits | None = None,
        counts: Counts | None = None,
    ) -> None:
        self.me = me
        self.peer = peer
        self.peer_incarnation = peer_incarnation
        self.session = session
        self.limits = limits or Limits()
        self.counts = counts or Counts()
        self.stage = Stage.CALLING
        self.peer_session: int | None = None
        self.reason: Reason | None = None  # set once down
        # Outgoing: [acked+1 .. next_seq) = flying, then unsent.
        self._flying: deque[Item] = deque()
        self._unsent: deque[Item] = deque()
        self._bytes = 0
        self._acked = 0
        self._next_seq = 1
        # Incoming.
        self._received = 0
        self._unacked_count = 0
        self._unacked_bytes = 0
        self._gap_told: int | None = None
        # What `poll` owes.
        self._hello_due = True
        self._ack_due = False
        self._gap_due = False
        self._probe_due = False
        self._answer_due: int | None = None  # a probe's number
        self._bye_due = False
        # Timers, absolute.
        self._hello_at_s: float | None = now_s + self.limits.hello_s
        self._hello_wait_s = self.limits.hello_s
        self._ack_at_s: float | None = None
        self._probe_at_s: float | None = None
        self._probe_wait_s = self.limits.probe_s
        self._probe_count = 0
        self._probe_last_seq = 0  # the last one transmitted before the probe
        self._progress_s = now_s
        self.probes_unanswered = 0

    @property
    def is_up(self) -> bool:
        return self.stage is Stage.AGREED and self.reason is None

    @property
    def window_count(self) -> int:
        return len(self._flying) + len(self._unsent)

    # Sending.

    def send(self, header: Header, body: bytes, now_s: float) -> bool:
        """Queues one message. False: not up, or the window is full; nothing was queued."""
        if not self.is_up:
            return False
        size = len(body) + BODY_OVERHEAD
        window_count = self.window_count
        if window_count >= self.limits.count_max or self._bytes + size > self.limits.bytes_max:
            self.counts.full += 1
            return False
        if window_count == 0:
            self._progress_s = now_s
            self._probe_at_s = now_s + self._probe_wait_s
        self._unsent.append(Item(self._next_seq, header, body))
        self._next_seq += 1
        self._bytes += size
        return True

    def poll(self, now_s: float) -> Outgoing | None:
        """The next frame to transmit, or None. It counts as transmitted: do not drop it."""
        if self.reason is not None:
            if not self._bye_due:
                return None
            self._bye_due = False
            return Bye(self.session, self.reason.detail), None
        if self._hello_due:
            self._hello_due = False
            return self._poll_hello(), None
        if self.stage is not Stage.AGREED:
            return None
        if self._ack_due or self._gap_due or self._answer_due is not None:
            return self._poll_ack(), None
        if self._unsent:
            item = self._unsent.popleft()
            self._flying.append(item)
            self.counts.sent += 1
            self._ack_settle()
            header = item.header
            if header.deadline_s is not None:
                header = msgspec.structs.replace(header, deadline_s=header.deadline_s - now_s)
            return Data(item.seq, self._received, header), item.body
        if self._probe_due:
            self._probe_due = False
            self._probe_count += 1
            self._probe_last_seq = self._next_seq - 1
            return Probe(self._probe_count), None
        return None

    def _poll_hello(self) -> Hello:
        me = self.me
        return Hello(
            protocol=PROTOCOL,
            schema=me.schema,
            run=me.run,
            token=me.token,
            node=me.node,
            incarnation=me.incarnation,
            session=self.session,
            to_incarnation=self.peer_incarnation,
            heard_session=self.peer_session,
            stage=self.stage,
            received=self._received,
        )

    def _poll_ack(self) -> Ack:
        ack = Ack(self._received, self._answer_due, self._gap_due)
        self._answer_due = None
        self._gap_due = False
        self._ack_settle()
        return ack

    def _ack_settle(self) -> None:
        """What was received is on its way to the peer."""
        self._ack_due = False
        self._ack_at_s = None
        self._unacked_count = 0
        self._unacked_bytes = 0

    # Receiving.

    def receive(
        self, frame: AnyFrame, body: bytes | memoryview | None, now_s: float
    ) -> tuple[Event, ...]:
        """Takes one frame of the peer; gives what it means for the owner, in order."""
        if self.reason is not None:
            return ()
        match frame:
            case Data():
                return self._receive_data(frame, b"" if body is None else body, now_s)
            case Hello():
                return self._receive_hello(frame, now_s)
        if self.stage is Stage.CALLING:
            self.counts.early += 1
            return ()
        match frame:
            case Ack():
                self._receive_ack(frame, now_s)
            case Probe():
                self._answer_due = frame.count
            case Bye():
                if frame.session == self.peer_session:
                    return self._fall(Cause.UNREACHABLE, frame.detail or "the peer ended the link")
                self.counts.stale += 1
        return ()

    def _receive_data(
        self, frame: Data, body: bytes | memoryview, now_s: float
    ) -> tuple[Event, ...]:
        if self.stage is Stage.CALLING:
            self.counts.early += 1
            return ()
        # The peer sends only once it has heard that we heard it: its hello may have been lost.
        up = self._agree() if self.stage is Stage.HEARD else ()
        self._trim(frame.received, now_s)
        if frame.seq <= self._received:
            self.counts.duplicate += 1
            self._ack_due = True
            return up
        if frame.seq > self._received + 1:
            if self._gap_told != self._received:
                self.counts.gap += 1
                self._gap_told = self._received
                self._gap_due = True
            return up
        self._received = frame.seq
        self._unacked_count += 1
        self._unacked_bytes += len(body) + BODY_OVERHEAD
        if (
            self._unacked_count >= self.limits.ack_every
            or self._unacked_bytes * 4 >= self.limits.bytes_max
        ):
            self._ack_due = True
        elif self._ack_at_s is None:
            self._ack_at_s = now_s + self.limits.ack_s
        self.counts.delivered += 1
        header = frame.header
        if header.deadline_s is not None:
            header = msgspec.structs.replace(header, deadline_s=header.deadline_s + now_s)
        return (*up, Arrived(header, body))

    def _receive_ack(self, frame: Ack, now_s: float) -> None:
        self._trim(frame.received, now_s)
        if frame.gap:
            self._rewind()
        elif frame.probe is not None and frame.probe == self._probe_count:
            self.probes_unanswered = 0
            if frame.received < self._probe_last_seq and self._flying:
                self._rewind()

    def _receive_hello(self, hello: Hello, now_s: float) -> tuple[Event, ...]:
        if (hello.node, hello.incarnation) != (self.peer, self.peer_incarnation):
            self.counts.stale += 1
            return ()
        if not hmac.compare_digest(hello.token, self.me.token):
            self.counts.refused += 1
            return ()
        complaint = self._receive_hello_complaint(hello)
        if complaint is not None:
            self.counts.refused += 1
            return self._fall(Cause.UNREACHABLE, complaint, tell=True)
        if hello.to_incarnation != self.me.incarnation:
            self.counts.stale += 1
            return ()
        known = self.peer_session
        if known is not None and hello.session < known:
            self.counts.stale += 1
            return ()
        if known is not None and hello.session > known and self.stage is Stage.AGREED:
            return self._fall(Cause.UNREACHABLE, "the peer started the link afresh", afresh=True)
        events: tuple[Event, ...] = ()
        if self.stage is not Stage.AGREED:
            self.peer_session = hello.session
            self.stage = Stage.HEARD
            if hello.heard_session == self.session:
                events = self._agree()
        if hello.heard_session == self.session:
            self._trim(hello.received, now_s)
        if hello.stage is not Stage.AGREED or hello.heard_session != self.session:
            self._hello_due = True
        return events

    def _receive_hello_complaint(self, hello: Hello) -> str | None:
        if hello.protocol != PROTOCOL:
            return f"the peer speaks protocol {hello.protocol}, this node {PROTOCOL}"
        if hello.run != self.me.run:
            return "the peer belongs to another run"
        if hello.schema != self.me.schema:
            return "the peer's messages differ from this node's: not the same version"
        return None

    def _agree(self) -> tuple[Event, ...]:
        self.stage = Stage.AGREED
        self._hello_at_s = None
        return (Up(),)

    # The window.

    def _trim(self, received: int, now_s: float) -> None:
        """Forgets all messages up to `received`."""
        if received <= self._acked or received >= self._next_seq:
            return  # old news, or a claim to more than was sent
        for queue in (self._flying, self._unsent):
            while queue and queue[0].seq <= received:
                self._bytes -= len(queue.popleft().body) + BODY_OVERHEAD
        self._acked = received
        self._progress_s = now_s
        self._probe_wait_s = self.limits.probe_s
        self._probe_due = False
        self.probes_unanswered = 0
        self._probe_at_s = now_s + self._probe_wait_s if self.window_count else None

    def _rewind(self) -> None:
        """All that is not acknowledged is to be sent again."""
        self.counts.resent += len(self._flying)
        self._unsent.extendleft(reversed(self._flying))
        self._flying.clear()

    def fresh_pipe(self) -> None:
        """The owner has replaced what carries the frames: hello again, then all that is open."""
        if self.reason is None:
            self._rewind()
            self._hello_due = True

    # Time.

    def wake_s(self) -> float | None:
        """When `tick` has something to do, if ever."""
        if self.reason is not None:
            return None
        times = [
            at_s
            for at_s in (self._hello_at_s, self._ack_at_s, self._probe_at_s)
            if at_s is not None
        ]
        return min(times) if times else None

    def tick(self, now_s: float) -> tuple[Event, ...]:
        if self.reason is not None:
            return ()
        limits = self.limits
        if self._hello_at_s is not None and now_s >= self._hello_at_s:
            self._hello_due = True
            self._hello_wait_s = min(self._hello_wait_s * 2, limits.repeat_s_max)
            self._hello_at_s = now_s + self._hello_wait_s
        if self._ack_at_s is not None and now_s >= self._ack_at_s:
            self._ack_due = True
            self._ack_at_s = None
        if self._probe_at_s is not None and now_s >= self._probe_at_s:
            # Probes count too: who stood still itself has not asked, and may not have read.
            is_stalled = now_s - self._progress_s >= limits.stall_s
            if is_stalled and self.probes_unanswered >= PROBES_MIN:
                return self._fall(
                    Cause.UNREACHABLE, f"no acknowledgement for {limits.stall_s:g} s", tell=True
                )
            self._probe_due = True
            self.probes_unanswered += 1  # also one that the pipe will not even take
            self._probe_wait_s = min(self._probe_wait_s * 2, limits.repeat_s_max)
            self._probe_at_s = now_s + self._probe_wait_s
        return ()

    # The end.

    def close(self, reason: Reason) -> None:
        """Ends the link from this side; one `Bye` is left to be polled."""
        if self.reason is None:
            self._fall(reason.cause, reason.detail, tell=True)

    def _fall(
        self, cause: Cause, detail: str, *, tell: bool = False, afresh: bool = False
    ) -> tuple[Event, ...]:
        self.reason = Reason(cause=cause, detail=detail)
        self.counts.lost += self.window_count
        self._flying.clear()
        self._unsent.clear()
        self._bytes = 0
        self._acked = self._next_seq - 1
        self._bye_due = tell
        return (Gone(self.reason, afresh),)

    def check(self) -> None:
        """Asserts the laws of this end."""
        seqs = [item.seq for item in (*self._flying, *self._unsent)]
        assert seqs == list(range(self._acked + 1, self._next_seq)), (seqs, self._acked)
        held = sum(len(item.body) + BODY_OVERHEAD for item in (*self._flying, *self._unsent))
        assert held == self._bytes, (held, self._bytes)
        assert len(seqs) <= self.limits.count_max, len(seqs)
        assert self._bytes <= self.limits.bytes_max, self._bytes
        assert not (self.reason is not None and seqs), "a link that is down holds messages"
        assert not (seqs and self.reason is None and self._probe_at_s is None), "no probe timer"
        assert self.stage is Stage.CALLING or self.peer_session is not None
        assert self.stage is Stage.AGREED or (self._received == 0 and self._next_seq == 1)
