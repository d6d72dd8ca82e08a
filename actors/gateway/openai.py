"""This file turns a body of the OpenAI dialect into a call, or refuses it.

It does not know HTTP, streams or the tokenizer: bytes and facts in, an `Ask` out. Chance is an
argument. What the tokenizer must judge (lengths, templates) is not judged here.
Laws: whatever the bytes, the result is an `Ask` or `Refused`, never another exception; the refusal
names the field; the cost is linear in the length of the body.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeVar

import msgspec

from actors.gateway.call import Call, Prompt
from actors.gateway.constraint import read_constraint
from actors.gateway.conversation import read_conversation
from actors.gateway.errors import Refused, invalid
from actors.gateway.inputs import NEUTRAL, Limits, check_ids, check_model, decode, read_inputs
from actors.gateway.pattern import (
    CROWD_MAX,
    CROWD_MOVES_MAX,
    MOVES_MAX,
    BadPattern,
    crowd_of,
    move_count,
    read_pattern,
)
from actors.gateway.shape import Shape, read_shape
from messages.openai import (
    NOT_GIVEN,
    ChatBody,
    CompletionBody,
    Generation,
    Unsupported,
)
from messages.types import (
    Grammar,
    ProcessorCall,
    Sampling,
    StopPattern,
    StopRules,
)

COMPLETION_MAX_TOKENS = 16
# One bias entry costs the sampler a write in each step: enough for whole scripts, not for a
# vocabulary.
BIAS_COUNT_MAX = 4096
STOP_IDS_MAX = 1024
BAD_WORDS_MAX = 256
BAD_WORD_CHARS_MAX = 256

# Values of an `Unsupported` field that ask for nothing, beside those of every field.
NEUTRAL_OF: Mapping[str, frozenset[bytes]] = {
    "suffix": frozenset({b'""'}),
    "modalities": frozenset({b'["text"]', b'[ "text" ]'}),
    "function_call": frozenset({b'"none"'}),
}
UNSUPPORTED: Mapping[str, str] = {
    "custom_logit_processor": " It holds code, and code that comes with a request is never run;"
    " `logits_processors` names those that are installed here.",
}
N = TypeVar("N", int, float)


class Ask(NamedTuple):
    """A body, read: the call, and how its answer is to be written."""

    call: Call
    is_chat: bool
    stream: bool
    include_usage: bool
    logprobs: int | None  # alternatives for each token; None: no logprobs
    echoes: tuple[str | None, ...] | None  # with `echo`: each prompt's text, None: from its ids
    prompt_only: bool
    shape: Shape = Shape()  # of a chat's answer
    live_usage: bool = False  # in every chunk
    token_ids: bool = False
    prompt_logprobs: bool = False  # vLLM's list of them
    drops_output: bool = False  # what is generated is only there to have the prompt computed
    kept_count: int | None = None  # of each prompt's choices, the most likely; None: all


# Reads a body of either route, given the time of its arrival (Unix) and a source of seeds.
def read_chat(body: bytes, limits: Limits, draw: Callable[[], int], created_s: float = 0.0) -> Ask:
    """POST /v1/chat/completions. Raises Refused: the client's fault."""
    return ask_chat(decode(body, _chat_decoder), limits, draw, created_s)


def ask_chat(chat: ChatBody, limits: Limits, draw: Callable[[], int], created_s: float) -> Ask:
    """What a chat's body asks for, whichever dialect it was made from. Raises Refused."""
    check_generation(chat, limits)
    if not chat.messages:
        raise invalid("There must be at least one message.", "messages")
    if chat.best_of not in (None, 1):
        raise invalid("`best_of` is for completions; a chat has `n`.", "best_of")
    if chat.top_logprobs is not None and not chat.logprobs:
        raise invalid("`top_logprobs` needs `logprobs` to be true.", "top_logprobs")
    max_tokens, param = chat.max_completion_tokens, "max_completion_tokens"
    if max_tokens is None:
        max_tokens, param = chat.max_tokens, "max_tokens"
    if max_tokens == 0:
        raise invalid("`max_tokens` must be at least 1.", param)
    if max_tokens is None:
        max_tokens = limits.config.default_max_tokens
    logprobs = (chat.top_logprobs or 0) if chat.logprobs else None
    constraint = read_constraint(chat)
    shaped = read_shape(chat, limits.parsers, constraint, limits.config.tools_max)
    check_constrained(chat, shaped.grammar)
    stop = read_stop(chat, limits)
    if shaped.shape.shows_special:
        stop = msgspec.structs.replace(stop, skip_special=False)
    if shaped.shape.thoughts_parser:
        stop = msgspec.structs.replace(stop, want_spans=True)
    prompt, echo = read_conversation(chat, created_s, shaped.tools_json)
    call = Call(
        prompts=(Prompt(chat=prompt),),
        choice_count=1 if chat.n is None else chat.n,
        sampling=read_sampling(chat, max_tokens, logprobs, limits, draw),
        stop=stop,
        namespace=read_namespace(chat),
        priority=chat.priority or 0,
        grammar=shaped.grammar,
        spelling={"prompt": "messages"},
        **read_prompt_rules(chat),
    )
    return Ask(
        call=call,
        is_chat=True,
        stream=bool(chat.stream),
        include_usage=read_include_usage(chat),
        logprobs=logprobs,
        echoes=(echo,) if chat.echo else None,
        prompt_only=False,
        shape=shaped.shape,
        prompt_logprobs=chat.prompt_logprobs is not None,
        live_usage=read_live_usage(chat),
        token_ids=bool(chat.return_token_ids),
    )


def read_completion(
    body: bytes, limits: Limits, draw: Callable[[], int], created_s: float = 0.0
) -> Ask:
    """POST /v1/completions. Raises Refused: the client's fault."""
    return ask_completion(decode(body, _completion_decoder), limits, draw)


def ask_completion(completion: CompletionBody, limits: Limits, draw: Callable[[], int]) -> Ask:
    """The same of a completion. Raises Refused."""
    check_generation(completion, limits)
    prompts = read_prompts(completion, limits)
    max_tokens = completion.max_tokens
    if max_tokens is None:
        max_tokens = limits.config.default_max_tokens or COMPLETION_MAX_TOKENS
    if completion.echo and completion.logprobs is not None and completion.stream:
        raise invalid("The log probabilities of an echoed prompt cannot be streamed.", "logprobs")
    tells = completion.prompt_logprobs is not None or (
        completion.echo and completion.logprobs is not None
    )
    echoes = tuple(prompt.text for prompt in prompts) if completion.echo else None
    add_special = completion.add_special_tokens
    stop = read_stop(completion, limits)
    grammar = read_constraint(completion)
    check_constrained(completion, grammar)
    choice_count, kept_count = read_best_of(completion, limits)
    logprobs = completion.logprobs
    if kept_count is not None and logprobs is None:
        logprobs = 0  # to compare the choices by
    call = Call(
        prompts=prompts,
        choice_count=choice_count,
        sampling=read_sampling(completion, max(1, max_tokens), logprobs, limits, draw),
        stop=msgspec.structs.replace(stop, continues_prompt=True),
        prompt_only=max_tokens == 0 and not tells,
        want_prompt_text=echoes is not None and None in echoes,
        add_special=True if add_special is None else add_special,
        namespace=read_namespace(completion),
        priority=completion.priority or 0,
        grammar=grammar,
        **read_prompt_rules(completion),
    )
    return Ask(
        call=call,
        is_chat=False,
        stream=bool(completion.stream),
        include_usage=read_include_usage(completion),
        logprobs=completion.logprobs,
        echoes=echoes,
        prompt_only=max_tokens == 0 and not tells,
        prompt_logprobs=completion.prompt_logprobs is not None,
        drops_output=max_tokens == 0 and bool(tells),
        live_usage=read_live_usage(completion),
        token_ids=bool(completion.return_token_ids),
        kept_count=kept_count,
    )


def check_generation(body: Generation, limits: Limits) -> None:
    """What the types of the common fields don't say."""
    check_model(body.model, limits)
    check_unsupported(body)
    if body.n is not None and not 1 <= body.n <= limits.config.choices_max:
        raise invalid(f"`n` must be between 1 and {limits.config.choices_max}.", "n")
    if body.stream_options is not None and not body.stream:
        raise invalid("`stream_options` needs `stream` to be true.", "stream_options")
    check_ids(body.stop_token_ids, "stop_token_ids", limits, STOP_IDS_MAX)
    if body.chat_template is not None and not (
        limits.config.request_templates and isinstance(body, ChatBody)
    ):
        raise invalid("A request cannot bring its own chat template here.", "chat_template")
    if body.prompt_logprobs is not None and body.stream:
        raise invalid("`prompt_logprobs` cannot be streamed.", "prompt_logprobs")
    check_ids(body.allowed_token_ids, "allowed_token_ids", limits)
    if body.allowed_token_ids == []:
        raise invalid("`allowed_token_ids` cannot be an empty list.", "allowed_token_ids")
    words = body.bad_words or []
    if len(words) > BAD_WORDS_MAX:
        raise invalid(f"`bad_words` may have at most {BAD_WORDS_MAX} entries.", "bad_words")
    if any(not 0 < len(word) <= BAD_WORD_CHARS_MAX for word in words):
        raise invalid(f"A bad word has between 1 and {BAD_WORD_CHARS_MAX} characters.", "bad_words")
    if body.truncate_prompt_tokens == 0:
        raise invalid(
            "`truncate_prompt_tokens` must be at least 1, or -1.", "truncate_prompt_tokens"
        )


def check_unsupported(body: Unsupported) -> None:
    for name in Unsupported.__struct_fields__:
        raw = getattr(body, name)
        if raw is NOT_GIVEN:
            continue
        value = bytes(raw)
        if value in NEUTRAL or value in NEUTRAL_OF.get(name, ()):
            continue
        raise unsupported(name)


def unsupported(name: str) -> Refused:
    why = UNSUPPORTED.get(name, "")
    return invalid(f"`{name}` is not supported.{why}", name)


def check_constrained(body: Generation, grammar: Grammar | None) -> None:
    """What would have a constrained answer go on behind its end."""
    if grammar is None:
        return
    for name in ("ignore_eos", "min_tokens"):
        if getattr(body, name):
            raise invalid(f"`{name}` and `{grammar.param}` exclude each other.", name)


def read_prompts(body: CompletionBody, limits: Limits) -> tuple[Prompt, ...]:
    if body.prompt is None:
        raise invalid("The required field `prompt` is missing.", "prompt")
    return read_inputs(body.prompt, "prompt", limits)


def read_sampling(
    body: Generation,
    max_tokens: int,
    logprobs: int | None,
    limits: Limits,
    draw: Callable[[], int],
) -> Sampling:
    """`max_tokens` 0: what is left of the context."""
    min_tokens = body.min_tokens or 0
    if max_tokens and min_tokens > max_tokens:
        raise invalid("`min_tokens` cannot be more than the token limit.", "min_tokens")
    defaults = limits.defaults
    top_k = given(body.top_k, defaults.top_k, 0)
    if top_k < 0 or top_k >= limits.vocab_size:
        top_k = 0
    top_p = given(body.top_p, defaults.top_p, 1.0)
    if top_p == 0.0:
        top_k, top_p = 1, 1.0
    return Sampling(
        temperature=given(body.temperature, defaults.temperature, 1.0),
        top_k=top_k,
        top_p=top_p,
        min_p=given(body.min_p, defaults.min_p, 0.0),
        presence_penalty=body.presence_penalty or 0.0,
        frequency_penalty=body.frequency_penalty or 0.0,
        repetition_penalty=given(body.repetition_penalty, defaults.repetition_penalty, 1.0),
        logit_bias=read_bias(body.logit_bias, limits),
        seed=draw() if body.seed is None else body.seed,
        logprobs=logprobs,
        stop_ids=tuple(sorted(set(body.stop_token_ids or ()))),
        ignore_eos=bool(body.ignore_eos),
        min_tokens=min_tokens,
        max_tokens=max_tokens,
        allowed_ids=tuple(sorted(set(body.allowed_token_ids or ()))),
        prompt_logprobs=read_prompt_logprobs(body),
        processors=tuple(
            ProcessorCall(choice.name, bytes(choice.params).removeprefix(b"null"))
            for choice in body.logits_processors or ()
        ),
    )


def read_prompt_logprobs(body: Generation) -> int | None:
    """How many alternatives for each token of the prompt; None: nothing is asked of them."""
    wanted = [] if body.prompt_logprobs is None else [body.prompt_logprobs]
    if isinstance(body, CompletionBody) and body.echo and body.logprobs is not None:
        wanted.append(body.logprobs)
    return max(wanted, default=None)


def given(*values: N | None) -> N:
    """The first that is there; the last one is."""
    return next(value for value in values if value is not None)


def read_bias(bias: dict[str, float] | None, limits: Limits) -> tuple[tuple[int, float], ...]:
    if not bias:
        return ()
    if len(bias) > BIAS_COUNT_MAX:
        raise invalid(f"`logit_bias` may have at most {BIAS_COUNT_MAX} entries.", "logit_bias")
    entries: dict[int, float] = {}
    for key, value in bias.items():
        if not (key.isascii() and key.isdigit() and len(key) < 16):
            raise invalid(
                f"`logit_bias` has a key that is no token id: {key[:40]!r}.", "logit_bias"
            )
        token_id = int(key)
        if token_id >= limits.vocab_size:
            raise invalid(
                f"`logit_bias` must hold token ids between 0 and {limits.vocab_size - 1}.",
                "logit_bias",
            )
        entries[token_id] = value
    return tuple(sorted(entries.items()))


def read_stop(body: Generation, limits: Limits) -> StopRules:
    stop = body.stop
    strings = [] if stop is None else [stop] if isinstance(stop, str) else stop
    if len(strings) > limits.config.stops_max:
        raise invalid(f"At most {limits.config.stops_max} stop strings.", "stop")
    for text in strings:
        if not text:
            raise invalid("A stop string cannot be empty.", "stop")
        if len(text) > limits.config.stop_chars_max:
            raise invalid(
                f"A stop string may have at most {limits.config.stop_chars_max} characters.", "stop"
            )
    return StopRules(
        strings=tuple(dict.fromkeys(strings)),
        patterns=read_patterns(body, limits),
        pattern_chars_max=limits.config.stop_chars_max,
        keep_match=bool(body.include_stop_str_in_output or body.no_stop_trim),
        min_tokens=body.min_tokens or 0,
        skip_special=True if body.skip_special_tokens is None else body.skip_special_tokens,
    )


def read_patterns(body: Generation, limits: Limits) -> tuple[StopPattern, ...]:
    given = body.stop_regex
    texts = [] if given is None else [given] if isinstance(given, str) else given
    if len(texts) > limits.config.stops_max:
        raise invalid(f"At most {limits.config.stops_max} stop expressions.", "stop_regex")
    patterns: list[StopPattern] = []
    moves_left = MOVES_MAX
    for text in dict.fromkeys(texts):
        if len(text) > limits.config.stop_chars_max:
            raise invalid(
                f"A stop expression may have at most {limits.config.stop_chars_max} characters.",
                "stop_regex",
            )
        try:
            patterns.append(read_pattern(text, moves_left))
        except BadPattern as error:
            raise invalid(f"`stop_regex` has a wrong expression: {error}.", "stop_regex") from None
        moves_left -= move_count(patterns[-1])
    if crowd_of(patterns).is_too_large:
        raise invalid(
            f"`stop_regex` is too costly: a character may stand at more than {CROWD_MAX} places of "
            f"it at once, or go on from there in more than {CROWD_MOVES_MAX} ways. Shorter bounded "
            "repetitions, as in `.{100}`, or unbounded ones, as in `.*`, cost less.",
            "stop_regex",
        )
    return tuple(patterns)


def read_namespace(body: Generation) -> str:
    """Salts are kept apart from every other kind of namespace by their own prefix."""
    return "" if body.cache_salt is None else f"salt:{body.cache_salt}"


def read_prompt_rules(body: Generation) -> dict[str, Any]:
    """What a call has of its prompts besides themselves."""
    length = body.truncate_prompt_tokens
    return {
        "bad_words": tuple(dict.fromkeys(body.bad_words or ())),
        "truncate_len": None if length is None else max(length, 0),
        "want_prompt_ids": bool(body.return_token_ids),
    }


def read_best_of(body: CompletionBody, limits: Limits) -> tuple[int, int | None]:
    """How many choices run for each prompt, and how many of them are shown."""
    wanted = 1 if body.n is None else body.n
    best_of = body.best_of
    if best_of is None or best_of == wanted:
        return wanted, None
    if not wanted <= best_of <= limits.config.choices_max:
        raise invalid(f"`best_of` must be between `n` and {limits.config.choices_max}.", "best_of")
    if body.stream:
        raise invalid("An answer that is the best of several cannot be streamed.", "best_of")
    return best_of, wanted


def read_live_usage(body: Generation) -> bool:
    return bool(body.stream_options and body.stream_options.continuous_usage_stats)


def read_include_usage(body: Generation) -> bool:
    return bool(body.stream_options and body.stream_options.include_usage)


_chat_decoder = msgspec.json.Decoder(ChatBody)
_completion_decoder = msgspec.json.Decoder(CompletionBody)
