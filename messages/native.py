"""This file holds the public HTTP schemas of our own routes and of SGLang's native ones: /generate,
looking at tokens, and what an operator asks for.

It does not know how a body becomes a call (`actors/gateway/native.py`, `tokens.py`); only the
gateway imports it. The rules are those of `messages/openai.py`, except that -1 is what this dialect
has for "off" in some places.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec

from messages.openai import (
    NOT_GIVEN,
    Bias,
    ChatBody,
    Count,
    Int32,
    Int64,
    Penalty,
    Processors,
    Repetition,
    Salt,
    Tool,
    TopK,
    TopLogprobs,
    Unit,
)

Heat = Annotated[float, msgspec.Meta(ge=0.0, le=1e4)]
StartLen = Annotated[int, msgspec.Meta(ge=-1, le=2**31 - 1)]
Rid = Annotated[str, msgspec.Meta(min_length=1, max_length=256)]


class SamplingParams(msgspec.Struct, kw_only=True, frozen=True):
    max_new_tokens: Count | None = None  # 128 where it is not given
    min_new_tokens: Count | None = None
    temperature: Heat | None = None
    top_p: Unit | None = None
    top_k: TopK | None = None
    min_p: Unit | None = None
    frequency_penalty: Penalty | None = None
    presence_penalty: Penalty | None = None
    repetition_penalty: Repetition | None = None
    stop: str | list[str] | None = None
    stop_regex: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None  # taken, and not used
    no_stop_trim: bool | None = None
    n: int | None = None
    logit_bias: dict[str, Bias] | None = None
    sampling_seed: Int64 | None = None
    json_schema: msgspec.Raw = NOT_GIVEN
    regex: str | None = None
    ebnf: str | None = None
    stream_interval: Int32 | None = None  # taken, and not used: each step is an event
    structural_tag: msgspec.Raw = NOT_GIVEN  # an object, or its text
    custom_params: msgspec.Raw = NOT_GIVEN  # refused


class Lacking(msgspec.Struct, kw_only=True, frozen=True):
    """Fields of the dialect that we do not have: anything that asks for something is refused."""

    input_embeds: msgspec.Raw = NOT_GIVEN
    image_data: msgspec.Raw = NOT_GIVEN
    video_data: msgspec.Raw = NOT_GIVEN
    audio_data: msgspec.Raw = NOT_GIVEN
    modalities: msgspec.Raw = NOT_GIVEN
    token_ids_logprob: msgspec.Raw = NOT_GIVEN
    return_hidden_states: msgspec.Raw = NOT_GIVEN
    return_routed_experts: msgspec.Raw = NOT_GIVEN
    return_entropy: msgspec.Raw = NOT_GIVEN
    return_sampling_mask: msgspec.Raw = NOT_GIVEN
    session_id: msgspec.Raw = NOT_GIVEN
    session_params: msgspec.Raw = NOT_GIVEN
    lora_path: msgspec.Raw = NOT_GIVEN
    custom_logit_processor: msgspec.Raw = NOT_GIVEN
    bootstrap_host: msgspec.Raw = NOT_GIVEN
    bootstrap_port: msgspec.Raw = NOT_GIVEN
    bootstrap_room: msgspec.Raw = NOT_GIVEN
    max_thinking_tokens: msgspec.Raw = NOT_GIVEN


class GenerateBody(Lacking, kw_only=True, frozen=True):
    """POST /generate. `text` or `input_ids`; a list of either, or of ids' lists, is a batch."""

    text: str | list[str] | None = None
    input_ids: list[int | list[int]] | None = None
    sampling_params: SamplingParams | list[SamplingParams] | None = None
    rid: Rid | list[Rid] | None = None
    return_logprob: bool | list[bool] | None = None
    logprob_start_len: StartLen | list[StartLen] | None = None  # -1: of the output only
    top_logprobs_num: TopLogprobs | list[TopLogprobs] | None = None
    return_text_in_logprobs: bool | None = None
    return_prompt_token_ids: bool | None = None
    stream: bool | None = None
    priority: Int32 | None = None
    cache_salt: Salt | None = None
    extra_key: Salt | None = None
    logits_processors: Processors | None = None  # of every prompt; see api/openai.md
    log_metrics: msgspec.Raw = NOT_GIVEN  # taken, and not used
    no_logs: msgspec.Raw = NOT_GIVEN  # taken, and not used
    background: msgspec.Raw = NOT_GIVEN  # taken, and not used


class TokenizeBody(msgspec.Struct, kw_only=True, frozen=True):
    """POST /tokenize, with `prompt`; with `messages` it is a `TokenizeChatBody`."""

    model: str | None = None  # the one that is served, where it is not given
    prompt: str | list[str] | None = None
    messages: msgspec.Raw = NOT_GIVEN
    add_special_tokens: bool | None = None


class TokenizeChatBody(ChatBody, kw_only=True, frozen=True):
    """The same of a conversation: all that shapes a chat's prompt."""

    model: str = ""


class DetokenizeBody(msgspec.Struct, kw_only=True, frozen=True):
    """POST /detokenize."""

    tokens: list[int | list[int]]
    model: str | None = None
    skip_special_tokens: bool | None = None


class ParseCallsBody(msgspec.Struct, kw_only=True, frozen=True):
    """POST /parse_function_call."""

    text: str
    tools: list[Tool]
    tool_call_parser: str | None = None  # the model's own, where it is not given


class SeparateBody(msgspec.Struct, kw_only=True, frozen=True):
    """POST /separate_reasoning."""

    text: str
    reasoning_parser: str | None = None  # the model's own, where it is not given


class ParsedCall(msgspec.Struct, kw_only=True, frozen=True):
    tool_index: int | None  # which of the tools it calls
    name: str
    parameters: str  # JSON, as the model wrote it


class ParsedCalls(msgspec.Struct, kw_only=True, frozen=True):
    normal_text: str
    calls: list[ParsedCall]


class Separated(msgspec.Struct, kw_only=True, frozen=True):
    reasoning_text: str
    text: str


class AbortBody(msgspec.Struct, kw_only=True, frozen=True):
    """POST /abort_request. `rid` is an id, or the beginning of several."""

    rid: str | None = None
    abort_all: bool | None = None


class PauseBody(msgspec.Struct, kw_only=True, frozen=True):
    """POST /pause_generation."""

    mode: Literal["abort", "retract", "in_place"] = "abort"


class Finish(msgspec.Struct, kw_only=True, frozen=True, omit_defaults=True):
    type: str
    matched: str | int | None = None  # of `stop`
    length: int | None = None  # of `length`
    message: str | None = None  # of `abort`


# logprob, id, text; the first token of a prompt has no probability
Spelled = tuple[float | None, int, str | None]


class MetaInfo(msgspec.Struct, kw_only=True, frozen=True):
    id: str
    finish_reason: Finish | None
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    e2e_latency: float | msgspec.UnsetType = msgspec.UNSET  # seconds; with the last
    input_token_logprobs: list[Spelled] | msgspec.UnsetType = msgspec.UNSET
    output_token_logprobs: list[Spelled] | msgspec.UnsetType = msgspec.UNSET
    input_top_logprobs: list[list[Spelled]] | msgspec.UnsetType = msgspec.UNSET
    output_top_logprobs: list[list[Spelled]] | msgspec.UnsetType = msgspec.UNSET
    prompt_token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET


class Generated(msgspec.Struct, kw_only=True, frozen=True):
    """One answer of /generate; in a stream all of it so far, with its index in the batch."""

    text: str
    output_ids: list[int]
    meta_info: MetaInfo
    index: int | msgspec.UnsetType = msgspec.UNSET


class Tokenized(msgspec.Struct, kw_only=True, frozen=True):
    """Lists of lists where the prompt was a list."""

    tokens: Any
    count: Any
    max_model_len: int


class Detokenized(msgspec.Struct, kw_only=True, frozen=True):
    text: Any


class Rendered(msgspec.Struct, kw_only=True, frozen=True):
    prompt: str
    token_ids: list[int]
    count: int


class RenderReply(msgspec.Struct, kw_only=True, frozen=True):
    """What the model would read, by prompt."""

    id: str
    object: Literal["render"] = "render"
    model: str
    prompts: list[Rendered]
    max_model_len: int


class Loads(msgspec.Struct, kw_only=True, frozen=True):
    """What one replica has to do, by SGLang's names."""

    dp_rank: int = 0
    num_running_reqs: int
    num_waiting_reqs: int
    num_total_reqs: int
    num_used_tokens: int
    max_total_num_tokens: int
    token_usage: float
    utilization: float  # of the places of running requests
    max_running_requests: int
    num_waiting_tokens: int  # computed before, or not
    cache_hit_rate: float  # of all prompt tokens since the scheduler's start
    is_paused: bool


class LoadReply(msgspec.Struct, kw_only=True, frozen=True):
    """GET /v1/loads."""

    dp_rank_count: int = 1
    loads: list[Loads]


class ModelInfo(msgspec.Struct, kw_only=True, frozen=True):
    """GET /model_info. What is not known here, or is a path, is left out."""

    model_path: str
    tokenizer_path: str
    served_model_name: str
    is_generation: bool = True
    has_image_understanding: bool = False
    has_audio_understanding: bool = False
    preferred_sampling_params: None = None
    weight_version: str = "default"
    context_length: int
    vocab_size: int
    parameter_count: int
    dtype: str
    tool_call_parser: str | None
    reasoning_parser: str | None


class ServerInfo(msgspec.Struct, kw_only=True, frozen=True):
    """GET /server_info: an allow-list. No key, path or address is in it."""

    version: str
    model: ModelInfo
    device: str
    page_size: int
    max_total_num_tokens: int
    choices_max: int
    prompts_max: int
    open_max: int
    body_bytes_max: int
    open_calls: int
    internal_states: list[Loads]


class Done(msgspec.Struct, kw_only=True, frozen=True):
    """What a control route has done."""

    success: bool
    message: str
