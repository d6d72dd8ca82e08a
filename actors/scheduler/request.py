"""This file is one request as the scheduler knows it, and the table of what may happen to it when.

It does not know queues, pages' numbers beyond those granted to it, or messages' ways. All that
decides a transition is in `TABLE`; a pair that is not there is our bug and raises.

    a sequence   [0 ............ prompt_len)[prompt_len ...... len(tokens))[ ... limit_len)
                  the prompt                 output that is known           not to be passed
    its KV       [0 ........................ planned_len)                  [ ... room_len)
                  computed by the steps sent so far                         has pages

Laws: planned_len <= room_len; what is planned is at most one token ahead of what steps in flight
will make known; len(tokens) <= limit_len.
"""

from __future__ import annotations

import enum
from array import array

from actors.scheduler.mail import Mail
from messages.scheduler import Submit
from messages.types import unpack


class State(enum.Enum):
    WAITING = "waiting"  # holds nothing (or is about to: retracted, with a step in flight)
    ADMITTING = "admitting"  # the cache has been asked for its pages
    PREFILL = "prefill"  # holds pages and a slot; known tokens are still to be computed
    DECODE = "decode"  # computes one token a step
    DONE = "done"


class Event(enum.Enum):
    ASK = "ask"
    DEFER = "defer"
    ADMIT = "admit"
    PREFILLED = "prefilled"  # the last known token is planned
    JUMP = "jump"  # several tokens have become known at once
    RETRACT = "retract"
    END = "end"


TABLE: dict[State, dict[Event, State]] = {
    State.WAITING: {Event.ASK: State.ADMITTING, Event.END: State.DONE},
    State.ADMITTING: {
        Event.DEFER: State.WAITING,
        Event.ADMIT: State.PREFILL,
        Event.END: State.DONE,
    },
    State.PREFILL: {
        Event.PREFILLED: State.DECODE,
        Event.RETRACT: State.WAITING,
        Event.END: State.DONE,
    },
    State.DECODE: {
        Event.JUMP: State.PREFILL,
        Event.RETRACT: State.WAITING,
        Event.END: State.DONE,
    },
    State.DONE: {},
}


class IllegalTransition(AssertionError):
    """Our bug: the event cannot happen in that state."""


class Request:
    """One attempt at one sequence."""

    __slots__ = (
        "admitted_once",
        "arrival",
        "arrived_s",
        "asked_at",
        "attempt",
        "cached_len",
        "cached_tokens",
        "grammar",
        "granted",
        "id",
        "is_acknowledged",
        "is_announced",
        "is_opened",
        "is_poisoned",
        "is_retiring",
        "last_step",
        "leased_len",
        "limit_len",
        "mail",
        "match_len",
        "namespace",
        "overtaken_count",
        "page_count",
        "pages",
        "planned_len",
        "priority",
        "prompt_len",
        "reply_to",
        "resumed_len",
        "room_len",
        "sampling",
        "shared_at",
        "slot",
        "state",
        "stop",
        "stop_ids",
        "stop_len",
        "tokens",
        "was_retracted",
    )

    def __init__(
        self,
        submit: Submit,
        *,
        mail: Mail,
        arrival: int,
        now_s: float,
        limit_len: int,
        eos_ids: frozenset[int],
    ) -> None:
        self.id = submit.request
        self.attempt = submit.attempt
        self.reply_to = submit.reply_to
        self.mail = mail  # of its front end
        self.sampling = submit.sampling
        self.stop = submit.stop
        self.grammar = submit.grammar
        self.namespace = submit.namespace
        self.priority = submit.priority
        self.arrival = arrival  # grows with every request
        self.arrived_s = now_s
        self.state = State.WAITING

        self.tokens: array[int] = unpack(submit.prompt)
        self.prompt_len = len(self.tokens)
        self.tokens.extend(unpack(submit.emitted))
        self.resumed_len = len(self.tokens) - self.prompt_len  # made by an earlier attempt
        self.limit_len = min(limit_len, self.prompt_len + submit.sampling.max_tokens)
        stop_ids = frozenset(submit.sampling.stop_ids)
        self.stop_ids = stop_ids if submit.sampling.ignore_eos else stop_ids | eos_ids

        # Waiting
        self.overtaken_count = 0  # admissions of later arrivals since it waits
        self.match_len = 0  # tokens that the cache had of it when last asked
        self.asked_at = 0  # how much the cache had been told when it was asked for pages
        self.was_retracted = False

        # Running
        self.slot: int | None = None
        self.is_opened = False  # the worker has been told of the slot's tenant
        self.pages = b""  # as leased at admission; int32
        self.page_count = 0  # with those granted since
        self.granted: array[int] = array("i")
        self.cached_len = 0  # KV that was there at this admission
        self.leased_len = 0  # tokens that were known at this admission
        self.planned_len = 0
        self.room_len = 0
        self.stop_len = 0  # plan one more token below this, look closer at it
        self.last_step: int | None = None  # the last step with a row of it
        self.is_retiring = False  # has left, and a step in flight still touches its pages
        self.shared_at = 0  # how much the cache had been told when this request last shared

        # What the client learns
        self.admitted_once = False
        self.cached_tokens = 0  # of the prompt, at the first admission
        self.is_announced = False  # the detokenizer has been told of it
        self.is_acknowledged = True  # False: aborted, and to be told when its pages are free
        self.is_poisoned = False  # its KV can't be trusted: none of it is kept

    def advance(self, event: Event) -> None:
        """Raises IllegalTransition for a pair that the table lacks."""
        state = TABLE[self.state].get(event)
        if state is None:
            raise IllegalTransition(f"{event.value} while {self.state.value}: {self.id}")
        self.state = state

    @property
    def seniority(self) -> tuple[int, int]:
        """Smallest first: whom the others have to wait for."""
        return (-self.priority, self.arrival)

    @property
    def output_len(self) -> int:
        return len(self.tokens) - self.prompt_len

    @property
    def is_running(self) -> bool:
        return self.state is State.PREFILL or self.state is State.DECODE

    def check(self, page_size: int) -> None:
        """Asserts the laws."""
        assert 0 < self.prompt_len <= len(self.tokens), f"{self.id}: {len(self.tokens)} tokens"
        assert len(self.tokens) <= self.limit_len, f"{self.id} passed {self.limit_len}"
        if self.is_running:
            assert self.slot is not None, f"{self.id} runs without a slot"
            assert self.room_len == self.page_count * page_size
            assert self.page_count == len(self.pages) // 4 + len(self.granted)
            assert self.cached_len <= self.planned_len <= self.room_len, f"{self.id}"
            assert self.stop_len == min(self.room_len, self.limit_len - 1)
        if self.state is State.PREFILL:
            assert self.planned_len < len(self.tokens) <= self.room_len, f"{self.id}"
        if self.state is State.DECODE:
            assert self.planned_len >= len(self.tokens) - 1, f"{self.id}"
            assert self.planned_len < self.limit_len, f"{self.id}"
        if self.state in (State.WAITING, State.ADMITTING) and not self.is_retiring:
            assert not self.pages and not self.granted, f"{self.id} waits with pages"
            assert self.slot is None, f"{self.id} waits in slot {self.slot}"
