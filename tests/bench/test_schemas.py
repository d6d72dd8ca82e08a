"""What `bench.schemas` makes of an answer, and what it counts over an engine."""

from __future__ import annotations

import argparse

import pytest

from bench.schemas import NO_JSON, broken_by, count
from kernels.constrain import Constrainer, load_engine
from tests.kernels import test_schemas
from tests.kernels.test_constrain import table


@pytest.mark.parametrize(
    ("said", "broken"),
    [
        (b'["a", "b"]', None),
        (b'["a", "a"]', "uniqueItems"),
        (b'["a", "bcd"]', "maxLength"),
        (b'["\x06"]', NO_JSON),
        (b'["\xff"]', NO_JSON),
        (b'["a"', NO_JSON),
    ],
)
def test_an_answer_is_judged_by_the_keyword_that_it_breaks(said: bytes, broken: str | None) -> None:
    schema = {"type": "array", "uniqueItems": True, "items": {"type": "string", "maxLength": 2}}
    assert broken_by(schema, said) == broken


def test_what_is_broken_below_a_combination_is_told_as_that() -> None:
    assert broken_by({"allOf": [{"type": "integer"}, {"maximum": 9}]}, b"10") == "allOf"
    assert broken_by({"if": {"minimum": 10}, "then": {"multipleOf": 2}}, b"11") == "then"


def test_classes_of_a_pattern_are_those_of_ascii() -> None:
    schema = {"type": "string", "pattern": r"^\w\W$"}
    assert broken_by(schema, '"aé"'.encode()) is None
    assert broken_by(schema, '"éa"'.encode()) == "pattern"


def test_a_schema_of_an_older_draft_is_judged_by_that() -> None:
    schema = {"items": [{"type": "integer"}, {"type": "null"}], "additionalItems": False}
    assert broken_by(schema, b"[1, null]") is None
    assert broken_by(schema, b"[1, null, 2]") == "additionalItems"


def test_schemas_are_counted_as_refused_or_by_their_answers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(test_schemas, "schemas", lambda: [{"type": "null"}, {"type": "boolean"}])
    monkeypatch.setattr(test_schemas, "KEYWORDS", [{"type": "no such type"}])
    constrainer = Constrainer(load_engine("llguidance", table()), table())
    found = count(constrainer, argparse.Namespace(answers=2, show=0))
    assert (found["schemas"], found["refused"], found["answers"]) == (3, 1, 4)
    assert (found["no_json"], found["break_schema"], found["unfinished"]) == (0, 0, 0)
