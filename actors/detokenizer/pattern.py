"""This file runs stop expressions over a text, one character at a time.

It does not know how an expression is written (the gateway reads it), nor what is held back or sent.
Each state of the automaton has the lengths of the matches that may be going on in it, as the bits
of one number: bit n - 1 for one of n characters. A match of more than `chars_max` characters is
none, so neither the bits nor what may have to be held back grow with the text.
Laws: `step` finds the matches that end at this character, of every length up to `chars_max`; `held`
is the longest end of the text that may still become a match; the work for a character is bounded
by the automaton's moves.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import lru_cache

from messages.types import StopPattern, unpack

HITS_MAX = 1 << 16  # characters that are remembered, and their states, together
FAR = 1 << 30


class Patterns:
    """The automaton of a set of expressions. Immutable but for its memory of characters, so that
    many requests share one."""

    __slots__ = (
        "_classes",
        "_hit_count",
        "_hits",
        "first",
        "follows",
        "full",
        "keep",
        "last",
        "texts",
        "way_of",
        "ways",
    )

    def __init__(self, patterns: Sequence[StopPattern], chars_max: int) -> None:
        self.texts: list[str] = []  # by state
        classes: dict[str, list[int]] = {}  # the states of each class of characters
        self._hits: dict[str, frozenset[int]] = {}  # by character
        self._hit_count = 0
        first: set[int] = set()
        last: set[int] = set()
        self.follows: list[tuple[int, ...]] = []  # by state
        for pattern in patterns:
            base = len(self.follows)
            self.texts += [pattern.text] * len(pattern.classes)
            for state, chars in enumerate(pattern.classes, base):
                classes.setdefault(chars, []).append(state)
            first.update(base + state for state in unpack(pattern.first))
            last.update(base + state for state in unpack(pattern.last))
            self.follows += [
                tuple(base + state for state in unpack(follows)) for follows in pattern.follows
            ]
        self._classes = [(re.compile(chars), states) for chars, states in classes.items()]
        # States that go on alike, as those of a repeated choice do, are moved together.
        self.ways = list(dict.fromkeys(self.follows))
        numbers = {follows: number for number, follows in enumerate(self.ways)}
        self.way_of = [numbers[follows] for follows in self.follows]
        self.first, self.last = frozenset(first), frozenset(last)
        self.full = (1 << chars_max) - 1
        # By state: the lengths from which a match can still be completed by more characters.
        self.keep = [
            (1 << max(0, chars_max - more)) - 1 if more < FAR else 0 for more in self._more()
        ]

    def _more(self) -> list[int]:
        """By state: how many more characters a match needs at least; at least one."""
        before: list[list[int]] = [[] for _ in self.follows]
        for state, follows in enumerate(self.follows):
            for following in follows:
                before[following].append(state)
        more = [FAR] * len(self.follows)
        level = set(self.last)
        distance = 0
        while level:
            distance += 1
            level = {state for end in level for state in before[end] if more[state] == FAR}
            for state in level:
                more[state] = distance
        return more

    def hits(self, character: str) -> frozenset[int]:
        """The states that this character leads to."""
        found = self._hits.get(character)
        if found is None:
            found = frozenset(
                state
                for chars, states in self._classes
                if chars.match(character)
                for state in states
            )
            self._hit_count += 1 + len(found)
            if self._hit_count > HITS_MAX:
                self._hits.clear()
                self._hit_count = 1 + len(found)
            self._hits[character] = found
        return found


class PatternRun:
    """One text on its way through `Patterns`."""

    __slots__ = ("active", "held", "patterns")

    def __init__(self, patterns: Patterns) -> None:
        self.patterns = patterns
        self.active: dict[int, int] = {}  # by state: the lengths of what is going on there
        self.held = 0  # characters at the end of the text that may become a match

    def step(self, character: str) -> tuple[int, str] | None:
        """The longest match that ends here: its length, and the expression's text."""
        patterns = self.patterns
        hits = patterns.hits(character)
        reached = dict.fromkeys(patterns.first & hits, 1)
        ways: dict[int, int] = {}
        for state, lengths in self.active.items():
            way = patterns.way_of[state]
            ways[way] = ways.get(way, 0) | lengths
        for way, lengths in ways.items():
            longer = lengths << 1 & patterns.full
            for following in patterns.ways[way]:
                if following in hits:
                    reached[following] = reached.get(following, 0) | longer
        found: tuple[int, str] | None = None
        for state in sorted(patterns.last & reached.keys()):
            length = reached[state].bit_length()
            if length and (found is None or length > found[0]):
                found = (length, patterns.texts[state])
        keep = patterns.keep
        self.active = {
            state: kept for state, lengths in reached.items() if (kept := lengths & keep[state])
        }
        self.held = max(map(int.bit_length, self.active.values()), default=0)
        return found


@lru_cache(maxsize=64)
def automaton_of(patterns: tuple[StopPattern, ...], chars_max: int) -> Patterns:
    return Patterns(patterns, chars_max)
