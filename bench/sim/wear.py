"""This file is an engine of grammars whose compiled ones are spent: after so many tokens the
matchers of one break all at once, as llguidance's do past the limits of what they share.

What is spent is not told but where it is asked for: a mask that is made of it leaves one token, and
what it takes breaks it. Only what several share is spent: what a row has for itself is enough.
"""

from __future__ import annotations

from collections.abc import Callable

from kernels.constrain import Engine, Matcher, Root, Words


class WearingRoot:
    def __init__(self, root: Root, room: int, spent: Callable[[], None]) -> None:
        self.root = root
        self.room = room  # tokens that its matchers may still take
        self.matcher_count = 0
        self.spent = spent
        self.is_worn = False

    def new(self) -> WearingMatcher:
        self.matcher_count += 1
        return WearingMatcher(self, self.root.new())

    def use(self) -> None:
        self.room -= 1
        if self.room < 0 and self.matcher_count > 1 and not self.is_worn:
            self.is_worn = True
            self.spent()


class WearingMatcher:
    def __init__(self, root: WearingRoot, matcher: Matcher) -> None:
        self.root = root
        self.matcher = matcher
        self._is_broken = False

    def take(self, token: int) -> bool:
        self.root.use()
        self._is_broken |= self.root.is_worn
        return self.matcher.take(token) and not self._is_broken

    def forced(self) -> int | None:
        return self.matcher.forced()

    @property
    def is_broken(self) -> bool:
        return self._is_broken or self.matcher.is_broken


class WearingEngine:
    def __init__(self, engine: Engine, room: Callable[[], int]) -> None:
        """`room`: how many tokens the matchers of a grammar may take, asked for each."""
        self.engine = engine
        self.room = room
        self.spent_count = 0

    def compile(self, kind: str, text: str, *, alone: bool = False) -> WearingRoot:
        root = self.engine.compile(kind, text, alone=alone)
        return WearingRoot(root, self.room(), self._spent)

    def fill(self, matchers: list[tuple[WearingMatcher, int]], mask: Words) -> None:
        self.engine.fill([(matcher.matcher, index) for matcher, index in matchers], mask)
        for matcher, index in matchers:
            matcher.root.use()
            if matcher.root.is_worn:
                row = mask[index].view("uint32")
                first = int(row.nonzero()[0][0])
                bits = int(row[first])
                row[:] = 0
                row[first] = bits & -bits

    def replay(self, matcher: WearingMatcher, token: int) -> None:
        self.engine.replay(matcher.matcher, token)

    def _spent(self) -> None:
        self.spent_count += 1
