"""This file is the mailbox of one actor: four lanes, emptied in order, the user lane bounded.

It does not know actors, nodes or the event loop: time is an argument, and whoever puts the first
message wakes the owner. A plain deque with a flag costs a fraction of any queue with locks.

Laws, asserted by `check`: the user lane never holds more than `count_max` bounded messages nor more
than `bytes_max` bytes; a message past its deadline is dropped when its turn comes, and counted;
what a full lane does is the owner's choice and never silent; who waits for room (Full.WAIT) is
bounded by `count_max` on this node, and by its credits on another.
"""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Callable, Hashable
from typing import Any

import msgspec

from actors.runtime.sizes import fixed_sizes, size_of
from messages.base import Address, Lane

_fixed_size = fixed_sizes.get  # bound once: `put` is the hot path
URGENT_MAX = 16_384  # kill, control and supervision together; a backstop, never the normal bound


class Full(enum.Enum):
    """What a full user lane does with one message more."""

    REJECT = "reject"  # the sender gets `Undelivered(FULL)`
    # The sender handles nothing further until there is room: its kill, control and supervision
    # lanes alone go on. What it sends until then is parked, at most `count_max` more, and past that
    # refused. A sender on another node has `credits` and is paused without one, see `streams.py`.
    # Only who named this actor as a peer while it started is paused: circles are looked for there.
    WAIT = "wait"
    DROP_OLDEST = "drop_oldest"
    DROP_NEW = "drop_new"
    COALESCE = "coalesce"  # a message takes the place of a waiting one with the same key
    FAIL = "fail"  # the owner crashes: for mailboxes that can't overflow unless there is a bug


class MailboxSpec(msgspec.Struct, frozen=True, kw_only=True):
    """The bound of a user lane. `bytes_max` is against estimates, see `size_of`."""

    count_max: int = 1024
    bytes_max: int = 64 << 20
    full: Full = Full.REJECT
    coalesce_key: Callable[[Any], Hashable] | None = None  # with Full.COALESCE
    credits: int | None = None  # with Full.WAIT: of each sender on another node; None: `count_max`

    @property
    def window(self) -> int:
        """What each sender on another node may have under way; 0: it is not counted."""
        if self.full is not Full.WAIT:
            return 0
        return self.count_max if self.credits is None else self.credits


class Envelope(msgspec.Struct, gc=False):
    """One message as it waits. Mutable only for `COALESCE` and for the stamps of the mailbox."""

    body: Any
    sender: Address | None = None
    deadline_s: float | None = None
    question: int | None = None
    request: str | None = None
    exact: bool = False  # meant for one incarnation only: not kept over a restart in place
    own: bool = False  # from the actor to itself (timer, offload): not bounded
    tick: tuple[Hashable, int] | None = None  # which timer, and its generation
    put_s: float = 0.0
    size_bytes: int = 0
    parked_by: Any = None  # Full.WAIT: the life that waits for room; None again once it has it
    inflow: Any = None  # Full.WAIT: whose credit it came on; None again once it has left


class Put(enum.Enum):
    """What became of a message that was put."""

    TAKEN = "taken"
    DROPPED = "dropped"  # it or an older one was dropped by the owner's policy; counted
    REFUSED = "refused"
    WAITING = "waiting"  # parked until there is room; the sender should pause
    OVERFLOWED = "overflowed"  # the owner must crash


# Bound once: read from its class, a member costs as much as a call (Python 3.11).
TAKEN, USER = Put.TAKEN, Lane.USER


class Mailbox:
    """The four lanes of one actor. Outlives a restart in place."""

    __slots__ = (
        "_by_key",
        "_bytes_max",
        "_coalesces",
        "_count_max",
        "_is_watched",
        "_lanes",
        "_user",
        "bounded_bytes",
        "bounded_count",
        "coalesced_count",
        "dropped_count",
        "expired",
        "expired_count",
        "overtaken_count",
        "parked",
        "parked_count",
        "refused_count",
        "spec",
        "urgent_count",
    )

    def __init__(self, spec: MailboxSpec) -> None:
        assert (spec.coalesce_key is not None) == (spec.full is Full.COALESCE), spec
        self.spec = spec
        self._count_max = spec.count_max
        self._bytes_max = spec.bytes_max
        self._coalesces = spec.full is Full.COALESCE
        self._is_watched = spec.full in (Full.COALESCE, Full.WAIT)  # more is to do at each take
        self._lanes: tuple[deque[Envelope], ...] = (deque(), deque(), deque())
        self._user: deque[Envelope] = deque()
        self._by_key: dict[Hashable, Envelope] = {}
        self.parked: deque[Envelope] = deque()  # Full.WAIT
        self.parked_count = 0  # of those, the ones without a credit: at most `count_max`
        self.expired: list[Envelope] = []  # dropped by `take`; whoever takes reports and clears it
        self.urgent_count = 0
        self.bounded_count = 0
        self.bounded_bytes = 0
        self.dropped_count = 0
        self.refused_count = 0
        self.coalesced_count = 0
        self.expired_count = 0
        self.overtaken_count = 0  # urgent messages taken while user messages waited

    def __len__(self) -> int:
        return self.urgent_count + len(self._user)

    def put(self, envelope: Envelope, now_s: float) -> Put:
        """Puts one message into the user lane, or does what the owner chose for a full one."""
        envelope.put_s = now_s
        if envelope.own:
            self._user.append(envelope)
            return TAKEN
        size_bytes = envelope.size_bytes
        if size_bytes == 0:
            body = envelope.body
            size_bytes = _fixed_size(type(body)) or size_of(body)
            envelope.size_bytes = size_bytes
        if self._coalesces and self._put_coalesces(envelope):
            return TAKEN
        total_bytes = self.bounded_bytes + size_bytes
        if self.bounded_count >= self._count_max or total_bytes > self._bytes_max or self.parked:
            return self._put_when_full(envelope)
        if self._coalesces:
            self._append(envelope)
            return TAKEN
        self._user.append(envelope)  # as `_append`, in line: this is the hot path
        self.bounded_count += 1
        self.bounded_bytes = total_bytes
        return TAKEN

    def put_urgent(self, lane: Lane, envelope: Envelope, now_s: float) -> Put:
        """Puts one message into a lane before the user's."""
        assert lane is not Lane.USER
        if self.urgent_count >= URGENT_MAX:
            self.refused_count += 1
            return Put.REFUSED
        envelope.put_s = now_s
        self._lanes[lane].append(envelope)
        self.urgent_count += 1
        return Put.TAKEN

    def _append(self, envelope: Envelope) -> None:
        self._user.append(envelope)
        self.bounded_count += 1
        self.bounded_bytes += envelope.size_bytes
        if self.spec.coalesce_key is not None:
            self._by_key[self.spec.coalesce_key(envelope.body)] = envelope

    def _put_coalesces(self, envelope: Envelope) -> bool:
        assert self.spec.coalesce_key is not None
        waiting = self._by_key.get(self.spec.coalesce_key(envelope.body))
        if waiting is None:
            return False
        rest_bytes = self.bounded_bytes - waiting.size_bytes
        if rest_bytes + envelope.size_bytes > self.spec.bytes_max:
            return False
        waiting.body, waiting.sender = envelope.body, envelope.sender
        waiting.deadline_s, waiting.question = envelope.deadline_s, envelope.question
        waiting.request, waiting.exact = envelope.request, envelope.exact
        waiting.size_bytes = envelope.size_bytes
        self.bounded_bytes = rest_bytes + envelope.size_bytes
        self.coalesced_count += 1
        return True

    def _put_when_full(self, envelope: Envelope) -> Put:
        spec = self.spec
        if envelope.size_bytes > spec.bytes_max:  # would not fit into an empty lane either
            self.refused_count += 1
            return Put.OVERFLOWED if spec.full is Full.FAIL else Put.REFUSED
        match spec.full:
            case Full.REJECT | Full.COALESCE:
                self.refused_count += 1
                return Put.REFUSED
            case Full.FAIL:
                self.refused_count += 1
                return Put.OVERFLOWED
            case Full.DROP_NEW:
                self.dropped_count += 1
                return Put.DROPPED
            case Full.WAIT:
                if envelope.inflow is None:  # the others are bounded by the credits of each sender
                    if self.parked_count >= spec.count_max:
                        self.refused_count += 1
                        return Put.REFUSED
                    self.parked_count += 1
                self.parked.append(envelope)
                return Put.WAITING
            case Full.DROP_OLDEST:
                self._drop_oldest_until_fits(envelope.size_bytes)
                self._append(envelope)
                return Put.DROPPED

    def _drop_oldest_until_fits(self, size_bytes: int) -> None:
        kept: list[Envelope] = []
        while (
            self.bounded_count >= self.spec.count_max
            or self.bounded_bytes + size_bytes > self.spec.bytes_max
        ):
            oldest = self._user.popleft()
            if oldest.own:
                kept.append(oldest)
                continue
            self._forget(oldest)
            self.dropped_count += 1
        self._user.extendleft(reversed(kept))

    def _forget(self, envelope: Envelope) -> None:
        self.bounded_count -= 1
        self.bounded_bytes -= envelope.size_bytes
        if self._coalesces:
            self._forget_key(envelope)

    def _forget_key(self, envelope: Envelope) -> None:
        assert self.spec.coalesce_key is not None
        key = self.spec.coalesce_key(envelope.body)
        if self._by_key.get(key) is envelope:
            del self._by_key[key]

    def take(self, now_s: float) -> tuple[Lane, Envelope] | None:
        """Takes the next message; None when empty. Expired ones go to `expired` on the way."""
        if self.urgent_count:
            for lane in (Lane.KILL, Lane.CONTROL, Lane.SUPERVISION):
                if self._lanes[lane]:
                    self.urgent_count -= 1
                    if self._user:
                        self.overtaken_count += 1
                    return lane, self._lanes[lane].popleft()
        user = self._user
        while user:
            envelope = user.popleft()
            if not envelope.own:
                self.bounded_count -= 1
                self.bounded_bytes -= envelope.size_bytes
                if self._is_watched:
                    self._left(envelope)
            if envelope.deadline_s is not None and envelope.deadline_s <= now_s:
                self.expired_count += 1
                self.expired.append(envelope)
                continue
            return USER, envelope
        return None

    def _left(self, envelope: Envelope) -> None:
        if self._coalesces:
            self._forget_key(envelope)
        elif envelope.inflow is not None:
            give_back(envelope)

    def unpark(self) -> list[Envelope]:
        """Moves parked messages in while there is room; returns them, so senders can go on."""
        moved: list[Envelope] = []
        while self.parked:
            first = self.parked[0]
            if (
                self.bounded_count >= self.spec.count_max
                or self.bounded_bytes + first.size_bytes > self.spec.bytes_max
            ):
                break
            self.parked_count -= first.inflow is None
            self._append(self.parked.popleft())
            moved.append(first)
        return moved

    def uncredit(self, inflow: Any = None) -> list[Envelope]:
        """The credits of one sender on another node (None: of all) are void. What has come on them
        waits on like that of anybody else; returned is what is parked past the bound of those."""
        for envelope in self._user:
            if envelope.inflow is inflow or inflow is None:
                envelope.inflow = None
        waiting, self.parked = self.parked, deque()
        surplus: list[Envelope] = []
        for envelope in waiting:
            if envelope.inflow is not None and (envelope.inflow is inflow or inflow is None):
                envelope.inflow = None
                if self.parked_count >= self.spec.count_max:
                    surplus.append(envelope)
                    continue
                self.parked_count += 1
            self.parked.append(envelope)
        return surplus

    def count_of(self, inflow: Any) -> int:
        """How many wait here on the credits of one sender."""
        return sum(envelope.inflow is inflow for envelope in (*self._user, *self.parked))

    def keep_for_next_life(self) -> list[Envelope]:
        """After a crash: keeps what the next incarnation may handle, returns the rest.

        Gone are the lanes of the dead incarnation, its own timers and results, and what was meant
        for exactly that incarnation. Parked messages stay parked; credits were the dead one's.
        """
        lost = [e for lane in self._lanes for e in lane] + self.uncredit()
        for lane in self._lanes:
            lane.clear()
        self.urgent_count = 0
        waiting, self._user = self._user, deque()
        for envelope in waiting:
            if envelope.own:
                continue
            if envelope.exact or envelope.question is not None:
                self._forget(envelope)
                lost.append(envelope)
            else:
                self._user.append(envelope)
        return lost

    def empty(self) -> list[Envelope]:
        """Removes and returns all messages from others, parked ones too."""
        left = [e for lane in self._lanes for e in lane]
        left += [e for e in self._user if not e.own]
        left += self.parked
        for lane in self._lanes:
            lane.clear()
        self._user.clear()
        self.parked.clear()
        self._by_key.clear()
        self.urgent_count = self.bounded_count = self.bounded_bytes = self.parked_count = 0
        return left

    def oldest_s(self) -> float | None:
        """When the next message of the user lane was put."""
        return self._user[0].put_s if self._user else None

    def check(self) -> None:
        bounded = [e for e in self._user if not e.own]
        assert self.bounded_count == len(bounded), (self.bounded_count, len(bounded))
        total_bytes = sum(e.size_bytes for e in bounded)
        assert self.bounded_bytes == total_bytes, (self.bounded_bytes, total_bytes)
        assert self.bounded_count <= self.spec.count_max, self.bounded_count
        assert self.bounded_bytes <= self.spec.bytes_max, self.bounded_bytes
        assert self.urgent_count == sum(len(lane) for lane in self._lanes)
        assert self.urgent_count <= URGENT_MAX
        assert self.parked_count == sum(e.inflow is None for e in self.parked), self.parked_count
        assert self.parked_count <= self.spec.count_max, self.parked_count
        assert not self.parked or self.spec.full is Full.WAIT
        if self.spec.coalesce_key is not None:
            waiting_ids = {id(e) for e in bounded}
            assert all(id(e) in waiting_ids for e in self._by_key.values())


def give_back(envelope: Envelope) -> None:
    """A message is not in the mailbox any more, or never came into it: its sender may send one
    more."""
    inflow, envelope.inflow = envelope.inflow, None
    if inflow is not None:
        inflow.taken()
