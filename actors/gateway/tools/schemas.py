"""This file makes the schemas of calls from those of tools: an object of name and arguments.

It does not know formats or bodies. Each tool's schema lies apart, its own references still leading
to it. Law: what fits such a schema is a call of one of the tools, with arguments that fit its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from actors.gateway.tools.base import Signature

KEYS = ("arguments",)
# What engines of grammars cannot hold an answer to.
UNHELD = frozenset(
    """if then else not contains minContains maxContains propertyNames dependentRequired
    dependentSchemas dependencies unevaluatedItems unevaluatedProperties uniqueItems""".split()
)
NAMED = frozenset({"$defs", "definitions", "patternProperties", "properties"})
VALUES = frozenset({"const", "default", "enum", "examples"})


def call_schema(tools: Sequence[Signature], keys: Sequence[str] = KEYS) -> dict[str, Any]:
    """One call. `keys`: what the arguments may be called."""
    return {"anyOf": calls_of(tools, keys), "$defs": schemas_of(tools)}


def array_schema(
    tools: Sequence[Signature], keys: Sequence[str] = KEYS, *, single: bool = False
) -> dict[str, Any]:
    """At least one call in an array."""
    items = {"anyOf": calls_of(tools, keys)}
    array: dict[str, Any] = {"type": "array", "minItems": 1, "items": items}
    if single:
        array["maxItems"] = 1
    return {**array, "$defs": schemas_of(tools)}


def calls_of(tools: Sequence[Signature], keys: Sequence[str]) -> list[dict[str, Any]]:
    return [
        {
            "type": "object",
            "properties": {"name": {"const": tool.name}, key: {"$ref": root_of(index)}},
            "required": ["name", key],
            "additionalProperties": False,
        }
        for index, tool in enumerate(tools)
        for key in keys
    ]


def schemas_of(tools: Sequence[Signature]) -> dict[str, Any]:
    return {f"t{index}": moved(tool.schema, root_of(index)) for index, tool in enumerate(tools)}


def root_of(index: int) -> str:
    return f"#/$defs/t{index}"


def moved(value: Any, root: str) -> Any:
    """A schema whose references begin at `root`. Its depth is bounded before."""
    if isinstance(value, list):
        return [moved(item, root) for item in value]
    if not isinstance(value, dict):
        return value
    result = {}
    for key, item in value.items():
        is_reference = key == "$ref" and isinstance(item, str) and item.startswith("#")
        result[key] = root + item[1:] if is_reference else moved(item, root)
    return result


def loosened(value: Any) -> Any:
    """A schema that all fit which fit the given one, without what nobody can be held to: that of a
    tool which is not strict. Its depth is bounded before."""
    if isinstance(value, list):
        return [loosened(item) for item in value]
    if not isinstance(value, dict):
        return value
    result = {}
    for key, item in value.items():
        if key in VALUES:
            result[key] = item
        elif key in NAMED and isinstance(item, dict):
            result[key] = {name: loosened(inner) for name, inner in item.items()}
        elif key == "oneOf" and "anyOf" not in value:  # that only one fits is what cannot be held
            result["anyOf"] = loosened(item)
        elif key not in UNHELD:
            result[key] = loosened(item)
    return result
