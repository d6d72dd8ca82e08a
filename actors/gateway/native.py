"""This file turns a body of SGLang's native /generate into a call, or refuses it.

It does not know HTTP, streams or the tokenizer: each prompt is read as a completion
(`openai.ask_completion`), and `native_replies.py` writes the answers.
Laws: whatever the bytes, the result is an `Asked` or `Refused`; the refusal names the field as this
dialect spells it; a list is answered by a list of the same length and order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeVar

import msgspec

from actors.gateway.call import Call, Variant
from actors.gateway.dialect import Dialect
from actors.gateway.errors import invalid
from actors.gateway.inputs import Limits, decode, worded
from actors.gateway.native_replies import Asked, GenerateStream, GenerateWriter
from actors.gateway.openai import Ask, ask_completion, unsupported
from messages.native import GenerateBody, Lacking, SamplingParams
from messages.openai import CompletionBody

NEW_TOKENS = 128
NOTHING = (b"", b"null", b"false", b"[]", b"{}")
# What a completion's field is called here.
SPELLING = {
    **{name: f"sampling_params.{name}" for name in SamplingParams.__struct_fields__},
    "max_tokens": "sampling_params.max_new_tokens",
    "min_tokens": "sampling_params.min_new_tokens",
    "seed": "sampling_params.sampling_seed",
    "include_stop_str_in_output": "sampling_params.no_stop_trim",
}
T = TypeVar("T")


class Item(NamedTuple):
    """One prompt of a batch."""

    prompt: str | list[int]
    params: SamplingParams
    logprobs: int | None
    start_len: int | None  # from which token on the prompt's are wanted too


def read_generate(
    body: bytes, limits: Limits, draw: Callable[[], int], created_s: float = 0.0
) -> Asked:
    """POST /generate. Raises Refused: the client's fault."""
    given = decode(body, _decoder)
    check_lacking(given)
    prompts, is_batch = read_prompts(given, limits)
    items = read_items(given, prompts)
    asks = [ask_item(given, item, limits, draw) for item in items]
    calls = [ask.call for ask in asks]
    counts = {call.choice_count for call in calls}
    if len(counts) > 1:
        raise invalid("`n` must be the same for all of a batch.", "sampling_params.n")
    only = {(ask.call.prompt_only, ask.drops_output) for ask in asks}
    if len(only) > 1:
        message = "`max_new_tokens` of 0 must be that of all of a batch, with like log probs."
        raise invalid(message, "sampling_params.max_new_tokens")
    call = Call(
        prompts=tuple(call.prompts[0] for call in calls),
        choice_count=calls[0].choice_count,
        variants=tuple(Variant(call.sampling, call.stop, call.grammar) for call in calls),
        prompt_only=calls[0].prompt_only,
        want_prompt_text=bool(given.return_prompt_token_ids),  # so that the prompts are checked
        namespace=calls[0].namespace,
        priority=given.priority or 0,
        param="input_ids" if given.text is None else "text",
        spelling=spelling_of(given),
        count_param="sampling_params.n",
    )
    return Asked(
        call=call,
        stream=bool(given.stream),
        is_list=is_batch or call.choice_count > 1,
        rids=read_rids(given, len(prompts)),
        logprobs=tuple(item.logprobs for item in items),
        start_lens=tuple(item.start_len for item in items),
        drops_output=asks[0].drops_output,
        with_text=bool(given.return_text_in_logprobs),
        with_prompt=bool(given.return_prompt_token_ids),
    )


def check_lacking(given: GenerateBody) -> None:
    for name in Lacking.__struct_fields__:
        if bytes(getattr(given, name)) not in NOTHING:
            raise unsupported(name)


def read_prompts(given: GenerateBody, limits: Limits) -> tuple[Sequence[str | list[int]], bool]:
    """The prompts, and whether they came as a batch."""
    text, ids = given.text, given.input_ids
    if (text is None) == (ids is None):
        raise invalid("Exactly one of `text` and `input_ids` is needed.", "text")
    param = "text" if ids is None else "input_ids"
    if isinstance(text, str):
        return [text], False
    given_list = text if text is not None else ids
    if not given_list:
        raise invalid(f"`{param}` cannot be an empty list.", param)
    if isinstance(given_list[0], int):
        if not all(isinstance(item, int) for item in given_list):
            raise invalid("`input_ids` mixes ids and lists of ids.", param)
        return [given_list], False  # type: ignore[list-item]
    if any(isinstance(item, int) for item in given_list):
        raise invalid("`input_ids` mixes ids and lists of ids.", param)
    if len(given_list) > limits.config.prompts_max:
        raise invalid(f"At most {limits.config.prompts_max} prompts in one call.", param)
    return given_list, True  # type: ignore[return-value]


def read_items(given: GenerateBody, prompts: Sequence[str | list[int]]) -> list[Item]:
    count = len(prompts)
    params = spread(given.sampling_params, count, "sampling_params")
    wanted = spread(given.return_logprob, count, "return_logprob")
    starts = spread(given.logprob_start_len, count, "logprob_start_len")
    tops = spread(given.top_logprobs_num, count, "top_logprobs_num")
    items = []
    for index, prompt in enumerate(prompts):
        logprobs = (tops[index] or 0) if wanted[index] else None
        start = starts[index]
        start_len = None if logprobs is None or start is None or start < 0 else start
        items.append(Item(prompt, params[index] or SamplingParams(), logprobs, start_len))
    return items


def spread(value: T | list[T] | None, count: int, param: str) -> list[T | None]:
    """One value for each prompt."""
    if not isinstance(value, list):
        return [value] * count
    if len(value) != count:
        raise invalid(f"`{param}` has {len(value)} entries for {count} prompts.", param)
    return list(value)


def read_rids(given: GenerateBody, count: int) -> tuple[str, ...]:
    """The client's ids, one for each prompt, or none."""
    if given.rid is None:
        return ()
    if isinstance(given.rid, str):
        return (given.rid,) if count == 1 else tuple(f"{given.rid}_{i}" for i in range(count))
    if len(given.rid) != count:
        raise invalid(f"`rid` has {len(given.rid)} entries for {count} prompts.", "rid")
    return tuple(given.rid)


def ask_item(given: GenerateBody, item: Item, limits: Limits, draw: Callable[[], int]) -> Ask:
    """One prompt as a completion of its own."""
    params = item.params
    if bytes(params.custom_params) not in NOTHING:
        raise invalid("`custom_params` is not supported.", "sampling_params.custom_params")
    max_tokens = NEW_TOKENS if params.max_new_tokens is None else params.max_new_tokens
    salts = [salt for salt in (given.cache_salt, given.extra_key) if salt is not None]
    completion = CompletionBody(
        model=limits.model,
        prompt=item.prompt,  # type: ignore[arg-type]
        max_tokens=max_tokens,
        min_tokens=params.min_new_tokens,
        temperature=params.temperature,
        top_p=params.top_p,
        top_k=params.top_k,
        min_p=params.min_p,
        frequency_penalty=params.frequency_penalty,
        presence_penalty=params.presence_penalty,
        repetition_penalty=params.repetition_penalty,
        stop=params.stop or None,
        stop_regex=params.stop_regex or None,
        stop_token_ids=params.stop_token_ids,
        ignore_eos=params.ignore_eos,
        skip_special_tokens=params.skip_special_tokens,
        include_stop_str_in_output=params.no_stop_trim,
        n=params.n,
        logit_bias=params.logit_bias,
        seed=params.sampling_seed,
        json_schema=params.json_schema,
        regex=params.regex,
        ebnf=params.ebnf,
        structural_tag=params.structural_tag,
        logprobs=item.logprobs,
        prompt_logprobs=None if item.start_len is None else item.logprobs,
        cache_salt="\x00".join(salts) or None,
        logits_processors=given.logits_processors,
    )
    with worded(spelling_of(given)):
        return ask_completion(completion, limits, draw)


def spelling_of(given: GenerateBody) -> dict[str, str]:
    return {**SPELLING, "prompt": "text" if given.text is not None else "input_ids"}


def names(ask: Asked) -> tuple[str, ...]:
    return ask.rids


_decoder = msgspec.json.Decoder(GenerateBody)

DIALECTS = (Dialect("/generate", "", read_generate, GenerateWriter, GenerateStream, names=names),)
