"""This file is about tokens that a grammar forces: the worker appends them behind a sampled one.

It does not know steps or pages. A forced token is like any other to the client, and like one of a
prompt to the scheduler: known, and still to be computed. Law: had it been sampled, nothing else
could have come, so its probability is 1.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator

from actors.scheduler.finish import finish_of
from actors.scheduler.flights import Flight, rows_of
from actors.scheduler.request import Request
from messages.detokenizer import Tail
from messages.types import FinishReason, Logprob, pack, unpack
from messages.worker import StepDone


def jumped(flight: Flight, message: StepDone) -> Iterator[tuple[Request, array[int]]]:
    """What each row got behind its sampled token, of those rows that have not been given up."""
    if not message.jumped_slots:
        return  # as with most steps: whose the rows are need not be looked up
    by_slot: dict[int, array[int]] = {}
    pairs = zip(unpack(message.jumped_slots), unpack(message.jumped_tokens), strict=True)
    for slot, token in pairs:
        by_slot.setdefault(slot, array("i")).append(token)
    rows = rows_of(flight, pack(by_slot))
    for request, tokens in zip(rows, by_slot.values(), strict=True):
        if request is not None:
            yield request, tokens


def take(
    request: Request, forced: array[int]
) -> tuple[Tail, tuple[FinishReason, int | None] | None]:
    """Appends them, up to one that ends the request. What the client is told, without an end; and
    the end."""
    index = request.output_len
    over = None
    for token in forced:
        request.tokens.append(token)
        over = finish_of(request)
        if over is not None:
            break
    taken = request.tokens[request.prompt_len + index :]
    count = request.sampling.logprobs
    logprobs = () if count is None else tuple(certain(token, count) for token in taken)
    return Tail(request.id, request.attempt, index, taken.tobytes(), logprobs), over


def certain(token: int, count: int) -> Logprob:
    """The probability of a token that had no alternative."""
    return Logprob(token, 0.0, ((token, 0.0),) if count else ())
