"""This file keeps answers of the Responses API in memory: at most so many, the oldest out first.

It does not know HTTP nor time. Laws: never more entries or bytes than the limits, except that what
is still being made stays; an answer is found under its own id only.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from actors.gateway.responses.tape import Tape
from messages.responses import InputItem, ResponsesReply

ENTRY_BYTES = 512  # what an entry costs beside its text, about


class Kept:
    """One answer. `history` is what a next turn goes on from, without the answer's own items."""

    __slots__ = ("bytes_len", "cancel", "history", "input", "reply", "tape")

    def __init__(
        self,
        reply: ResponsesReply,
        history: tuple[InputItem, ...],
        input: tuple[InputItem, ...],
        cancel: Callable[[], None] | None = None,
        tape: Tape | None = None,
    ) -> None:
        self.reply = reply
        self.history = history
        self.input = input
        self.cancel = cancel  # while it is made in the background
        self.tape = tape  # where it can be streamed again
        encode = msgspec.json.Encoder().encode
        self.bytes_len = ENTRY_BYTES + len(encode(history)) + len(encode(reply))
        if tape is not None:
            self.bytes_len += tape.bytes_len

    @property
    def is_made(self) -> bool:
        return self.cancel is None


class ResponseStore:
    def __init__(self, count_max: int, bytes_max: int) -> None:
        self.count_max = count_max
        self.bytes_max = bytes_max
        self.bytes_len = 0
        self._kept: dict[str, Kept] = {}

    def __len__(self) -> int:
        return len(self._kept)

    def put(self, kept: Kept) -> None:
        """Keeps it, in place of an older state of the same answer."""
        self.remove(kept.reply.id)
        if self.count_max == 0:
            return
        self._kept[kept.reply.id] = kept
        self.bytes_len += kept.bytes_len
        for entry in [entry for entry in self._kept.values() if entry.is_made]:
            if len(self._kept) <= self.count_max and self.bytes_len <= self.bytes_max:
                break
            self.remove(entry.reply.id)

    def get(self, response_id: str) -> Kept | None:
        return self._kept.get(response_id)

    def remove(self, response_id: str) -> Kept | None:
        kept = self._kept.pop(response_id, None)
        if kept is not None:
            self.bytes_len -= kept.bytes_len
        return kept

    def check(self) -> None:
        entries = self._kept.values()
        total = sum(entry.bytes_len for entry in entries)
        assert self.bytes_len == total, f"{self.bytes_len} bytes counted, {total} kept"
        made = [entry for entry in entries if entry.is_made]
        is_within = len(entries) <= self.count_max and total <= self.bytes_max
        assert is_within or not made, f"{len(entries)} entries of {total} bytes"
        for response_id, entry in self._kept.items():
            assert entry.reply.id == response_id, f"{entry.reply.id} is kept as {response_id}"
