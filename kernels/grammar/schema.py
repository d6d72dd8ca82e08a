"""This file rewrites a schema where the library llguidance would fail on what it says.

It does not know the library nor compiles anything. Laws: what fits the schema that comes out
fits the one that went in; names of properties, constants and unknown keywords stay as they are.
"""

from __future__ import annotations

import math
from typing import Any

from kernels.constrain import BadGrammar

# Others are annotations, as JSON Schema has it; the library refuses them.
FORMATS = frozenset("""date date-time duration email hostname ipv4 ipv6 time uri uuid""".split())
VALUES = frozenset({"default", "examples"})
NAMED = frozenset({"$defs", "definitions", "dependentSchemas", "patternProperties", "properties"})
LOWER = ("minimum", "exclusiveMinimum")
UPPER = ("maximum", "exclusiveMaximum")
RANGE_MAX = 9 * 10**18  # beyond it the library's digits overflow, and its recursion has no end
EXACT_MAX = 2**53  # larger constants are written as the nearest float
SLIVER = 2.0**-20


def settled(schema: Any) -> Any:
    """Raises BadGrammar where that cannot be done."""
    if isinstance(schema, list):
        return [settled(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    result = {}
    for key, item in schema.items():
        if key in ("const", "enum"):
            check_exact(item)
            result[key] = item
        elif key in VALUES:
            result[key] = item
        elif key in NAMED and isinstance(item, dict):
            result[key] = {name: settled(inner) for name, inner in item.items()}
        elif key in LOWER and is_number(item):
            result[key] = bounded(key, item, 1)
        elif key in UPPER and is_number(item):
            result[key] = bounded(key, item, -1)
        elif key != "format" or not isinstance(item, str) or item in FORMATS:
            result[key] = settled(item)
    leave_out(result, LOWER, UPPER, 1)
    leave_out(result, UPPER, LOWER, -1)
    return result


def is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def check_exact(value: Any) -> None:
    if isinstance(value, list | dict):
        for item in value.values() if isinstance(value, dict) else value:
            check_exact(item)
    elif isinstance(value, int) and abs(value) > EXACT_MAX:
        raise BadGrammar("A constant of the schema is an integer of more than 53 bits.")


def bounded(key: str, bound: float, sign: int) -> float:
    """An end of a range (`sign`: 1 for the lower one) that the library can count to."""
    if sign * bound > RANGE_MAX or bound in (math.inf, -math.inf):
        raise BadGrammar(f"The schema's `{key}` is beyond what an integer of 64 bits can be.")
    return max(bound, -RANGE_MAX) if sign > 0 else min(bound, RANGE_MAX)


def leave_out(
    schema: dict[str, Any], near: tuple[str, str], far: tuple[str, str], sign: int
) -> None:
    """The library takes an integer that is left out at a range's end for a part of it, where the
    other end is no integer away: a sliver beside it is left out as well."""
    end, open_end = near
    bound = schema.get(open_end)
    others = [sign * schema[key] for key in far if is_number(schema.get(key))]
    if not is_number(bound) or bound != round(bound) or sign * bound < 0 or not others:
        return
    length = min(others) - sign * bound
    if 0 < length < 1:
        del schema[open_end]
        beside = bound + sign * length * SLIVER
        given = schema.get(end)
        if not is_number(given) or sign * given < sign * beside:
            schema[end] = beside
