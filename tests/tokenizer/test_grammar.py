"""The form of constraints: what is refused before any engine sees it. Cases of the reports."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from actors.tokenizer.grammar import check_grammar
from actors.tokenizer.prompt import Refused
from messages.types import Fault, Grammar

TREE = {
    "$defs": {
        "a/b": {
            "type": ["object", "null"],
            "properties": {"c": {"type": "array", "items": {"$ref": "#/$defs/a~1b"}}},
        }
    },
    "$ref": "#/$defs/a%2Fb".replace("%2F", "~1"),
}


def check(value: Any, kind: str = "json_schema") -> None:
    text = value if isinstance(value, str) and kind in ("regex", "ebnf") else json.dumps(value)
    check_grammar(Grammar(kind, text, param="response_format"))


@pytest.mark.parametrize(
    "value",
    [
        {},
        True,
        {"type": "object", "properties": {}, "additionalProperties": False},
        {"enum": ["objekt", {"type": "objekt"}], "description": "x"},
        {"const": {"$ref": 7}},
        {"type": "integer", "maximum": 20_000_000_000},
        {"anyOf": [{"type": "string"}, {"type": "null"}]},
        {"items": [{"type": "string"}], "type": "array"},
        {"$defs": {"a": True, "b": {"$ref": "#/$defs/a"}}, "items": {"$ref": "#/$defs/b"}},
        TREE,
    ],
)
def test_good_schemas_pass(value: Any) -> None:
    check(value)


def deep(levels: int) -> Any:
    value: Any = {}
    for _ in range(levels):
        value = {"items": value}
    return value


def chain(count: int, link: Callable[[Any], Any]) -> Any:
    """Each definition holds a reference to the next."""
    defs = {f"d{i}": link({"$ref": f"#/$defs/d{i + 1}"}) for i in range(count)}
    return {"$defs": {**defs, f"d{count}": {}}, "$ref": "#/$defs/d0"}


LINKS: list[Callable[[Any], Any]] = [
    lambda reference: reference,
    lambda reference: {"type": "object", "properties": {"a": reference, "b": reference}},
    lambda reference: {"items": {"anyOf": [{"type": "null"}, reference]}},
    lambda reference: {"allOf": [reference, {"$ref": "#/$defs/d0"}]},  # a circle of all of them
]


@pytest.mark.parametrize("link", LINKS)
def test_references_that_lead_deep_down_are_refused(link: Callable[[Any], Any]) -> None:
    """An engine that follows them by recursion would end its process."""
    check(chain(100, link))
    with pytest.raises(Refused, match="256 schemas in each other"):
        check(chain(300, link))
    # In whichever order they are seen.
    far = chain(300, link)
    far["$defs"] = dict(reversed(far["$defs"].items()))
    far["anyOf"] = [{"$ref": f"#/$defs/d{i}"} for i in reversed(range(300))]
    for value in (far, {**far, "anyOf": far["anyOf"][::-1]}):
        with pytest.raises(Refused, match="256 schemas in each other"):
            check(value)


def test_many_references_to_few_places_pass() -> None:
    wide = {f"p{i}": {"$ref": "#/$defs/x"} for i in range(2000)}
    check({"type": "object", "properties": wide, "$defs": {"x": {"items": {"$ref": "#"}}}})


@pytest.mark.parametrize(
    "value",
    [
        {"type": "objekt"},
        {"type": 7},
        {"type": ["string", 7]},
        "not a schema",
        None,
        [],
        {"properties": []},
        {"properties": {"a": "x"}},
        {"items": "x", "type": "array"},
        {"anyOf": []},
        {"anyOf": {}},
        {"properties": {"a": {"items": {"type": "objekt"}}}},
        {"$ref": "#"},
        {"$ref": 5},
        {"$ref": "#/nope"},
        {"$ref": "http://127.0.0.1:9/s.json"},
        {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"},
        {"$defs": {"a": 5}, "$ref": "#/$defs/a"},
        deep(100),
        {"enum": list(range(30_000))},
        {"description": "x" * 300_000},
    ],
)
def test_wrong_schemas_are_refused(value: Any) -> None:
    """B095, B097, B099."""
    with pytest.raises(Refused) as caught:
        check(value)
    problem = caught.value.problem
    assert problem.fault is Fault.INVALID and problem.param == "response_format"
    assert len(problem.message) < 400


def test_expressions_are_bounded_and_not_empty() -> None:
    check("[a-f]{6}", "regex")
    check(["a", "b"], "choice")
    for kind, value in (("regex", ""), ("ebnf", "x" * 20_000), ("choice", ["a"] * 5000)):
        with pytest.raises(Refused):
            check(value, kind)


def test_the_schemas_of_tags_are_looked_at() -> None:
    row = {"trigger": "<f", "begin": "<f>", "schema": {"type": "integer"}, "end": ""}
    check([row, {**row, "schema": None}], "structural_tag")
    check({"first": [row], "prefixes": [""], "between": []}, "structural_tag")
    with pytest.raises(Refused):
        check({"first": [{**row, "schema": {"type": "objekt"}}]}, "structural_tag")
    with pytest.raises(Refused):
        check([row, {**row, "schema": {"type": "objekt"}}], "structural_tag")
