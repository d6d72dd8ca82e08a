"""Goal: a mailbox keeps its bounds and its order whatever is put. Method: examples for each policy,
and random puts and takes against a list."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from actors.runtime.mailbox import (
    Envelope,
    Full,
    Mailbox,
    MailboxSpec,
    Put,
)
from actors.runtime.sizes import size_of
from actors.runtime.wiring import wait_cycle
from messages.base import Lane, Message


class Note(Message, frozen=True):
    key: int
    text: str = ""


def note(key: int, text: str = "", **fields: Any) -> Envelope:
    return Envelope(Note(key, text), **fields)


def keys(mailbox: Mailbox, now_s: float = 0.0) -> list[int]:
    found = []
    while (taken := mailbox.take(now_s)) is not None:
        found.append(taken[1].body.key)
        mailbox.check()
    return found


def filled(full: Full, **fields: Any) -> Mailbox:
    mailbox = Mailbox(MailboxSpec(count_max=2, full=full, **fields))
    assert [mailbox.put(note(k), 0.0) for k in (1, 2)] == [Put.TAKEN, Put.TAKEN]
    return mailbox


def test_lanes_are_emptied_in_order() -> None:
    mailbox = Mailbox(MailboxSpec())
    mailbox.put(note(4), 0.0)
    for key, lane in ((3, Lane.SUPERVISION), (2, Lane.CONTROL), (1, Lane.KILL)):
        mailbox.put_urgent(lane, note(key), 0.0)
    assert keys(mailbox) == [1, 2, 3, 4]
    assert mailbox.overtaken_count == 3


@pytest.mark.parametrize(
    ("full", "put", "left"),
    [
        (Full.REJECT, Put.REFUSED, [1, 2]),
        (Full.DROP_NEW, Put.DROPPED, [1, 2]),
        (Full.DROP_OLDEST, Put.DROPPED, [2, 3]),
        (Full.FAIL, Put.OVERFLOWED, [1, 2]),
        (Full.WAIT, Put.WAITING, [1, 2]),
    ],
)
def test_what_a_full_mailbox_does(full: Full, put: Put, left: list[int]) -> None:
    mailbox = filled(full)
    assert mailbox.put(note(3), 0.0) is put
    mailbox.check()
    assert keys(mailbox) == left


def test_waiting_messages_move_in_as_room_appears_and_keep_their_order() -> None:
    mailbox = filled(Full.WAIT)
    assert [mailbox.put(note(k), 0.0) for k in (3, 4, 5)] == [
        Put.WAITING,
        Put.WAITING,
        Put.REFUSED,
    ]
    mailbox.take(0.0)
    assert [e.body.key for e in mailbox.unpark()] == [3]
    assert mailbox.put(note(6), 0.0) is Put.WAITING, "nobody overtakes those who wait"
    assert keys(mailbox) == [2, 3]


class Purse:
    """A sender on another node, as a mailbox sees it."""

    def __init__(self) -> None:
        self.taken_count = 0

    def taken(self) -> None:
        self.taken_count += 1


def credited(mailbox: Mailbox, purse: Purse, *numbers: int) -> list[Put]:
    return [mailbox.put(note(number, inflow=purse), 0.0) for number in numbers]


def test_what_comes_on_credit_is_parked_beyond_the_bound_of_others_and_each_take_is_told() -> None:
    mailbox, purse = filled(Full.WAIT), Purse()
    assert credited(mailbox, purse, 3, 4, 5) == [Put.WAITING] * 3
    assert [mailbox.put(note(k), 0.0) for k in (6, 7, 8)] == [Put.WAITING, Put.WAITING, Put.REFUSED]
    mailbox.check()
    assert (mailbox.count_of(purse), mailbox.parked_count) == (3, 2)
    taken = []
    while (got := mailbox.take(0.0)) is not None:
        taken.append(got[1].body.key)
        mailbox.unpark()
        mailbox.check()
    assert taken == [1, 2, 3, 4, 5, 6, 7]
    assert purse.taken_count == 3


def test_void_credits_leave_what_waits_within_the_bound_of_others() -> None:
    mailbox, dead, alive = filled(Full.WAIT), Purse(), Purse()
    credited(mailbox, dead, 3, 4, 5)
    credited(mailbox, alive, 6)
    assert [e.body.key for e in mailbox.uncredit(dead)] == [5]
    mailbox.check()
    assert (mailbox.count_of(dead), mailbox.count_of(alive), mailbox.parked_count) == (0, 1, 2)


def test_credits_end_with_the_life_that_gave_them() -> None:
    mailbox, purse = Mailbox(MailboxSpec(count_max=2, full=Full.WAIT)), Purse()
    credited(mailbox, purse, 1, 2, 3, 4, 5)
    assert [e.body.key for e in mailbox.keep_for_next_life()] == [5]
    mailbox.check()
    while mailbox.take(0.0):
        mailbox.unpark()
    assert (mailbox.count_of(purse), purse.taken_count) == (0, 0)


def test_coalescing_replaces_the_waiting_message_with_the_same_key() -> None:
    spec = MailboxSpec(count_max=2, full=Full.COALESCE, coalesce_key=lambda m: m.key)
    mailbox = Mailbox(spec)
    for key, text in ((1, "old"), (2, ""), (1, "new")):
        assert mailbox.put(note(key, text), 0.0) is Put.TAKEN
    assert mailbox.put(note(3), 0.0) is Put.REFUSED
    taken = mailbox.take(0.0)
    assert taken is not None and taken[1].body == Note(1, "new")
    assert mailbox.put(note(1, "next"), 0.0) is Put.TAKEN
    assert keys(mailbox) == [2, 1]
    assert mailbox.coalesced_count == 1


def test_bytes_are_bounded_too() -> None:
    mailbox = Mailbox(MailboxSpec(bytes_max=1000))
    assert mailbox.put(note(1, "x" * 600), 0.0) is Put.TAKEN
    assert mailbox.put(note(2, "x" * 600), 0.0) is Put.REFUSED
    assert mailbox.put(note(3, "x" * 100), 0.0) is Put.TAKEN
    assert keys(mailbox) == [1, 3]


def test_a_message_that_could_never_fit_is_refused_by_every_policy() -> None:
    for full in (Full.REJECT, Full.WAIT, Full.DROP_OLDEST, Full.DROP_NEW):
        mailbox = Mailbox(MailboxSpec(bytes_max=1000, full=full))
        mailbox.put(note(1), 0.0)
        assert mailbox.put(note(2, "x" * 2000), 0.0) is Put.REFUSED
        assert keys(mailbox) == [1]


def test_an_expired_message_is_dropped_at_its_turn_and_counted() -> None:
    mailbox = Mailbox(MailboxSpec())
    mailbox.put(note(1, deadline_s=5.0), 0.0)
    mailbox.put(note(2, deadline_s=50.0), 0.0)
    assert len(mailbox) == 2
    assert keys(mailbox, now_s=10.0) == [2]
    assert (mailbox.expired_count, [e.body.key for e in mailbox.expired]) == (1, [1])


def test_what_an_actor_tells_itself_is_never_refused() -> None:
    mailbox = filled(Full.REJECT)
    assert mailbox.put(note(9, own=True), 0.0) is Put.TAKEN
    assert keys(mailbox) == [1, 2, 9]


def test_dropping_the_oldest_spares_what_an_actor_told_itself() -> None:
    mailbox = Mailbox(MailboxSpec(count_max=2, full=Full.DROP_OLDEST))
    mailbox.put(note(9, own=True), 0.0)
    for key in (1, 2, 3, 4):
        mailbox.put(note(key), 0.0)
        mailbox.check()
    assert keys(mailbox) == [9, 3, 4]


def test_after_a_crash_only_what_the_next_life_may_handle_is_kept() -> None:
    mailbox = Mailbox(MailboxSpec())
    mailbox.put(note(1), 0.0)
    mailbox.put(note(2, exact=True), 0.0)
    mailbox.put(note(3, own=True), 0.0)
    mailbox.put(note(4, question=7), 0.0)
    mailbox.put_urgent(Lane.CONTROL, note(5), 0.0)
    assert sorted(e.body.key for e in mailbox.keep_for_next_life()) == [2, 4, 5]
    mailbox.check()
    assert keys(mailbox) == [1]


def test_the_age_is_that_of_the_next_message() -> None:
    mailbox = Mailbox(MailboxSpec())
    assert mailbox.oldest_s() is None
    mailbox.put(note(1), 3.0)
    mailbox.put(note(2), 4.0)
    assert mailbox.oldest_s() == 3.0


def test_sizes_follow_text_and_buffers() -> None:
    assert size_of(Note(1, "x" * 1000)) - size_of(Note(1, "")) == 1000
    assert size_of((b"12345678",) * 10) > 80
    assert size_of(()) > 0


@given(
    st.dictionaries(st.integers(0, 5), st.lists(st.integers(0, 5), max_size=4)),
    st.sets(st.integers(0, 5)),
)
def test_a_wait_cycle_is_found_exactly_when_there_is_one(
    edges: dict[int, list[int]], waiting: set[int]
) -> None:
    peers = {str(a): tuple(map(str, bs)) for a, bs in edges.items()}
    waits = {str(w) for w in waiting}
    circle = wait_cycle(peers, waits)
    assert (circle is not None) == has_circle(peers, waits)
    if circle is not None:
        assert circle[0] == circle[-1]
        for a, b in zip(circle, circle[1:], strict=False):
            assert b in peers[a] and b in waits


def has_circle(peers: dict[str, tuple[str, ...]], waits: set[str]) -> bool:
    """The dull way: follow every edge as often as there are actors."""
    reach = {a: {b for b in bs if b in waits} for a, bs in peers.items()}
    for _ in range(7):
        reach = {a: bs | {c for b in bs for c in reach.get(b, ())} for a, bs in reach.items()}
    return any(a in bs for a, bs in reach.items())


class MailboxMachine(RuleBasedStateMachine):
    """Against plain lists: one of waiting (key, bytes, deadline, own) and one of parked ones."""

    def __init__(self) -> None:
        super().__init__()
        self.full = Full.REJECT
        self.mailbox = Mailbox(MailboxSpec(count_max=3, bytes_max=400))
        self.user: list[tuple[int, int, float | None, bool]] = []
        self.urgent: list[tuple[Lane, int]] = []
        self.count = 0
        self.now_s = 0.0

    @initialize(full=st.sampled_from([Full.REJECT, Full.DROP_NEW, Full.DROP_OLDEST, Full.FAIL]))
    def start(self, full: Full) -> None:
        self.full = full
        self.mailbox = Mailbox(MailboxSpec(count_max=3, bytes_max=400, full=full))

    def is_full(self, size_bytes: int) -> bool:
        bounded = [m for m in self.user if not m[3]]
        return len(bounded) >= 3 or sum(m[1] for m in bounded) + size_bytes > 400

    @rule(
        length=st.integers(0, 500),
        deadline_s=st.none() | st.floats(0, 20),
        own=st.booleans(),
    )
    def put(self, length: int, deadline_s: float | None, own: bool) -> None:
        self.count += 1
        envelope = note(self.count, "x" * length, deadline_s=deadline_s, own=own)
        size_bytes = size_of(envelope.body)
        put = self.mailbox.put(envelope, self.now_s)
        row = (self.count, size_bytes, deadline_s, own)
        if own or not self.is_full(size_bytes):
            assert put is Put.TAKEN
            self.user.append(row)
        elif self.full is Full.DROP_OLDEST and size_bytes <= 400:
            assert put is Put.DROPPED
            while self.is_full(size_bytes):
                self.user.remove(next(m for m in self.user if not m[3]))
            self.user.append(row)
        elif self.full is Full.DROP_NEW and size_bytes <= 400:
            assert put is Put.DROPPED
        else:
            assert put is (Put.OVERFLOWED if self.full is Full.FAIL else Put.REFUSED)

    @rule(lane=st.sampled_from([Lane.KILL, Lane.CONTROL, Lane.SUPERVISION]))
    def put_urgent(self, lane: Lane) -> None:
        self.count += 1
        self.mailbox.put_urgent(lane, note(self.count), self.now_s)
        self.urgent.append((lane, self.count))

    @rule(seconds=st.floats(0, 3))
    def wait(self, seconds: float) -> None:
        self.now_s += seconds

    @rule()
    def take(self) -> None:
        taken = self.mailbox.take(self.now_s)
        if self.urgent:
            expected = min(self.urgent, key=lambda m: (m[0], m[1]))
            self.urgent.remove(expected)
            assert taken is not None and (taken[0], taken[1].body.key) == expected
            return
        while self.user and self.user[0][2] is not None and self.user[0][2] <= self.now_s:
            self.user.pop(0)
        if not self.user:
            assert taken is None
            return
        assert taken is not None and taken[1].body.key == self.user.pop(0)[0]

    @invariant()
    def laws_hold(self) -> None:
        self.mailbox.check()
        assert len(self.mailbox) == len(self.user) + len(self.urgent)


test_random_puts_and_takes_agree_with_a_list = MailboxMachine.TestCase
