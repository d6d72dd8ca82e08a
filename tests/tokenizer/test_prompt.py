"""This file tests what fits: lengths against the context, ids against the vocabulary."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from actors.tokenizer.prompt import (
    Refused,
    check_chars,
    check_ids,
    check_sampling,
    labels,
    settle,
)
from messages.types import Fault, Problem, Sampling


def refusal(raised: pytest.ExceptionInfo[Refused]) -> Problem:
    problem = raised.value.problem
    assert problem.fault is Fault.INVALID
    return problem


@given(
    prompt_len=st.integers(1, 300),
    context_len=st.integers(1, 200),
    max_tokens=st.integers(0, 300),
    min_tokens=st.integers(0, 50),
)
def test_what_is_settled_fits_and_what_does_not_fit_is_refused_with_its_numbers(
    prompt_len: int, context_len: int, max_tokens: int, min_tokens: int
) -> None:
    sampling = Sampling(max_tokens=max_tokens, min_tokens=min_tokens)
    wanted = max_tokens or max(1, min_tokens)
    try:
        settled = settle(sampling, prompt_len, context_len, "prompt")
    except Refused as refused:
        problem = refused.problem
        assert prompt_len + wanted > context_len
        assert problem.code == "context_length_exceeded"
        assert problem.param == "prompt"
        numbers = [int(number) for number in re.findall(r"-?\d+", problem.message)]
        assert {context_len, prompt_len} <= set(numbers)
        assert min(numbers) >= 0
    else:
        assert 1 <= settled.max_tokens and prompt_len + settled.max_tokens <= context_len
        assert settled.max_tokens == (max_tokens or context_len - prompt_len)


def test_a_prompt_of_the_whole_context_leaves_no_room() -> None:
    with pytest.raises(Refused, match="leaves no room") as raised:
        settle(Sampling(max_tokens=0), 8, 8, "messages")
    assert refusal(raised).param == "messages"


def test_a_text_that_cannot_fit_is_refused_by_its_characters() -> None:
    check_chars(640, 640, 10, "prompt")
    with pytest.raises(Refused, match=r"10 tokens.*641 characters") as raised:
        check_chars(641, 640, 10, "prompt")
    assert refusal(raised).code == "context_length_exceeded"


@pytest.mark.parametrize("wrong", [49152, -1, 2**31 - 1])
def test_ids_outside_the_vocabulary_are_named(wrong: int) -> None:
    check_ids([0, 49151], 49152, "prompt")
    with pytest.raises(Refused, match=rf"token id {wrong}\b") as raised:
        check_ids([1, wrong], 49152, "prompt")
    assert refusal(raised).param == "prompt"


def test_a_prompt_without_tokens_is_refused() -> None:
    with pytest.raises(Refused, match="empty"):
        check_ids([], 10, "prompt")


@pytest.mark.parametrize(
    ("sampling", "param"),
    [
        (Sampling(logit_bias=((3, 1.0), (10, -1.0))), "logit_bias"),
        (Sampling(logit_bias=((-1, 1.0),)), "logit_bias"),
        (Sampling(stop_ids=(10,)), "stop_token_ids"),
    ],
)
def test_ids_in_the_sampling_are_checked_too(sampling: Sampling, param: str) -> None:
    check_sampling(Sampling(logit_bias=((9, 1.0),), stop_ids=(0,)), 10)
    with pytest.raises(Refused) as raised:
        check_sampling(sampling, 10)
    assert refusal(raised).param == param


def test_words_stand_for_the_token_that_they_begin_with() -> None:
    spelled = {"yes": [5, 6], "no": [7], "nope": [7, 8], "": []}

    def encode(word: str, *, add_special: bool) -> list[int]:
        assert not add_special
        return spelled[word]

    assert labels(("yes", "no"), encode) == (5, 7)
    for wrong in (("no", "nope"), ("yes", "")):
        with pytest.raises(Refused, match="apart"):
            labels(wrong, encode)


def test_label_ids_outside_the_vocabulary_are_refused() -> None:
    with pytest.raises(Refused) as raised:
        check_sampling(Sampling(label_ids=(3, 10)), 10)
    assert refusal(raised).param == "label_token_ids"
