"""This file reads what the text of an answer must be: the fields of three dialects, one `Grammar`.

It does not know grammars' engines, nor whether a schema makes sense: the tokenizer looks at its
form, the worker compiles it. Law: a body has one constraint at most; a refusal names the field.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NoReturn, TypeVar

import msgspec

from actors.gateway.errors import invalid
from actors.gateway.tools.base import Tag, Tags
from messages.openai import (
    NOT_GIVEN,
    Constraints,
    ResponseFormat,
    StructuralTag,
    StructuredOptions,
    StructuredOutputs,
)
from messages.types import Grammar

S = TypeVar("S")
ANY_OBJECT = {"type": "object"}
UNKNOWN = "Object contains unknown field `"  # msgspec's words
RAW_BYTES_MAX = 512 << 10  # of a constraint, before anything is read of it


def read_constraint(body: Constraints) -> Grammar | None:
    """Raises Refused, also where two fields ask for something."""
    found: list[Grammar] = []
    for name in Constraints.__struct_fields__:
        value = getattr(body, name)
        if value is None or (isinstance(value, msgspec.Raw) and is_neutral(value)):
            continue
        if isinstance(value, msgspec.Raw) and len(bytes(value)) > RAW_BYTES_MAX:
            raise invalid(f"`{name}` is longer than {RAW_BYTES_MAX} bytes.", name)
        grammar = read_field(name, value)
        if grammar is not None:
            found.append(grammar)
    if len(found) > 1:
        names = " and ".join(f"`{grammar.param}`" for grammar in found[:2])
        raise invalid(f"{names} exclude each other.", found[1].param)
    return found[0] if found else None


def is_neutral(raw: msgspec.Raw) -> bool:
    return raw is NOT_GIVEN or bytes(raw) in (b"", b"null")


def read_field(name: str, value: Any) -> Grammar | None:
    """None: the field asks for nothing."""
    match name:
        case "response_format":
            return read_format(decode_raw(value, ResponseFormat, name))
        case "json_schema" | "guided_json":
            return schema(decode_raw(value, object, name), name)
        case "structured_outputs":
            return read_structured(decode_raw(value, StructuredOutputs, name))
        case "regex" | "guided_regex":
            return Grammar("regex", value, param=name)
        case "structural_tag":
            return tagged(decode_raw(value, object, name), name)
        case "ebnf" | "guided_grammar":
            return Grammar("ebnf", value, param=name)
        case "guided_choice":
            return choice(value, name)
    return None  # a field of `Unsupported`, which has been looked at already


def read_format(form: ResponseFormat) -> Grammar | None:
    if form.type == "text":
        return None
    if form.type == "json_object":
        return schema(ANY_OBJECT, "response_format")
    if form.type == "structural_tag":
        parts = {name: getattr(form, name) for name in ("structures", "triggers", "format")}
        return tagged(msgspec.to_builtins(parts), "response_format")
    if form.json_schema is None:
        raise invalid(
            "A response format of type `json_schema` needs its `json_schema`.",
            "response_format.json_schema",
        )
    return schema(form.json_schema.schema, "response_format")


def read_structured(form: StructuredOutputs) -> Grammar:
    where = "structured_outputs"
    options = StructuredOptions.__struct_fields__
    for name in options:
        if bytes(getattr(form, name)) not in (b"", b"null", b"false"):
            raise invalid(f"`{where}.{name}` is not supported.", f"{where}.{name}")
    given = [
        name
        for name in form.__struct_fields__
        if name not in options
        and getattr(form, name) is not None
        and (name, getattr(form, name)) != ("json_object", False)
    ]
    if len(given) != 1:
        count = "no constraint" if not given else "more than one constraint"
        raise invalid(f"`{where}` has {count}; it needs exactly one.", where)
    value = getattr(form, given[0])
    match given[0]:
        case "json":
            return schema(value, where)
        case "json_object":
            return schema(ANY_OBJECT, where)
        case "regex":
            return Grammar("regex", value, param=where)
        case "choice":
            return choice(value, where)
        case "structural_tag":
            return tagged(value, where, f"{where}.structural_tag")
    return Grammar("ebnf", value, param=where)


def schema(value: Any, param: str) -> Grammar:
    """A schema, or the text of one."""
    if isinstance(value, str):
        try:
            value = msgspec.json.decode(value)
        except (msgspec.DecodeError, RecursionError):
            raise invalid(f"`{param}` has a schema that is not JSON.", param) from None
    if not isinstance(value, dict | bool):
        raise invalid(f"`{param}` needs a schema that is an object.", param)
    try:
        text = msgspec.json.encode(value).decode()
    except RecursionError:
        raise invalid(f"`{param}` is nested too deeply.", param) from None
    return Grammar("json_schema", text, param=param)


def tagged(value: Any, param: str, place: str = "") -> Grammar:
    """A structural tag, or the text of one. `place`: where it is, if not the field itself."""
    place = place or param
    if isinstance(value, str):
        try:
            value = msgspec.json.decode(value)
        except (msgspec.DecodeError, RecursionError):
            raise invalid(f"`{param}` is not JSON.", param) from None
    if isinstance(value, dict) and value.get("format") is not None:
        message = f"`{place}.format` is not supported; `structures` and `triggers` are."
        raise invalid(message, f"{place}.format")
    try:
        form = msgspec.convert(value, StructuralTag)
    except msgspec.ValidationError as error:
        decode_raw_refuse(str(error), place)
    for structure in form.structures:
        if not any(structure.begin.startswith(trigger) for trigger in form.triggers):
            raise invalid(f"A structure of `{param}` begins with none of the triggers.", param)
        if not isinstance(structure.schema, dict | bool):
            raise invalid(f"`{param}` needs schemas that are objects.", param)
    triggers = [
        next(trigger for trigger in form.triggers if structure.begin.startswith(trigger))
        for structure in form.structures
    ]
    rows = zip(triggers, form.structures, strict=True)
    return tags((Tag(trigger, s.begin, s.schema, s.end) for trigger, s in rows), param)


def tags(rows: Iterable[Tag], param: str) -> Grammar:
    """Free text with structures in it."""
    return grammar_of([tag._asdict() for tag in rows], param)


def call_tags(form: Tags, param: str) -> Grammar:
    """What the model says may hold calls, as their format has them."""
    if not form.is_first:
        return tags(form.tags, param)
    rows = [tag._asdict() for tag in form.tags]
    return grammar_of({"first": rows, "prefixes": form.prefixes, "between": form.between}, param)


def grammar_of(value: Any, param: str) -> Grammar:
    try:
        return Grammar("structural_tag", msgspec.json.encode(value).decode(), param=param)
    except RecursionError:
        raise invalid(f"`{param}` is nested too deeply.", param) from None


def choice(options: list[str], param: str) -> Grammar:
    if not options or "" in options:
        raise invalid(f"`{param}` needs at least one text, and none that is empty.", param)
    return Grammar("choice", msgspec.json.encode(options).decode(), param=param)


def decode_raw(raw: msgspec.Raw, kind: type[S], param: str) -> S:
    """The typed value of a field that was left undecoded. Raises Refused."""
    try:
        return msgspec.json.decode(raw, type=kind)
    except msgspec.ValidationError as error:
        decode_raw_refuse(str(error), param)
    except RecursionError:
        raise invalid(f"`{param}` is nested too deeply.", param) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise invalid(f"`{param}` is not valid JSON: {error}.", param) from None


def decode_raw_refuse(text: str, param: str) -> NoReturn:
    """Puts the path within the field behind the field's own name."""
    reason, _, where = text.partition(" - at `")
    path = where.rstrip("`").removeprefix("$").replace("[...]", "")
    if reason.startswith(UNKNOWN):
        path += f".{reason.removeprefix(UNKNOWN).rstrip('`')[:100]}"
        raise invalid(f"`{param}{path}` is no field that is known here.", f"{param}{path}")
    reason = reason.replace("`", "").replace(" | null", "")
    raise invalid(f"`{param}{path}` is wrong: {reason}.", f"{param}{path}")
