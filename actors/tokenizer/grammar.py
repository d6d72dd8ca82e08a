"""This file looks at the form of a constraint before any work is spent on it.

It does not know engines: whether a grammar can be compiled, the worker says. Pure; its cost is
linear in the text's length.
Laws: what passes is bounded in length, depth and count; every reference of a schema leads to a
place in the schema, and not round in a circle; nothing is fetched.
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
    """The types of the keywords that every engine relies on, and the references."""
    if not isinstance(root, dict | bool):
        raise refuse("A schema must be an object.", param)
    pending = [root]
    while pending:
        schema = pending.pop()
        if isinstance(schema, bool):
            continue
        check_type(schema.get("type"), param)
        if "$ref" in schema:
            check_reference(schema, root, param)
        for keyword, value in schema.items():
            pending += subschemas(keyword, value, param)


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


def check_reference(schema: Any, root: Any, param: str | None) -> None:
    """Follows a chain of references to something that is not only a reference."""
    seen: set[str] = set()
    while isinstance(schema, dict) and "$ref" in schema:
        pointer = schema["$ref"]
        if not isinstance(pointer, str):
            raise refuse("`$ref` in the schema must be a text.", param)
        if pointer in seen:
            raise refuse(f"`$ref` {pointer[:200]} in the schema leads back to itself.", param)
        seen.add(pointer)
        schema = resolve(pointer, root, param)


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
