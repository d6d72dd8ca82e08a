"""This file is the gateway's mailbox.

A request is one sequence: the gateway splits `n` choices and several prompts into one each. It ends
in exactly one terminal message: a `Delta` with `finish`, or `Failed`. Whatever carries an older
`attempt` than the gateway's record is dropped.
"""

from __future__ import annotations

from messages.base import Message, Part
from messages.types import FinishReason, Float32s, Int32s, Logprob, Problem, Usage


class TokenLogprob(Part, frozen=True):
    """A `Logprob` whose ids have been turned into bytes by the detokenizer."""

    token: bytes
    token_id: int
    logprob: float
    best: tuple[tuple[bytes, int, float], ...] = ()


class Delta(Part, frozen=True):
    """New text of one request: tokens [`index`, `index + token_count`) of its output."""

    request: str
    attempt: int
    index: int
    token_count: int
    text: str = ""
    token_ids: bytes = b""  # Int32s, where StopRules.want_token_ids
    logprobs: tuple[TokenLogprob, ...] = ()
    finish: FinishReason | None = None
    matched: str | int | None = None  # the stop string or id that ended it
    usage: Usage | None = None  # with `finish`; of the prompt alone with the first of an attempt
    problem: Problem | None = None  # with finish == ERROR
    # In a delta of its own, without tokens: of prompt tokens from `prompt_index` on. They may come
    # again; the first one's says nothing.
    prompt_logprobs: tuple[TokenLogprob, ...] = ()
    prompt_index: int = 0
    vector: Float32s = b""  # with the first token, where `Sampling` asks for one
    # By token, where StopRules.want_spans: how many characters the text has up to its end, with
    # what is held back.
    spans: Int32s = b""


class Deltas(Message, frozen=True):
    """All that one step brought for one gateway."""

    rows: tuple[Delta, ...]


class Encoded(Message, frozen=True):
    """From the tokenizer: the prompt is valid and on its way. `prompt_ids` where asked for."""

    request: str
    attempt: int
    prompt_tokens: int
    prompt_ids: bytes = b""
    prompt_text: str = ""


class Failed(Message, frozen=True):
    """The request ends here. Terminal."""

    request: str
    attempt: int
    problem: Problem


class Unknown(Message, frozen=True):
    """From the scheduler, for `Poll`: it has nothing of these (request, attempt)."""

    rows: tuple[tuple[str, int], ...]


class Abort(Message, frozen=True):
    """From another gateway, for an operator: end the requests whose client's id, or ours, begins
    so. Empty: all."""

    prefix: str


class Recall(Message, frozen=True):
    """From another gateway: something of a kept response of yours. Answered by `Recalled`."""

    response: str
    verb: str  # get | history | asked | delete | cancel | events
    after: int = 0  # of events: how many are not needed


class Recalled(Message, frozen=True):
    """`data` is JSON: the reply, or items; or events as they are sent."""

    data: bytes = b""
    problem: Problem | None = None
    is_over: bool = True  # of events: there will be no others


In = Deltas | Encoded | Failed | Unknown | Abort | Recall

__all__ = [
    "Abort",
    "Delta",
    "Deltas",
    "Encoded",
    "Failed",
    "FinishReason",
    "In",
    "Logprob",
    "Recall",
    "Recalled",
    "TokenLogprob",
    "Unknown",
]
