"""Logits processors of a real server: allowed ones do their work, also when a worker dies, and code
does not come in by any field."""

from __future__ import annotations

import base64
import json
import os
import pickle
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.house.server import WAIT_S, Server

NGRAM = {"name": "no_repeat_ngram", "params": {"size": 1}}


@pytest.fixture(scope="module")
def house(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    log_dir = tmp_path_factory.mktemp("logs")
    found = Server(tiny, log_dir, "--logits-processors", "no_repeat_ngram,thinking_budget")
    try:
        yield found.wait_ready()
    finally:
        found.close()


def body_of(house: Server, **fields: Any) -> dict[str, Any]:
    body = {"model": house.model(), "prompt": "Hello", "max_tokens": 24, "temperature": 0.0}
    return {**body, "ignore_eos": True, "return_token_ids": True, **fields}


def complete(house: Server, **fields: Any) -> httpx.Response:
    body = body_of(house, **fields)
    return httpx.post(f"{house.url}/v1/completions", json=body, timeout=WAIT_S)


def streamed(house: Server, pid: int, **fields: Any) -> list[int]:
    """Token ids of a stream in which the process `pid` dies after the first of them."""
    ids: list[int] = []
    body = body_of(house, stream=True, **fields)
    with httpx.stream("POST", f"{house.url}/v1/completions", json=body, timeout=WAIT_S) as answer:
        for line in answer.iter_lines():
            if not line.startswith("data: {"):
                continue
            for choice in json.loads(line[6:])["choices"]:
                if not ids:
                    os.kill(pid, signal.SIGKILL)
                ids += choice.get("token_ids") or []
    return ids


def ids_of(answer: httpx.Response) -> list[int]:
    assert answer.status_code == 200, answer.text
    ids: list[int] = answer.json()["choices"][0]["token_ids"]
    return ids


def test_an_allowed_processor_changes_what_is_said(house: Server) -> None:
    plain = ids_of(complete(house))
    changed = ids_of(complete(house, logits_processors=[NGRAM]))
    assert len(changed) == 24 == len(set(changed))
    assert ids_of(complete(house)) == plain
    pid = house.pid_of("replica/worker")
    assert streamed(house, pid, logits_processors=[NGRAM]) == changed
    params = {"max_new_tokens": 24, "temperature": 0.0, "ignore_eos": True}
    native = {"text": "Hello", "logits_processors": [NGRAM], "sampling_params": params}
    answer = httpx.post(f"{house.url}/generate", json=native, timeout=WAIT_S)
    assert answer.json()["output_ids"] == changed


class Bomb:
    def __reduce__(self) -> tuple[Any, ...]:
        return (print, ("executed",))


CODE = base64.b64encode(pickle.dumps(Bomb())).decode()


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"logits_processors": [{"name": "os.system"}]}, "logits_processors[0].name"),
        ({"logits_processors": [NGRAM, {**NGRAM, "params": {}}]}, "logits_processors[1].params"),
        ({"logits_processors": [{"qualname": "os.system"}]}, "logits_processors[0]"),
        ({"custom_logit_processor": CODE}, "custom_logit_processor"),
    ],
)
def test_everything_else_is_refused_by_name(
    house: Server, fields: dict[str, Any], param: str
) -> None:
    answer = complete(house, **fields)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == param
    assert "executed" not in house.said()
