"""This file holds the public HTTP schemas of the Anthropic dialect: /v1/messages and its counting.

It does not know how a body becomes a chat (`actors/gateway/anthropic.py`); only the gateway imports
it. The rules are those of `messages/openai.py`: strict types, `null` is "not given", a field that
would change the answer and that we do not have is refused by name, one that nobody knows is
ignored.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec

from messages.openai import NOT_GIVEN, Positive, TopK, Unit

ToolName = Annotated[str, msgspec.Meta(min_length=1, max_length=128, pattern=r"^[\w-]+$")]


class Block(msgspec.Struct, kw_only=True, frozen=True):
    """Any block of a content; which fields it needs its type says."""

    type: str
    text: str | None = None
    thinking: str | None = None
    id: str | None = None
    name: str | None = None
    input: dict[str, Any] | None = None
    tool_use_id: str | None = None
    content: str | list[Block] | None = None
    is_error: bool | None = None  # the model sees the result's text, and no more


class Turn(msgspec.Struct, kw_only=True, frozen=True):
    role: Literal["user", "assistant", "system"]
    content: str | list[Block]


class Tool(msgspec.Struct, kw_only=True, frozen=True):
    """A tool of the client's own: those that the vendor runs have another type, and are refused."""

    name: ToolName
    type: str | None = None
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    strict: bool | None = None


class ToolChoice(msgspec.Struct, kw_only=True, frozen=True):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(msgspec.Struct, kw_only=True, frozen=True):
    type: Literal["enabled", "disabled", "adaptive", "between_tools"]
    budget_tokens: Positive | None = None  # taken, and not used
    display: Literal["summarized", "omitted"] | None = None  # summarized: all of it is shown


class OutputFormat(msgspec.Struct, kw_only=True, frozen=True):
    type: Literal["json_schema"]
    schema: dict[str, Any]


class OutputConfig(msgspec.Struct, kw_only=True, frozen=True):
    format: OutputFormat | None = None
    effort: str | None = None  # given to the template as `reasoning_effort`


class Refusals(msgspec.Struct, kw_only=True, frozen=True):
    """What the vendor's service has and we do not: anything but null or empty is refused."""

    container: msgspec.Raw = NOT_GIVEN
    context_management: msgspec.Raw = NOT_GIVEN
    mcp_servers: msgspec.Raw = NOT_GIVEN


class CountBody(Refusals, kw_only=True, frozen=True):
    """POST /v1/messages/count_tokens."""

    model: str
    messages: list[Turn]
    system: str | list[Block] | None = None
    tools: list[Tool] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = None


class MessagesBody(CountBody, kw_only=True, frozen=True):
    """POST /v1/messages."""

    max_tokens: Positive
    stop_sequences: list[str] | None = None
    stream: bool | None = None
    temperature: Unit | None = None
    top_p: Unit | None = None
    top_k: TopK | None = None
    metadata: msgspec.Raw = NOT_GIVEN  # taken, and not used
    service_tier: msgspec.Raw = NOT_GIVEN  # taken, and not used


class Usage(msgspec.Struct, kw_only=True, frozen=True):
    """`input_tokens` are those that were not found in the cache."""

    input_tokens: int
    output_tokens: int
    cache_read_input_tokens: int
    cache_creation_input_tokens: int = 0


class TextBlock(msgspec.Struct, kw_only=True, frozen=True, tag="text", tag_field="type"):
    text: str


class ThinkingBlock(msgspec.Struct, kw_only=True, frozen=True, tag="thinking", tag_field="type"):
    """Nothing here is signed: the signature is there because clients want one."""

    thinking: str
    signature: str = ""


class ToolUseBlock(msgspec.Struct, kw_only=True, frozen=True, tag="tool_use", tag_field="type"):
    id: str
    name: str
    input: Any


class Reply(msgspec.Struct, kw_only=True, frozen=True, tag="message", tag_field="type"):
    """The whole answer, and the beginning of a stream."""

    id: str
    role: Literal["assistant"] = "assistant"
    model: str
    content: list[TextBlock | ThinkingBlock | ToolUseBlock]
    stop_reason: str | None
    stop_sequence: str | None
    usage: Usage


class CountReply(msgspec.Struct, kw_only=True, frozen=True):
    input_tokens: int


class AnthropicError(msgspec.Struct, kw_only=True, frozen=True):
    type: str
    message: str


class AnthropicErrorReply(msgspec.Struct, kw_only=True, frozen=True, tag="error", tag_field="type"):
    error: AnthropicError
