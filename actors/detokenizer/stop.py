"""This file finds stop strings in a text that arrives in pieces, and holds back what may be one.

It does not know tokens or requests. All stop strings are looked for at once, character by
character, by an automaton whose states are the beginnings of stop strings; stop expressions, where
there are some, by theirs (`pattern.py`).

Laws: the result does not depend on where the text is cut; the match that ends first wins, the
longest of those that end there; what is held back is the longest end of the text that is a proper
beginning of a match, so nothing of a match is ever returned, and nothing else is kept. It is less
than the longest stop string, and with expressions less than their `chars_max`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from actors.detokenizer.pattern import PatternRun, Patterns


class StopStrings:
    """The automaton of a set of stop strings. Immutable; matchers of many requests can share it."""

    __slots__ = ("ends", "holds", "moves", "starts", "strings")

    def __init__(self, strings: Sequence[str]) -> None:
        """`strings` without empty ones (the gateway refuses those: they would match anywhere)."""
        assert all(strings), "an empty stop string"
        self.strings = tuple(strings)
        self.starts = frozenset(string[0] for string in strings)
        # By state; 0 is "no beginning of any". `moves` has the transitions of the tree of strings
        # plus, where the tree has none, those of the longest shorter beginning.
        self.moves: list[dict[str, int]] = [{}]
        self.ends: list[str | None] = [None]  # the longest string that ends in this state
        self.holds: list[int] = [0]  # length of the longest proper beginning
        depths = [0]
        for string in strings:
            state = 0
            for character in string:
                following = self.moves[state].get(character)
                if following is None:
                    following = len(self.moves)
                    self.moves[state][character] = following
                    self.moves.append({})
                    self.ends.append(None)
                    self.holds.append(0)
                    depths.append(depths[state] + 1)
                state = following
            self.ends[state] = string
        self._link(depths)

    def _link(self, depths: list[int]) -> None:
        """Breadth first: a state inherits from the longest shorter beginning that it ends with."""
        shorter = [0] * len(self.moves)
        waiting: deque[int] = deque([0])
        while waiting:
            state = waiting.popleft()
            children, parent = self.moves[state], shorter[state]
            if state:
                # A whole string that is no beginning of a longer one can't grow into a match.
                self.holds[state] = depths[state] if children else self.holds[parent]
                if self.ends[state] is None:
                    self.ends[state] = self.ends[parent]
            for character, child in children.items():
                shorter[child] = self.moves[parent].get(character, 0) if state else 0
                waiting.append(child)
            if state:
                self.moves[state] = {**self.moves[parent], **children}


class StopMatcher:
    """One request's text on its way through a StopStrings, and through Patterns if given."""

    __slots__ = ("held", "keep_match", "matched", "run", "state", "strings")

    def __init__(
        self,
        strings: StopStrings,
        *,
        keep_match: bool = False,
        patterns: Patterns | None = None,
    ) -> None:
        self.strings = strings
        self.keep_match = keep_match
        self.run = None if patterns is None else PatternRun(patterns)
        self.matched: str | None = None
        self.held = ""
        self.state = 0

    def push(self, text: str, *, counts: bool = True) -> str:
        """The text that is now certain not to be part of a match.

        Sets `matched` when a match is complete; the rest of `text` is then dropped. With `counts`
        false a complete one does not count (but one that it has begun may, later).
        """
        assert self.matched is None, "text after the match"
        strings, state, run = self.strings, self.state, self.run
        if run is None and state == 0 and strings.starts.isdisjoint(text):
            return text
        moves, ends = strings.moves, strings.ends
        for index, character in enumerate(text):
            state = moves[state].get(character, 0)
            end = ends[state]
            length = 0 if end is None else len(end)
            if run is not None:
                found = run.step(character)
                if found is not None and found[0] > length:
                    length, end = found
            if end is not None and counts:
                self.matched = end
                whole = self.held + text[: index + 1]
                self.held = ""
                return whole if self.keep_match else whole[: len(whole) - length]
        self.state = state
        whole = self.held + text
        cut = len(whole) - max(strings.holds[state], 0 if run is None else run.held)
        self.held = whole[cut:]
        return whole[:cut]

    def finish(self) -> str:
        """What is held back: no match came of it."""
        held, self.held, self.state = self.held, "", 0
        if self.run is not None:
            self.run = PatternRun(self.run.patterns)
        return held

    def check(self) -> None:
        """What is held is a proper beginning of a match, and matches nothing yet."""
        length = self.strings.holds[self.state]
        if self.run is not None:
            length = max(length, self.run.held)
        assert length == len(self.held), (self.state, self.held)
        if self.run is None:
            strings = self.strings.strings
            beginnings = [s for s in strings if s.startswith(self.held) and s != self.held]
            assert not self.held or beginnings, self.held
        else:
            assert self.run.held < self.run.patterns.full.bit_length(), self.held
