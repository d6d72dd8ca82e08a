"""This file says what one client's call is, whatever protocol it came by: prompts times choices.

It does not know HTTP nor any protocol; `openai.py` makes calls from bodies, `actors/engine.py` from
Python arguments. A call is split into requests, each one sequence; choice i belongs to prompt
i // choice_count.

A call whose prompts must all be valid before any of them runs (several prompts, several choices),
or that only wants its prompt back, is *checked first*: the tokenizer encodes each prompt once and
passes nothing on; then each choice is sent with the ids.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import msgspec

from messages.base import Address
from messages.gateway import Delta
from messages.tokenizer import Chat, Encode
from messages.types import Grammar, Int32s, Sampling, StopRules


class Prompt(msgspec.Struct, frozen=True, kw_only=True):
    """Exactly one of the three."""

    chat: Chat | None = None
    text: str | None = None
    ids: Int32s | None = None


class Variant(NamedTuple):
    """What one prompt of a call has for itself."""

    sampling: Sampling
    stop: StopRules
    grammar: Grammar | None = None


class Call(msgspec.Struct, frozen=True, kw_only=True):
    prompts: tuple[Prompt, ...]
    choice_count: int = 1  # for each prompt
    # Of the first choice; the others have their own `choice`. `max_tokens` 0: what is left of the
    # context.
    sampling: Sampling = Sampling()
    stop: StopRules = StopRules()
    prompt_only: bool = False  # generate nothing: the prompt's length (and text) is the answer
    want_prompt_text: bool = False
    add_special: bool = True
    namespace: str = ""
    priority: int = 0
    grammar: Grammar | None = None
    variants: tuple[Variant, ...] = ()  # by prompt, where they differ; these three are void then
    # With `prompt_only`: the prompt may be empty or too long; its text is as `stop.skip_special`
    # says.
    measure: bool = False
    bad_words: tuple[str, ...] = ()
    truncate_len: int | None = None  # see `tokenizer.Encode`
    want_prompt_ids: bool = False
    label_words: tuple[str, ...] = ()
    param: str = ""  # what the client calls its prompts; "": as completions and chats do
    count_param: str = "n"  # and the number of choices
    # How its dialect spells fields of ours: what is found wrong later is said so (`stream.py`).
    spelling: Mapping[str, str] = {}

    def variant(self, prompt: int) -> Variant:
        if self.variants:
            return self.variants[prompt]
        return Variant(self.sampling, self.stop, self.grammar)

    @property
    def request_count(self) -> int:
        return len(self.prompts) * self.choice_count

    @property
    def checked_first(self) -> bool:
        wants_prompt = self.want_prompt_text or self.want_prompt_ids
        return self.request_count > 1 or self.prompt_only or wants_prompt


class Checked(msgspec.Struct, frozen=True, kw_only=True):
    """What the tokenizer said about one prompt."""

    token_count: int
    ids: Int32s = b""
    text: str = ""


class Row(NamedTuple):
    """What one message brought for one choice of a call."""

    choice: int  # index within the call
    delta: Delta


def check_encodes(call: Call, call_id: str, reply_to: Address) -> list[Encode]:
    """One message per prompt that only checks it. Request `CALL.pI` is prompt I."""
    return [
        encode_of(
            call,
            prompt,
            f"{call_id}.p{index}",
            reply_to,
            variant=call.variant(index),
            choice=0,
            want_prompt_ids=True,
            want_prompt_text=call.want_prompt_text,
            forward=False,
        )
        for index, prompt in enumerate(call.prompts)
    ]


def run_encodes(
    call: Call, call_id: str, reply_to: Address, checked: list[Checked] | None = None
) -> list[Encode]:
    """One message per choice. Request `CALL.I` is choice I. With `checked`, the ids go instead."""
    prompts = call.prompts if checked is None else [Prompt(ids=prompt.ids) for prompt in checked]
    return [
        encode_of(
            call,
            prompts[index // call.choice_count],
            f"{call_id}.{index}",
            reply_to,
            variant=call.variant(index // call.choice_count),
            choice=index % call.choice_count,
        )
        for index in range(call.request_count)
    ]


def encode_of(
    call: Call,
    prompt: Prompt,
    request: str,
    reply_to: Address,
    *,
    variant: Variant,
    choice: int,
    want_prompt_ids: bool = False,
    want_prompt_text: bool = False,
    forward: bool = True,
) -> Encode:
    """The first attempt of one request. Its token ids always come back: a resumed attempt needs
    them."""
    return Encode(
        request=request,
        attempt=1,
        reply_to=reply_to,
        sampling=msgspec.structs.replace(
            variant.sampling,
            choice=choice,
            # The first choice speaks for the prompt.
            prompt_logprobs=None if choice else variant.sampling.prompt_logprobs,
        ),
        stop=msgspec.structs.replace(variant.stop, want_token_ids=True),
        chat=prompt.chat,
        text=prompt.text,
        ids=prompt.ids,
        add_special=call.add_special,
        namespace=call.namespace,
        priority=call.priority,
        want_prompt_ids=want_prompt_ids,
        want_prompt_text=want_prompt_text,
        forward=forward,
        grammar=variant.grammar,
        measure=call.measure,
        bad_words=call.bad_words,
        truncate_len=call.truncate_len,
        label_words=call.label_words,
        param=call.param,
    )
