"""This file holds the public HTTP schemas of the OpenAI dialect: request bodies, replies, chunks.

It does not know how a body becomes a request (`actors/gateway/openai.py`) nor any other room; only
the gateway imports it.

Rules. Types are strict: no bool for an int, no "10" for 10. `null` means "not given" everywhere.
A field of the dialect that would change the answer and that we do not have is refused by name,
see `Unsupported`; a field that nobody knows is ignored, since clients send their vendor's extras
to every server. Bounds that depend on the settings or on the model are checked by the gateway.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec

Count = Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]
Positive = Annotated[int, msgspec.Meta(ge=1, le=2**31 - 1)]
Int32 = Annotated[int, msgspec.Meta(ge=-(2**31), le=2**31 - 1)]
Int64 = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]
Unit = Annotated[float, msgspec.Meta(ge=0.0, le=1.0)]
Temperature = Annotated[float, msgspec.Meta(ge=0.0, le=2.0)]
Penalty = Annotated[float, msgspec.Meta(ge=-2.0, le=2.0)]
# Logits are divided by it: much smaller, and they overflow float32.
Repetition = Annotated[float, msgspec.Meta(ge=0.01, le=100.0)]
Bias = Annotated[float, msgspec.Meta(ge=-100.0, le=100.0)]
TopLogprobs = Annotated[int, msgspec.Meta(ge=0, le=20)]
TopK = Annotated[int, msgspec.Meta(ge=-1, le=2**31 - 1)]
Salt = Annotated[str, msgspec.Meta(min_length=1, max_length=1024)]

NOT_GIVEN = msgspec.Raw()


class Unsupported(msgspec.Struct, kw_only=True, frozen=True):
    """Fields that peers or OpenAI have and we do not: anything but a neutral value is refused.

    They stay undecoded, so that a long list in one of them costs a scan and nothing else.
    """

    functions: msgspec.Raw = NOT_GIVEN
    function_call: msgspec.Raw = NOT_GIVEN
    audio: msgspec.Raw = NOT_GIVEN
    modalities: msgspec.Raw = NOT_GIVEN
    prediction: msgspec.Raw = NOT_GIVEN
    web_search_options: msgspec.Raw = NOT_GIVEN
    moderation: msgspec.Raw = NOT_GIVEN
    suffix: msgspec.Raw = NOT_GIVEN
    use_beam_search: msgspec.Raw = NOT_GIVEN
    prompt_embeds: msgspec.Raw = NOT_GIVEN
    lora_path: msgspec.Raw = NOT_GIVEN
    custom_logit_processor: msgspec.Raw = NOT_GIVEN
    guided_whitespace_pattern: msgspec.Raw = NOT_GIVEN


class StreamOptions(msgspec.Struct, kw_only=True, frozen=True):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None  # of its choice, in every chunk


class Constraints(Unsupported, kw_only=True, frozen=True):
    """What the text of the answer must be: at most one of them. OpenAI's name, SGLang's, vLLM's.

    Raw, since a schema is any JSON; `actors/gateway/constraint.py` reads them.
    """

    response_format: msgspec.Raw = NOT_GIVEN
    json_schema: msgspec.Raw = NOT_GIVEN
    regex: str | None = None
    ebnf: str | None = None
    structural_tag: msgspec.Raw = NOT_GIVEN
    structured_outputs: msgspec.Raw = NOT_GIVEN
    guided_json: msgspec.Raw = NOT_GIVEN
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None


class JsonSchemaFormat(msgspec.Struct, kw_only=True, frozen=True):
    """`strict` changes nothing: a schema is always kept to."""

    schema: Any
    name: str | None = None
    description: str | None = None
    strict: bool | None = None


Marker = Annotated[str, msgspec.Meta(min_length=1, max_length=1024)]


class Structure(msgspec.Struct, kw_only=True, frozen=True):
    """What is between `begin` and `end` keeps to the schema."""

    begin: Marker
    schema: Any
    end: Annotated[str, msgspec.Meta(max_length=1024)] = ""


class StructuralTag(msgspec.Struct, kw_only=True, frozen=True):
    """Text is free until one of the triggers; then it goes on as one of the structures that begin
    so."""

    structures: Annotated[list[Structure], msgspec.Meta(min_length=1, max_length=256)]
    triggers: Annotated[list[Marker], msgspec.Meta(min_length=1, max_length=256)]


class ResponseFormat(msgspec.Struct, kw_only=True, frozen=True):
    type: Literal["text", "json_object", "json_schema", "structural_tag"]
    json_schema: JsonSchemaFormat | None = None
    structures: list[Structure] | None = None
    triggers: list[Marker] | None = None
    format: Any = None  # of a structural tag's newer form: refused


class StructuredOptions(msgspec.Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """What vLLM has beside a constraint and we have not: anything but false and null is refused."""

    disable_fallback: msgspec.Raw = NOT_GIVEN
    disable_any_whitespace: msgspec.Raw = NOT_GIVEN
    disable_additional_properties: msgspec.Raw = NOT_GIVEN
    whitespace_pattern: msgspec.Raw = NOT_GIVEN


class StructuredOutputs(StructuredOptions, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """vLLM's way to say it: one of these. `json` is a schema, as an object or as text."""

    json: Any = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: Any = None


class ProcessorChoice(msgspec.Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """A logits processor that the operator has installed and allowed, and its parameters: an
    object."""

    name: Annotated[str, msgspec.Meta(min_length=1, max_length=128)]
    params: msgspec.Raw = NOT_GIVEN


Processors = Annotated[list[ProcessorChoice], msgspec.Meta(max_length=8)]


class Generation(Constraints, kw_only=True, frozen=True):
    """What both routes take."""

    model: str
    max_tokens: Count | None = None
    temperature: Temperature | None = None
    top_p: Unit | None = None  # 0 is taken as greedy
    top_k: TopK | None = None  # 0 and -1: off
    min_p: Unit | None = None
    n: int | None = None
    seed: Int64 | None = None  # every value is a seed, also -1
    stop: str | list[str] | None = None
    stop_regex: str | list[str] | None = None  # a match ends the text; see api/openai.md
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool | None = None
    no_stop_trim: bool | None = None  # SGLang's name for the same
    ignore_eos: bool | None = None
    min_tokens: Count | None = None
    skip_special_tokens: bool | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: Repetition | None = None
    logit_bias: dict[str, Bias] | None = None
    allowed_token_ids: list[int] | None = None  # no others are chosen
    bad_words: list[str] | None = None  # texts that the answer shall not have
    # At most 8, in this order; see api/openai.md.
    logits_processors: Processors | None = None
    truncate_prompt_tokens: TopK | None = None  # keep the last of them; -1: as many as fit
    best_of: int | None = None  # completions: the `n` most likely of so many
    return_token_ids: bool | None = None  # of the output, and of the prompt
    prompt_logprobs: TopLogprobs | None = None  # vLLM's form; not in a stream
    # Of a chat, and only where the operator lets requests bring one.
    chat_template: Annotated[str, msgspec.Meta(max_length=65_536)] | None = None
    echo: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: str | None = None  # ignored
    metadata: dict[str, str] | None = None  # ignored
    store: bool | None = None  # ignored: of this route's answers nothing is kept
    service_tier: str | None = None  # ignored: there is one
    safety_identifier: str | None = None  # ignored
    prompt_cache_key: str | None = None  # ignored: prefixes are found by themselves
    prompt_cache_retention: str | None = None  # ignored
    prompt_cache_options: dict[str, Any] | None = None  # ignored
    verbosity: str | None = None  # ignored
    guided_decoding_backend: str | None = None  # ignored: the operator chooses the engine
    cache_salt: Salt | None = None  # prefixes are shared only between requests of one salt
    priority: Int32 | None = None


class Part(msgspec.Struct, kw_only=True, frozen=True):
    """One part of a message's content. Only text parts are taken; they are joined without a gap."""

    type: str
    text: str | None = None
    refusal: str | None = None


class FunctionCall(msgspec.Struct, kw_only=True, frozen=True):
    name: str
    arguments: str = ""


class ToolCall(msgspec.Struct, kw_only=True, frozen=True):
    id: str | None = None
    type: Literal["function"] = "function"
    function: FunctionCall


class Function(msgspec.Struct, kw_only=True, frozen=True):
    """`strict`: the arguments keep to the schema also where the model chooses to call. Where a
    call is forced they always do."""

    name: Annotated[str, msgspec.Meta(min_length=1, max_length=256, pattern=r"^[\w.:/-]+$")]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(msgspec.Struct, kw_only=True, frozen=True):
    type: Literal["function"]
    function: Function


class ChosenFunction(msgspec.Struct, kw_only=True, frozen=True):
    name: str


class AllowedTool(msgspec.Struct, kw_only=True, frozen=True):
    type: Literal["function"] = "function"
    function: ChosenFunction

    @property
    def name(self) -> str:
        return self.function.name


class AllowedTools(msgspec.Struct, kw_only=True, frozen=True):
    """`required`: one of them must be called. The prompt shows all tools, as far as the others can
    be barred."""

    mode: Literal["auto", "required"]
    tools: Annotated[list[AllowedTool], msgspec.Meta(min_length=1, max_length=1024)]


class ToolChoice(msgspec.Struct, kw_only=True, frozen=True):
    type: Literal["function", "allowed_tools"] = "function"
    function: ChosenFunction | None = None
    allowed_tools: AllowedTools | None = None


class ChatMessage(msgspec.Struct, kw_only=True, frozen=True):
    """`developer` is handled as `system`. `tool` needs a `tool_call_id`."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[Part] | None = None
    name: str | None = None
    tool_call_id: str | None = None
    tool_calls: list[ToolCall] | None = None
    reasoning_content: str | None = None  # of the assistant; the template decides what of it shows


class ChatBody(Generation, kw_only=True, frozen=True):
    """POST /v1/chat/completions. Without a limit the answer may fill the context."""

    messages: list[ChatMessage]
    max_completion_tokens: Positive | None = None  # goes before `max_tokens`
    logprobs: bool | None = None
    top_logprobs: TopLogprobs | None = None
    # With `tool_choice: "none"` the tools are not shown to the model, and not read.
    tools: msgspec.Raw = NOT_GIVEN
    tool_choice: msgspec.Raw = NOT_GIVEN
    parallel_tool_calls: bool | None = None
    reasoning_effort: str | None = None  # given to the template; "none" also switches thinking off
    separate_reasoning: bool | None = None  # false: reasoning stays in `content`, tags and all
    include_reasoning: bool | None = None  # false: reasoning is left out of the answer
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None


class CompletionBody(Generation, kw_only=True, frozen=True):
    """POST /v1/completions. Without a limit 16 tokens are made, as the dialect has it."""

    prompt: str | list[str | int | list[int]] | None = None
    logprobs: TopLogprobs | None = None
    add_special_tokens: bool | None = None


class PromptDetails(msgspec.Struct, kw_only=True, frozen=True):
    cached_tokens: int


class CompletionDetails(msgspec.Struct, kw_only=True, frozen=True):
    reasoning_tokens: int


class Usage(msgspec.Struct, kw_only=True, frozen=True):
    """`completion_tokens_details`: of a chat."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails
    completion_tokens_details: CompletionDetails | msgspec.UnsetType = msgspec.UNSET


class TopLogprob(msgspec.Struct, kw_only=True, frozen=True):
    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(msgspec.Struct, kw_only=True, frozen=True):
    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class ChatLogprobs(msgspec.Struct, kw_only=True, frozen=True):
    content: list[TokenLogprob]
    refusal: None = None


class PromptLogprob(msgspec.Struct, kw_only=True, frozen=True):
    """`rank` is null where the token is not among the alternatives."""

    logprob: float
    rank: int | None
    decoded_token: str


# By id, for each prompt token; null for the first.
PromptLogprobs = list[dict[str, PromptLogprob] | None]


class CompletionLogprobs(msgspec.Struct, kw_only=True, frozen=True):
    """Four lists of one length. `top_logprobs` is null where no alternatives were asked for."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None] | None
    text_offset: list[int]


class ReplyCall(msgspec.Struct, kw_only=True, frozen=True):
    id: str
    type: Literal["function"] = "function"
    function: FunctionCall


class ReplyMessage(msgspec.Struct, kw_only=True, frozen=True):
    """`content` is null where the answer is tool calls and nothing else."""

    role: Literal["assistant"] = "assistant"
    content: str | None
    refusal: None = None
    reasoning_content: str | msgspec.UnsetType = msgspec.UNSET
    tool_calls: list[ReplyCall] | msgspec.UnsetType = msgspec.UNSET


class ChatChoice(msgspec.Struct, kw_only=True, frozen=True):
    index: int
    message: ReplyMessage
    logprobs: ChatLogprobs | None
    finish_reason: str
    matched_stop: str | int | None  # the stop string or the stop id that ended it
    token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET


class ChatReply(msgspec.Struct, kw_only=True, frozen=True):
    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    prompt_token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET
    prompt_logprobs: PromptLogprobs | msgspec.UnsetType = msgspec.UNSET


class CompletionChoice(msgspec.Struct, kw_only=True, frozen=True):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: str | None
    matched_stop: str | int | None | msgspec.UnsetType = msgspec.UNSET
    token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET
    prompt_token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET  # in a choice's first chunk
    prompt_logprobs: PromptLogprobs | msgspec.UnsetType = msgspec.UNSET


class CompletionReply(msgspec.Struct, kw_only=True, frozen=True):
    """A plain answer, and also each chunk of a stream: the dialect has one shape for both."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | None | msgspec.UnsetType = msgspec.UNSET


class ChunkFunction(msgspec.Struct, kw_only=True, frozen=True):
    name: str | msgspec.UnsetType = msgspec.UNSET
    arguments: str


class ChunkCall(msgspec.Struct, kw_only=True, frozen=True):
    """id, type and name come once, in a call's first chunk."""

    index: int
    id: str | msgspec.UnsetType = msgspec.UNSET
    type: Literal["function"] | msgspec.UnsetType = msgspec.UNSET
    function: ChunkFunction


class ChunkDelta(msgspec.Struct, kw_only=True, frozen=True):
    role: Literal["assistant"] | msgspec.UnsetType = msgspec.UNSET
    content: str | msgspec.UnsetType = msgspec.UNSET
    reasoning_content: str | msgspec.UnsetType = msgspec.UNSET
    tool_calls: list[ChunkCall] | msgspec.UnsetType = msgspec.UNSET


class ChunkChoice(msgspec.Struct, kw_only=True, frozen=True):
    index: int
    delta: ChunkDelta
    logprobs: ChatLogprobs | None
    finish_reason: str | None
    matched_stop: str | int | None | msgspec.UnsetType = msgspec.UNSET
    token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET


class ChatChunk(msgspec.Struct, kw_only=True, frozen=True):
    """`usage` is null on all chunks but the last where it was asked for, and absent otherwise."""

    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: int
    model: str
    choices: list[ChunkChoice]
    usage: Usage | None | msgspec.UnsetType = msgspec.UNSET
    prompt_token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET  # in the first chunk


class ModelCard(msgspec.Struct, kw_only=True, frozen=True):
    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "histrio"
    root: str
    parent: str | None = None
    max_model_len: int


class ModelList(msgspec.Struct, kw_only=True, frozen=True):
    object: Literal["list"] = "list"
    data: list[ModelCard]


class Error(msgspec.Struct, kw_only=True, frozen=True):
    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorReply(msgspec.Struct, kw_only=True, frozen=True):
    error: Error
