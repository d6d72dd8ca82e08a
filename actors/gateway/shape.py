"""This file reads what the answer of a chat is made of: tools, reasoning, and what is forced of it.

It does not know templates, streams or formats' insides: it names the parsers, and `reading.py` runs
them. `required` and a named tool are forced by a grammar, in a form that needs no markers: an array
of calls, or the arguments of the one call.
Law: whatever the body, the result is a `Shape` or `Refused` that names the field.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import msgspec

from actors.gateway.constraint import decode_raw, schema, tags
from actors.gateway.errors import invalid
from actors.gateway.reasoning.base import REASONING_PARSERS
from actors.gateway.tools.base import TOOL_PARSERS
from messages.openai import ChatBody, Tool, ToolChoice
from messages.types import Grammar

JSON, NAMED = "json", "named"
DEPTH_MAX = 100  # of a tool's parameters
FALLBACK = "hermes"  # what the tokenizer describes to models whose template knows no tools


class Shape(NamedTuple):
    """How the text of an answer is to be read."""

    tool_parser: str = ""  # "": no calls; NAMED: all of it is one call's arguments
    names: tuple[str, ...] = ()  # the tools that may be called
    single: bool = False  # only the first call counts
    reasoning_parser: str = ""
    shows_reasoning: bool = True
    shows_special: bool = False  # the parsers need the special tokens' text
    is_forced: bool = False  # `grammar` is of the tools

    @property
    def is_plain(self) -> bool:
        return not (self.tool_parser or self.reasoning_parser)


class Parsers(NamedTuple):
    """What the settings, or the model's template, say."""

    tool: str = ""
    reasoning: str = ""


class Shaped(NamedTuple):
    shape: Shape
    grammar: Grammar | None
    tools_json: bytes  # for the template


def read_shape(
    chat: ChatBody, parsers: Parsers, constraint: Grammar | None, tools_max: int
) -> Shaped:
    """Raises Refused. A tool that must be called goes before any other constraint."""
    choice = read_choice(chat)
    tools = [] if choice == "none" else read_tools(chat, tools_max)
    reasoning = read_reasoning(chat, parsers.reasoning)
    shape = Shape(reasoning_parser=reasoning, shows_reasoning=chat.include_reasoning is not False)
    grammar = constraint
    tools_json = b""
    if choice not in ("none", "auto") and not tools:
        raise invalid("`tool_choice` needs `tools`.", "tools")
    if tools:
        tools_json = bytes(chat.tools)
        names = tuple(tool.function.name for tool in tools)
        single = chat.parallel_tool_calls is False
        parser = parsers.tool or FALLBACK
        if isinstance(choice, ToolChoice):
            name = choice.function.name
            if name not in names:
                raise invalid(f"There is no tool `{name[:100]}`.", "tool_choice")
            tool = tools[names.index(name)]
            grammar = schema(parameters_of(tool), "tools")
            names, parser = (name,), NAMED
        elif choice == "required":
            grammar = schema(calls_schema(tools, single), "tools")
            parser = JSON
        elif constraint is not None:
            parser = ""  # the answer is what the constraint says: no call fits it
        if parser == "none":
            parser = ""
        if grammar is None and parser in TAGGED and any(tool.function.strict for tool in tools):
            grammar = strict_calls(tools)
        shape = shape._replace(
            tool_parser=parser, names=names, single=single, is_forced=grammar is not constraint
        )
    shape = shape._replace(shows_special=shows_special(shape))
    if grammar is not None and reasoning:
        form = REASONING_PARSERS.get(reasoning)
        begin = "" if form.is_open else form.begin
        grammar = msgspec.structs.replace(grammar, begin=begin, end=form.end)
    return Shaped(shape, grammar, tools_json)


def read_choice(chat: ChatBody) -> str | ToolChoice:
    """`auto`, `none`, `required`, or the tool that is named."""
    raw = bytes(chat.tool_choice)
    if raw in (b"", b"null", b'"auto"'):
        return "auto"
    if raw in (b'"none"', b'"required"'):
        return raw.decode().strip('"')
    if raw.startswith(b'"'):
        raise invalid("`tool_choice` is none of none, auto, required or a tool.", "tool_choice")
    return decode_raw(chat.tool_choice, ToolChoice, "tool_choice")


def read_tools(chat: ChatBody, tools_max: int) -> list[Tool]:
    if bytes(chat.tools) in (b"", b"null"):
        return []
    tools = decode_raw(chat.tools, list[Tool], "tools")
    if len(tools) > tools_max:
        raise invalid(f"At most {tools_max} tools.", "tools")
    names = [tool.function.name for tool in tools]
    if len(set(names)) < len(names):
        raise invalid("Two tools have one name.", "tools")
    return tools


def read_reasoning(chat: ChatBody, parser: str) -> str:
    """The parser, unless the request switches it or the reasoning off."""
    if chat.separate_reasoning is False or not parser:
        return ""
    if not thinks(chat) and REASONING_PARSERS.get(parser).is_open:
        return ""
    return parser


def thinks(chat: ChatBody) -> bool:
    kwargs = chat.chat_template_kwargs or {}
    if kwargs.get("enable_thinking") is False or kwargs.get("thinking") is False:
        return False
    return chat.reasoning_effort != "none"


def shows_special(shape: Shape) -> bool:
    tool = shape.tool_parser
    return bool(
        (tool and tool != NAMED and TOOL_PARSERS.get(tool).shows_special)
        or (shape.reasoning_parser and REASONING_PARSERS.get(shape.reasoning_parser).shows_special)
    )


# The grammars of forced calls


def parameters_of(tool: Tool) -> dict[str, Any]:
    """The schema of a tool's arguments; a tool without one takes none."""
    given = tool.function.parameters
    if not given:
        return {"type": "object", "properties": {}, "additionalProperties": False}
    check_depth(given)
    return given if "type" in given or "$ref" in given else {**given, "type": "object"}


# Formats whose calls stand between texts, JSON objects of name and arguments.
TAGGED = frozenset({"hermes", "qwen", "qwen25"})


def strict_calls(tools: list[Tool]) -> Grammar:
    """The model may call, and if it does, as the strict tools' schemas say."""
    begin, end = "<tool_call>", "}\n</tool_call>"
    structures = []
    for tool in tools:
        head = f'{begin}\n{{"name": {msgspec.json.encode(tool.function.name).decode()}, '
        schema = parameters_of(tool) if tool.function.strict else {"type": "object"}
        structures.append((f'{head}"arguments": ', schema, end))
    return tags(structures, [begin], "tools")


def calls_schema(tools: list[Tool], single: bool) -> dict[str, Any]:
    """An array of calls. Each tool's schema lies apart, its own references still leading to it."""
    calls = []
    schemas = {}
    for index, tool in enumerate(tools):
        root = f"#/$defs/t{index}"
        schemas[f"t{index}"] = moved(parameters_of(tool), root)
        properties = {"name": {"const": tool.function.name}, "arguments": {"$ref": root}}
        calls.append(
            {
                "type": "object",
                "properties": properties,
                "required": ["name", "arguments"],
                "additionalProperties": False,
            }
        )
    array: dict[str, Any] = {"type": "array", "minItems": 1, "items": {"anyOf": calls}}
    if single:
        array["maxItems"] = 1
    return {**array, "$defs": schemas}


def moved(value: Any, root: str) -> Any:
    """A schema whose references begin at `root`. No deeper than `check_depth` lets pass."""
    if isinstance(value, list):
        return [moved(item, root) for item in value]
    if not isinstance(value, dict):
        return value
    result = {}
    for key, item in value.items():
        is_reference = key == "$ref" and isinstance(item, str) and item.startswith("#")
        result[key] = root + item[1:] if is_reference else moved(item, root)
    return result


def check_depth(value: Any) -> None:
    level, depth = [value], 0
    while level:
        depth += 1
        if depth > DEPTH_MAX:
            raise invalid("The parameters of a tool are nested too deeply.", "tools")
        level = [
            item
            for node in level
            if isinstance(node, dict | list)
            for item in (node.values() if isinstance(node, dict) else node)
        ]
