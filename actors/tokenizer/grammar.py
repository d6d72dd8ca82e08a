"""This file looks at the form of a constraint before any work is spent on it.

It does not know engines: whether a grammar can be compiled, the worker says. Pure; its cost is
linear in the text's length.
Laws: what passes is bounded in length, depth and count, also along references; every reference of a
schema leads to a place in the schema, and not round in a circle; nothing is fetched.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

from actors.tokenizer.prompt import Refused, refuse
from messages.types import Grammar

BYTES_MAX = 256 << 10  # of a schema or a list of choices
EXPRESSION_CHARS_MAX = 16 << 10  # of a regular expression or a grammar
DEPTH_MAX = 64
NODES_MAX = 20_000
LEVELS_MAX = 256  # twice as many, and some, overflow the stack of an engine's thread
CHOICES_MAX = 4096
TYPES = frozenset({"array", "boolean", "integer", "null", "number", "object", "string"})
# Keywords whose value is a schema, a list of them, a map to them.
ONE = frozenset(
    {"additionalProperties", "contains", "else", "if", "items", "not", "propertyNames", "then"}
)
MANY = frozenset({"allOf", "anyOf", "oneOf", "prefixItems"})
NAMED = frozenset({"$defs", "definitions", "dependentSchemas", "patternProperties", "properties"})


def check_grammar(grammar: Grammar) -> None:
    """Raises Refused: the caller's fault."""
    param = grammar.param or None
    is_text = grammar.kind in ("regex", "ebnf")
    limit = EXPRESSION_CHARS_MAX if is_text else BYTES_MAX
    if len(grammar.text) > limit:
        raise refuse(f"The constraint is longer than {limit} characters.", param)
    if is_text:
        if not grammar.text:
            raise refuse("The constraint is empty.", param)
        return
    try:
        value = json.loads(grammar.text)
    except (ValueError, RecursionError):
        raise refuse("The constraint is not valid JSON.", param) from None
    if grammar.kind == "choice":
        if len(value) > CHOICES_MAX:
            raise refuse(f"There may be at most {CHOICES_MAX} choices.", param)
        return
    check_size(value, param)
    if grammar.kind == "structural_tag":
        for row in value["first"] if isinstance(value, dict) else value:
            if row["schema"] is not None:
                check_schema(row["schema"], param)
        return
    check_schema(value, param)


def check_size(value: Any, param: str | None) -> None:
    level, depth, count = [value], 0, 0
    while level:
        depth += 1
        count += len(level)
        if depth > DEPTH_MAX:
            raise refuse(f"The schema is nested more than {DEPTH_MAX} levels deep.", param)
        if count > NODES_MAX:
            raise refuse(f"The schema has more than {NODES_MAX} parts.", param)
        level = [child for node in level for child in children(node)]


def children(node: Any) -> Iterator[Any]:
    if isinstance(node, dict):
        yield from node.values()
    elif isinstance(node, list):
        yield from node


def check_schema(root: Any, param: str | None) -> None:
    """The types of the keywords that every engine relies on, the references, and how deep schemas
    lie in each other: engines go down by recursion, and a deep one is the end of their process."""
    if not isinstance(root, dict | bool):
        raise refuse("A schema must be an object.", param)
    inner: dict[int, list[int]] = {}  # the schemas that each holds or refers to
    references: dict[int, tuple[str, int]] = {}
    bare: set[int] = set()  # nothing but references
    pending = [root]
    while pending:
        schema = pending.pop()
        if isinstance(schema, bool) or id(schema) in inner:
            continue
        check_type(schema.get("type"), param)
        found: list[Any] = []
        if "$ref" in schema:
            pointer = schema["$ref"]
            if not isinstance(pointer, str):
                raise refuse("`$ref` in the schema must be a text.", param)
            target = resolve(pointer, root, param)
            references[id(schema)] = pointer, id(target)
            found.append(target)
            if len(schema) == 1:
                bare.add(id(schema))
        for keyword, value in schema.items():
            found += subschemas(keyword, value, param)
        inner[id(schema)] = [id(child) for child in found if isinstance(child, dict)]
        pending += found
    check_circles(references, param)
    ends: dict[int, int] = {}  # of what is bare: what it leads to in the end
    for start in bare:
        chain = [start]
        while chain[-1] in bare and chain[-1] not in ends:
            chain.append(references[chain[-1]][1])
        ends.update(dict.fromkeys(chain[:-1], ends.get(chain[-1], chain[-1])))
    for holder, children in inner.items():
        lead = [ends.get(child, child) for child in children]
        inner[holder] = [child for child in lead if child in inner]
    if isinstance(root, dict) and levels_of(inner, id(root)) > LEVELS_MAX:
        raise refuse(f"The schema has more than {LEVELS_MAX} schemas in each other.", param)


def check_circles(references: dict[int, tuple[str, int]], param: str | None) -> None:
    """A chain of references leads, and not by many steps, to what is not only a reference."""
    steps: dict[int, int] = {}
    for start in references:
        chain: dict[int, None] = {}
        schema = start
        while schema in references and schema not in steps:
            pointer, target = references[schema]
            if schema in chain:
                raise refuse(f"`$ref` {pointer[:200]} in the schema leads back to itself.", param)
            chain[schema] = None
            schema = target
        begin = steps.get(schema, 0) + 1
        steps.update({passed: n for n, passed in enumerate(reversed(chain), begin)})
    if max(steps.values(), default=0) > LEVELS_MAX:
        raise refuse(f"The schema has more than {LEVELS_MAX} schemas in each other.", param)


def levels_of(inner: dict[int, list[int]], root: int) -> int:
    """The most schemas on a way down from `root`; of a circle all of its schemas count. Tarjan's
    algorithm: circles are complete in the order from the innermost outwards."""
    order: dict[int, int] = {}
    low: dict[int, int] = {}
    levels: dict[int, int] = {}  # of those whose circle is complete
    open_: list[int] = []
    way = [(root, iter(inner[root]))]
    order[root] = low[root] = 0
    open_.append(root)
    while way:
        schema, children = way[-1]
        for child in children:
            if child not in order:
                order[child] = low[child] = len(order)
                open_.append(child)
                way.append((child, iter(inner[child])))
                break
            if child not in levels:
                low[schema] = min(low[schema], order[child])
        else:
            way.pop()
            if way:
                low[way[-1][0]] = min(low[way[-1][0]], low[schema])
            if low[schema] == order[schema]:
                circle: list[int] = []
                while not circle or circle[-1] != schema:
                    circle.append(open_.pop())
                below = [levels[c] for s in circle for c in inner[s] if c in levels]
                levels.update(dict.fromkeys(circle, len(circle) + max(below, default=0)))
    return levels[root]


def check_type(value: Any, param: str | None) -> None:
    types = value if isinstance(value, list) else [value]
    for name in types if value is not None else ():
        if not isinstance(name, str) or name not in TYPES:
            raise refuse(f"The schema has an unknown type: {str(name)[:100]}.", param)


def subschemas(keyword: str, value: Any, param: str | None) -> list[Any]:
    found: list[Any] = []
    if keyword in ONE:
        # Older drafts have a list of schemas in `items`.
        found = value if keyword == "items" and isinstance(value, list) else [value]
    elif keyword in MANY:
        if not isinstance(value, list) or not value:
            raise refuse(f"`{keyword}` in the schema must be a list of schemas.", param)
        found = value
    elif keyword in NAMED:
        if not isinstance(value, dict):
            raise refuse(f"`{keyword}` in the schema must be an object.", param)
        found = list(value.values())
    if not all(isinstance(item, dict | bool) for item in found):
        raise refuse(f"`{keyword}` in the schema holds something that is no schema.", param)
    return found


ESCAPE = re.compile(rb"%([0-9A-Fa-f]{2})")


def unquote(text: str) -> str:
    """`%2F` and the like, as pointers in references may have them."""
    raw = ESCAPE.sub(lambda match: bytes([int(match[1], 16)]), text.encode())
    return raw.decode("utf-8", "replace")


def resolve(pointer: str, root: Any, param: str | None) -> Any:
    if not pointer.startswith("#"):
        raise refuse(f"`$ref` {pointer[:200]} leads out of the schema; nothing is fetched.", param)
    node = root
    for part in pointer[1:].split("/")[1:]:
        key = unquote(part).replace("~1", "/").replace("~0", "~")
        if isinstance(node, dict) and key in node:
            node = node[key]
        elif isinstance(node, list) and key.isdigit() and int(key) < len(node):
            node = node[int(key)]
        else:
            raise refuse(f"`$ref` {pointer[:200]} leads nowhere in the schema.", param)
    if not isinstance(node, dict | bool):
        raise refuse(f"`$ref` {pointer[:200]} leads to something that is no schema.", param)
    return node


__all__ = ["Refused", "check_grammar"]
