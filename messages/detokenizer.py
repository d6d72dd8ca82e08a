"""This file is the detokenizer's mailbox."""

from __future__ import annotations

from messages.base import Address, Message, Part
from messages.types import FinishReason, Float32s, Int32s, Logprob, Problem, StopRules, Usage


class Open(Part, frozen=True):
    """A request whose tokens will follow."""

    request: str
    attempt: int
    reply_to: Address  # the gateway
    stop: StopRules
    emitted: Int32s = b""  # tokens the client already has: replayed, not sent
    usage: Usage = Usage()  # prompt and cached tokens, for a finish that the detokenizer decides


class Tail(Part, frozen=True):
    """New tokens of one request: [`index`, `index + len(tokens)`) of its output, or its end."""

    request: str
    attempt: int
    index: int
    tokens: Int32s = b""
    logprobs: tuple[Logprob, ...] = ()
    finish: FinishReason | None = None
    matched: int | None = None  # the stop id that ended it; its token is not part of the text
    usage: Usage | None = None  # with `finish`
    problem: Problem | None = None  # with finish == ERROR
    # In a tail of its own, without tokens: of prompt tokens from `prompt_index` on.
    prompt_logprobs: tuple[Logprob, ...] = ()
    prompt_index: int = 0
    vector: Float32s = b""  # with the first token, where `Sampling` asks for one


class Tokens(Message, frozen=True):
    """All that one step brought: first `opened`, then `rows`, in order."""

    rows: tuple[Tail, ...] = ()
    opened: tuple[Open, ...] = ()


In = Tokens  # a union of one
