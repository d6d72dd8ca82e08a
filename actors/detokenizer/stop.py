"""This file finds stop strings in a text that arrives in pieces, and holds back what may be one.

It does not know tokens or requests. All stop strings are looked for at once, character by
character, by an automaton whose states are the beginnings of stop strings.

Laws: the result does not depend on where the text is cut; the match that ends first wins, the
longest of those that end there; what is held back is the longest end of the text that is a proper
beginning of a stop string, so nothing of a match is ever returned, and nothing else is kept.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence


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
    """One request's text on its way through a StopStrings."""

    __slots__ = ("held", "keep_match", "matched", "state", "strings")

    def __init__(self, strings: StopStrings, *, keep_match: bool = False) -> None:
        self.strings = strings
        self.keep_match = keep_match
        self.matched: str | None = None
        self.held = ""
        self.state = 0

    def push(self, text: str, *, counts: bool = True) -> str:
        """The text that is now certain not to be part of a match.

        Sets `matched` when a stop string is complete; the rest of `text` is then dropped. With
        `counts` false a complete one does not count (but one that it has begun may, later).
        """
        assert self.matched is None, "text after the match"
        strings, state = self.strings, self.state
        if state == 0 and strings.starts.isdisjoint(text):
            return text
        moves, ends = strings.moves, strings.ends
        for index, character in enumerate(text):
            state = moves[state].get(character, 0)
            end = ends[state]
            if end is not None and counts:
                self.matched = end
                whole = self.held + text[: index + 1]
                self.held = ""
                return whole if self.keep_match else whole[: len(whole) - len(end)]
        self.state = state
        whole = self.held + text
        cut = len(whole) - strings.holds[state]
        self.held = whole[cut:]
        return whole[:cut]

    def finish(self) -> str:
        """What is held back: no match came of it."""
        held, self.held, self.state = self.held, "", 0
        return held

    def check(self) -> None:
        """What is held is a proper beginning of a stop string, and matches nothing yet."""
        assert self.strings.holds[self.state] == len(self.held), (self.state, self.held)
        beginnings = [s for s in self.strings.strings if s.startswith(self.held) and s != self.held]
        assert not self.held or beginnings, self.held
