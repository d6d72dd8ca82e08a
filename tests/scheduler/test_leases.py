"""Goal: pages go back when no step in flight touches them, and only then is anybody told."""

from __future__ import annotations

from actors.scheduler.admission import Admission
from actors.scheduler.flights import Flights
from actors.scheduler.leases import Leases
from actors.scheduler.output import Output
from actors.scheduler.planner import Plan
from actors.scheduler.queue import POLICIES
from actors.scheduler.request import Event, Request, State
from actors.scheduler.reserve import Reserve
from messages import cache
from messages.types import FinishReason, pack
from messages.worker import StepDone
from tests.scheduler.make import make_running

PAGE = 4


class Stand:
    """Leases with a request that decodes, and a step of it in flight."""

    def __init__(self) -> None:
        self.output, self.flights = Output(), Flights(1, 4)
        self.admission = Admission(POLICIES.get("fcfs")())
        self.leases = Leases(self.output, self.admission, self.flights, Reserve(PAGE), PAGE)
        self.request = make_running(1, 6, 6, page_count=2, page_size=PAGE, max_tokens=8)
        self.step = self.flights.send(Plan([self.request], [], [], []), [], b"", 0.0)

    def leave(self, event: Event) -> Request:
        self.request.advance(event)
        self.request.slot = None
        self.leases.retire(self.request)
        self.leases.check()
        return self.request

    def land(self) -> None:
        self.flights.land(StepDone(1, self.step.step, b"", b""))
        self.leases.settle_retiring()
        self.leases.check()

    def told(self) -> list[FinishReason | None]:
        return [row.finish for row in self.request.mail.rows]


def test_pages_that_a_step_touches_go_back_when_it_has_landed() -> None:
    stand = Stand()
    request = stand.leave(Event.END)
    assert request.is_retiring
    assert stand.output.to_cache == []
    stand.land()
    assert not request.is_retiring
    tokens = request.tokens[: request.prompt_len].tobytes()
    assert stand.output.to_cache == [cache.Release("r1", 1, tokens, b"")]
    assert stand.told() == []


def test_pages_that_no_step_touches_go_back_at_once_with_those_granted() -> None:
    stand = Stand()
    stand.request.granted.append(9)
    stand.land()
    stand.leave(Event.END)
    (release,) = stand.output.to_cache
    assert isinstance(release, cache.Release)
    assert release.pages == pack([9])


def test_of_one_whose_keys_cannot_be_trusted_the_cache_keeps_nothing() -> None:
    stand = Stand()
    stand.request.is_poisoned = True
    stand.leave(Event.END)
    stand.land()
    assert stand.output.to_cache == [cache.Release("r1", 1, b"", b"")]


def test_an_abort_is_told_once_and_after_the_pages_went_back() -> None:
    stand = Stand()
    stand.request.is_acknowledged = False
    stand.leave(Event.END)
    assert stand.told() == []
    stand.land()
    assert stand.told() == [FinishReason.ABORT]
    stand.leases.acknowledge(stand.request)
    assert stand.told() == [FinishReason.ABORT]


def test_who_was_retracted_waits_again_when_its_pages_went_back() -> None:
    stand = Stand()
    request = stand.leave(Event.RETRACT)
    assert list(stand.admission.waiting()) == []
    stand.land()
    assert list(stand.admission.waiting()) == [request]
    assert request.state is State.WAITING
    request.check(PAGE)
