"""Goal: whatever a constrained sequence says is valid by its schema.

Method: a few hundred schemas, made of parts below, each followed by random choices among the
allowed tokens to the end; the outside library `jsonschema` is the judge. A schema may be refused,
since not everything can be turned into a grammar; how many may be is bounded, so that refusing all
is no way out.
"""

from __future__ import annotations

import json
import random
from typing import Any

import jsonschema
import numpy as np
import pytest

from kernels.batch import Constraint
from kernels.constrain import BadGrammar, Constrainer, load_engine
from tests.kernels.driver import ints
from tests.kernels.test_constrain import EOS, PIECES, V, bytes_of, table

SCALARS: list[Any] = [
    {"type": "null"},
    {"type": "boolean"},
    {"type": "integer"},
    {"type": "number"},
    {"type": "string", "maxLength": 6},
    {"type": "string", "minLength": 2, "maxLength": 4},
    {"type": "string", "pattern": "^[a-c]{2,3}$"},
    {"type": "string", "format": "date"},
    {"type": "string", "format": "uuid"},
    {"type": "string", "format": "ipv4"},
    {"type": "integer", "minimum": -3, "maximum": 12},
    {"type": "integer", "exclusiveMinimum": 5, "maximum": 6},
    {"type": "integer", "maximum": 20_000_000_000},
    {"type": "number", "minimum": 0, "maximum": 1},
    {"type": "number", "minimum": -1.5, "exclusiveMaximum": 2.25},
    {"type": "integer", "multipleOf": 5},
    {"enum": ["a", 1, None, True, 'é"\\\n']},
    {"const": {"x": [1, 2]}},
    {"type": ["integer", "null"]},
    {"anyOf": [{"type": "string", "maxLength": 3}, {"type": "integer"}]},
    {"oneOf": [{"type": "string", "maxLength": 3}, {"type": "integer"}]},
    {"allOf": [{"type": "integer", "minimum": 2}, {"type": "integer", "maximum": 9}]},
    {"not": {"type": "string"}, "type": "integer"},
    True,
]
SMALL: Any = {"maxItems": 3}


def arrays(item: Any) -> list[Any]:
    return [
        {"type": "array", "items": item, **SMALL},
        {"type": "array", "items": item, "minItems": 2, **SMALL},
        {"type": "array", "prefixItems": [item, {"type": "null"}], "items": False},
        {"type": "array", "items": item, "uniqueItems": True, **SMALL},
    ]


def objects(value: Any) -> list[Any]:
    closed = {"type": "object", "additionalProperties": False}
    return [
        {**closed, "properties": {"a": value}, "required": ["a"]},
        {**closed, "properties": {"a": value, "b": value, "c": {"type": "null"}}},
        {**closed, "properties": {"b c": value, 'd"': value}, "required": ["b c", 'd"']},
        {"type": "object", "additionalProperties": value, "maxProperties": 2},
        {"type": "object", "patternProperties": {"^x[0-9]$": value}, "additionalProperties": False},
        {
            "$defs": {"v": value},
            **closed,
            "properties": {
                "a": {"$ref": "#/$defs/v"},
                "n": {"anyOf": [{"$ref": "#"}, {"type": "null"}]},
            },
            "required": ["a"],
        },
    ]


def schemas() -> list[Any]:
    found = list(SCALARS)
    for scalar in SCALARS:
        found += arrays(scalar) + objects(scalar)
    for scalar in SCALARS[:8]:
        found += [nested for array in arrays(scalar)[:2] for nested in objects(array)[:2]]
        found += arrays(objects(scalar)[0])[:2]
    return found


def answer(constrainer: Constrainer, rng: random.Random, count_max: int) -> list[int] | None:
    """Random tokens to the end; None where the end does not come in `count_max` tokens."""
    tokens: list[int] = []
    for _ in range(count_max):
        masks = constrainer.masks(ints([0]))
        assert masks is not None and len(masks.rows) == 1, bytes_of(tokens)
        allowed = np.flatnonzero(masks.allowed(V)[0]).tolist()
        assert allowed, f"no way on from {bytes_of(tokens)!r}"
        ends = [token for token in allowed if token == EOS or PIECES[token] in b'"}],']
        plain = [token for token in allowed if PIECES[token][:1] not in (b" ", b"\n", b"\t", b"\r")]
        token = rng.choice(ends if ends and rng.random() < 0.6 else plain or allowed)
        constrainer.take(ints([0]), ints([token]))
        if token == EOS:
            return tokens
        tokens.append(token)
    return None


@pytest.fixture(scope="module")
def constrainer() -> Constrainer:
    return Constrainer(load_engine("llguidance", table()), table())


def test_every_finished_answer_is_valid_by_its_schema(constrainer: Constrainer) -> None:
    every = schemas()
    assert len(every) > 250
    refused = unfinished = finished = 0
    for number, schema in enumerate(every):
        judge = jsonschema.Draft202012Validator(schema)
        constraint = Constraint("json_schema", json.dumps(schema))
        for seed in range(2):
            constrainer.clear()
            try:
                constrainer.open(0, constraint, [])
            except BadGrammar:
                refused += 1
                break
            tokens = answer(constrainer, random.Random(number * 2 + seed), 300)
            if tokens is None:
                unfinished += 1
                continue
            finished += 1
            text = bytes_of(tokens).decode()
            errors = [error.message for error in judge.iter_errors(json.loads(text))]
            assert not errors, (schema, text, errors[:2])
    assert refused <= len(every) // 4, f"{refused} of {len(every)} schemas were refused"
    assert unfinished <= len(every) // 4, f"{unfinished} answers did not end"
    assert finished > len(every)
