"""What waits for a reader: order, size, and the one end."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from actors.gateway.call import Row
from actors.gateway.outbox import Outbox
from messages.gateway import Delta, TokenLogprob
from messages.types import Fault, Problem


def row(number: int, text: str = "x", logprobs: int = 0) -> Row:
    tokens = (TokenLogprob(b"x", 1, -1.0, ((b"x", 1, -1.0),)),) * logprobs
    return Row(0, Delta("r", 1, number, 1, text, logprobs=tokens))


@given(st.lists(st.one_of(st.none(), st.text(max_size=20)), max_size=40))
def test_rows_come_out_once_and_in_order(steps: list[str | None]) -> None:
    outbox = Outbox()
    put: list[Row] = []
    got: list[Row] = []
    for number, text in enumerate(steps):
        if text is None:
            got += outbox.take()
        else:
            put.append(row(number, text))
            waiting = outbox.push(put[-1], float(number))
            assert waiting >= len(text)
        outbox.check()
    got += outbox.take()
    assert got == put and outbox.bytes_len == 0 and outbox.unread_since_s is None


def test_it_knows_since_when_the_oldest_row_waits() -> None:
    outbox = Outbox()
    outbox.push(row(0), 1.0)
    outbox.push(row(1), 2.0)
    assert outbox.unread_since_s == 1.0
    outbox.take()
    outbox.push(row(2), 3.0)
    assert outbox.unread_since_s == 3.0


def test_logprobs_count_as_bytes_too() -> None:
    bare, rich = Outbox(), Outbox()
    assert rich.push(row(0, logprobs=5), 0.0) > bare.push(row(0), 0.0)


def test_there_is_one_end_and_nothing_after_it() -> None:
    outbox = Outbox()
    outbox.push(row(0), 0.0)
    problem = Problem(fault=Fault.INTERNAL, message="x")
    outbox.end(problem)
    assert outbox.take() and outbox.problem is problem
    with pytest.raises(AssertionError):
        outbox.end()
    with pytest.raises(AssertionError):
        outbox.push(row(1), 0.0)
