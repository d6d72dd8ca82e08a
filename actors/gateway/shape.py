"""This file reads what the answer of a chat is made of: tools, reasoning, and what is forced of it.

It does not know templates, streams or formats' insides: it names the parsers, and `reading.py` runs
them. `required` and a named tool are forced by a grammar, in a form that needs no markers: an array
of calls, or the arguments of the one call. Where the model chooses, tools that are strict, and
those that `allowed_tools` leaves, are kept to by tags of the model's own format, if it has some.
Law: whatever the body, the result is a `Shape` or `Refused` that names the field.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import msgspec

from actors.gateway.constraint import call_tags, decode_raw, schema
from actors.gateway.errors import invalid
from actors.gateway.reasoning.base import REASONING_PARSERS
from actors.gateway.tools.base import TOOL_PARSERS, Signature
from actors.gateway.tools.schemas import array_schema, loosened
from messages.config import GatewayConfig
from messages.openai import AllowedTools, ChatBody, ChosenFunction, Tool, ToolChoice
from messages.tokenizer import Dialect
from messages.types import Grammar

JSON, NAMED = "array", "named"  # what is forced: an array of calls, or one call's arguments
TOOLS_BYTES_MAX = 2 << 20
DEPTH_MAX = 100  # of a tool's parameters
FALLBACK = "hermes"  # what the tokenizer describes to models whose template knows no tools


Choice = str | ChosenFunction | AllowedTools


class Shape(NamedTuple):
    """How the text of an answer is to be read."""

    tool_parser: str = ""  # "": no calls; JSON, NAMED: all of it is what is forced
    names: tuple[str, ...] = ()  # the tools that may be called
    single: bool = False  # only the first call counts
    reasoning_parser: str = ""
    thoughts_parser: str = ""  # by which tokens of reasoning are counted, told apart or not
    shows_reasoning: bool = True
    shows_special: bool = False  # the parsers need the special tokens' text

    @property
    def is_plain(self) -> bool:
        return not (self.tool_parser or self.reasoning_parser)


class Parsers(NamedTuple):
    """What the settings, or the model's template, say."""

    tool: str = ""
    reasoning: str = ""


def parsers_of(config: GatewayConfig, dialect: Dialect) -> Parsers:
    """By name from the settings, or by what the tokenizer has seen in the model's template. Raises
    UnknownName for a setting that is none."""
    tool, reasoning = config.tool_parser, config.reasoning_parser
    if tool == "auto":
        tool = dialect.tool_parser
    elif tool != "none":
        TOOL_PARSERS.get(tool)
    if reasoning == "auto":
        reasoning = dialect.reasoning_parser
    if reasoning in ("none", ""):
        reasoning = ""
    else:
        REASONING_PARSERS.get(reasoning)
    return Parsers(tool, reasoning)


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
    thoughts = read_reasoning(chat, parsers.reasoning)
    reasoning = "" if chat.separate_reasoning is False else thoughts
    shape = Shape(
        reasoning_parser=reasoning,
        thoughts_parser=thoughts,
        shows_reasoning=chat.include_reasoning is not False,
    )
    grammar = constraint
    tools_json = b""
    if choice not in ("none", "auto") and not tools:
        raise invalid("`tool_choice` needs `tools`.", "tools")
    if tools:
        shape, grammar, shown = read_calls(chat, shape, choice, tools, parsers.tool, constraint)
        tools_json = bytes(chat.tools) if shown is None else msgspec.json.encode(shown)
    shape = shape._replace(shows_special=shows_special(shape))
    if grammar is not None and reasoning:
        form = REASONING_PARSERS.get(reasoning)
        begin = "" if form.is_open else form.begin
        grammar = msgspec.structs.replace(grammar, begin=begin, end=form.end)
    return Shaped(shape, grammar, tools_json)


def read_calls(
    chat: ChatBody,
    shape: Shape,
    choice: Choice,
    tools: list[Tool],
    parser: str,
    constraint: Grammar | None,
) -> tuple[Shape, Grammar | None, list[Tool] | None]:
    """Who may be called and how that is read, what is forced, and which tools the template shows
    (None: as they are in the body)."""
    single = chat.parallel_tool_calls is False
    parser = parser or FALLBACK
    callable_tools, shown, grammar = tools, None, constraint
    if isinstance(choice, AllowedTools):
        names = dict.fromkeys(entry.name for entry in choice.tools)
        callable_tools = [tool_named(name, tools) for name in names]
    if isinstance(choice, ChosenFunction):
        tool = tool_named(choice.name, tools)
        callable_tools, parser = [tool], NAMED
        grammar = schema(parameters_of(tool), "tools")
    elif choice == "required" or (isinstance(choice, AllowedTools) and choice.mode == "required"):
        signatures = signatures_of(callable_tools, always=True)
        grammar = schema(array_schema(signatures, single=single), "tools")
        parser = JSON
    elif constraint is not None or parser == "none":
        parser = ""  # no call fits an answer that is what the constraint says
    elif len(callable_tools) < len(tools) or any(tool.function.strict for tool in callable_tools):
        tags = TOOL_PARSERS.get(parser).tags
        if tags is not None:
            grammar = call_tags(tags(signatures_of(callable_tools, always=False)), "tools")
        elif len(callable_tools) < len(tools):
            shown = callable_tools  # the others cannot be barred: the model does not know them

    called = tuple(tool.function.name for tool in callable_tools)
    return shape._replace(tool_parser=parser, names=called, single=single), grammar, shown


def tool_named(name: str, tools: list[Tool]) -> Tool:
    for tool in tools:
        if tool.function.name == name:
            return tool
    raise invalid(f"There is no tool `{name[:100]}`.", "tool_choice")


def read_choice(chat: ChatBody) -> Choice:
    """`auto`, `none`, `required`, the tool that is named, or the tools that are allowed."""
    raw = bytes(chat.tool_choice)
    if raw in (b"", b"null", b'"auto"'):
        return "auto"
    if raw in (b'"none"', b'"required"'):
        return raw.decode().strip('"')
    if raw.startswith(b'"'):
        raise invalid("`tool_choice` is none of none, auto, required or a tool.", "tool_choice")
    found = decode_raw(chat.tool_choice, ToolChoice, "tool_choice")
    chosen = found.function if found.type == "function" else found.allowed_tools
    if chosen is None:
        raise invalid(f"`tool_choice` needs its `{found.type}`.", "tool_choice")
    return chosen


def read_tools(chat: ChatBody, tools_max: int) -> list[Tool]:
    if bytes(chat.tools) in (b"", b"null"):
        return []
    if len(bytes(chat.tools)) > TOOLS_BYTES_MAX:
        raise invalid(f"`tools` are longer than {TOOLS_BYTES_MAX} bytes.", "tools")
    tools = decode_raw(chat.tools, list[Tool], "tools")
    if len(tools) > tools_max:
        raise invalid(f"At most {tools_max} tools.", "tools")
    names = [tool.function.name for tool in tools]
    if len(set(names)) < len(names):
        raise invalid("Two tools have one name.", "tools")
    return tools


def read_reasoning(chat: ChatBody, parser: str) -> str:
    """The parser, unless the request switches the reasoning off."""
    if parser and not thinks(chat) and REASONING_PARSERS.get(parser).is_open:
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
        (tool and tool not in (JSON, NAMED) and TOOL_PARSERS.get(tool).shows_special)
        or (shape.thoughts_parser and REASONING_PARSERS.get(shape.thoughts_parser).shows_special)
    )


# The grammars of forced calls


def parameters_of(tool: Tool) -> dict[str, Any]:
    """What a tool's arguments are held to, if to anything; a tool without a schema takes none."""
    given = tool.function.parameters
    if not given:
        return {"type": "object", "properties": {}, "additionalProperties": False}
    check_depth(given)
    given = given if tool.function.strict else loosened(given)
    return given if "type" in given or "$ref" in given else {**given, "type": "object"}


def signatures_of(tools: Iterable[Tool], *, always: bool) -> list[Signature]:
    """`always`: the arguments fit the schema of a tool that is not strict, too."""
    return [
        Signature(
            tool.function.name,
            parameters_of(tool) if always or tool.function.strict else {"type": "object"},
        )
        for tool in tools
    ]


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
