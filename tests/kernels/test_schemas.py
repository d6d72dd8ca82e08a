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


INT: Any = {"type": "integer", "minimum": 0, "maximum": 20}
TEXT: Any = {"type": "string", "maxLength": 4}
CLOSED: Any = {"type": "object", "additionalProperties": False}
TWO: Any = {**CLOSED, "properties": {"a": INT, "b": INT}}


def number(**bounds: Any) -> Any:
    return {"type": "number", **bounds}


def integer(**bounds: Any) -> Any:
    return {"type": "integer", **bounds}


# One keyword or edge after the other, in the order of the public test suite.
KEYWORDS: list[Any] = [
    {
        "allOf": [{"properties": {"a": INT}, "required": ["a"]}, {"properties": {"b": TEXT}}],
        "type": "object",
    },
    {"allOf": [{"type": "string", "minLength": 2}, {"maxLength": 3}]},
    {"allOf": [{"enum": [1, 2, 3]}, {"enum": [2, 3, 4]}]},
    {"allOf": [{"multipleOf": 2}, {"multipleOf": 3}], **INT},
    {"allOf": [{"type": "string", "pattern": "^a"}, {"pattern": "b$"}], "maxLength": 6},
    {"anyOf": [{"minimum": 3}, {"maximum": 1}], "type": "integer"},
    {"anyOf": [False, {"type": "null"}]},
    {**TWO, "anyOf": [{"required": ["a"]}, {"required": ["b"]}]},
    {"oneOf": [{**INT, "multipleOf": 2}, {**INT, "multipleOf": 3}]},
    {"oneOf": [{**CLOSED, "properties": {"a": INT}}, TWO]},
    {"oneOf": [{"type": "number"}, {"type": "integer"}]},
    {"oneOf": [True, False], "type": "null"},
    {**integer(minimum=0, maximum=50), "if": {"minimum": 10}, "then": {"multipleOf": 2}},
    {"type": "array", "items": INT, "contains": {"const": 3}, "maxItems": 3},
    {"type": "array", "items": INT, "contains": {"minimum": 10}, "maxContains": 1, "maxItems": 4},
    {"type": "array", "uniqueItems": True, "items": {"enum": [1, 2]}, "maxItems": 3},
    {"type": "array", "prefixItems": [INT], "unevaluatedItems": False},
    {"type": "array", "items": [INT, {"type": "null"}], "additionalItems": False},
    {"minItems": 2, "items": INT, "maxItems": 3},
    {"type": "object", "propertyNames": {"pattern": "^[a-c]$"}, "maxProperties": 2},
    {"type": "object", "minProperties": 2, "additionalProperties": INT, "maxProperties": 3},
    {**TWO, "minProperties": 1},
    {**TWO, "dependentRequired": {"a": ["b"]}},
    {**TWO, "dependencies": {"a": ["b"]}},
    {**TWO, "dependentSchemas": {"a": {"required": ["b"]}}},
    {"type": "object", "properties": {"a": INT}, "unevaluatedProperties": False},
    {"type": "object", "patternProperties": {"^a": INT, "b$": {"maximum": 5}}, "maxProperties": 2},
    {"type": "object", "required": ["z"]},
    {**CLOSED, "properties": {"__proto__": INT, "": INT, 'é"\\': INT}},
    {**TWO, "not": {"required": ["a"]}},
    {"not": {"const": 3}, **integer(minimum=2, maximum=4)},
    {"$ref": "#/$defs/x", "$defs": {"x": integer(minimum=3, maximum=9)}, "maximum": 5},
    {**CLOSED, "properties": {"$ref": TEXT, "format": {"const": "x"}, "minimum": {"const": 1}}},
    {"$defs": {"a": {"$anchor": "foo", "type": "null"}}, "$ref": "#foo"},
    {"$defs": {"n": {"$dynamicAnchor": "n", "type": "null"}}, "$dynamicRef": "#n"},
    {"enum": [{"a": 1, "format": "x"}, [1, 2], [], {}]},
    {"enum": [1, True, 0, False]},
    {"enum": ["a", 1], "type": "integer"},
    *({"const": value} for value in (None, "\u2028🙂\0", 1e3, 0.1, -0.0, 1e-7, [], {"b": [{}]})),
    *({"const": sign * 2**53 + near} for sign in (1, -1) for near in (-1, 0, 1)),
    *({"enum": [{"a": [value]}]} for value in (12345678901234567890, 2**63, 2**64, 10**20)),
    *({"type": "string", "format": name} for name in ("email", "date-time", "duration", "uri")),
    *({"format": name, "maxLength": 5} for name in ("password", "path", "regex", "int32")),
    integer(format="int64", minimum=-3, maximum=3),
    *(
        {"type": "string", "pattern": text}
        for text in ("a+b?", "^[^\\s]{2}$", "^é🙂$", "^.$", "^x|y$")
    ),
    {"type": "string", "pattern": "\\w\\W\\S\\D", "maxLength": 8},
    {"type": "string", "pattern": "^(?=a).{2}$"},
    {"type": "string", "minLength": 1, "maxLength": 1},
    number(multipleOf=0.25, minimum=0, maximum=5),
    number(exclusiveMinimum=0, exclusiveMaximum=0.001),
    number(exclusiveMinimum=0, maximum=0.5),
    number(exclusiveMinimum=10, maximum=10.5),
    number(exclusiveMaximum=0, minimum=-0.5),
    number(exclusiveMaximum=-1, exclusiveMinimum=-1.5),
    number(exclusiveMinimum=1, minimum=1.2, maximum=1.5),
    number(minimum=1e-7, maximum=1e-6),
    number(exclusiveMaximum=10),
    integer(exclusiveMinimum=0.5, exclusiveMaximum=2.5),
    integer(minimum=-3.5, maximum=-1.5),
    integer(minimum=1, exclusiveMinimum=0, maximum=5, exclusiveMaximum=3),
    integer(minimum=2**53 - 2, maximum=2**53 + 2),
    integer(minimum=-(2**63), maximum=2**63 - 1),
    integer(minimum=-(2**63), maximum=-(2**63) + 3),
    integer(minimum=-(2**63) + 1, maximum=-1),
    integer(minimum=2**64 - 2, maximum=2**64),
    integer(minimum=-(10**30), maximum=-(10**29)),
    {"allOf": [integer(minimum=-(2**63)), {"maximum": -(2**63) + 5}]},
    {},
    {"type": ["null", "boolean"], "title": "t", "default": 5, "x-own": {"a": 1}, "$comment": "c"},
]


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
    every = schemas() + KEYWORDS
    assert len(every) > 390
    refused = unfinished = finished = 0
    for number, schema in enumerate(every):
        older = isinstance(schema, dict) and isinstance(schema.get("items"), list)
        judge = (jsonschema.Draft7Validator if older else jsonschema.Draft202012Validator)(schema)
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
