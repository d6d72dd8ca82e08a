"""Goal: what the table lacks raises, with the state, the event and the request in the text."""

from __future__ import annotations

import pytest

from actors.scheduler.request import TABLE, Event, IllegalTransition, State
from tests.scheduler.make import make_request


def test_every_pair_is_a_transition_or_an_error() -> None:
    for state in State:
        for event in Event:
            request = make_request("r7")
            request.state = state
            if event in TABLE[state]:
                request.advance(event)
                assert request.state is TABLE[state][event]
            else:
                with pytest.raises(IllegalTransition) as caught:
                    request.advance(event)
                assert str(caught.value) == f"{event.value} while {state.value}: r7"
                assert request.state is state


def test_any_state_but_done_can_end() -> None:
    for state in State:
        assert (Event.END in TABLE[state]) == (state is not State.DONE)


def test_only_those_who_hold_pages_are_retracted() -> None:
    holders = {state for state in State if Event.RETRACT in TABLE[state]}
    assert holders == {State.PREFILL, State.DECODE}


def test_every_state_is_reached_from_waiting() -> None:
    reached, edge = {State.WAITING}, [State.WAITING]
    while edge:
        for target in TABLE[edge.pop()].values():
            if target not in reached:
                reached.add(target)
                edge.append(target)
    assert reached == set(State)
