"""Goal: the order of arrival holds where the policy has no better reason; overtaking is bounded."""

from __future__ import annotations

import random

import pytest

from actors.scheduler.queue import OVERTAKEN_MAX, POLICIES, WINDOW, FirstCome, LongestPrefix, Queue
from tests.scheduler.make import make_request


def names(queue: Queue) -> list[str]:
    found = []
    while len(queue):
        found.append(queue.pop().id)
    return found


def test_fcfs_is_the_order_of_arrival_whatever_the_order_of_pushes() -> None:
    requests = [make_request(f"r{index}", arrival=index) for index in range(50)]
    shuffled = list(requests)
    random.Random(1).shuffle(shuffled)
    queue = Queue(FirstCome())
    for request in shuffled:
        queue.push(request)
        queue.check()
    assert names(queue) == [request.id for request in requests]


def test_higher_priority_goes_first() -> None:
    for policy in (FirstCome(), LongestPrefix()):
        queue = Queue(policy)
        queue.push(make_request("low", arrival=1))
        queue.push(make_request("high", arrival=2, priority=5))
        low_match = make_request("lower", arrival=3)
        low_match.match_len = 100
        queue.push(low_match)
        assert names(queue)[0] == "high"


def test_longest_prefix_goes_first_and_arrival_breaks_ties() -> None:
    queue = Queue(LongestPrefix())
    for arrival, match_len in enumerate([0, 16, 64, 64, 32]):
        request = make_request(f"r{arrival}", arrival=arrival)
        request.match_len = match_len
        queue.push(request)
    assert names(queue) == ["r2", "r3", "r4", "r1", "r0"]


def test_nobody_is_overtaken_without_bound() -> None:
    queue = Queue(LongestPrefix())
    queue.push(make_request("old", arrival=0))
    for arrival in range(1, 3 * OVERTAKEN_MAX):
        request = make_request(f"r{arrival}", arrival=arrival)
        request.match_len = 64
        queue.push(request)
    assert names(queue).index("old") == OVERTAKEN_MAX


def test_a_retracted_request_goes_before_later_arrivals() -> None:
    """B149."""
    for policy in POLICIES.names():
        queue = Queue(POLICIES.get(policy)())
        for arrival in (2, 3):
            request = make_request(f"r{arrival}", arrival=arrival)
            request.match_len = 64
            queue.push(request)
        retracted = make_request("r1", arrival=1)
        retracted.was_retracted = True
        queue.push(retracted)
        assert names(queue)[0] == "r1"


def test_a_policy_sees_a_window_of_the_queue() -> None:
    queue = Queue(LongestPrefix())
    for arrival in range(2 * WINDOW):
        request = make_request(f"r{arrival}", arrival=arrival)
        request.match_len = arrival
        queue.push(request)
    assert queue.pop().id == f"r{WINDOW - 1}"


def test_those_who_leave_are_found_anywhere() -> None:
    queue = Queue(FirstCome())
    requests = [make_request(f"r{index}", arrival=index) for index in range(20)]
    for request in requests:
        queue.push(request)
    stranger = make_request("r3", arrival=3)
    assert not queue.remove(stranger)
    for request in requests[::3]:
        assert queue.remove(request)
        assert not queue.remove(request)
    assert names(queue) == [request.id for index, request in enumerate(requests) if index % 3]


def test_an_unknown_policy_is_refused_by_name() -> None:
    with pytest.raises(LookupError, match="fcfs, lpm"):
        POLICIES.get("sjf")
