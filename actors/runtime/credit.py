"""This file is the law of credits: how much may be under way from one who sends to one who takes.

It does not know what is sent, nor when: actors' messages (`streams.py`) and the scheduler's steps
are both counted by it. A credit is the permission to have one more under way. Both ends speak in
totals: each thing sent has a number, and a grant says up to which number the sender may go. So a
loss, of what was sent or of a grant, is made good by the next word that arrives.

Laws, asserted by `check`. At the sender: granted = spent + left, and 0 <= left <= window. At the
taker: no more wait there than the window, and arrived <= told <= granted. Together: what is under
way or waits is never more than was granted and not spent before, so never more than the window.
"""

from __future__ import annotations


class Account:
    """The sender's end, with one life of the taker."""

    __slots__ = ("granted", "incarnation", "left", "spent", "stale_count", "window")

    def __init__(self, window: int, incarnation: int = 1) -> None:
        """`window`: what may be under way at once; granted from the start."""
        assert window > 0, window
        self.window = window
        self.incarnation = incarnation  # of the taker
        self.granted = window
        self.spent = 0
        self.left = window
        self.stale_count = 0  # grants that were not for this account

    @property
    def in_flight(self) -> int:
        """What was sent and is, as far as is known here, not taken yet."""
        return self.window - self.left

    def spend(self) -> int:
        """Takes one credit; returns the number of what is sent on it."""
        assert self.left > 0, "sent without a credit"
        self.left -= 1
        self.spent += 1
        return self.spent

    def grant(self, granted: int, incarnation: int) -> int | None:
        """Takes the word of a life of the taker: all up to the number `granted` may be sent.

        Returns how many more that is. None: it is of another life of the taker, or can't be true
        (more than was sent and the window); nothing has changed but a count.
        """
        if incarnation != self.incarnation or granted > self.spent + self.window:
            self.stale_count += 1
            return None
        more = granted - self.granted
        if more <= 0:  # overtaken by a later word
            return 0
        self.granted = granted
        self.left += more
        return more

    def reopen(self, window: int, incarnation: int) -> None:
        """The taker has a new life, which knows nothing of what the last one was sent."""
        assert window > 0 and incarnation > self.incarnation, (window, incarnation)
        self.window = self.granted = self.left = window
        self.incarnation = incarnation
        self.spent = 0

    def check(self) -> None:
        assert self.granted == self.spent + self.left, (self.granted, self.spent, self.left)
        assert 0 <= self.left <= self.window, (self.left, self.window)


class Allowance:
    """The taker's end, with one life of a sender."""

    __slots__ = ("arrived", "batch", "lost_count", "told", "waiting", "window")

    def __init__(self, window: int) -> None:
        assert window > 0, window
        self.window = window
        self.batch = max(1, window // 2)  # a grant for each would double the messages
        self.arrived = 0  # the last number
        self.waiting = 0  # of those, not taken yet
        self.told = window  # what the sender was last told
        self.lost_count = 0  # numbers that were passed over

    @property
    def granted(self) -> int:
        return self.arrived - self.waiting + self.window

    def arrive(self, number: int) -> bool:
        """One has come. False: its number is none that may come now; nothing has changed."""
        if not self.arrived < number <= self.told:
            return False
        self.lost_count += number - self.arrived - 1
        self.arrived = number
        self.waiting += 1
        return True

    def take(self) -> int | None:
        """One of those that waited is gone. Returns what the sender is to be told, if it is time
        to. A sender without a credit is told at the latest with the last one that waits."""
        assert self.waiting > 0, "more taken than came"
        self.waiting -= 1
        return self._tell() if self.granted - self.told >= self.batch else None

    def asked(self, spent: int) -> int | None:
        """The sender has sent all up to the number `spent`, and they have come or are lost.

        Returns what it is to be told, if that lets it send; else it will be told when it does.
        """
        if spent > self.told:
            return None
        if spent > self.arrived:
            self.lost_count += spent - self.arrived
            self.arrived = spent
        return self._tell() if self.granted > spent else None

    def _tell(self) -> int:
        self.told = self.granted
        return self.told

    def check(self) -> None:
        assert 0 <= self.waiting <= self.window, (self.waiting, self.window)
        assert self.arrived <= self.told <= self.granted, (self.arrived, self.told, self.granted)
