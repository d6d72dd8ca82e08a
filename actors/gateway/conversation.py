"""This file turns the messages of a chat body into what the model's template will see.

It does not know templates, tokens or the rest of the body. Parts are joined without a gap, for
every role; `developer` becomes `system`; a tool call's arguments become an object where they are
one.
Law: whatever the messages, the result is a conversation or `Refused` that names the field.
"""

from __future__ import annotations

from typing import Any

import msgspec

from actors.gateway.errors import invalid
from messages.openai import ChatBody, ChatMessage, Part, ToolCall
from messages.tokenizer import Chat

# What the tokenizer itself gives to the template; a request cannot give it.
TEMPLATE_RESERVED = frozenset(
    {
        "add_generation_prompt",
        "bos_token",
        "chat_template",
        "continue_final_message",
        "conversation",
        "documents",
        "eos_token",
        "messages",
        "raise_exception",
        "return_dict",
        "strftime_now",
        "tokenize",
        "tools",
    }
)


def read_conversation(
    chat: ChatBody, created_s: float, tools_json: bytes = b""
) -> tuple[Chat, str]:
    """The conversation as the template sees it, and the text that `echo` repeats."""
    continues = bool(chat.continue_final_message)
    prompts = chat.add_generation_prompt
    if continues and prompts:
        raise invalid(
            "`continue_final_message` and `add_generation_prompt` exclude each other.",
            "continue_final_message",
        )
    if continues and chat.messages[-1].role != "assistant":
        raise invalid(
            "`continue_final_message` needs a last message of the assistant.",
            "continue_final_message",
        )
    for name in chat.chat_template_kwargs or ():
        if name in TEMPLATE_RESERVED or name.startswith("_"):
            raise invalid(f"`{name[:100]}` cannot be set by a request.", "chat_template_kwargs")
    messages = [read_message(message, i) for i, message in enumerate(chat.messages)]
    kwargs = read_kwargs(chat)
    conversation = Chat(
        messages_json=msgspec.json.encode(messages),
        tools_json=tools_json,
        template_kwargs_json=msgspec.json.encode(kwargs) if kwargs else b"",
        add_generation_prompt=not continues if prompts is None else prompts,
        continue_final_message=continues,
        created_s=created_s,
        template=chat.chat_template or "",
    )
    return conversation, messages[-1]["content"] if continues else ""


def read_kwargs(chat: ChatBody) -> dict[str, Any]:
    """What the template is given; `reasoning_effort` under the names that templates know."""
    kwargs = dict(chat.chat_template_kwargs or {})
    if chat.reasoning_effort is not None:
        kwargs.setdefault("reasoning_effort", chat.reasoning_effort)
        if chat.reasoning_effort == "none":
            kwargs.setdefault("enable_thinking", False)
    return kwargs


def read_message(message: ChatMessage, index: int) -> dict[str, Any]:
    where = f"messages[{index}]"
    if message.role == "tool" and message.tool_call_id is None:
        raise invalid("A tool message needs its `tool_call_id`.", f"{where}.tool_call_id")
    content = message.content
    if content is None:
        if message.role != "assistant" or not message.tool_calls:
            raise invalid("A message needs its `content`.", f"{where}.content")
        content = ""
    if isinstance(content, list):
        content = read_parts(content, f"{where}.content")
    role = "system" if message.role == "developer" else message.role
    entry: dict[str, Any] = {"role": role, "content": content}
    if message.name is not None:
        entry["name"] = message.name
    if message.tool_call_id is not None:
        entry["tool_call_id"] = message.tool_call_id
    if message.reasoning_content is not None:
        entry["reasoning_content"] = message.reasoning_content
    if message.tool_calls:
        entry["tool_calls"] = [read_tool_call(call) for call in message.tool_calls]
    return entry


def read_parts(parts: list[Part], where: str) -> str:
    if not parts:
        raise invalid("A message's `content` cannot be an empty list.", where)
    texts = []
    for i, part in enumerate(parts):
        if part.type not in ("text", "refusal"):
            raise invalid(
                f"Content parts of type `{part.type[:100]}` are not supported.",
                f"{where}[{i}].type",
            )
        text = part.refusal if part.type == "refusal" else part.text
        if text is None:
            raise invalid(
                f"A {part.type} part needs its `{part.type}`.", f"{where}[{i}].{part.type}"
            )
        texts.append(text)
    return "".join(texts)


def read_tool_call(call: ToolCall) -> dict[str, Any]:
    """A call of the history. Templates want an object for the arguments; where the text is none
    (a call that was cut off), they get the text, so that the conversation can go on."""
    arguments: Any = call.function.arguments
    try:
        decoded = msgspec.json.decode(arguments) if arguments else {}
    except (msgspec.DecodeError, RecursionError):
        decoded = None
    if isinstance(decoded, dict):
        arguments = decoded
    function = {"name": call.function.name, "arguments": arguments}
    return {"id": call.id, "type": call.type, "function": function}
