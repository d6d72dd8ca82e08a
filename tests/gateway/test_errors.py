"""One place says how a failure looks: every fault has its status, type and code."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from actors.gateway.errors import STATUS, TYPE, answer, answer_http, body, respelled
from messages.types import Fault, Problem
from tests.gateway.street import CONTEXT, Street


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


def test_a_dialect_has_its_own_words_for_fields() -> None:
    names = {"seed": "options.seed", "max_tokens": "num_predict", "messages": "input"}

    def said(message: str, param: str | None) -> tuple[str, str | None]:
        found = respelled(Problem(Fault.INVALID, message, param=param), names)
        return found.message, found.param

    assert said("`seed` is wrong.", "seed") == ("`options.seed` is wrong.", "options.seed")
    assert said("Lower max_tokens, seed.", "messages") == ("Lower num_predict, seed.", "input")
    assert said("`messages[0].role` is", "messages[0].role") == ("`input` is", "input")
    assert said("`seed.x` is wrong.", "seed[1].y") == (
        "`options.seed.x` is wrong.",
        "options.seed[1].y",
    )
    assert said("`x` and the_seed", None) == ("`x` and the_seed", None)


HI = [{"role": "user", "content": "hi"}]
SCHEMA = {"type": "json_schema", "schema": {"not": {}}}
MESSAGES = {"model": "M", "max_tokens": 5, "messages": HI}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        ("/v1/chat/completions", {"messages": HI, "structured_outputs": {"json": {}}}, None),
        ("/v1/completions", {"prompt": "hi", "guided_regex": "("}, "guided_regex"),
        (
            "/v1/responses",
            {"input": "hi", "text": {"format": {**SCHEMA, "name": "x"}}},
            "text.format",
        ),
        ("/generate", {"text": "hi", "sampling_params": {"regex": "("}}, "sampling_params.regex"),
        (
            "/generate",
            {"text": ["hi", "ho"], "sampling_params": {"json_schema": "{}"}},
            "sampling_params.json_schema",
        ),
        ("/v1/messages", {**MESSAGES, "output_format": SCHEMA}, "output_format"),
        ("/v1/messages", {**MESSAGES, "output_config": {"format": SCHEMA}}, "output_config.format"),
        ("/api/chat", {"messages": HI, "format": {"not": {}}}, "format"),
        ("/api/generate", {"prompt": "hi", "raw": True, "format": {"not": {}}}, "format"),
    ],
)
async def test_what_is_found_wrong_late_is_named_as_the_dialect_does(
    path: str, fields: dict[str, Any], param: str | None, stream: bool
) -> None:
    street = Street()
    street.back.bars = True
    body = {"model": "M", "stream": stream, **fields}
    got = await street.ask(street.request("POST", path, body))
    assert got.status == 400
    param = param or "structured_outputs"
    error = got.json()["error"]
    message = error if isinstance(error, str) else error["message"]
    assert f"`{param}` has a constraint" in message
    assert isinstance(error, str) or error.get("param", param) == param
    street.assert_idle()


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": "w " * 99}]},
            "messages",
        ),
        ("/v1/responses", {"input": "w " * 99}, "input"),
        ("/v1/completions", {"prompt": "w " * 99}, "prompt"),
    ],
)
async def test_a_prompt_that_does_not_fit_is_named_as_the_dialect_does(
    path: str, fields: dict[str, Any], param: str
) -> None:
    assert CONTEXT < 99
    street = Street()
    got = await street.ask(street.request("POST", path, {"model": "M", **fields}))
    assert (got.status, got.error()["param"]) == (400, param)
    street.assert_idle()
