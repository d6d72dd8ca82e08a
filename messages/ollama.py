"""This file holds the public HTTP schemas of the Ollama dialect.

It does not know how a body becomes a chat (`actors/gateway/ollama.py`); only the gateway imports
it. The rules are those of `messages/openai.py`. Options that place a model on a machine (num_gpu,
num_thread …) are that dialect's habit in every request: they are taken, and not used.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec

from messages.openai import (
    NOT_GIVEN,
    Int64,
    Penalty,
    Positive,
    Repetition,
    Temperature,
    TopLogprobs,
    Unit,
)

AnyInt = Annotated[int, msgspec.Meta(ge=-(2**31), le=2**31 - 1)]


class Options(msgspec.Struct, kw_only=True, frozen=True):
    temperature: Temperature | None = None
    top_k: AnyInt | None = None  # 0 and less: off
    top_p: Unit | None = None
    min_p: Unit | None = None
    seed: Int64 | None = None
    num_predict: AnyInt | None = None  # less than 0: what is left of the context
    stop: str | list[str] | None = None
    repeat_penalty: Repetition | None = None  # over all of prompt and answer
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    mirostat: float | None = None  # refused unless it is off
    tfs_z: float | None = None  # refused unless it is off
    typical_p: float | None = None  # refused unless it is off


class Function(msgspec.Struct, kw_only=True, frozen=True):
    name: str
    arguments: dict[str, Any] | str = ""


class Call(msgspec.Struct, kw_only=True, frozen=True):
    function: Function
    id: str | None = None


class Turn(msgspec.Struct, kw_only=True, frozen=True):
    role: Literal["system", "user", "assistant", "tool"]
    content: str | None = None
    thinking: str | None = None
    images: msgspec.Raw = NOT_GIVEN
    tool_calls: list[Call] | None = None
    tool_name: str | None = None
    tool_call_id: str | None = None


class Common(msgspec.Struct, kw_only=True, frozen=True):
    model: str
    options: Options | None = None
    format: msgspec.Raw = NOT_GIVEN  # "json", or a schema
    think: bool | Literal["low", "medium", "high"] | None = None
    stream: bool | None = None  # true where it is not given
    keep_alive: msgspec.Raw = NOT_GIVEN  # taken, and not used: the model stays
    logprobs: bool | None = None
    top_logprobs: TopLogprobs | None = None


class ChatBody(Common, kw_only=True, frozen=True):
    """POST /api/chat. Without messages it only asks for the model to be there."""

    messages: list[Turn] | None = None
    tools: msgspec.Raw = NOT_GIVEN


class GenerateBody(Common, kw_only=True, frozen=True):
    """POST /api/generate. Without a prompt it only asks for the model to be there."""

    prompt: str | None = None
    system: str | None = None
    raw: bool | None = None  # the prompt is what the model reads, without a template
    template: msgspec.Raw = NOT_GIVEN
    context: msgspec.Raw = NOT_GIVEN
    images: msgspec.Raw = NOT_GIVEN
    suffix: msgspec.Raw = NOT_GIVEN


class EmbedBody(msgspec.Struct, kw_only=True, frozen=True):
    """POST /api/embed. Without an input it only asks for the model to be there."""

    model: str
    input: str | list[str] | None = None
    truncate: bool | None = None  # an input that is too long keeps its last tokens; else refused
    dimensions: Positive | None = None  # only with models whose config says that they may be cut
    options: Options | None = None  # taken, and not used
    keep_alive: msgspec.Raw = NOT_GIVEN  # taken, and not used: the model stays


class EmbeddingsBody(msgspec.Struct, kw_only=True, frozen=True):
    """POST /api/embeddings, the older route: one text."""

    model: str
    prompt: str | None = None
    options: Options | None = None  # taken, and not used
    keep_alive: msgspec.Raw = NOT_GIVEN  # taken, and not used: the model stays


class EmbedReply(msgspec.Struct, kw_only=True, frozen=True, omit_defaults=True):
    """Each of length 1."""

    model: str
    embeddings: list[list[float]]
    total_duration: int | None = None
    load_duration: int | None = None
    prompt_eval_count: int | None = None


class EmbeddingsReply(msgspec.Struct, kw_only=True, frozen=True):
    embedding: list[float]


class ShowBody(msgspec.Struct, kw_only=True, frozen=True):
    """POST /api/show. `name` is the older spelling."""

    model: str | None = None
    name: str | None = None
    verbose: bool | None = None


class CalledFunction(msgspec.Struct, kw_only=True, frozen=True):
    name: str
    arguments: dict[str, Any]


class MadeCall(msgspec.Struct, kw_only=True, frozen=True):
    id: str
    function: CalledFunction


class TokenLogprob(msgspec.Struct, kw_only=True, frozen=True):
    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TokenLogprob] | msgspec.UnsetType = msgspec.UNSET


class Message(msgspec.Struct, kw_only=True, frozen=True, omit_defaults=True):
    role: str
    content: str
    thinking: str | None = None
    tool_calls: list[MadeCall] | None = None


class Line(msgspec.Struct, kw_only=True, frozen=True, omit_defaults=True):
    """One line of a stream, or the whole answer. `message` is of a chat, `response` of the other
    route; the counts and the nanoseconds come with the last one."""

    model: str
    created_at: str
    done: bool
    message: Message | None = None
    response: str | None = None
    thinking: str | None = None
    logprobs: list[TokenLogprob] | None = None
    done_reason: str | None = None
    total_duration: int | None = None
    load_duration: int | None = None
    prompt_eval_count: int | None = None
    prompt_eval_duration: int | None = None
    eval_count: int | None = None
    eval_duration: int | None = None


class Details(msgspec.Struct, kw_only=True, frozen=True):
    """What is not known here is empty."""

    parent_model: str = ""
    format: str
    family: str = ""
    families: list[str] = []
    parameter_size: str
    quantization_level: str


class Card(msgspec.Struct, kw_only=True, frozen=True, omit_defaults=True):
    """The digest is of the model's name and shape, not of its files."""

    name: str
    model: str
    modified_at: str
    size: int
    digest: str
    details: Details
    expires_at: str | None = None  # these three of /api/ps
    size_vram: int | None = None
    context_length: int | None = None


class Tags(msgspec.Struct, kw_only=True, frozen=True):
    """Of /api/tags and /api/ps."""

    models: list[Card]


class Show(msgspec.Struct, kw_only=True, frozen=True):
    modelfile: str
    parameters: str
    template: str
    details: Details
    model_info: dict[str, Any]
    capabilities: list[str]
    modified_at: str


class Version(msgspec.Struct, kw_only=True, frozen=True):
    version: str


class OllamaErrorReply(msgspec.Struct, kw_only=True, frozen=True):
    error: str
