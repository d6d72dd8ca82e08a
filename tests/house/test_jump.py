"""Tokens that a grammar forces, appended unsampled: no client can tell it from sampling them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.house.server import WAIT_S, Server, eventually, metric_of

FORM = {
    "type": "object",
    "properties": {
        "customer_billing_address": {"type": "string", "maxLength": 4},
        "preferred_window": {"enum": ["morning_before_noon", "evening_after_six"]},
    },
    "required": ["customer_billing_address", "preferred_window"],
    "additionalProperties": False,
}
REQUESTS: list[dict[str, Any]] = [
    {"logprobs": 2},
    {"temperature": 0.0, "logprobs": 0},
    {"n": 3},
    {"stop": ["ing_addr"]},
    {"stop": ["before", "after"], "include_stop_str_in_output": True},
    {"presence_penalty": 1.0, "repetition_penalty": 1.2},
    *({"max_tokens": count} for count in (1, 5, 9, 14)),
]


@pytest.fixture(scope="module")
def houses(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Server]]:
    """One that jumps, and one that does not."""
    found = [
        Server(tiny, tmp_path_factory.mktemp("logs"), "--token-jump"),
        Server(tiny, tmp_path_factory.mktemp("logs"), "--no-token-jump", "--placement", "inline"),
    ]
    try:
        yield [server.wait_ready() for server in found]
    finally:
        for server in found:
            server.close()


def body_of(server: Server, **fields: Any) -> dict[str, Any]:
    wanted = {"type": "json_schema", "json_schema": {"name": "form", "schema": FORM}}
    body = {"model": server.model(), "prompt": "Hello", "max_tokens": 120, "seed": 3}
    return {**body, "response_format": wanted, "return_token_ids": True, **fields}


def whole(server: Server, **fields: Any) -> tuple[Any, Any]:
    answer = httpx.post(
        f"{server.url}/v1/completions", json=body_of(server, **fields), timeout=WAIT_S
    )
    assert answer.status_code == 200, answer.text
    found = answer.json()
    return found["choices"], found["usage"]


@pytest.mark.parametrize("fields", REQUESTS, ids=str)
def test_answers_are_those_of_a_house_that_samples_every_token(
    houses: list[Server], fields: dict[str, Any]
) -> None:
    (jumping, plain) = (whole(server, **fields) for server in houses)
    assert jumping == plain
    choices, usage = jumping
    assert usage["completion_tokens"] == sum(len(choice["token_ids"]) for choice in choices)
    if not fields.keys() & {"stop", "max_tokens"}:
        for choice in choices:
            assert set(json.loads(choice["text"])) == set(FORM["required"])


def test_streams_are_the_same_too(houses: list[Server]) -> None:
    for server in houses:
        body = body_of(server, stream=True, stream_options={"include_usage": True}, logprobs=1)
        text, ids, usage = "", [], None
        with httpx.stream(
            "POST", f"{server.url}/v1/completions", json=body, timeout=WAIT_S
        ) as answer:
            for line in answer.iter_lines():
                if line.startswith("data: {"):
                    chunk = json.loads(line[6:])
                    usage = chunk.get("usage") or usage
                    for choice in chunk["choices"]:
                        text += choice["text"]
                        ids += choice.get("token_ids") or []
        choices, told = whole(houses[1], logprobs=1)
        assert (text, ids) == (choices[0]["text"], choices[0]["token_ids"])
        assert usage == told


def steps_of_a_token(server: Server) -> float:
    """Of all that the server has said: what the scheduler counted, both at one time."""
    _, usage = whole(server, temperature=0.0)

    def told() -> float:
        page = server.get("/metrics").text
        token_count = metric_of(page, "histrio_generated_tokens_total")
        if token_count < usage["completion_tokens"]:
            return 0.0
        return metric_of(page, "histrio_step_seconds_count") / token_count

    found: float = eventually(told, "its numbers are told")
    return found


def test_jumps_take_fewer_steps(houses: list[Server]) -> None:
    jumping, plain = map(steps_of_a_token, houses)
    assert jumping < plain
