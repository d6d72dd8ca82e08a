"""This file turns a body of the Ollama dialect into a chat of ours, or refuses it.

It does not know HTTP, streams or templates: what it makes goes the way of every chat
(`openai.ask_chat`), and `ollama_replies.py` writes the answer.
Laws: whatever the bytes, the result is an `Ask`, `Ready` or `Refused`; the refusal names the field.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from actors.gateway.dialect import NDJSON, Dialect, Ready
from actors.gateway.errors import Refused, invalid
from actors.gateway.inputs import Limits, decode, worded
from actors.gateway.ollama_replies import ChatLines, GenerateLines, load_line
from actors.gateway.openai import Ask, ask_chat, ask_completion
from messages.ollama import ChatBody, Common, GenerateBody, Options, Turn
from messages.openai import (
    NOT_GIVEN,
    ChatMessage,
    CompletionBody,
    FunctionCall,
    Generation,
    ToolCall,
)
from messages.openai import ChatBody as OurChat
from messages.types import Fault, Problem

NOTHING = (b"", b"null", b'""', b"[]")
# What the dialect's own server does where a request says nothing of it.
TEMPERATURE, TOP_K, TOP_P = 0.8, 40, 0.9
# What a chat's field is called here.
SPELLING = {
    "max_tokens": "options.num_predict",
    "stop": "options.stop",
    "repetition_penalty": "options.repeat_penalty",
    "response_format": "format",
    "reasoning_effort": "think",
    "chat_template_kwargs": "think",
}


def read_chat(body: bytes, limits: Limits, draw: Callable[[], int], created_s: float = 0.0) -> Ask:
    """POST /api/chat. Raises Refused: the client's fault; Ready."""
    given = decode(body, _chat_decoder)
    model = check_common(given, limits)
    if not given.messages:
        raise Ready(load_line(model, created_s, is_chat=True))
    messages = [read_turn(turn, index) for index, turn in enumerate(given.messages)]
    return ask_templated(given, model, messages, given.tools, limits, draw, created_s)


def read_generate(
    body: bytes, limits: Limits, draw: Callable[[], int], created_s: float = 0.0
) -> Ask:
    """POST /api/generate. Raises Refused, Ready."""
    given = decode(body, _generate_decoder)
    model = check_common(given, limits)
    for name in ("template", "context", "images", "suffix"):
        if bytes(getattr(given, name)) not in NOTHING:
            raise invalid(f"`{name}` is not supported.", name)
    if not given.prompt:
        raise Ready(load_line(model, created_s, is_chat=False))
    if given.raw:
        return ask_raw(given, model, limits, draw)
    messages = [ChatMessage(role="user", content=given.prompt)]
    if given.system:
        messages.insert(0, ChatMessage(role="system", content=given.system))
    return ask_templated(given, model, messages, NOT_GIVEN, limits, draw, created_s)


def named(name: str, limits: Limits) -> str:
    """Our model's name, by which a tag may stand. Raises Refused."""
    if name in (limits.model, f"{limits.model}:latest"):
        return limits.model
    message = f"model '{name[:200]}' not found"
    raise Refused(Problem(fault=Fault.NOT_FOUND, message=message, param="model"))


def check_common(given: Common, limits: Limits) -> str:
    model = named(given.model, limits)
    if given.think and not limits.parsers.reasoning:
        raise invalid(f'"{model[:200]}" does not support thinking', "think")
    options = given.options or Options()
    for name, off in (("mirostat", 0.0), ("tfs_z", 1.0), ("typical_p", 1.0)):
        if getattr(options, name) not in (None, off):
            raise invalid(f"`options.{name}` is not supported.", f"options.{name}")
    return model


def ask_templated(
    given: Common,
    model: str,
    messages: list[ChatMessage],
    tools: msgspec.Raw,
    limits: Limits,
    draw: Callable[[], int],
    created_s: float,
) -> Ask:
    kwargs: dict[str, Any] = {}
    if given.think is not None:
        kwargs["enable_thinking"] = given.think is not False
    chat = OurChat(
        model=model,
        messages=messages,
        tools=tools,
        logprobs=given.logprobs,
        top_logprobs=given.top_logprobs,
        chat_template_kwargs=kwargs or None,
        reasoning_effort=given.think if isinstance(given.think, str) else None,
        # The dialect's way to begin the answer for the model.
        continue_final_message=messages[-1].role == "assistant" or None,
        **common_of(given),
    )
    with worded(SPELLING):
        ask = ask_chat(chat, limits, draw, created_s)
    return ask._replace(call=msgspec.structs.replace(ask.call, spelling=SPELLING))


def ask_raw(given: GenerateBody, model: str, limits: Limits, draw: Callable[[], int]) -> Ask:
    completion = CompletionBody(
        model=model,
        prompt=given.prompt,
        logprobs=(given.top_logprobs or 0) if given.logprobs else None,
        **common_of(given),
    )
    with worded(SPELLING):
        ask = ask_completion(completion, limits, draw)
    sampling = ask.call.sampling
    if completion.max_tokens is None:  # no limit, where the other dialect has its 16
        sampling = msgspec.structs.replace(sampling, max_tokens=0)
    call = msgspec.structs.replace(ask.call, sampling=sampling, spelling=SPELLING)
    return ask._replace(call=call)


def common_of(given: Common) -> dict[str, Any]:
    """The fields of a `Generation`."""
    options = given.options or Options()
    predict = options.num_predict
    top_k = TOP_K if options.top_k is None else options.top_k
    fields: dict[str, Any] = {
        "stream": given.stream is not False,
        "max_tokens": predict if predict is not None and predict > 0 else None,
        "temperature": TEMPERATURE if options.temperature is None else options.temperature,
        "top_k": max(0, top_k),
        "top_p": TOP_P if options.top_p is None else options.top_p,
        "min_p": options.min_p,
        "seed": options.seed,
        "stop": options.stop or None,
        "repetition_penalty": options.repeat_penalty,
        "presence_penalty": options.presence_penalty,
        "frequency_penalty": options.frequency_penalty,
        "response_format": read_format(given.format),
    }
    assert fields.keys() <= set(Generation.__struct_fields__), fields.keys()
    return fields


def read_format(raw: msgspec.Raw) -> msgspec.Raw:
    """As OpenAI's dialect has it."""
    value = bytes(raw)
    if value in NOTHING:
        return NOT_GIVEN
    if value == b'"json"':
        return msgspec.Raw(b'{"type":"json_object"}')
    if not value.startswith(b"{"):
        raise invalid("`format` is none of json or a schema.", "format")
    return msgspec.Raw(b'{"type":"json_schema","json_schema":{"schema":' + value + b"}}")


def read_turn(turn: Turn, index: int) -> ChatMessage:
    if bytes(turn.images) not in NOTHING:
        raise invalid("`images` are not supported.", f"messages[{index}].images")
    calls = [
        ToolCall(
            id=call.id or f"call_{index}_{number}",
            function=FunctionCall(
                name=call.function.name, arguments=arguments_of(call.function.arguments)
            ),
        )
        for number, call in enumerate(turn.tool_calls or ())
    ]
    return ChatMessage(
        role=turn.role,
        content=turn.content or "",
        name=turn.tool_name,
        tool_call_id=(turn.tool_call_id or turn.tool_name or "") if turn.role == "tool" else None,
        tool_calls=calls or None,
        reasoning_content=turn.thinking or None,
    )


def arguments_of(value: dict[str, Any] | str) -> str:
    return value if isinstance(value, str) else msgspec.json.encode(value).decode()


_chat_decoder = msgspec.json.Decoder(ChatBody)
_generate_decoder = msgspec.json.Decoder(GenerateBody)

DIALECTS = (
    Dialect("/api/chat", "", read_chat, ChatLines, ChatLines, NDJSON, ping=b""),
    Dialect("/api/generate", "", read_generate, GenerateLines, GenerateLines, NDJSON, ping=b""),
)
