"""This file turns the ids of one request into text, token by token.

It does not know requests, stop strings or where the text goes. Three streams, by what the
vocabulary allows (`actors/vocab/pieces.py`): bytes, texts with runs of bytes, or the tokenizer
itself over a window.

Laws: the joined results of `push` and `finish` are what the tokenizer's own `decode` makes of all
ids; no result but the last holds U+FFFD for a character that a later token may complete; what has
been returned after n tokens depends on those n tokens alone, not on how they were grouped.
"""

from __future__ import annotations

from codecs import utf_8_decode
from typing import Protocol

from actors.vocab.pieces import BytePieces, Pieces, TextPieces, WholePieces

MISSING = "\N{REPLACEMENT CHARACTER}"
# How many tokens without any new text a window may grow by before its text is taken as it is.
# A character has at most four bytes; more than that many tokens is not one that will be completed.
WINDOW_PENDING_MAX = 8


class Stream(Protocol):
    """The text of one request, as it grows."""

    def push(self, token_id: int) -> str:
        """The text that this token completes; "" while that is only part of a character."""

    def finish(self) -> str:
        """What is left: an unfinished character is one U+FFFD. Nothing is pushed afterwards."""


def open_stream(pieces: Pieces, *, skip_special: bool, continues: bool = False) -> Stream:
    """A stream at its beginning. `continues`: its text goes on after a prompt, so what a tokenizer
    would leave out at the beginning of a text stays."""
    if isinstance(pieces, BytePieces):
        return ByteStream(pieces, skip_special)
    if isinstance(pieces, TextPieces):
        return TextStream(pieces, skip_special, continues)
    return WindowStream(pieces, skip_special)


class ByteStream:
    """Byte-level tokenizers: bytes are UTF-8 as far as they go."""

    __slots__ = ("pending", "table")

    def __init__(self, pieces: BytePieces, skip_special: bool) -> None:
        self.table = pieces.shown if skip_special else pieces.every
        self.pending = b""  # the beginning of a character: at most three bytes

    def push(self, token_id: int) -> str:
        table = self.table
        piece = table[token_id] if token_id < len(table) else None
        if not piece:
            return ""
        data = self.pending + piece if self.pending else piece
        text, used = utf_8_decode(data, "replace", False)
        self.pending = data[used:]
        return text

    def finish(self) -> str:
        text, _ = utf_8_decode(self.pending, "replace", True)
        self.pending = b""
        return text


class TextStream:
    """Tokens are texts. Where some are single bytes, a run of them is judged as a whole, when it
    ends: the tokenizer takes all of it as characters or none."""

    __slots__ = ("first", "later", "run", "started", "strip", "strip_left")

    def __init__(self, pieces: TextPieces, skip_special: bool, continues: bool) -> None:
        self.later = pieces.shown if skip_special else pieces.every
        self.first = pieces.first_shown if skip_special else pieces.first_every
        self.started = continues
        self.run = bytearray()
        self.strip = pieces.strip
        self.strip_left = 0 if continues else pieces.strip_count_max

    def push(self, token_id: int) -> str:
        table = self.later if self.started else self.first
        piece = table[token_id] if token_id < len(table) else None
        if piece is None:
            return ""
        self.started = True
        if isinstance(piece, int):
            self.run.append(piece)
            return ""
        if self.run:
            piece = self.end_run() + piece
        return self.stripped(piece) if self.strip_left else piece

    def finish(self) -> str:
        text = self.end_run() if self.run else ""
        return self.stripped(text) if self.strip_left else text

    def end_run(self) -> str:
        try:
            return self.run.decode()
        except UnicodeDecodeError:
            return MISSING * len(self.run)
        finally:
            self.run.clear()

    def stripped(self, text: str) -> str:
        kept = text
        while self.strip_left and kept.startswith(self.strip):
            kept = kept[len(self.strip) :]
            self.strip_left -= 1
        if kept:
            self.strip_left = 0
        return kept


class WindowStream:
    """Tokenizers without a rule for single tokens: the last few tokens are decoded together, and
    what they add to the text of those before them is new."""

    __slots__ = ("decode", "ids", "known", "skip_special")

    def __init__(self, pieces: WholePieces, skip_special: bool) -> None:
        self.decode = pieces.decode
        self.skip_special = skip_special
        self.ids: list[int] = []  # the window: context, then what is pending
        self.known = 0  # the first so many of them are in the text already

    def push(self, token_id: int) -> str:
        self.ids.append(token_id)
        before = self.decode(self.ids[: self.known], self.skip_special) if self.known else ""
        after = self.decode(self.ids, self.skip_special)
        pending = len(self.ids) - self.known
        if len(after) <= len(before):
            if pending > WINDOW_PENDING_MAX and after == before:
                del self.ids[self.known :]  # they are none of the text, as special ones
            return ""
        if after.endswith(MISSING) and pending < WINDOW_PENDING_MAX:
            return ""
        del self.ids[: self.known]
        self.known = len(self.ids)
        return after[len(before) :]

    def finish(self) -> str:
        before = self.decode(self.ids[: self.known], self.skip_special) if self.known else ""
        return self.decode(self.ids, self.skip_special)[len(before) :]
