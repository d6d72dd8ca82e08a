"""This file plans one step: which sequences compute how many tokens.

It does not know messages, slots or the cache, and changes nothing: it reads requests and returns a
plan. Decode comes first, every sequence that can, one token each; what is left of the budget goes
to chunks: three quarters to tokens that grammars have forced, first come first served, since their
streams are under way, and the rest to prompts in order of admission; or all to the one kind that
there is. So a running stream gets a token with every step, whatever prompts arrive.

Laws: a step computes at most max(budget, sequences) tokens; while anything waits to be prefilled, a
step computes at least one token of it, and of prompts beside forced tokens, where it has room for
two; the most senior sequence is never retracted.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import NamedTuple

from actors.scheduler.request import Request


class Plan(NamedTuple):
    """What the next step computes."""

    decodes: list[Request]  # one token each
    grown: list[Request]  # of `decodes`, those that need one more page first
    stalled: list[Request]  # would decode, but there is no page for them
    prefills: list[tuple[Request, int]]  # how many tokens of each

    @property
    def is_empty(self) -> bool:
        return not self.decodes and not self.prefills


def plan(
    decoding: Collection[Request],
    prefilling: Collection[Request],
    jumping: Collection[Request] = (),
    *,
    budget: int,
    page_size: int,
    spare_count: int,
) -> Plan:
    """`budget`: tokens; `spare_count`: pages at hand for growth."""
    decodes = [request for request in decoding if request.planned_len < request.stop_len]
    grown: list[Request] = []
    stalled: list[Request] = []
    if len(decodes) < len(decoding):
        # Of the others, some only wait for their last token; the rest have filled their pages.
        needy = [
            request
            for request in decoding
            if request.planned_len >= request.stop_len
            and request.planned_len + 1 < request.limit_len
        ]
        if len(needy) > spare_count:
            # The most senior must get on, or two could starve each other for ever.
            needy.sort(key=lambda request: request.seniority)
        grown, stalled = needy[:spare_count], needy[spare_count:]
        decodes += grown
    left = max(budget - len(decodes), 1)
    share = left - max(1, left // 4) if prefilling and left > 1 else left
    prefills = plan_prefill(jumping, share, page_size) if jumping else []
    left -= sum(count for _, count in prefills)
    if left:
        prefills += plan_prefill(prefilling, left, page_size)
    return Plan(decodes, grown, stalled, prefills)


def plan_prefill(
    prefilling: Iterable[Request], left: int, page_size: int
) -> list[tuple[Request, int]]:
    """Fills `left` tokens, of which there is one at least."""
    prefills: list[tuple[Request, int]] = []
    for request in prefilling:
        if left == 0:
            break
        count = len(request.tokens) - request.planned_len
        if count > left:
            # Only full pages can be shared, so a chunk that ends within a prompt ends on a page.
            aligned = (request.planned_len + left) // page_size * page_size - request.planned_len
            if aligned <= 0 and prefills:
                break
            count = aligned if aligned > 0 else left
            left = count
        prefills.append((request, count))
        left -= count
    return prefills


def choose_victims(
    running: Iterable[Request], stalled: Collection[Request], page_size: int
) -> list[Request]:
    """Whom to retract so that the others can go on: the latest arrivals, never the most senior.

    Pages found cached are not counted as gained, since others may be reading them.
    """
    order = sorted(running, key=lambda request: request.seniority)
    needed = len(stalled)
    victims: list[Request] = []
    while needed > 0 and len(order) > 1:
        victim = order.pop()
        victims.append(victim)
        needed -= victim.page_count - victim.cached_len // page_size
        if victim in stalled:
            needed -= 1
    return victims
