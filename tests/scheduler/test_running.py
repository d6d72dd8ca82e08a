"""Goal: a slot has one tenant, and the worker hears once of each that it must forget."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from actors.scheduler.request import Event, Request, State
from actors.scheduler.running import Running
from messages.types import pack, unpack
from tests.scheduler.make import make_request

PAGE = 4
COUNT_MAX = 4


def entered(running: Running, name: str, prompt_len: int, cached_len: int = 0) -> Request:
    request = make_request(name, range(prompt_len))
    request.advance(Event.ASK)
    running.enter(request, pack(range(-(-prompt_len // PAGE))), cached_len)
    return request


def computed(running: Running, request: Request) -> None:
    request.planned_len = len(request.tokens)
    running.planned([(request, len(request.tokens))])


def test_who_computes_a_prompt_decodes_once_all_of_it_is_planned() -> None:
    running = Running(COUNT_MAX, PAGE)
    request = entered(running, "a", 6, cached_len=4)
    assert (running.backlog_len, running.used_len) == (2, 8)
    request.planned_len = 5
    running.planned([(request, 1)])
    assert request.state is State.PREFILL
    computed(running, request)
    assert request.state is State.DECODE
    assert running.backlog_len == 0
    running.check()


def test_who_jumped_waits_apart_from_prompts_and_in_order() -> None:
    running = Running(COUNT_MAX, PAGE)
    first, second = entered(running, "a", 3), entered(running, "b", 3)
    computed(running, first)
    computed(running, second)
    prompt = entered(running, "c", 5)
    running.jumped(second)
    running.jumped(first)
    assert list(running.jumping.values()) == [second, first]
    assert list(running.prefilling.values()) == [prompt]
    running.check()
    second.tokens.append(1)
    assert running.backlog_len == 5 + 1
    computed(running, second)
    assert second.state is State.DECODE
    running.leave(first)
    assert not running.jumping and len(running) == 2
    running.check()


def test_a_page_more_is_room_for_a_page_of_tokens() -> None:
    running = Running(COUNT_MAX, PAGE)
    request = entered(running, "a", 4)
    room_len = request.room_len
    assert running.grow(request, 17) == (request.slot, 17)
    assert request.room_len == room_len + PAGE
    assert list(request.granted) == [17]
    request.check(PAGE)


@settings(max_examples=60)
@given(data=st.data())
def test_slots_have_one_tenant_and_closed_ones_are_told_once(data: st.DataObject) -> None:
    running = Running(COUNT_MAX, PAGE)
    tenants: dict[int, Request] = {}
    known: set[int] = set()  # slots whose tenant the worker has been told of
    untold: list[int] = []
    for nth in range(data.draw(st.integers(1, 30))):
        moves = ["step"]
        if len(tenants) < COUNT_MAX:
            moves.append("enter")
        if tenants:
            moves.append("leave")
        move = data.draw(st.sampled_from(moves))
        if move == "enter":
            request = entered(running, str(nth), 3)
            assert request.slot is not None
            assert request.slot not in tenants
            tenants[request.slot] = request
        elif move == "leave":
            slot = data.draw(st.sampled_from(sorted(tenants)))
            running.leave(tenants.pop(slot))
            if slot in known:
                known.remove(slot)
                untold.append(slot)
        else:
            assert list(unpack(running.take_closed())) == untold
            untold = []
            known = set(tenants)
            for request in tenants.values():
                request.is_opened = True
        assert len(running) == len(tenants)
        assert {request.slot for request in running.all()} == set(tenants)
        running.check()
