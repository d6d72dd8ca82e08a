"""This file turns a body of the Anthropic dialect into a chat of ours, or refuses it.

It does not know HTTP, streams or templates: the chat it makes goes the way of every chat
(`openai.ask_chat`), and `anthropic_replies.py` writes the answer.
Laws: whatever the bytes, the result is an `Ask` or `Refused`; the refusal names the field; no text
of a message is dropped but hidden thinking, which only its vendor can read.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from actors.gateway.anthropic_replies import (
    CountWriter,
    MessageStream,
    MessageWriter,
    event_frame,
)
from actors.gateway.dialect import Dialect
from actors.gateway.errors import Refused, invalid
from actors.gateway.inputs import Limits, decode, worded
from actors.gateway.openai import Ask, ask_chat
from messages.anthropic import Block, CountBody, MessagesBody, Refusals, Tool, ToolChoice, Turn
from messages.openai import NOT_GIVEN, ChatBody, ChatMessage, FunctionCall, ToolCall

NOTHING = (b"", b"null", b"[]", b"{}")
# What a chat's field is called here.
SPELLING = {
    "stop": "stop_sequences",
    "prompt": "messages",
    "reasoning_effort": "output_config.effort",
    "chat_template_kwargs": "thinking",
}


def read_messages(
    body: bytes, limits: Limits, draw: Callable[[], int], created_s: float = 0.0
) -> Ask:
    """POST /v1/messages. Raises Refused: the client's fault."""
    given = decode(body, _messages_decoder)
    chat = msgspec.structs.replace(
        chat_of(given),
        max_tokens=given.max_tokens,
        stop=given.stop_sequences or None,
        stream=given.stream,
        temperature=given.temperature,
        top_p=given.top_p,
        top_k=given.top_k,
    )
    return ask_as(chat, given, limits, draw, created_s)


def read_count(body: bytes, limits: Limits, draw: Callable[[], int], created_s: float = 0.0) -> Ask:
    """POST /v1/messages/count_tokens. Raises Refused."""
    given = decode(body, _count_decoder)
    asked = ask_as(chat_of(given), given, limits, draw, created_s)
    call = msgspec.structs.replace(asked.call, prompt_only=True, measure=True)
    return asked._replace(call=call)


def ask_as(
    chat: ChatBody, given: CountBody, limits: Limits, draw: Callable[[], int], created_s: float
) -> Ask:
    """The chat's call; its faults in the words of this dialect. Raises Refused."""
    config = given.output_config
    is_older = config is None or config.format is None
    place = "output_format" if is_older else "output_config.format"
    spelling = {**SPELLING, "response_format": place}
    with worded(spelling):
        ask = ask_chat(chat, limits, draw, created_s)
    return ask._replace(call=msgspec.structs.replace(ask.call, spelling=spelling))


def chat_of(given: CountBody) -> ChatBody:
    """The conversation, its tools and what its answer must be."""
    for name in Refusals.__struct_fields__:
        if bytes(getattr(given, name)) not in NOTHING:
            raise invalid(f"`{name}` is not supported.", name)
    if not given.messages:
        raise invalid("There must be at least one message.", "messages")
    system = read_system(given.system)
    turns = [
        message
        for index, turn in enumerate(given.messages)
        for message in read_turn(turn, f"messages[{index}]")
    ]
    parallel = None
    if given.tool_choice is not None and given.tool_choice.disable_parallel_tool_use:
        parallel = False
    last = given.messages[-1]
    shows_thinking = True
    kwargs: dict[str, Any] = {}
    if given.thinking is not None:
        kwargs["enable_thinking"] = given.thinking.type != "disabled"
        shows_thinking = given.thinking.display != "omitted"
    return ChatBody(
        model=given.model,
        messages=[*system, *turns],
        tools=read_tools(given.tools),
        tool_choice=read_choice(given.tool_choice, bool(given.tools)),
        parallel_tool_calls=parallel,
        response_format=read_format(given),
        reasoning_effort=None if given.output_config is None else given.output_config.effort,
        include_reasoning=shows_thinking,
        chat_template_kwargs=kwargs or None,
        # The dialect's way to begin the answer for the model.
        continue_final_message=last.role == "assistant" or None,
    )


def read_system(system: str | list[Block] | None) -> list[ChatMessage]:
    if not system:
        return []
    text = system if isinstance(system, str) else read_texts(system, "system")
    return [ChatMessage(role="system", content=text)]


def read_texts(blocks: list[Block], where: str) -> str:
    """The text of blocks that may be nothing else."""
    return "".join(read_text(block, f"{where}[{index}]") for index, block in enumerate(blocks))


def read_text(block: Block, where: str) -> str:
    if block.type != "text":
        raise unsupported(block, where)
    if block.text is None:
        raise invalid("A text block needs its `text`.", f"{where}.text")
    return block.text


def unsupported(block: Block, where: str) -> Refused:
    return invalid(
        f"Content blocks of type `{block.type[:100]}` are not supported here.", f"{where}.type"
    )


def read_turn(turn: Turn, where: str) -> list[ChatMessage]:
    """One turn as the messages it is to a template: results of tools are messages of their own."""
    if isinstance(turn.content, str):
        return [ChatMessage(role=turn.role, content=turn.content)]
    if not turn.content:
        raise invalid("A message's `content` cannot be an empty list.", f"{where}.content")
    if turn.role == "system":
        text = read_texts(turn.content, f"{where}.content")
        return [ChatMessage(role="system", content=text)]
    read = read_user if turn.role == "user" else read_assistant
    return read(turn.content, f"{where}.content")


def read_user(blocks: list[Block], where: str) -> list[ChatMessage]:
    results, texts = [], []
    for index, block in enumerate(blocks):
        place = f"{where}[{index}]"
        if block.type == "tool_result":
            results.append(read_result(block, place))
        else:
            texts.append(read_text(block, place))
    if texts:
        return [*results, ChatMessage(role="user", content="".join(texts))]
    return results


def read_result(block: Block, where: str) -> ChatMessage:
    if block.tool_use_id is None:
        raise invalid("A tool result needs its `tool_use_id`.", f"{where}.tool_use_id")
    content = block.content or ""
    if not isinstance(content, str):
        content = read_texts(content, f"{where}.content")
    return ChatMessage(role="tool", content=content, tool_call_id=block.tool_use_id)


def read_assistant(blocks: list[Block], where: str) -> list[ChatMessage]:
    texts, thoughts = [], []
    calls: list[ToolCall] = []
    for index, block in enumerate(blocks):
        place = f"{where}[{index}]"
        if block.type == "thinking":
            thoughts.append(block.thinking or "")
        elif block.type == "tool_use":
            calls.append(read_call(block, place))
        elif block.type != "redacted_thinking":
            texts.append(read_text(block, place))
    message = ChatMessage(
        role="assistant",
        content="".join(texts),
        tool_calls=calls or None,
        reasoning_content="".join(thoughts) or None,
    )
    return [message]


def read_call(block: Block, where: str) -> ToolCall:
    if block.id is None or block.name is None:
        name = "id" if block.id is None else "name"
        raise invalid(f"A tool use needs its `{name}`.", f"{where}.{name}")
    arguments = msgspec.json.encode(block.input or {}).decode()
    return ToolCall(id=block.id, function=FunctionCall(name=block.name, arguments=arguments))


def read_tools(tools: list[Tool] | None) -> msgspec.Raw:
    if not tools:
        return NOT_GIVEN
    functions = []
    for index, tool in enumerate(tools):
        if tool.type not in (None, "custom"):
            raise invalid(
                f"Tools of type `{tool.type[:100]}` are not run by this server.",
                f"tools[{index}].type",
            )
        if tool.input_schema is None:
            where = f"tools[{index}].input_schema"
            raise invalid(f"The required field `{where}` is missing.", where)
        function: dict[str, Any] = {"name": tool.name, "parameters": tool.input_schema}
        if tool.description is not None:
            function["description"] = tool.description
        if tool.strict is not None:
            function["strict"] = tool.strict
        functions.append({"type": "function", "function": function})
    return msgspec.Raw(msgspec.json.encode(functions))


def read_choice(choice: ToolChoice | None, has_tools: bool) -> msgspec.Raw:
    if choice is None or (choice.type == "auto" and not has_tools):
        return NOT_GIVEN
    value: Any = {"auto": "auto", "any": "required", "none": "none"}.get(choice.type)
    if choice.type == "tool":
        if choice.name is None:
            raise invalid("A choice of one tool needs its `name`.", "tool_choice.name")
        value = {"type": "function", "function": {"name": choice.name}}
    return msgspec.Raw(msgspec.json.encode(value))


def read_format(given: CountBody) -> msgspec.Raw:
    """The newer place goes before the older."""
    form = given.output_format
    if given.output_config is not None and given.output_config.format is not None:
        form = given.output_config.format
    if form is None:
        return NOT_GIVEN
    value = {"type": "json_schema", "json_schema": {"schema": form.schema}}
    return msgspec.Raw(msgspec.json.encode(value))


_messages_decoder = msgspec.json.Decoder(MessagesBody)
_count_decoder = msgspec.json.Decoder(CountBody)

DIALECTS = (
    Dialect(
        "/v1/messages",
        "msg_",
        read_messages,
        MessageWriter,
        MessageStream,
        ping=event_frame("ping", {}),
    ),
    Dialect("/v1/messages/count_tokens", "msg_", read_count, CountWriter),
)
