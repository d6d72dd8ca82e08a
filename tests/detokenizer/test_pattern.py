"""This file tests stop expressions on a text in pieces, against `re` over the whole of it."""

from __future__ import annotations

import re
from itertools import product
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from actors.detokenizer.pattern import HITS_MAX, PatternRun, Patterns, automaton_of
from actors.detokenizer.stop import StopMatcher, StopStrings
from actors.gateway.pattern import crowd_of, read_pattern

EXPRESSIONS = [
    "a+b",
    "ab|ba",
    "(ab)+a",
    "b.a",
    "a[^b]a",
    "b{2,3}",
    "(a|b)c",
    "c",
    "a.*b",
    "aab|ab",
    r"\d+",
    "(?i)A1",
]


def patterns_of(texts: list[str], chars_max: int) -> Patterns:
    return Patterns([read_pattern(text) for text in texts], chars_max)


def dull(
    texts: list[str], strings: list[str], pieces: list[tuple[str, bool]], chars_max: int, keep: bool
) -> tuple[str, set[str]]:
    """All that comes out, and what may have matched."""
    text = ""
    for piece, counts in pieces:
        for character in piece:
            text += character
            found = [
                (len(text) - begin, expression)
                for expression in texts
                for begin in range(max(0, len(text) - chars_max), len(text))
                if re.compile(expression).fullmatch(text, begin)
            ]
            found += [(len(string), string) for string in strings if text.endswith(string)]
            if found and counts:
                length = max(found)[0]
                kept = text if keep else text[: len(text) - length]
                return kept, {name for size, name in found if size == length}
    return text, set()


@settings(max_examples=300, deadline=None)
@given(
    texts=st.lists(st.sampled_from(EXPRESSIONS), min_size=1, max_size=3, unique=True),
    strings=st.lists(st.text("abc", min_size=1, max_size=3), max_size=2, unique=True),
    pieces=st.lists(st.tuples(st.text("abc1\n", max_size=5), st.booleans()), max_size=7),
    chars_max=st.sampled_from([2, 3, 5, 64]),
    keep=st.booleans(),
)
def test_a_text_in_pieces_ends_where_the_whole_text_does(
    texts: list[str],
    strings: list[str],
    pieces: list[tuple[str, bool]],
    chars_max: int,
    keep: bool,
) -> None:
    expected, names = dull(texts, strings, pieces, chars_max, keep)
    patterns = patterns_of(texts, chars_max)
    matcher = StopMatcher(StopStrings(strings), keep_match=keep, patterns=patterns)
    out, held_max = "", max([chars_max, *map(len, strings)]) - 1
    for piece, counts in pieces:
        out += matcher.push(piece, counts=counts)
        assert expected.startswith(out), "part of a match was shown"
        if matcher.matched is not None:
            break
        matcher.check()
        assert len(matcher.held) <= held_max
    else:
        out += matcher.finish()
    assert out == expected
    assert matcher.matched in names if names else matcher.matched is None


@pytest.mark.parametrize("expression", ["a+b", "ab|ba", "(ab)+a", "a[^b]a", "b{2,3}", "a.*b"])
def test_what_is_held_is_what_may_still_become_a_match_and_nothing_else(expression: str) -> None:
    chars_max = 4
    patterns = patterns_of([expression], chars_max)
    known = re.compile(expression)
    tails = ["".join(t) for n in range(1, chars_max) for t in product("ab", repeat=n)]
    for text in ("".join(t) for n in range(6) for t in product("ab", repeat=n)):
        run = PatternRun(patterns)
        for character in text:
            run.step(character)
        wanted = max(
            (
                length
                for length in range(1, min(chars_max, len(text)) + 1)
                if any(
                    length + len(tail) <= chars_max
                    and known.fullmatch(text[len(text) - length :] + tail)
                    for tail in tails
                )
            ),
            default=0,
        )
        assert run.held == wanted, text


def test_a_match_that_does_not_count_can_still_grow_into_one() -> None:
    matcher = StopMatcher(StopStrings(()), patterns=patterns_of([r"\d+;|\d\d"], 64))
    assert matcher.push("x12", counts=False) == "x"
    assert matcher.push(";", counts=True) == ""
    assert matcher.matched == r"\d+;|\d\d"


def test_the_match_can_be_kept() -> None:
    matcher = StopMatcher(StopStrings(()), keep_match=True, patterns=patterns_of(["</[a-z]+>"], 64))
    assert matcher.push("42</ans") == "42"
    assert matcher.push("wer> more") == "</answer>"


def test_an_expression_without_an_end_holds_back_no_more_than_its_bound() -> None:
    """`a.*b`: after an `a` anything may become a match, but none of more than 16 characters is."""
    matcher = StopMatcher(StopStrings(()), patterns=patterns_of(["a.*b"], 16))
    text = ("a" + "x" * 9) * 10
    shown = "".join(map(matcher.push, text))
    assert len(shown) >= len(text) - 15
    assert shown + matcher.finish() == text
    assert matcher.matched is None
    assert matcher.push("axxb") == ""
    assert matcher.matched == "a.*b"


def test_work_for_a_character_is_bounded_by_the_automaton() -> None:
    """What has engines that go back take for ever takes a step for each character."""
    patterns = patterns_of(["(a+)+b", "(a|a)*c", "(.*a){20}d"], 1024)
    run = PatternRun(patterns)
    for _ in range(3000):
        assert run.step("a") is None
        assert len(run.active) <= len(patterns.follows)
        assert all(lengths.bit_length() <= 1024 for lengths in run.active.values())
    assert run.held == 1023
    assert run.step("b") == (1024, "(a+)+b")


class Counted(dict[int, int]):
    """Counts what is done for the states in it."""

    def __init__(self, *args: object) -> None:
        super().__init__(*args)
        self.done = 0

    def items(self) -> Any:
        self.done += len(self)
        return super().items()


@pytest.mark.parametrize("text", [".{127}X", "(.+a){64}", "a{0,100}b", "(.?.){42}X"])
def test_the_dearest_expressions_that_are_read_stay_within_their_count(text: str) -> None:
    """States that are gone through for one character, and moves from them."""
    pattern = read_pattern(text)
    crowd = crowd_of([pattern])
    assert not crowd.is_too_large
    run = PatternRun(Patterns([pattern], 1024))
    most = 0
    for _ in range(1500):
        before = Counted(run.active)
        run.active = before
        moves = sum(len(run.patterns.follows[state]) for state in run.active)
        run.step("a")
        assert before.done <= crowd.places and moves <= crowd.moves
        most = max(most, before.done)
    assert most >= crowd.places // 2  # it is no idle bound


def test_what_is_remembered_of_characters_is_bounded() -> None:
    patterns = patterns_of(["|".join("." * 500)], 64)
    for code in range(300):
        assert len(patterns.hits(chr(0x4E00 + code))) == 500
        assert sum(1 + len(states) for states in patterns._hits.values()) <= HITS_MAX


def test_requests_with_the_same_expressions_share_an_automaton() -> None:
    one, two = (read_pattern("a+b"),), (read_pattern("a+b"),)
    assert automaton_of(one, 64) is automaton_of(two, 64)
