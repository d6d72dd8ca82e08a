"""This file turns a body of the Responses API into a chat, and the chat's refusals back.

It does not know HTTP, the store or the tokenizer: a decoded body and the history in, an `Ask` out.
What a chat may be is judged by `actors/gateway/openai.py` alone; this file renames.
Law: whatever the body, the result is an `Ask` or `Refused` that names a field of this dialect.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import msgspec

from actors.gateway.errors import invalid
from actors.gateway.inputs import NEUTRAL, Limits, decode, worded
from actors.gateway.openai import Ask, read_chat
from messages.openai import NOT_GIVEN
from messages.responses import (
    InputItem,
    InputPart,
    OutputItem,
    OutputMessage,
    OutputReasoning,
    ResponsesBody,
    UnsupportedResponses,
)

LOGPROBS = "message.output_text.logprobs"
TEXT_PARTS = frozenset({"input_text", "output_text", "text", "reasoning_text", "summary_text"})
# Fields that are the chat's, by the same name.
SAME = (
    "model",
    "temperature",
    "top_p",
    "parallel_tool_calls",
    "metadata",
    "user",
    "top_k",
    "min_p",
    "seed",
    "stop",
    "min_tokens",
    "ignore_eos",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "logit_bias",
    "chat_template_kwargs",
    "cache_salt",
    "priority",
)
SPELLING = {
    "max_completion_tokens": "max_output_tokens",
    "max_tokens": "max_output_tokens",
    "response_format": "text.format",
    "reasoning_effort": "reasoning.effort",
    "messages": "input",
    "prompt": "input",
}


def decode_responses(body: bytes) -> ResponsesBody:
    """Raises Refused: the client's fault."""
    found = decode(body, _decoder)
    for name in UnsupportedResponses.__struct_fields__:
        raw = getattr(found, name)
        if raw is not NOT_GIVEN and bytes(raw) not in NEUTRAL:
            raise invalid(f"`{name}` is not supported.", name)
    if found.truncation == "auto":
        raise invalid("`truncation: auto` is not supported: nothing is left out.", "truncation")
    if found.background and found.store is False:
        raise invalid("`background` needs `store`.", "background")
    return found


def input_items(body: ResponsesBody) -> tuple[InputItem, ...]:
    """What this request adds to the history. Raises Refused."""
    if isinstance(body.input, str):
        return (InputItem(role="user", content=body.input),)
    if not body.input:
        raise invalid("`input` cannot be empty.", "input")
    return tuple(body.input)


def read_responses(
    body: ResponsesBody,
    history: Sequence[InputItem],
    limits: Limits,
    draw: Callable[[], int],
    created_s: float,
) -> Ask:
    """`history` ends with this request's own items. Raises Refused: the client's fault."""
    chat: dict[str, Any] = {
        name: value for name in SAME if (value := getattr(body, name)) is not None
    }
    messages = read_items(history)
    if body.instructions is not None:
        messages.insert(0, {"role": "system", "content": body.instructions})
    chat["messages"] = messages
    if body.max_output_tokens is not None:
        chat["max_completion_tokens"] = body.max_output_tokens
    if body.tools:
        chat["tools"] = [read_tool(tool, i) for i, tool in enumerate(body.tools)]
    if body.tool_choice is not None:
        chat["tool_choice"] = read_tool_choice(body.tool_choice)
    if body.reasoning is not None and body.reasoning.effort is not None:
        chat["reasoning_effort"] = body.reasoning.effort
    if body.text is not None and body.text.format is not None:
        chat["response_format"] = read_format(body)
    if body.top_logprobs is not None or LOGPROBS in (body.include or ()):
        chat["logprobs"] = True
        chat["top_logprobs"] = body.top_logprobs or 0
    if body.stream:
        chat["stream"] = True
    with worded(SPELLING):
        ask = read_chat(msgspec.json.encode(chat), limits, draw, created_s)
    return ask._replace(call=msgspec.structs.replace(ask.call, spelling=SPELLING))


def read_items(items: Iterable[InputItem]) -> list[dict[str, Any]]:
    """Messages for the template. Reasoning and calls of one turn become one assistant message."""
    messages: list[dict[str, Any]] = []
    turn: dict[str, Any] | None = None  # the assistant's, while it may still get calls

    def current() -> dict[str, Any]:
        nonlocal turn
        if turn is None:
            turn = {"role": "assistant", "content": ""}
            messages.append(turn)
        return turn

    for i, item in enumerate(items):
        where = f"input[{i}]"
        if item.type == "reasoning":
            parts = item.content or item.summary or ()
            if text := read_text(parts, f"{where}.content"):
                turn = None
                current()["reasoning_content"] = text
        elif item.type == "function_call":
            if item.name is None or item.call_id is None:
                raise invalid("A function_call needs its `name` and `call_id`.", where)
            function = {"name": item.name, "arguments": item.arguments or ""}
            call = {"id": item.call_id, "type": "function", "function": function}
            current().setdefault("tool_calls", []).append(call)
        elif item.type == "function_call_output":
            if item.call_id is None or item.output is None:
                raise invalid("A function_call_output needs its `call_id` and `output`.", where)
            content = read_text(item.output, f"{where}.output")
            messages.append({"role": "tool", "tool_call_id": item.call_id, "content": content})
            turn = None
        elif item.type == "message":
            if item.role is None or item.content is None:
                raise invalid("A message needs its `role` and `content`.", where)
            content = read_text(item.content, f"{where}.content")
            if item.role == "assistant":
                if turn is None or turn["content"] or "tool_calls" in turn:
                    turn = None
                current()["content"] = content
            else:
                messages.append({"role": item.role, "content": content})
                turn = None
        else:
            message = f"Items of type `{item.type[:100]}` are not supported."
            raise invalid(message, f"{where}.type")
    return messages


def read_text(content: str | Iterable[InputPart], where: str) -> str:
    if isinstance(content, str):
        return content
    texts = []
    for i, part in enumerate(content):
        text = part.refusal if part.type == "refusal" else part.text
        if part.type not in TEXT_PARTS and part.type != "refusal":
            message = f"Content parts of type `{part.type[:100]}` are not supported."
            raise invalid(message, f"{where}[{i}].type")
        if text is None:
            raise invalid("A part needs its text.", f"{where}[{i}]")
        texts.append(text)
    return "".join(texts)


def read_tool(tool: dict[str, Any], index: int) -> dict[str, Any]:
    kind = tool.get("type")
    if kind != "function":
        message = f"Tools of type `{str(kind)[:100]}` are not supported."
        raise invalid(message, f"tools[{index}].type")
    function = {key: value for key, value in tool.items() if key != "type" and value is not None}
    return {"type": "function", "function": function}


def read_tool_choice(choice: str | dict[str, Any]) -> Any:
    if isinstance(choice, str):
        return choice
    if choice.get("type") == "allowed_tools" and isinstance(choice.get("tools"), list):
        tools = [named_function(entry) for entry in choice["tools"]]
        allowed = {"mode": choice.get("mode"), "tools": tools}
        return {"type": "allowed_tools", "allowed_tools": allowed}
    return named_function(choice)


def named_function(choice: Any) -> dict[str, Any]:
    """Of a choice, or of a list of them, in the chat's form."""
    is_function = isinstance(choice, dict) and choice.get("type") == "function"
    if not is_function or not isinstance(choice.get("name"), str):
        message = "`tool_choice` is none of none, auto, required, allowed_tools or a function."
        raise invalid(message, "tool_choice")
    return {"type": "function", "function": {"name": choice["name"]}}


def read_format(body: ResponsesBody) -> dict[str, Any]:
    assert body.text is not None and body.text.format is not None
    form = body.text.format
    if form.type != "json_schema":
        return {"type": form.type}
    if form.schema is None:
        raise invalid("The required field `text.format.schema` is missing.", "text.format.schema")
    return {"type": "json_schema", "json_schema": {"name": form.name, "schema": form.schema}}


def as_input(item: OutputItem) -> InputItem:
    """An item of an answer as the next turn's history has it."""
    if isinstance(item, OutputMessage):
        text = "".join(part.text for part in item.content)
        return InputItem(id=item.id, role="assistant", content=text)
    if isinstance(item, OutputReasoning):
        parts = [InputPart(type="reasoning_text", text=part.text) for part in item.content]
        return InputItem(type="reasoning", id=item.id, content=parts)
    return InputItem(
        type="function_call",
        id=item.id,
        call_id=item.call_id,
        name=item.name,
        arguments=item.arguments,
    )


_decoder = msgspec.json.Decoder(ResponsesBody)
