"""This file tests the stop matcher against a dull model: a text's places, one after another."""

from __future__ import annotations

from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from actors.detokenizer.stop import StopMatcher, StopStrings


def dull(
    strings: list[str], pieces: list[tuple[str, bool]], keep: bool
) -> tuple[str, str | None, list[str]]:
    """All that comes out, what matched, and what has come out after each piece."""
    text, shown = "", []
    for piece, counts in pieces:
        for character in piece:
            text += character
            ending = [string for string in strings if text.endswith(string)]
            if ending and counts:
                longest = max(ending, key=len)
                kept = text if keep else text[: len(text) - len(longest)]
                return kept, longest, [*shown, kept]
        held = max(
            (n for s in strings for n in range(len(s)) if n <= len(text) and text.endswith(s[:n])),
            default=0,
        )
        shown.append(text[: len(text) - held])
    return text, None, shown


def run(strings: list[str], pieces: list[tuple[str, bool]], keep: bool = False) -> None:
    """Asserts that the matcher does what the dull model says."""
    expected, matched, shown = dull(strings, pieces, keep)
    matcher = StopMatcher(StopStrings(strings), keep_match=keep)
    out = ""
    for index, (piece, counts) in enumerate(pieces):
        out += matcher.push(piece, counts=counts)
        assert out == shown[index]
        if matcher.matched is not None:
            break
        matcher.check()
    else:
        out += matcher.finish()
    assert (out, matcher.matched) == (expected, matched)


@settings(max_examples=500)
@given(
    strings=st.lists(st.text("ab\n", min_size=1, max_size=5), min_size=1, max_size=4),
    pieces=st.lists(st.tuples(st.text("ab\n", max_size=6), st.booleans()), max_size=8),
    keep=st.booleans(),
)
def test_the_matcher_agrees_with_the_dull_model(
    strings: list[str], pieces: list[tuple[str, bool]], keep: bool
) -> None:
    run(strings, pieces, keep)


@pytest.mark.parametrize("stop", ["\n\n", "fox j", "x", "over the lazy dog.", "zebra", "he quic"])
def test_every_way_to_cut_a_text_gives_the_same(stop: str) -> None:
    text = "the\n\nquick fox jumps over the lazy dog."
    for cuts in [(), *combinations(range(1, len(text)), 1), *combinations(range(1, len(text)), 2)]:
        edges = [0, *cuts, len(text)]
        pieces = [(text[a:b], True) for a, b in zip(edges, edges[1:], strict=False)]
        run([stop, "\n<ZZ>"], pieces)


def test_no_part_of_a_stop_string_is_shown_before_it_is_complete() -> None:
    """B005."""
    matcher = StopMatcher(StopStrings(["STOP HERE"]))
    assert [matcher.push(piece) for piece in ("abc ST", "OP", " HE", "RE tail")] == [
        "abc ",
        "",
        "",
        "",
    ]
    assert matcher.matched == "STOP HERE"


def test_newlines_that_only_looked_like_a_stop_come_out() -> None:
    """B009."""
    matcher = StopMatcher(StopStrings(["\n<ZZ>"]))
    pieces = ["one", "\n", "two\n", "\n", "<Z", "three", "\n"]
    assert "".join(map(matcher.push, pieces)) + matcher.finish() == "".join(pieces)


def test_a_match_that_does_not_count_stays_in_the_text() -> None:
    """B059: the first tokens are exempt, also for a match that they begin."""
    matcher = StopMatcher(StopStrings(["ab"]))
    assert matcher.push("xab", counts=False) == "xab"
    assert matcher.push("ya", counts=False) == "y"
    assert matcher.push("b", counts=True) == ""
    assert matcher.matched == "ab"


def test_the_match_can_be_kept() -> None:
    matcher = StopMatcher(StopStrings(["</answer>"]), keep_match=True)
    assert matcher.push("42</ans") == "42"
    assert matcher.push("wer> more") == "</answer>"


def test_of_strings_that_end_together_the_longest_wins() -> None:
    matcher = StopMatcher(StopStrings(["END", "THE END"]))
    assert matcher.push("at THE END.") == "at "
    assert matcher.matched == "THE END"


def test_the_largest_allowed_set_is_searched_without_going_back() -> None:
    strings = ["a" * 1023 + chr(ord("b") + index) for index in range(16)]
    automaton = StopStrings(strings)
    matcher = StopMatcher(automaton)
    text = "a" * 5000
    shown = "".join(map(matcher.push, text))
    assert len(shown) == 5000 - 1023
    assert len(automaton.moves) == 1 + 1023 + 16
