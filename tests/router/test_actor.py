"""Goal: requests and cancels pass in order, and one that cannot arrive ends."""

from __future__ import annotations

from actors.router.actor import SENT_MAX, Router
from actors.runtime.testkit import Cell
from messages.base import Address
from messages.config import Paths
from messages.gateway import Failed
from messages.scheduler import Cancel, Submit
from messages.system import Cause, Undelivered
from messages.types import Fault, Sampling, StopRules, pack

PATHS = Paths()
GATEWAY = Address("front", PATHS.gateway, 1)


def submit(name: str, attempt: int = 1) -> Submit:
    return Submit(name, attempt, GATEWAY, pack([1, 2]), Sampling(), StopRules())


def test_a_cancel_follows_its_request() -> None:
    cell = Cell(Router(PATHS), path=PATHS.router)
    cell.start()
    cell.tell(submit("a"))
    cell.tell(Cancel("a", 1))
    assert cell.take() == [
        (PATHS.scheduler, submit("a")),
        (PATHS.scheduler, Cancel("a", 1)),
    ]


def test_a_request_without_a_replica_ends_with_an_error() -> None:
    cell = Cell(Router(PATHS), path=PATHS.router, peers_up=[PATHS.gateway])
    cell.start()
    cell.tell(submit("a", attempt=3))
    cell.tell(Cancel("a", 3))
    ((target, failed),) = cell.take()
    assert target == str(GATEWAY)
    assert isinstance(failed, Failed)
    assert (failed.request, failed.attempt) == ("a", 3)
    assert failed.problem.fault is Fault.UNAVAILABLE


def test_a_full_replica_is_an_overload() -> None:
    cell = Cell(Router(PATHS), path=PATHS.router)
    cell.start()
    cell.tell(submit("a"))
    cell.take()
    address = Address("engine", PATHS.scheduler, 1)
    cell.undelivered(Undelivered(address, "Submit", Cause.FULL, "a"))
    ((_, failed),) = cell.take()
    assert isinstance(failed, Failed)
    assert failed.problem.fault is Fault.OVERLOADED
    assert failed.problem.retry_after_s
    cell.undelivered(Undelivered(address, "Submit", Cause.FULL, "a"))
    assert cell.take() == [], "one end, not two"


def test_what_is_remembered_is_bounded() -> None:
    router = Router(PATHS)
    cell = Cell(router, path=PATHS.router)
    cell.start()
    for index in range(SENT_MAX + 10):
        cell.tell(submit(f"r{index}"))
        cell.sent.clear()
    assert len(router.sent) == SENT_MAX
