"""This file counts the tokens that a model has thought with, of one choice.

It does not know chunks nor how an answer is written: deltas in, a number out. A token is reasoning
if any of its text is, the format's markers included; one without text is if it stands inside.
Laws: the count is a function of the tokens alone: neither how they are grouped nor what a stop
string holds back of their text changes it; it is at most the number of tokens.
"""

from __future__ import annotations

from collections import deque

from actors.gateway.reasoning.base import REASONING_PARSERS
from messages.gateway import Delta
from messages.types import unpack

MARK = "<"  # every marker of every format begins so


class Thoughts:
    def __init__(self, reasoning_parser: str) -> None:
        self.count = 0
        self._parser = REASONING_PARSERS.get(reasoning_parser).make()
        self._pending = 0  # tokens of what may become the beginning of a reasoning
        self._ends: deque[int] = deque()  # of tokens whose text is not all there: where it ends
        self._text = ""  # not read yet
        self._place = 0  # how much text has been read
        self._len = 0  # how much has come
        self._is_over = False

    def see(self, delta: Delta) -> None:
        self._text += delta.text
        self._len += len(delta.text)
        self._ends += unpack(delta.spans) or [self._len] * delta.token_count
        is_end = delta.finish is not None
        while self._ends and (self._ends[0] <= self._len or is_end):
            self._read(self._ends.popleft())
        if is_end and not self._is_over:
            self._is_over = True
            self._parser.flush()
            if self._parser.is_thinking:
                self.count += self._pending

    def _read(self, end: int) -> None:
        """One token, whose text goes up to `end`; a stop string has kept back what is missing."""
        size = max(0, min(end, self._len) - self._place)
        text, self._text = self._text[:size], self._text[size:]
        self._place += size
        counts = False
        waits = self._parser.is_thinking is None and not text
        # Only a marker changes the state; where one may be, each character is looked at.
        is_whole = MARK not in text and self._parser.is_thinking is not None
        for part in (text,) if is_whole else text:
            was_thinking = self._parser.is_thinking
            if part:
                self._parser.feed(part)
            is_thinking = self._parser.is_thinking
            waits = is_thinking is None and not was_thinking
            if was_thinking or is_thinking:
                counts = True
                self.count += self._pending
            if not waits:
                self._pending = 0
        if counts:
            self.count += 1
        elif waits:
            self._pending += 1
