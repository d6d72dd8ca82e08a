"""This file decides when a sequence is over, and with which words.

It does not know stop strings (the detokenizer sees text), steps or pages. Laws: none of the first
`min_tokens` tokens ends a sequence by what it is; a stop id wins over a limit reached by the same
token.
"""

from __future__ import annotations

from actors.scheduler.request import Request
from messages.types import Fault, FinishReason, Problem, Usage

STARVED_RETRY_S = 5.0


def finish_of(request: Request) -> tuple[FinishReason, int | None] | None:
    """Whether the last known token ends the request, and the id that did."""
    output_len = request.output_len
    if output_len > request.sampling.min_tokens:
        token = request.tokens[-1]
        if token in request.stop_ids:
            return FinishReason.STOP, token
    if len(request.tokens) >= request.limit_len:
        return FinishReason.LENGTH, None
    return None


def usage_of(request: Request, completion_tokens: int | None = None) -> Usage:
    """`cached_tokens` are those of the prompt found at the first admission: what a retracted
    request finds of its own is not a hit."""
    return Usage(
        prompt_tokens=request.prompt_len,
        completion_tokens=request.output_len if completion_tokens is None else completion_tokens,
        cached_tokens=request.cached_tokens,
    )


def too_long(prompt_len: int, capacity_len: int) -> Problem:
    return Problem(
        Fault.INVALID,
        f"The prompt has {prompt_len} tokens; with at least one token of output it does not fit"
        f" the KV capacity of this server, {capacity_len} tokens.",
        param="prompt",
        code="kv_capacity_exceeded",
    )


def beyond_context(prompt_len: int, context_len: int) -> Problem:
    return Problem(
        Fault.INVALID,
        f"The prompt has {prompt_len} tokens; with at least one token of output it does not fit"
        f" the model's context of {context_len} tokens.",
        param="prompt",
        code="context_length_exceeded",
    )


def empty_prompt() -> Problem:
    return Problem(Fault.INVALID, "The prompt has no tokens.", param="prompt")


def overloaded(waiting_count: int, retry_after_s: float) -> Problem:
    return Problem(
        Fault.OVERLOADED,
        f"The server is busy: {waiting_count} requests are waiting. Try again later.",
        code="queue_full",
        retry_after_s=retry_after_s,
    )


def not_computed() -> Problem:
    return Problem(Fault.INTERNAL, "The model could not compute this request.", code="step_failed")


def starved() -> Problem:
    return Problem(
        Fault.OVERLOADED,
        "There was not enough memory to compute this request. Try again when less is running.",
        code="out_of_memory",
        retry_after_s=STARVED_RETRY_S,
    )


def unbounded(request: Request) -> Problem:
    """The constraint has turned out to cost more than one may."""
    param = request.grammar.param if request.grammar is not None else ""
    return Problem(
        Fault.INVALID,
        "The constraint is too complex to be followed.",
        param=param or None,
        code="grammar_too_complex",
    )
