"""This file holds the public HTTP schemas of OpenAI's Responses API: bodies, items, replies.

It does not know how a body becomes a call (`actors/gateway/responses/`); only the gateway imports
it. The rules are those of `messages/openai.py`: strict types, `null` is "not given", a field that
would change the answer and that we do not have is refused by name, an unknown one is ignored.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from messages.openai import (
    NOT_GIVEN,
    Bias,
    Count,
    Int32,
    Int64,
    Penalty,
    Positive,
    Repetition,
    Salt,
    Temperature,
    TokenLogprob,
    TopK,
    TopLogprobs,
    Unit,
)


class UnsupportedResponses(msgspec.Struct, kw_only=True, frozen=True):
    """Fields of the dialect that we do not have: anything but a neutral value is refused."""

    conversation: msgspec.Raw = NOT_GIVEN
    prompt: msgspec.Raw = NOT_GIVEN
    context_management: msgspec.Raw = NOT_GIVEN
    moderation: msgspec.Raw = NOT_GIVEN
    image: msgspec.Raw = NOT_GIVEN
    background_options: msgspec.Raw = NOT_GIVEN
    max_tool_calls: msgspec.Raw = NOT_GIVEN  # of built-in tools, which there are none of


class InputPart(msgspec.Struct, kw_only=True, frozen=True, omit_defaults=True):
    """Only text: input_text, output_text, text, refusal, reasoning_text, summary_text."""

    type: str
    text: str | None = None
    refusal: str | None = None


class InputItem(msgspec.Struct, kw_only=True, frozen=True, omit_defaults=True):
    """A message, a function_call, a function_call_output or a reasoning item, by `type`."""

    type: str = "message"
    role: Literal["system", "developer", "user", "assistant"] | None = None
    content: str | list[InputPart] | None = None
    id: str | None = None
    status: str | None = None
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None
    output: str | list[InputPart] | None = None
    summary: list[InputPart] | None = None


class TextFormat(msgspec.Struct, kw_only=True, frozen=True):
    type: Literal["text", "json_object", "json_schema"]
    schema: Any = None
    name: str | None = None
    description: str | None = None
    strict: bool | None = None


class TextConfig(msgspec.Struct, kw_only=True, frozen=True):
    format: TextFormat | None = None
    verbosity: str | None = None  # ignored


class ReasoningConfig(msgspec.Struct, kw_only=True, frozen=True):
    effort: str | None = None  # given to the template; "none" also switches thinking off
    summary: str | None = None  # ignored: reasoning is answered as it is


class ResponsesStreamOptions(msgspec.Struct, kw_only=True, frozen=True):
    include_obfuscation: bool | None = None  # ignored: nothing is ever padded


class ResponsesBody(UnsupportedResponses, kw_only=True, frozen=True):
    """POST /v1/responses. Below `user`: what the chat route has beyond the dialect."""

    model: str
    input: str | list[InputItem]
    instructions: str | None = None
    previous_response_id: str | None = None
    max_output_tokens: Positive | None = None
    temperature: Temperature | None = None
    top_p: Unit | None = None
    top_logprobs: TopLogprobs | None = None
    include: list[str] | None = None  # message.output_text.logprobs; others are ignored
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    text: TextConfig | None = None
    reasoning: ReasoningConfig | None = None
    stream: bool | None = None
    stream_options: ResponsesStreamOptions | None = None
    store: bool | None = None
    background: bool | None = None
    truncation: Literal["auto", "disabled"] | None = None  # auto is refused
    metadata: dict[str, str] | None = None
    service_tier: str | None = None  # ignored
    safety_identifier: str | None = None  # ignored
    prompt_cache_key: str | None = None  # ignored: prefixes are found by themselves
    prompt_cache_retention: str | None = None  # ignored
    prompt_cache_options: dict[str, Any] | None = None  # ignored
    user: str | None = None
    top_k: TopK | None = None
    min_p: Unit | None = None
    seed: Int64 | None = None
    stop: str | list[str] | None = None
    min_tokens: Count | None = None
    ignore_eos: bool | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: Repetition | None = None
    logit_bias: dict[str, Bias] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    cache_salt: Salt | None = None
    priority: Int32 | None = None


Status = Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]
ItemStatus = Literal["in_progress", "completed", "incomplete"]


class OutputText(msgspec.Struct, kw_only=True, frozen=True, tag="output_text", tag_field="type"):
    text: str
    annotations: list[None] = []
    logprobs: list[TokenLogprob] = []


class ReasoningText(
    msgspec.Struct, kw_only=True, frozen=True, tag="reasoning_text", tag_field="type"
):
    text: str


class OutputMessage(msgspec.Struct, kw_only=True, frozen=True, tag="message", tag_field="type"):
    id: str
    status: ItemStatus
    role: Literal["assistant"] = "assistant"
    content: list[OutputText]


class OutputReasoning(msgspec.Struct, kw_only=True, frozen=True, tag="reasoning", tag_field="type"):
    id: str
    status: ItemStatus
    summary: list[None] = []
    content: list[ReasoningText]


class OutputCall(msgspec.Struct, kw_only=True, frozen=True, tag="function_call", tag_field="type"):
    id: str
    status: ItemStatus
    call_id: str
    name: str
    arguments: str


OutputItem = OutputMessage | OutputReasoning | OutputCall


class InputDetails(msgspec.Struct, kw_only=True, frozen=True):
    cached_tokens: int


class OutputDetails(msgspec.Struct, kw_only=True, frozen=True):
    reasoning_tokens: int


class ResponsesUsage(msgspec.Struct, kw_only=True, frozen=True):
    input_tokens: int
    input_tokens_details: InputDetails
    output_tokens: int
    output_tokens_details: OutputDetails
    total_tokens: int


class ResponsesError(msgspec.Struct, kw_only=True, frozen=True):
    code: str
    message: str


class Incomplete(msgspec.Struct, kw_only=True, frozen=True):
    reason: Literal["max_output_tokens"] = "max_output_tokens"


class ResponsesReply(msgspec.Struct, kw_only=True, frozen=True):
    """What is answered, kept, and carried by the events at both ends of a stream."""

    id: str
    object: Literal["response"] = "response"
    created_at: int
    completed_at: int | None = None
    status: Status
    background: bool
    error: ResponsesError | None = None
    incomplete_details: Incomplete | None = None
    instructions: str | None
    max_output_tokens: int | None
    metadata: dict[str, str]
    model: str
    output: list[OutputItem]
    parallel_tool_calls: bool
    previous_response_id: str | None
    reasoning: dict[str, Any]
    service_tier: Literal["default"] = "default"
    store: bool
    temperature: float
    text: dict[str, Any]
    tool_choice: str | dict[str, Any]
    tools: list[dict[str, Any]]
    top_logprobs: int
    top_p: float
    truncation: Literal["disabled"] = "disabled"
    usage: ResponsesUsage | None = None
    user: str | None


class DeletedReply(msgspec.Struct, kw_only=True, frozen=True):
    id: str
    object: str
    deleted: bool = True


class ItemList(msgspec.Struct, kw_only=True, frozen=True):
    object: Literal["list"] = "list"
    data: list[InputItem]
    first_id: str | None
    last_id: str | None
    has_more: bool
