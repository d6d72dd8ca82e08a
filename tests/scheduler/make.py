"""Requests for the tests of single cores."""

from __future__ import annotations

from collections.abc import Sequence

from actors.scheduler.mail import Mail
from actors.scheduler.request import Event, Request
from messages.base import Address
from messages.scheduler import Submit
from messages.types import Sampling, StopRules, pack

GATEWAY = Address("front", "gateway", 1)


def make_submit(
    name: str = "r",
    prompt: Sequence[int] = (1, 2, 3),
    *,
    emitted: Sequence[int] = (),
    attempt: int = 1,
    priority: int = 0,
    sampling: Sampling | None = None,
) -> Submit:
    return Submit(
        name,
        attempt,
        GATEWAY,
        pack(prompt),
        sampling or Sampling(max_tokens=8),
        StopRules(),
        pack(emitted),
        "",
        priority,
    )


def make_request(
    name: str = "r",
    prompt: Sequence[int] = (1, 2, 3),
    *,
    arrival: int = 1,
    limit_len: int = 10_000,
    eos_ids: frozenset[int] = frozenset(),
    emitted: Sequence[int] = (),
    priority: int = 0,
    sampling: Sampling | None = None,
) -> Request:
    submit = make_submit(name, prompt, emitted=emitted, priority=priority, sampling=sampling)
    return Request(
        submit,
        mail=Mail(),
        arrival=arrival,
        now_s=0.0,
        limit_len=limit_len,
        eos_ids=eos_ids,
    )


def make_running(
    arrival: int,
    known_len: int,
    planned_len: int,
    *,
    page_count: int,
    page_size: int,
    max_tokens: int,
    cached_len: int = 0,
) -> Request:
    """One that holds pages: in decode if all that is known is planned, else in prefill."""
    request = make_request(
        f"r{arrival}",
        range(known_len),
        arrival=arrival,
        sampling=Sampling(max_tokens=max_tokens),
    )
    request.advance(Event.ASK)
    request.advance(Event.ADMIT)
    request.slot = arrival
    request.pages = b"\0\0\0\0" * page_count
    request.page_count = page_count
    request.cached_len = cached_len
    request.planned_len = planned_len
    request.room_len = page_count * page_size
    request.stop_len = min(request.room_len, request.limit_len - 1)
    if planned_len >= known_len:
        request.advance(Event.PREFILLED)
    request.check(page_size)
    return request
