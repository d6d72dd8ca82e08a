"""This file answers what reads a text that some model has written: its calls, its reasoning.

It does not know HTTP; nothing is generated, so that a reader has the whole answer (`Ready`).
Laws: whatever the bytes, it is an answer or `Refused` that names the field; the cost is linear in
the text.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import msgspec

from actors.gateway.dialect import Dialect, Ready
from actors.gateway.errors import invalid
from actors.gateway.inputs import Limits, decode
from actors.gateway.reading import Event, Reader
from actors.gateway.reasoning.base import REASONING_PARSERS, Reasoning
from actors.gateway.replies import plain_writer
from actors.gateway.shape import FALLBACK, Shape
from actors.gateway.sse import encode
from actors.gateway.tools.base import TOOL_PARSERS, Arguments, Start, Text
from kernels.registry import Registry, UnknownName
from messages.native import (
    ParseCallsBody,
    ParsedCall,
    ParsedCalls,
    SeparateBody,
    Separated,
)

Draw = Callable[[], int]


def read_calls(body: bytes, limits: Limits, draw: Draw, created_s: float = 0.0) -> NoReturn:
    """POST /parse_function_call. Raises Ready, or Refused: the client's fault."""
    given = decode(body, _calls_decoder)
    names = tuple(tool.function.name for tool in given.tools)
    if not names:
        raise invalid("There must be at least one tool.", "tools")
    if len(set(names)) < len(names):
        raise invalid("Two tools have one name.", "tools")
    if len(names) > limits.config.tools_max:
        raise invalid(f"At most {limits.config.tools_max} tools.", "tools")
    own = limits.parsers.tool if limits.parsers.tool != "none" else ""
    parser = given.tool_call_parser or own or FALLBACK
    check_name(TOOL_PARSERS, parser, "tool_call_parser")
    texts: list[str] = []
    calls: list[ParsedCall] = []
    for event in events_of(Shape(tool_parser=parser, names=names), given.text):
        if isinstance(event, Start):
            index = names.index(event.name) if event.name in names else None
            calls.append(ParsedCall(tool_index=index, name=event.name, parameters=""))
        elif isinstance(event, Arguments):
            whole = calls[-1].parameters + event.text
            calls[-1] = msgspec.structs.replace(calls[-1], parameters=whole)
        elif isinstance(event, Text):
            texts.append(event.text)
    raise Ready(encode(ParsedCalls(normal_text="".join(texts), calls=calls)))


def read_separate(body: bytes, limits: Limits, draw: Draw, created_s: float = 0.0) -> NoReturn:
    """POST /separate_reasoning. Raises Ready, or Refused."""
    given = decode(body, _separate_decoder)
    parser = given.reasoning_parser or limits.parsers.reasoning
    if not parser:
        raise invalid("This model has no reasoning parser: name one.", "reasoning_parser")
    check_name(REASONING_PARSERS, parser, "reasoning_parser")
    reasoning: list[str] = []
    texts: list[str] = []
    for event in events_of(Shape(reasoning_parser=parser), given.text):
        if isinstance(event, Reasoning):
            reasoning.append(event.text)
        elif isinstance(event, Text):
            texts.append(event.text)
    raise Ready(encode(Separated(reasoning_text="".join(reasoning), text="".join(texts))))


def check_name(registry: Registry[Any], name: str, param: str) -> None:
    try:
        registry.get(name)
    except UnknownName as error:
        raise invalid(f"`{param}` is not known: {error}.", param) from None


def events_of(shape: Shape, text: str) -> list[Event]:
    reader = Reader(shape, "", 0)
    return reader.feed(text) + reader.flush()


_calls_decoder = msgspec.json.Decoder(ParseCallsBody)
_separate_decoder = msgspec.json.Decoder(SeparateBody)

DIALECTS = (
    Dialect("/parse_function_call", "", read_calls, plain_writer),
    Dialect("/separate_reasoning", "", read_separate, plain_writer),
)
