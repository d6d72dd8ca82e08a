"""Goal: a sequence ends at the token that ends it, for the reason that holds."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from actors.scheduler.finish import finish_of, usage_of
from messages.types import FinishReason, Sampling, Usage
from tests.scheduler.make import make_request

EOS = frozenset({9})


def end_of(output: list[int], sampling: Sampling, limit_len: int = 1000) -> object:
    request = make_request(sampling=sampling, limit_len=limit_len, eos_ids=EOS, emitted=output)
    return finish_of(request)


@pytest.mark.parametrize(
    ("output", "sampling", "end"),
    [
        ([1], Sampling(max_tokens=4), None),
        ([9], Sampling(max_tokens=4), (FinishReason.STOP, 9)),
        ([9], Sampling(max_tokens=4, ignore_eos=True), None),
        ([7], Sampling(max_tokens=4, stop_ids=(7,)), (FinishReason.STOP, 7)),
        ([7], Sampling(max_tokens=4, stop_ids=(7,), ignore_eos=True), (FinishReason.STOP, 7)),
        ([1, 2, 3, 4], Sampling(max_tokens=4), (FinishReason.LENGTH, None)),
        ([1, 2, 3, 9], Sampling(max_tokens=4), (FinishReason.STOP, 9)),
        ([1, 9], Sampling(max_tokens=4, min_tokens=2), None),
        ([1, 2, 9], Sampling(max_tokens=4, min_tokens=2), (FinishReason.STOP, 9)),
        ([1, 2, 3, 9], Sampling(max_tokens=4, min_tokens=4), (FinishReason.LENGTH, None)),
        ([], Sampling(max_tokens=0), (FinishReason.LENGTH, None)),
    ],
)
def test_the_last_token_ends_it_or_not(output: list[int], sampling: Sampling, end: object) -> None:
    assert end_of(output, sampling) == end


def test_the_context_ends_what_max_tokens_would_allow() -> None:
    assert end_of([1, 2], Sampling(max_tokens=100), limit_len=5) == (FinishReason.LENGTH, None)
    assert end_of([1], Sampling(max_tokens=100), limit_len=5) is None


@given(
    output=st.lists(st.integers(5, 10), max_size=12),
    max_tokens=st.integers(1, 12),
    min_tokens=st.integers(0, 6),
    stop_ids=st.sets(st.integers(5, 10), max_size=2),
    ignore_eos=st.booleans(),
)
def test_the_first_end_is_where_a_plain_loop_finds_it(
    output: list[int], max_tokens: int, min_tokens: int, stop_ids: set[int], ignore_eos: bool
) -> None:
    sampling = Sampling(
        max_tokens=max_tokens,
        min_tokens=min_tokens,
        stop_ids=tuple(stop_ids),
        ignore_eos=ignore_eos,
    )
    stops = stop_ids | (set() if ignore_eos else {9})
    for count in range(1, len(output) + 1):
        found = end_of(output[:count], sampling)
        if output[count - 1] in stops and count > min_tokens:
            assert found == (FinishReason.STOP, output[count - 1])
            return
        if count == max_tokens:
            assert found == (FinishReason.LENGTH, None)
            return
        assert found is None


def test_usage_counts_what_an_earlier_attempt_made() -> None:
    request = make_request(prompt=range(10), emitted=[1, 2])
    request.tokens.append(3)
    request.cached_tokens = 4
    assert usage_of(request) == Usage(10, 3, 4)
    assert usage_of(request, 1) == Usage(10, 1, 4)
