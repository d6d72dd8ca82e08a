"""Goal: pages for growth are there before they are needed, and none is kept for nobody.

Method: a state machine plays the cache with a pool that runs short.
"""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from actors.scheduler.reserve import Reserve


class ReserveMachine(RuleBasedStateMachine):
    @initialize(page_size=st.sampled_from([1, 4, 16]), pool=st.integers(0, 40))
    def begin(self, page_size: int, pool: int) -> None:
        self.reserve = Reserve(page_size)
        self.pool = list(range(pool))
        self.lent: set[int] = set()
        self.asked = 0
        self.running = 0

    @rule(count=st.integers(0, 6))
    def run(self, count: int) -> None:
        self.running = count
        self.reserve.set_running(count)
        self.pool += self.reserve.take_excess()

    @precondition(lambda self: not self.asked)
    @rule()
    def ask(self) -> None:
        self.asked = self.reserve.take_ask()
        assert self.reserve.is_asking == (self.asked > 0)

    @precondition(lambda self: self.asked)
    @rule()
    def answer(self) -> None:
        assert self.reserve.take_ask() == 0, "two questions at once"
        pages = self.pool[: self.asked]
        del self.pool[: self.asked]
        self.reserve.add(pages)
        assert self.reserve.is_short <= (len(pages) < self.asked)
        self.asked = 0

    @precondition(lambda self: len(self.reserve))
    @rule()
    def spend(self) -> None:
        page = self.reserve.spend()
        assert page not in self.lent
        self.lent.add(page)

    @rule()
    def give_back(self) -> None:
        self.pool += sorted(self.lent)
        self.lent.clear()
        self.reserve.hint()

    @invariant()
    def laws_hold(self) -> None:
        if not hasattr(self, "reserve"):
            return
        self.reserve.check()
        if self.reserve.is_dry:
            assert not self.pool or self.asked, "dry beside a full pool"

    def teardown(self) -> None:
        if hasattr(self, "reserve"):
            if self.asked:
                self.reserve.add([])
            self.reserve.set_running(0)
            self.reserve.take_excess()
            assert len(self.reserve) == 0
            assert self.reserve.take_ask() == 0
            assert not self.reserve.is_short


TestReserve = ReserveMachine.TestCase
TestReserve.settings = settings(max_examples=100, stateful_step_count=40)


def test_pages_are_asked_for_before_the_last_is_spent() -> None:
    reserve = Reserve(16)
    reserve.set_running(8)
    assert reserve.take_ask() == 8
    reserve.add(list(range(8)))
    asked = 0
    while not asked:
        reserve.spend()
        asked = reserve.take_ask()
    assert len(reserve) > 0


def test_a_short_answer_is_not_asked_again_until_pages_went_back() -> None:
    reserve = Reserve(16)
    reserve.set_running(4)
    reserve.take_ask()
    reserve.add([1])
    assert reserve.is_short
    assert reserve.take_ask() == 0
    reserve.hint()
    assert reserve.take_ask() == 3
    reserve.add([2, 3, 4])
    assert not reserve.is_short
