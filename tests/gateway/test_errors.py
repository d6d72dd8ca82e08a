"""One place says how a failure looks: every fault has its status, type and code."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from actors.gateway.errors import STATUS, TYPE, answer, answer_http, body
from messages.types import Fault, Problem


@pytest.mark.parametrize("fault", list(Fault))
def test_every_fault_has_a_status_and_a_type(fault: Fault) -> None:
    got = answer(Problem(fault=fault, message="m", param="p"))
    error = msgspec.json.decode(got.body)["error"]
    assert error["message"] == "m" and error["param"] == "p"
    assert error["type"] == TYPE[fault] and got.status == STATUS[fault]
    assert (got.retry_after_s is not None) == (got.status == 503)


def test_retry_after_is_a_whole_number_of_seconds_and_never_zero() -> None:
    for given_s, said in ((0.0, 1), (0.2, 1), (1.0, 1), (2.5, 3)):
        problem = Problem(fault=Fault.OVERLOADED, message="m", retry_after_s=given_s)
        assert answer(problem).retry_after_s == said


def test_a_code_of_its_own_goes_before_the_faults() -> None:
    problem = Problem(fault=Fault.UNAVAILABLE, message="m", code="interrupted")
    assert msgspec.json.decode(body(problem))["error"]["code"] == "interrupted"


@pytest.mark.parametrize("status", [400, 404, 405, 408, 413, 415])
def test_refusals_of_http_have_the_same_shape(status: int) -> None:
    got = answer_http(status, "m")
    error = msgspec.json.decode(got.body)["error"]
    assert set(error) == {"message", "type", "param", "code"} and got.status == status
    assert error["code"]


@given(st.text())
def test_any_message_is_valid_json_on_one_line(message: str) -> None:
    data = body(Problem(fault=Fault.INVALID, message=message))
    assert b"\n" not in data and msgspec.json.decode(data)["error"]["message"] == message
