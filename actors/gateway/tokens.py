"""This file reads and answers what looks at prompts and generates nothing: tokenize, detokenize,
render.

It does not know HTTP nor vocabularies: each of these is a call that only its prompts are wanted of.
Laws: whatever the bytes, the result is an `Asked` or `Refused` that names the field; a prompt that
is empty or too long for the context is answered like any other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, TypeVar

import msgspec

from actors.gateway.call import Call, Checked, Prompt, Row
from actors.gateway.dialect import Dialect, Head
from actors.gateway.errors import invalid
from actors.gateway.inputs import Limits, check_count, check_ids, check_model, decode
from actors.gateway.openai import ask_chat, ask_completion
from actors.gateway.sse import encode
from messages.native import (
    DetokenizeBody,
    Detokenized,
    Rendered,
    RenderReply,
    TokenizeBody,
    TokenizeChatBody,
    Tokenized,
)
from messages.openai import ChatBody, CompletionBody
from messages.types import StopRules, pack, unpack

Draw = Callable[[], int]
T = TypeVar("T")


class Asked(NamedTuple):
    """A body, read. `stream` is never true: there is nothing to stream."""

    call: Call
    is_list: bool
    max_model_len: int
    stream: bool = False


def look(call: Call) -> Call:
    """The same prompts, with nothing generated."""
    return msgspec.structs.replace(call, prompt_only=True, measure=True, choice_count=1)


def listed(value: T | list[T], param: str, limits: Limits) -> tuple[list[T], bool]:
    if not isinstance(value, list):
        return [value], False
    if not value:
        raise invalid(f"`{param}` cannot be an empty list.", param)
    check_count(len(value), param, limits)
    return value, True


def read_tokenize(body: bytes, limits: Limits, draw: Draw, created_s: float = 0.0) -> Asked:
    """POST /tokenize. Raises Refused: the client's fault."""
    given = decode(body, _tokenize_decoder)
    check_model(given.model, limits)
    has_messages = bytes(given.messages) not in (b"", b"null")
    if (given.prompt is not None) == has_messages:
        raise invalid("Exactly one of `prompt` and `messages` is needed.", "prompt")
    if has_messages:
        chat = msgspec.structs.replace(decode(body, _tokenize_chat_decoder), model=limits.model)
        call = look(ask_chat(chat, limits, draw, created_s).call)
        return Asked(call, False, limits.context_len)
    assert given.prompt is not None
    texts, is_list = listed(given.prompt, "prompt", limits)
    call = Call(
        prompts=tuple(Prompt(text=text) for text in texts),
        add_special=given.add_special_tokens is not False,
        param="prompt",
    )
    return Asked(look(call), is_list, limits.context_len)


def read_detokenize(body: bytes, limits: Limits, draw: Draw, created_s: float = 0.0) -> Asked:
    """POST /detokenize. Raises Refused."""
    given = decode(body, _detokenize_decoder)
    check_model(given.model, limits)
    tokens: list[Any] = given.tokens
    kinds = {type(item) for item in tokens}
    if len(kinds) > 1:
        raise invalid("`tokens` mixes ids and lists of ids.", "tokens")
    rows, is_list = listed(tokens, "tokens", limits) if list in kinds else ([tokens], False)
    for row in rows:
        check_ids(row, "tokens", limits)
    call = Call(
        prompts=tuple(Prompt(ids=pack(row)) for row in rows),
        stop=StopRules(skip_special=given.skip_special_tokens is not False),
        want_prompt_text=True,
        param="tokens",
    )
    return Asked(look(call), is_list, limits.context_len)


def read_render_chat(body: bytes, limits: Limits, draw: Draw, created_s: float = 0.0) -> Asked:
    """POST /v1/chat/completions/render. Raises Refused for what the chat route refuses."""
    ask = ask_chat(decode(body, _chat_decoder), limits, draw, created_s)
    return rendering(ask.call, limits)


def read_render(body: bytes, limits: Limits, draw: Draw, created_s: float = 0.0) -> Asked:
    """POST /v1/completions/render. Raises Refused for what the route refuses."""
    ask = ask_completion(decode(body, _completion_decoder), limits, draw)
    return rendering(ask.call, limits)


def rendering(call: Call, limits: Limits) -> Asked:
    stop = msgspec.structs.replace(call.stop, skip_special=False)
    call = msgspec.structs.replace(call, want_prompt_text=True, stop=stop)
    return Asked(look(call), True, limits.context_len)


class Writer:
    """There are no rows."""

    def __init__(self, ask: Asked, head: Head, checked: Sequence[Checked]) -> None:
        self.ask = ask
        self.head = head

    def add(self, rows: Iterable[Row]) -> None:
        raise AssertionError("a prompt that is only looked at has no rows")

    def one_or_all(self, values: list[Any]) -> Any:
        return values if self.ask.is_list else values[0]


class TokenizeWriter(Writer):
    def body(self, checked: Sequence[Checked]) -> bytes:
        return encode(
            Tokenized(
                tokens=self.one_or_all([unpack(prompt.ids).tolist() for prompt in checked]),
                count=self.one_or_all([prompt.token_count for prompt in checked]),
                max_model_len=self.ask.max_model_len,
            )
        )


class DetokenizeWriter(Writer):
    def body(self, checked: Sequence[Checked]) -> bytes:
        return encode(Detokenized(text=self.one_or_all([prompt.text for prompt in checked])))


class RenderWriter(Writer):
    def body(self, checked: Sequence[Checked]) -> bytes:
        rendered = [
            Rendered(
                prompt=prompt.text,
                token_ids=unpack(prompt.ids).tolist(),
                count=prompt.token_count,
            )
            for prompt in checked
        ]
        return encode(
            RenderReply(
                id=self.head.id,
                model=self.head.model,
                prompts=rendered,
                max_model_len=self.ask.max_model_len,
            )
        )


_tokenize_decoder = msgspec.json.Decoder(TokenizeBody)
_tokenize_chat_decoder = msgspec.json.Decoder(TokenizeChatBody)
_detokenize_decoder = msgspec.json.Decoder(DetokenizeBody)
_chat_decoder = msgspec.json.Decoder(ChatBody)
_completion_decoder = msgspec.json.Decoder(CompletionBody)

DIALECTS = (
    Dialect("/tokenize", "tok-", read_tokenize, TokenizeWriter),
    Dialect("/v1/tokenize", "tok-", read_tokenize, TokenizeWriter),
    Dialect("/detokenize", "detok-", read_detokenize, DetokenizeWriter),
    Dialect("/v1/detokenize", "detok-", read_detokenize, DetokenizeWriter),
    Dialect("/v1/chat/completions/render", "render-", read_render_chat, RenderWriter),
    Dialect("/v1/completions/render", "render-", read_render, RenderWriter),
)
