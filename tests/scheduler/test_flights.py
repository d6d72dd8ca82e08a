"""Goal: no more steps are in flight than the worker grants, and each is answered once, in order.
Method: random steps and answers, of this epoch and of others, against a list of numbers."""

from __future__ import annotations

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from actors.scheduler.flights import Flights
from actors.scheduler.planner import Plan
from messages.worker import StepDone, StepFailed
from tests.scheduler.make import make_running


def one_token_more() -> Plan:
    request = make_running(1, 4, 4, page_count=64, page_size=16, max_tokens=1000)
    return Plan([request], [], [], [])


def test_a_step_without_a_credit_is_our_bug() -> None:
    flights = Flights(epoch=1, window=1)
    flights.send(one_token_more(), [], b"", 0.0)
    assert not flights.may_send
    with pytest.raises(AssertionError, match="without a credit"):
        flights.send(one_token_more(), [], b"", 0.0)


def test_an_answer_out_of_order_is_our_bug() -> None:
    flights = Flights(epoch=1, window=2)
    for _ in range(2):
        flights.send(one_token_more(), [], b"", 0.0)
    with pytest.raises(AssertionError, match="2 answered, 1 was due"):
        flights.land(StepDone(1, 2, b"", b""))


class Runway(RuleBasedStateMachine):
    @initialize(epoch=st.integers(1, 3), window=st.integers(1, 4))
    def open(self, epoch: int, window: int) -> None:
        self.flights = Flights(epoch, window)
        self.epoch, self.window = epoch, window
        self.plan = one_token_more()
        self.sent = 0
        self.in_flight: list[int] = []

    @precondition(lambda self: len(self.in_flight) < self.window)
    @rule()
    def send(self) -> None:
        assert self.flights.may_send
        step = self.flights.send(self.plan, [], b"", 0.0)
        self.sent += 1
        assert (step.epoch, step.step) == (self.epoch, self.sent)
        self.in_flight.append(step.step)

    @precondition(lambda self: self.in_flight)
    @rule(fails=st.booleans())
    def land(self, fails: bool) -> None:
        step = self.in_flight.pop(0)
        answer = (
            StepFailed(self.epoch, step, b"", "") if fails else StepDone(self.epoch, step, b"", b"")
        )
        assert self.flights.is_current(answer)
        assert self.flights.land(answer).step == step

    @rule(epoch=st.integers(1, 4), step=st.integers(1, 50))
    def hear_of_another_life(self, epoch: int, step: int) -> None:
        answer = StepDone(epoch, step, b"", b"")
        assert self.flights.is_current(answer) == (epoch == self.epoch)

    @invariant()
    def law(self) -> None:
        self.flights.check()
        assert self.flights.may_send == (len(self.in_flight) < self.window)
        assert self.flights.credit.in_flight == len(self.in_flight)


TestRunway = Runway.TestCase
