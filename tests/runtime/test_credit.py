"""Goal: both ends of a stream with credits keep the law, whatever is lost on the way and whoever
dies. Method: random events against a dull model: lists of numbers, on their way and waiting."""

from __future__ import annotations

import pytest
from hypothesis import assume
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from actors.runtime.credit import Account, Allowance


def test_the_window_is_granted_from_the_start_and_no_more() -> None:
    account = Account(2)
    assert [account.spend(), account.spend()] == [1, 2]
    assert (account.left, account.in_flight) == (0, 2)
    with pytest.raises(AssertionError, match="without a credit"):
        account.spend()


def test_a_grant_says_up_to_which_number_and_an_older_one_says_nothing() -> None:
    account = Account(3)
    for _ in range(3):
        account.spend()
    assert account.grant(5, 1) == 2
    assert account.grant(4, 1) == 0
    assert (account.granted, account.left) == (5, 2)


def test_a_grant_of_another_life_or_beyond_the_window_changes_a_count_alone() -> None:
    account = Account(3, incarnation=2)
    account.spend()
    for granted, incarnation in ((4, 1), (4, 3), (5, 2)):
        assert account.grant(granted, incarnation) is None
    assert (account.granted, account.left, account.stale_count) == (3, 2, 3)


def test_a_new_life_of_the_taker_has_the_whole_window() -> None:
    account = Account(3)
    for _ in range(3):
        account.spend()
    account.reopen(2, 2)
    assert (account.left, account.in_flight, account.spent) == (2, 0, 0)
    assert account.grant(4, 1) is None
    account.check()


def test_the_taker_refuses_numbers_that_were_not_granted_or_came_before() -> None:
    allowance = Allowance(2)
    assert allowance.arrive(1)
    assert not allowance.arrive(1)
    assert not allowance.arrive(3)
    assert allowance.waiting == 1
    with pytest.raises(AssertionError, match="more taken"):
        for _ in range(2):
            allowance.take()


def test_grants_come_in_batches_and_the_last_one_taken_always_brings_one() -> None:
    for window in range(1, 12):
        allowance = Allowance(window)
        for number in range(1, window + 1):
            assert allowance.arrive(number)
        told = [allowance.take() for _ in range(window)]
        assert told[-1] is not None or allowance.told > window, window
        assert sum(granted is not None for granted in told) <= 3 or window < 4


def test_what_was_lost_is_granted_again_once_the_sender_asks() -> None:
    account, allowance = Account(4), Allowance(4)
    for _ in range(4):
        account.spend()
    assert allowance.arrive(2)
    assert allowance.asked(account.spent) == 7, "three are lost, one waits"
    assert account.grant(7, 1) == 3
    assert allowance.lost_count == 3
    assert allowance.asked(9) is None, "no such number was granted"
    allowance.check()


class Ends(RuleBasedStateMachine):
    """One sender, one path with life after life, and what is on its way in between."""

    @initialize(window=st.integers(1, 9))
    def open(self, window: int) -> None:
        self.window = window
        self.account = Account(window)
        self.life = 1
        self.allowance = Allowance(window)
        self.sent: list[tuple[int, int]] = []  # (life, number) under way, in order
        self.waiting: list[int] = []
        self.words: list[tuple[int, int]] = []  # (life, granted) under way, in order
        self.stale_count = 0
        self.granted_most = window

    def say(self, granted: int | None) -> None:
        if granted is not None:
            self.words.append((self.life, granted))
            assert granted >= self.granted_most, "what was granted is not taken back"
            self.granted_most = granted

    @precondition(lambda self: self.account.left)
    @rule()
    def send(self) -> None:
        self.sent.append((self.account.incarnation, self.account.spend()))

    @precondition(lambda self: self.sent)
    @rule(is_lost=st.booleans())
    def carry(self, is_lost: bool) -> None:
        life, number = self.sent.pop(0)
        if is_lost or life != self.life:
            return
        assert self.allowance.arrive(number), "the sender never goes past what it was told"
        self.waiting.append(number)

    @precondition(lambda self: self.waiting)
    @rule()
    def take(self) -> None:
        self.waiting.pop(0)
        self.say(self.allowance.take())

    @precondition(lambda self: self.words)
    @rule(is_lost=st.booleans())
    def carry_back(self, is_lost: bool) -> None:
        life, granted = self.words.pop(0)
        if is_lost:
            return
        more = self.account.grant(granted, life)
        assert (more is None) == (life != self.account.incarnation)
        self.stale_count += more is None

    @rule()
    def ask(self) -> None:
        """In the pipe's order: all that was sent before has come or is lost."""
        assume(self.account.incarnation == self.life)
        while self.sent:
            self.carry(is_lost=False)
        self.say(self.allowance.asked(self.account.spent))

    @rule()
    def die(self) -> None:
        """The taker has a new life; the sender has not heard of it."""
        self.life += 1
        self.allowance = Allowance(self.window)
        self.waiting = []
        self.granted_most = self.window

    @rule(window=st.integers(1, 9))
    def hear_of_it(self, window: int) -> None:
        assume(self.account.incarnation < self.life and not self.waiting)
        self.window = window
        self.allowance = Allowance(window)
        self.granted_most = window
        self.account.reopen(window, self.life)

    @invariant()
    def law(self) -> None:
        self.account.check()
        self.allowance.check()
        assert self.account.stale_count == self.stale_count
        assert self.allowance.waiting == len(self.waiting) <= self.window
        if self.account.incarnation == self.life:
            under_way = sum(life == self.life for life, _ in self.sent) + len(self.waiting)
            assert under_way <= self.account.in_flight <= self.window
            assert self.account.granted <= self.allowance.told

    def teardown(self) -> None:
        """However it went, once all is quiet and the sender has asked, it has all of it again."""
        if self.account.incarnation != self.life:
            return
        while self.waiting:
            self.take()
        self.words.clear()
        if self.account.left < self.window:
            self.ask_quietly()
            assert self.account.left == self.window

    def ask_quietly(self) -> None:
        while self.sent:
            self.carry(is_lost=False)
        while self.waiting:
            self.take()
        self.words.clear()
        granted = self.allowance.asked(self.account.spent)
        assert granted is not None
        self.account.grant(granted, self.life)


TestEnds = Ends.TestCase
