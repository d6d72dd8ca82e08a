"""This file tests the reader of stop expressions against Python's `re`, and what it refuses."""

from __future__ import annotations

import re
import warnings

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from actors.gateway.pattern import (
    MOVES_MAX,
    POSITIONS_MAX,
    BadPattern,
    crowd_of,
    move_count,
    read_pattern,
)
from messages.types import StopPattern, unpack


def matches(pattern: StopPattern, text: str) -> bool:
    """Whether all of the text is a match, by going through the automaton."""
    states: set[int] | None = None
    for character in text:
        if states is None:
            reached = set(unpack(pattern.first))
        else:
            reached = {to for state in states for to in unpack(pattern.follows[state])}
        states = {s for s in reached if re.match(pattern.classes[s], character)}
    return bool(states and states & set(unpack(pattern.last)))


ATOMS = st.sampled_from(
    ["a", "b", ".", r"\d", r"\W", "[ab]", "[^a]", "[a-c\\d]", r"\n", "(?:)", "[-a]", "[]b]", r"\."]
)


def grown(parts: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    ends = st.sampled_from(["*", "+", "?", "{2}", "{1,2}", "{0,2}", "{,2}", "{2,}", "*?", "{,}"])
    return st.one_of(
        st.tuples(parts, parts).map("".join),
        st.tuples(parts, parts).map("|".join),
        st.tuples(parts.map("({})".format), ends).map("".join),
        st.tuples(parts.map("(?:{})".format), ends).map("".join),
    )


PATTERNS = st.recursive(ATOMS, grown, max_leaves=6)


@settings(max_examples=300, deadline=None)
@given(
    text=PATTERNS,
    flags=st.sampled_from(["", "(?i)", "(?s)", "(?is)"]),
    tried=st.lists(st.text("abAc1.\n-", max_size=6), min_size=1, max_size=12),
)
def test_an_automaton_matches_what_re_does(text: str, flags: str, tried: list[str]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        known = re.compile(flags + text)
    try:
        pattern = read_pattern(flags + text)
    except BadPattern as error:
        assert known.fullmatch("") and "empty text" in str(error), error
        return
    assert len(pattern.classes) == len(pattern.follows) <= POSITIONS_MAX
    assert move_count(pattern) <= MOVES_MAX
    for candidate in tried:
        assert matches(pattern, candidate) == bool(known.fullmatch(candidate)), candidate


@settings(max_examples=300, deadline=None)
@given(st.text("ab()[]{}|*+?^$\\.-,:<>P=!i123xbdwAZ ", max_size=12))
def test_whatever_the_text_it_is_read_or_refused(text: str) -> None:
    try:
        pattern = read_pattern(text)
    except BadPattern as error:
        assert str(error)
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        known = re.compile(text)
    for candidate in ("a", "b", "ab", "1", "-", "^", "{", "{1", "a{", "x"):
        assert matches(pattern, candidate) == bool(known.fullmatch(candidate)), candidate


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("", "empty text"),
        ("a*", "empty text"),
        ("(a|)", "empty text"),
        ("^a", "anchor"),
        ("a$", "anchor"),
        (r"\ba", "looks around"),
        (r"a\Z", "looks around"),
        ("(?=a)b", "looks around"),
        ("(?<!a)b", "looks around"),
        (r"(a)\1", "backreference"),
        ("(?P<n>a)(?P=n)", "looks around"),
        ("a++", "possessive"),
        ("a**", "repeats a repetition"),
        ("*a", "repeats nothing"),
        ("(a", "breaks off"),
        ("a)", "too many"),
        ("[a", "breaks off"),
        ("[b-a]", "wrong way round"),
        (r"[\d-z]", "range"),
        ("a{3,2}", "wrong way round"),
        ("a{2000}", "more than"),
        ("a{99999999999999999999}", "more than"),
        (r"\q", "unknown escape"),
        (r"\x1", "digits"),
        (r"\U00110000", "no character"),
        ("(?x)a", "flag"),
        ("a\\", "breaks off"),
    ],
)
def test_what_cannot_be_matched_in_one_pass_is_refused_in_words(text: str, word: str) -> None:
    with pytest.raises(BadPattern, match=re.escape(word)):
        read_pattern(text)


@pytest.mark.parametrize(
    "text",
    [
        "((a{100}){100}){100}",
        "(a|b|c|d){513}",
        "(" * 65 + "a" + ")" * 65,
        "(" * 1000,
        "[" * 1000,
        "((" + "|" * 900 + ")a){500}",
        "(" * 20 + "a" + "*)" * 20 + "{500}",
        "(" + "a?" * 200 + ")*",
        "(?:" + "|".join("abcdefgh" * 20) + "){3}",
    ],
)
def test_a_hostile_expression_is_refused_before_it_costs_anything(text: str) -> None:
    """B189: the size of an automaton is known before it is made; no repetition is written out."""
    with pytest.raises(BadPattern):
        read_pattern(text)


def test_the_states_of_all_expressions_are_bounded() -> None:
    """Each state is led to, so the moves bound states as well, also those of choices that go on
    to nothing."""
    moves_left, state_count = MOVES_MAX, 0
    with pytest.raises(BadPattern, match="complex"):
        for nth in range(16):
            pattern = read_pattern("|".join("." * (500 - nth)), moves_left)
            moves_left -= move_count(pattern)
            state_count += len(pattern.classes)
    assert 0 < state_count <= MOVES_MAX - moves_left


def test_the_catastrophes_of_engines_that_go_back_are_small() -> None:
    for text in ("(a+)+b", "(a|a)*b", "(a*)*b", "(a|aa)+b", "(.*a){20}", "a{0,100}b"):
        pattern = read_pattern(text)
        assert len(pattern.classes) <= 101 and move_count(pattern) <= 400, text


@pytest.mark.parametrize("text", [".{500}X", "a{129}b", "(?i)(Ss){70}", "(a|b|.|[ab]){33}"])
def test_an_expression_that_a_character_stands_in_at_many_places_is_too_large(text: str) -> None:
    assert crowd_of([read_pattern(text)]).is_too_large


@pytest.mark.parametrize(
    "text",
    [".{100}X", "a{0,100}b", "(.*a){20}", r"\n\n(Observation|Question|User): .{0,80}", "a" * 99],
)
def test_what_is_asked_for_in_earnest_is_not(text: str) -> None:
    assert not crowd_of([read_pattern(text)]).is_too_large


@given(st.lists(ATOMS, min_size=1, max_size=12), st.sampled_from("abcAB1 \n-].K"))
def test_no_character_stands_at_more_places_than_are_counted(
    atoms: list[str], character: str
) -> None:
    for flags in ("", "(?i)"):
        try:
            pattern = read_pattern(flags + "".join(atoms))
        except BadPattern:
            continue
        there = [state for state, chars in enumerate(pattern.classes) if re.match(chars, character)]
        crowd = crowd_of([pattern])
        assert len(there) <= crowd.places
        assert sum(len(unpack(pattern.follows[state])) for state in there) <= crowd.moves
