"""This file writes `docs/api.md`: every route, and every field of every body, as the structs say.

    python -m bench.api_page > docs/api.md

It does not know the routes: what there is comes from `actors/gateway/openapi.py`, what is said of a
field from the comment beside it in `messages/`. A field counts as refused where its struct is one
of `REFUSING`, and as ignored where its comment begins so. A test holds page and code together.
"""

from __future__ import annotations

import ast
import functools
import inspect
import sys
import textwrap
from operator import itemgetter
from typing import Any, get_args, get_type_hints

import msgspec

from actors.gateway.access import Access, Level
from actors.gateway.openapi import OPERATIONS, Operation, document
from messages import anthropic, native, openai, responses, vectors

REFUSING = (
    openai.Unsupported,
    responses.UnsupportedResponses,
    anthropic.Refusals,
    native.Lacking,
    vectors.VectorsUnsupported,
)
IGNORED = ("ignored", "taken, and not used")
STATUSES = ("required", "honoured", "ignored", "**refused**")
NEEDS = {Level.OPEN: "nobody", Level.KEY: "a key", Level.ADMIN: "an admin key"}
INTRO = """\
# HTTP API

Written by `python -m bench.api_page` from the structs in `messages/`; the same is served as
OpenAPI at `/openapi.json`.

Types are strict: no `"10"` for 10, no `true` for 1. `null` means "not given". A field that is not
in these tables is ignored, since clients send their vendor's extras to every server. A field
marked **refused** is one that would change the answer and that this server does not have: any
value but a neutral one (`null`, `false`, `[]`) is an error 400 that names it. What a table does not
say is in [api/openai.md](api/openai.md), [api/vectors.md](api/vectors.md) (embeddings, scores,
rankings), [api/anthropic.md](api/anthropic.md), [api/ollama.md](api/ollama.md) and
[api/native.md](api/native.md).

Errors are `{"error": {"message", "type", "param", "code"}}`, in the other dialects as these have
them. Once a stream has begun, an error is its last event. Every answer has an `x-request-id`,
which the log also has; a client's own is sent back.

Without keys (`--api-key-file`, `HISTRIO_API_KEYS`) every route but the control routes is open.
With keys every path needs one, whether there is such a route or not, but `/health` and `/ready`,
and by choice (`--metrics-open`) `/metrics`. Control routes always need an admin key
(`--admin-key-file`, `HISTRIO_ADMIN_KEYS`); without one they are refused. A key goes into
`Authorization: Bearer KEY`, or `x-api-key`.

`/v1/responses` keeps its answers in the memory of the gateway that made them, `--responses-max`
of at most `--responses-bytes-max`, the oldest out first. `/v1/files` and `/v1/batches` are off
(404) without a `--batch-dir`; what is in that directory survives restarts, and the requests of
batches go behind all other traffic, at most `--batch-running` of them at once.
"""


def page() -> str:
    sections = [INTRO, "## Routes\n", routes(), "## Fields\n"]
    done: dict[Any, str] = {}
    for row in OPERATIONS:
        if row.body is None:
            continue
        sections.append(f"### {row.method} {row.path}\n")
        if row.body in done:
            sections.append(f"As [{done[row.body]}](#{anchor(done[row.body])}).\n")
            continue
        done[row.body] = f"{row.method} {row.path}"
        sections.append(fields(row))
    return "\n".join(sections).rstrip() + "\n"


def anchor(title: str) -> str:
    return "".join(c for c in title.lower().replace(" ", "-") if c.isalnum() or c in "-_")


def routes() -> str:
    lines = ["| route | what | needs |", "| --- | --- | --- |"]
    for row in OPERATIONS:
        need = NEEDS[Access(("x",)).level(row.path)]
        lines.append(f"| `{row.method} {row.path}` | {row.summary} | {need} |")
    return "\n".join(lines) + "\n"


def fields(row: Operation) -> str:
    schema = schema_of(row)
    notes = notes_of(row.body)
    required = schema.get("required", [])
    kinds = [kind for kind in REFUSING if issubclass(row.body, kind)]
    refused = {name for kind in kinds for name in kind.__struct_fields__}
    lines: list[tuple[int, str]] = []
    for name, found in schema["properties"].items():
        note = notes.get(name, "")
        status = "honoured"
        if name in refused:
            status = "**refused**"
        elif note.lower().startswith(IGNORED):
            status = "ignored"
            note = note.partition(":")[2].strip()
        elif name in required:
            status = "required"
        kind = "" if status == "**refused**" else short(found)
        line = f"| `{name}` | {status} | {kind} | {escaped(note)} |"
        lines.append((STATUSES.index(status), "\n".join([line, *inner(row.body, name, found)])))
    head = ["| field | | type | |", "| --- | --- | --- | --- |"]
    return "\n".join([*head, *(line for _, line in sorted(lines, key=itemgetter(0)))]) + "\n"


def inner(body: type, name: str, outer: dict[str, Any]) -> list[str]:
    """The fields of a field that is an object of its own."""
    hint = get_type_hints(body, include_extras=True)[name]
    kinds = [kind for kind in get_args(hint) or (hint,) if is_struct(kind)]
    references = [one["$ref"] for one in outer.get("anyOf", (outer,)) if "$ref" in one]
    if not (kinds and references):
        return []
    notes = notes_of(kinds[0])
    schema = described()["components"]["schemas"][references[0].rsplit("/", 1)[1]]
    lines = []
    for field, found in schema.get("properties", {}).items():
        note = notes.get(field, "")
        status = "**refused**" if note.startswith("refused") else "honoured"
        if note.lower().startswith(IGNORED):
            status, note = "ignored", note.partition(":")[2].strip()
        note = note.removeprefix("refused").strip()
        kind_text = "" if note == "" and status == "**refused**" else short(found)
        lines.append(f"| `{name}.{field}` | {status} | {kind_text} | {escaped(note)} |")
    return lines


def is_struct(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, msgspec.Struct)


@functools.cache
def described() -> dict[str, Any]:
    found: dict[str, Any] = msgspec.json.decode(document("", ""))
    return found


def schema_of(row: Operation) -> dict[str, Any]:
    operation = described()["paths"][row.path][row.method.lower()]
    reference = operation["requestBody"]["content"]["application/json"]["schema"]["$ref"]
    found: dict[str, Any] = described()["components"]["schemas"][reference.rsplit("/", 1)[1]]
    return found


def short(schema: dict[str, Any]) -> str:
    """A type in a few words."""
    if "anyOf" in schema:
        kinds = [short(one) for one in schema["anyOf"] if one.get("type") != "null"]
        return " or ".join(dict.fromkeys(kinds))
    if "$ref" in schema:
        return "object"
    if "enum" in schema:
        return ", ".join(f"`{value}`" for value in schema["enum"] if value is not None)
    kind = str(schema.get("type", "any"))
    if kind == "array":
        return f"array of {short(schema['items'])}" if schema.get("items") else "array"
    low, high = schema.get("minimum"), schema.get("maximum")
    if low is not None and high is not None and high < 2**31 - 1:
        return f"{kind}, {low:g} to {high:g}"
    if low is not None and low > -(2**31):
        return f"{kind}, at least {low:g}"
    return kind


def notes_of(kind: type) -> dict[str, str]:
    """The comments beside the fields, nearest class first."""
    notes: dict[str, str] = {}
    for base in kind.__mro__:
        if base is msgspec.Struct or not issubclass(base, msgspec.Struct):
            continue
        source = textwrap.dedent(inspect.getsource(base))
        lines = source.splitlines()
        (made,) = ast.parse(source).body
        assert isinstance(made, ast.ClassDef)
        for node in made.body:
            if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                _, mark, note = lines[(node.end_lineno or 1) - 1].partition("  # ")
                notes.setdefault(node.target.id, note.strip() if mark else "")
    return notes


def escaped(text: str) -> str:
    return text.replace("|", "\\|")


if __name__ == "__main__":
    sys.stdout.write(page())
