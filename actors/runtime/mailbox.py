"""This file is the mailbox of one actor: four lanes, emptied in order, the user lane bounded.

It does not know actors, nodes or the event loop: time is an argument, and whoever puts the first
message wakes the owner. A plain deque with a flag costs a fraction of any queue with locks.

Laws, asserted by `check`: the user lane never holds more than `count_max` bounded messages nor more
than `bytes_max` bytes; a message past its deadline is dropped when its turn comes, and counted;
what a full lane does is the owner's choice and never silent.
"""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Callable, Collection, Hashable, Mapping
from typing import Any

import msgspec

from messages.base import Address, Lane

URGENT_MAX = 16_384  # kill, control and supervision together; a backstop, never the normal bound


class Full(enum.Enum):
    """What a full user lane does with one message more."""

    REJECT = "reject"  # the sender gets `Undelivered(FULL)`
    # The sender handles nothing further until there is room. What it sends until then is parked,
    # at most `count_max` more; past that, and from other nodes past that, it is refused.
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


class Put(enum.Enum):
    """What became of a message that was put."""

    TAKEN = "taken"
    DROPPED = "dropped"  # it or an older one was dropped by the owner's policy; counted
    REFUSED = "refused"
    WAITING = "waiting"  # parked until there is room; the sender should pause
    OVERFLOWED = "overflowed"  # the owner must crash


class Mailbox:
    """The four lanes of one actor. Outlives a restart in place."""

    __slots__ = (
        "_by_key",
        "_bytes_max",
        "_coalesces",
        "_count_max",
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
        self._lanes: tuple[deque[Envelope], ...] = (deque(), deque(), deque())
        self._user: deque[Envelope] = deque()
        self._by_key: dict[Hashable, Envelope] = {}
        self.parked: deque[Envelope] = deque()  # Full.WAIT: at most `count_max`
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
            return Put.TAKEN
        size_bytes = envelope.size_bytes
        if size_bytes == 0:
            body = envelope.body
            size_bytes = _fixed_sizes.get(type(body)) or size_of(body)
            envelope.size_bytes = size_bytes
        if self._coalesces and self._put_coalesces(envelope):
            return Put.TAKEN
        total_bytes = self.bounded_bytes + size_bytes
        if self.bounded_count >= self._count_max or total_bytes > self._bytes_max or self.parked:
            return self._put_when_full(envelope)
        if self._coalesces:
            self._append(envelope)
            return Put.TAKEN
        self._user.append(envelope)  # as `_append`, in line: this is the hot path
        self.bounded_count += 1
        self.bounded_bytes = total_bytes
        return Put.TAKEN

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
                if len(self.parked) >= spec.count_max:
                    self.refused_count += 1
                    return Put.REFUSED
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
                if self._coalesces:
                    self._forget_key(envelope)
            if envelope.deadline_s is not None and envelope.deadline_s <= now_s:
                self.expired_count += 1
                self.expired.append(envelope)
                continue
            return Lane.USER, envelope
        return None

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
            self._append(self.parked.popleft())
            moved.append(first)
        return moved

    def keep_for_next_life(self) -> list[Envelope]:
        """After a crash: keeps what the next incarnation may handle, returns the rest.

        Gone are the lanes of the dead incarnation, its own timers and results, and what was meant
        for exactly that incarnation. Parked messages stay parked.
        """
        lost = [e for lane in self._lanes for e in lane]
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
        self.urgent_count = self.bounded_count = self.bounded_bytes = 0
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
        assert len(self.parked) <= self.spec.count_max, len(self.parked)
        assert not self.parked or self.spec.full is Full.WAIT
        if self.spec.coalesce_key is not None:
            waiting_ids = {id(e) for e in bounded}
            assert all(id(e) in waiting_ids for e in self._by_key.values())


# Estimating the size of a message

_WORD_BYTES = 16  # of a field that has no length of its own
_sizers: dict[type, Callable[[Any], int]] = {}
_fixed_sizes: dict[type, int] = {}  # of the classes whose every field is a word


def size_of(value: Any) -> int:
    """Estimates the bytes that a message holds: exact for text and buffers, a word for numbers;
    a tuple counts as its first element times its length. Constant time for each field."""
    kind = type(value)
    if kind is bytes or kind is str:
        return len(value) + _WORD_BYTES
    if kind is tuple:
        return _WORD_BYTES + (len(value) * size_of(value[0]) if value else 0)
    sizer = _sizers.get(kind)
    if sizer is None:
        sizer = _sizers[kind] = _sizer_of(kind)
    return sizer(value)


def _sizer_of(kind: type) -> Callable[[Any], int]:
    if not (isinstance(kind, type) and issubclass(kind, msgspec.Struct)):
        return lambda value: _WORD_BYTES
    fields = msgspec.structs.fields(kind)
    fixed_bytes = _WORD_BYTES * (1 + len(fields))
    open_fields = tuple(f.name for f in fields if not _is_word(f.type))
    if not open_fields:
        _fixed_sizes[kind] = fixed_bytes
        return lambda value: fixed_bytes

    def sizer(value: Any) -> int:
        total = fixed_bytes
        for name in open_fields:
            total += size_of(getattr(value, name))
        return total

    return sizer


def _is_word(annotation: Any) -> bool:
    return annotation in (int, float, bool, type(None)) or (
        isinstance(annotation, type) and issubclass(annotation, enum.Enum)
    )


# Wiring


def wait_cycle(
    peers: Mapping[str, Collection[str]], waiting: Collection[str]
) -> tuple[str, ...] | None:
    """Finds a circle of actors that may all wait for each other, or None.

    `peers[a]` are the paths that `a` sends to; only an edge into one of `waiting` (mailboxes with
    `Full.WAIT`) can make its sender wait.
    """
    done: set[str] = set()
    for start in peers:
        trail: list[str] = []
        stack: list[tuple[str, int]] = [(start, 0)]
        while stack:
            path, depth = stack.pop()
            del trail[depth:]
            if path in trail:
                return (*trail[trail.index(path) :], path)
            if path in done:
                continue
            trail.append(path)
            targets = [t for t in peers.get(path, ()) if t in waiting]
            if not targets:
                done.add(path)
            stack += [(t, depth + 1) for t in targets]
        done.update(p for p in trail)
    return None
