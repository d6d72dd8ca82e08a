"""This file is the scheduler's mailbox."""

from __future__ import annotations

import enum

from messages.base import Address, Message
from messages.types import Grammar, Int32s, Sampling, StopRules
from messages.worker import StepDone, StepFailed


class Submit(Message, frozen=True):
    """A request to run: prompt ids, and for a resumed attempt the tokens that it already made."""

    request: str
    attempt: int
    reply_to: Address  # the gateway
    prompt: Int32s
    sampling: Sampling
    stop: StopRules
    emitted: Int32s = b""
    namespace: str = ""
    priority: int = 0
    grammar: Grammar | None = None


class Cancel(Message, frozen=True):
    """End the request, free its pages; the acknowledgement is its terminal `Delta` (ABORT).

    For a request that the scheduler does not know there is none: its terminal message is already on
    its way.
    """

    request: str
    attempt: int


class Poll(Message, frozen=True):
    """From a gateway that has heard nothing of these (request, attempt) for a while. Those that are
    not known here are answered by `gateway.Unknown`: their end was lost, or is on its way."""

    rows: tuple[tuple[str, int], ...]
    reply_to: Address


class StopMet(Message, frozen=True):
    """From the detokenizer: a stop string was completed by output token `token_count - 1`."""

    request: str
    attempt: int
    token_count: int


class Acquired(Message, frozen=True):
    """From the cache: the request holds all that it asked for.

    `pages` cover [0, len): the first `cached_len // page_size` of them are shared and already
    computed, the others are its own.
    """

    request: str
    attempt: int
    cached_len: int
    pages: Int32s


class Deferred(Message, frozen=True):
    """From the cache: not now. `behind` names a request that is computing the same prefix, or None
    when there are not enough pages; ask again after the next `Freed` or when `behind` is done."""

    request: str
    attempt: int
    behind: str | None = None


class Granted(Message, frozen=True):
    """From the cache, for `Reserve`: pages for decode growth, perhaps fewer than asked for."""

    pages: Int32s


class Freed(Message, frozen=True):
    """From the cache: pages became available. Sent only after a `Deferred` or a short `Granted`."""

    available_count: int


class Probed(Message, frozen=True):
    """From the cache, for `Probe`: how many tokens of each candidate it has, in the same order."""

    cached_lens: Int32s


class Outcome(enum.StrEnum):
    """What became of a grammar."""

    READY = "ready"  # rows may open with it
    WRONG = "wrong"  # for ever
    LATE = "late"  # it was compiled for as long as may be
    NO_TURN = "no_turn"  # others were, for so long


class Compiled(Message, frozen=True):
    """From the worker, for `Compile`."""

    number: int
    outcome: Outcome = Outcome.READY
    problem: str = ""  # what is wrong with it, in words for the client


class Inspect(Message, frozen=True):
    """How much there is to do; answered by `Load`."""


class Pause(Message, frozen=True):
    """Launch no step and let nobody in until `Continue`; requests go on being taken. With `retract`
    those who run wait again, and their pages go back to the cache. Answered by `Load`. A scheduler
    that is restarted is not paused."""

    retract: bool = False


class Continue(Message, frozen=True):
    """End of `Pause`; answered by `Load`."""


class Load(Message, frozen=True):
    """What a scheduler has to do, and has done since its start."""

    running_count: int
    waiting_count: int
    used_len: int  # tokens that the pages of those who run have room for
    capacity_len: int
    waiting_len: int  # tokens of those who wait, computed or not
    running_max: int
    is_paused: bool
    prompt_tokens: int  # of all that were let in
    cached_tokens: int  # those of them that were found in the cache


In = (
    Submit
    | Cancel
    | Poll
    | StopMet
    | Acquired
    | Deferred
    | Granted
    | Freed
    | Probed
    | StepDone
    | StepFailed
    | Compiled
    | Inspect
    | Pause
    | Continue
)
