"""Which logits processors a request may name, and what becomes of their parameters."""

from __future__ import annotations

import json
from typing import Any

import pytest

from actors.processors.base import PROCESSORS, allowed_of
from actors.tokenizer.processors import check_processors
from actors.tokenizer.prompt import Refused
from kernels.registry import UnknownName
from messages.types import ProcessorCall

ALLOWED = allowed_of("thinking_budget, no_repeat_ngram")


def spell(text: str) -> list[int]:
    return list(text.encode()) if text != "lost" else []


def checked(name: str, params: Any, allowed: tuple[str, ...] = ALLOWED) -> ProcessorCall:
    call = ProcessorCall(name, b"" if params is None else json.dumps(params).encode())
    (found,) = check_processors((call,), allowed, spell)
    return found


def test_the_built_in_ones_are_declared_with_work_that_exists() -> None:
    assert set(ALLOWED) == {"no_repeat_ngram", "thinking_budget"} <= set(PROCESSORS.names())
    with pytest.raises(UnknownName, match="unknown logits_processor 'os'"):
        allowed_of("no_repeat_ngram,os")
    assert allowed_of("") == allowed_of(" , ") == ()


def test_parameters_are_read_into_the_entrys_own_form() -> None:
    call = checked("no_repeat_ngram", {"size": 3})
    assert json.loads(call.params) == {"size": 3, "window": 0, "allowed_ids": []}
    call = checked("thinking_budget", {"budget": 9, "end": "ab"})
    read = json.loads(call.params)
    assert read == {"budget": 9, "begin_ids": [*b"<think>"], "end_ids": [*b"ab"]}
    assert checked("thinking_budget", {"budget": 9, "end": "ab"}) == call


@pytest.mark.parametrize(
    ("name", "params", "param"),
    [
        ("os.system", {"size": 3}, "name"),
        ("no_repeat_ngram", None, "params"),
        ("no_repeat_ngram", [], "params"),
        ("no_repeat_ngram", {"size": 0}, "params"),
        ("no_repeat_ngram", {"size": "3"}, "params"),
        ("no_repeat_ngram", {"size": 3, "code": "x"}, "params"),
        ("no_repeat_ngram", {"size": 3, "allowed_ids": [10**30]}, "params"),
        ("no_repeat_ngram", {"size": 3, "allowed_ids": [-1]}, "params"),
        ("thinking_budget", {"budget": -1}, "params"),
        ("thinking_budget", {"budget": 1, "end": "lost"}, "params"),
        ("thinking_budget", {"budget": 1, "begin_ids": [1]}, "params"),
    ],
)
def test_what_is_not_allowed_or_not_valid_is_refused(name: str, params: Any, param: str) -> None:
    with pytest.raises(Refused) as caught:
        checked(name, params)
    problem = caught.value.problem
    assert problem.param == f"logits_processors[0].{param}" and name in problem.message


def test_what_the_operator_has_not_allowed_is_unknown() -> None:
    with pytest.raises(Refused, match="known are: none"):
        checked("no_repeat_ngram", {"size": 3}, ())
