"""Goal: every step lets decode on, keeps to its budget, makes progress, and starves nobody.

Method: random sets of running sequences; the plan is compared with laws and with a plain
re-statement of its rules that looks at one sequence at a time.
"""

from __future__ import annotations

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from actors.scheduler.planner import choose_victims, plan
from actors.scheduler.request import Event, Request, State
from actors.scheduler.running import Running
from messages.types import Sampling
from tests.scheduler.make import make_request, make_running


@st.composite
def running_sets(draw: st.DrawFn) -> tuple[list[Request], int]:
    """Sequences in all phases, at all distances from their pages' end and their limit."""
    page_size = draw(st.sampled_from([1, 4, 16]))
    requests: list[Request] = []
    for arrival in range(1, draw(st.integers(0, 8)) + 1):
        known_len = draw(st.integers(1, 60))
        page_count = -(-known_len // page_size)
        max_tokens = draw(st.integers(1, 12))
        if draw(st.booleans()):
            planned_len = draw(st.integers(0, known_len - 1))
        else:
            ahead = draw(st.integers(0, min(2, max_tokens - 1)))
            planned_len = min(known_len + ahead, known_len + max_tokens - 1)
            page_count = -(-planned_len // page_size) + draw(st.integers(0, 1))
        cached_len = draw(st.integers(0, planned_len // page_size)) * page_size
        requests.append(
            make_running(
                arrival,
                known_len,
                planned_len,
                page_count=page_count,
                page_size=page_size,
                max_tokens=max_tokens,
                cached_len=cached_len,
            )
        )
    order = draw(st.permutations(requests))
    return list(order), page_size


@settings(max_examples=400)
@given(
    sets=running_sets(),
    budget=st.integers(1, 80),
    spare_count=st.integers(0, 4),
    jumping_count=st.integers(0, 4),
)
def test_a_plan_keeps_the_laws(
    sets: tuple[list[Request], int], budget: int, spare_count: int, jumping_count: int
) -> None:
    requests, page_size = sets
    decoding = [r for r in requests if r.state is State.DECODE]
    chunked = [r for r in requests if r.state is State.PREFILL]
    jumping, prefilling = chunked[:jumping_count], chunked[jumping_count:]
    before = [(r.planned_len, r.page_count, r.state) for r in requests]
    planned = plan(
        decoding, prefilling, jumping, budget=budget, page_size=page_size, spare_count=spare_count
    )
    assert before == [(r.planned_len, r.page_count, r.state) for r in requests], "it changed them"

    # Decode: exactly those with something left to sample, as far as there are pages.
    wanting = [r for r in decoding if r.planned_len + 1 < r.limit_len]
    needy = [r for r in wanting if r.planned_len == r.page_count * page_size]
    assert set(planned.grown) <= set(needy)
    assert len(planned.grown) == min(len(needy), spare_count)
    assert set(planned.stalled) == set(needy) - set(planned.grown)
    assert set(planned.decodes) == set(wanting) - set(planned.stalled)
    assert len(planned.decodes) == len(set(planned.decodes))
    for stalled in planned.stalled:
        for grown in planned.grown:
            assert grown.seniority < stalled.seniority, "a junior got a senior's page"

    # Prefill: in order, within the budget, on pages' ends; and never nothing, of either kind.
    left = budget - len(planned.decodes)
    for kind in (jumping, prefilling):
        chunks = [(r, count) for r, count in planned.prefills if r in kind]
        assert [r for r, _ in chunks] == kind[: len(chunks)]
        for request, count in chunks:
            assert 0 < count <= len(request.tokens) - request.planned_len
        for request, count in chunks[:-1]:
            assert count == len(request.tokens) - request.planned_len, "a chunk before the last one"
        if kind and (left > 1 or not jumping or kind is jumping):
            assert chunks, "it starves"
            request, count = chunks[-1]
            end = request.planned_len + count
            is_whole = end == len(request.tokens)
            assert (
                is_whole
                or end % page_size == 0
                or end // page_size == request.planned_len // page_size
            )
    assert [r for r, _ in planned.prefills if r in jumping] == [
        r for r, _ in planned.prefills[: sum(r in jumping for r, _ in planned.prefills)]
    ], "prompts go before what is forced"
    total = sum(count for _, count in planned.prefills)
    assert total <= max(left, 1)
    assert len(planned.decodes) + total <= max(budget, len(requests))


@settings(max_examples=300)
@given(sets=running_sets(), share=st.floats(0, 1))
def test_victims_are_the_latest_and_leave_the_most_senior(
    sets: tuple[list[Request], int], share: float
) -> None:
    requests, page_size = sets
    decoding = [r for r in requests if r.state is State.DECODE]
    stalled = decoding[: int(len(decoding) * share)]
    victims = choose_victims(requests, stalled, page_size)
    order = sorted(requests, key=lambda r: r.seniority)
    assert victims == order[len(order) - len(victims) :][::-1], "not the latest arrivals"
    if requests:
        assert order[0] not in victims, "the most senior must be able to finish"
    if not stalled:
        assert victims == []
    elif len(requests) > 1:
        assert victims, "somebody has to give way"

    def gained(chosen: list[Request]) -> int:
        own = sum(r.page_count - r.cached_len // page_size for r in chosen)
        return own + sum(1 for r in chosen if r in stalled)

    if victims:
        assert gained(victims[:-1]) < len(stalled), "one more than needed"


def test_streams_with_forced_tokens_take_turns_and_let_prompts_get_on() -> None:
    """All that the budget leaves is what those who jumped have freed."""
    rng = random.Random(3)
    running = Running(24, 16)
    last: dict[str, int] = {}
    requests = []
    for nth in range(24):
        request = make_request(
            f"r{nth}", arrival=nth, limit_len=10**6, sampling=Sampling(max_tokens=10**6)
        )
        request.advance(Event.ASK)
        running.enter(request, bytes(4 * 10_000), 0)
        requests.append(request)
    prompt = requests[-1]
    prompt.tokens.extend([1] * 400)
    for step in range(1, 900):
        planned = plan(
            running.decoding.values(),
            running.prefilling.values(),
            running.jumping.values(),
            budget=24,
            page_size=16,
            spare_count=0,
        )
        sampled = list(planned.decodes)
        for request in planned.decodes:
            request.planned_len += 1
        for request, count in planned.prefills:
            request.planned_len += count
            sampled += [request] if request.planned_len == len(request.tokens) else []
        running.planned(planned.prefills)
        running.check()
        for request in sampled:
            request.tokens.append(1)
            last[request.id] = step
            if rng.random() < 0.2 and request is not prompt:
                request.tokens.extend([1] * 6)
                running.jumped(request)
        assert step < 50 or all(step - at < 40 for at in last.values()), "a stream stands still"
    assert prompt.id in last, "a prompt starves"


def test_a_running_stream_gets_a_token_in_every_step_of_a_long_prefill() -> None:
    """B129: a prompt of 100 chunks beside one stream; the stream is in every plan."""
    stream = make_running(1, 8, 8, page_count=100, page_size=16, max_tokens=500)
    long = make_running(2, 6400, 0, page_count=400, page_size=16, max_tokens=8)
    steps = 0
    while long.planned_len < 6400:
        planned = plan([stream], [long], budget=64, page_size=16, spare_count=0)
        assert planned.decodes == [stream]
        ((_, count),) = planned.prefills
        long.planned_len += count
        stream.planned_len += 1
        steps += 1
    assert steps <= 6400 // 48 + 1
