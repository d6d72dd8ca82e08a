"""This file holds what one call has brought and its reader has not taken: rows, then an end.

It does not know who reads, nor how a reader is woken; time is an argument. The bound on its bytes
is its owner's to enforce: `push` says how much waits. Vectors are not counted: there is one for a
prompt, and a step may bring those of a whole call at once.
Laws: rows come out in the order in which they went in, all before the problem; nothing goes in
after the end; the end is set once.
"""

from __future__ import annotations

from actors.gateway.call import Row
from messages.types import Problem

ROW_BYTES = 96  # what a row or one alternative of a token costs besides its text, about


class Outbox:
    def __init__(self) -> None:
        self.rows: list[Row] = []
        self.bytes_len = 0
        self.unread_since_s: float | None = None
        self.is_over = False  # nothing more will come
        self.problem: Problem | None = None  # why, if it is no answer

    def push(self, row: Row, now_s: float) -> int:
        """Adds a row; returns the bytes that wait unread, about."""
        assert not self.is_over, "a row after the end"
        if not self.rows:
            self.unread_since_s = now_s
        self.rows.append(row)
        self.bytes_len += ROW_BYTES + len(row.delta.text)
        for token in row.delta.logprobs:
            self.bytes_len += ROW_BYTES * (1 + len(token.best))
        return self.bytes_len

    def take(self) -> list[Row]:
        rows, self.rows = self.rows, []
        self.bytes_len = 0
        self.unread_since_s = None
        return rows

    def end(self, problem: Problem | None = None) -> None:
        """What was pushed can still be taken."""
        assert not self.is_over, "a second end"
        self.is_over = True
        self.problem = problem

    def check(self) -> None:
        waits = self.unread_since_s is not None
        assert waits == bool(self.rows), f"{len(self.rows)} rows, unread is {waits}"
        assert (self.bytes_len > 0) == bool(self.rows), f"{self.bytes_len} bytes, {self.rows} rows"
