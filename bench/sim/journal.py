"""This file keeps what happens in a simulated world: a hash over all of it, and the last events.

It does not know what any of it means. Law: the hash is equal for two runs of one scenario, in
whatever process; so only what is the same in each may be told.
"""

from __future__ import annotations

import hashlib
from collections import Counter, deque
from collections.abc import Callable
from typing import Any

import msgspec

from actors.runtime.codec import kind_of
from actors.runtime.frame import AnyFrame, Data

LAST_EVENTS = 60
FRAMES = msgspec.msgpack.Decoder(AnyFrame)


class Journal:
    """`time` is the world's clock; `veil` is what differs between processes, in any frame."""

    def __init__(self, time: Callable[[], float], veil: bytes) -> None:
        self.time = time
        self.veil = veil
        self.seen: Counter[str] = Counter()  # what happened at all, by name
        self._digest = hashlib.blake2b(digest_size=16)
        self._events: deque[tuple[float, str, str, str, Any]] = deque(maxlen=LAST_EVENTS)

    def frame(self, source: str, target: str, parts: list[bytes]) -> None:
        """One frame has arrived."""
        now_s = self.time()
        data = b"".join(parts).replace(self.veil, b"model")
        self._digest.update(f"{now_s!r}|{source}|{target}|{len(data)}|".encode() + data)
        self._events.append((now_s, source, target, "frame", parts))

    def taken(self, node: str, target: str, body: Any) -> None:
        """A node takes a message out of a frame."""
        self._events.append((self.time(), node, target, "takes", body))

    def note(self, what: str) -> None:
        """Anything else: a fault, for one."""
        now_s = self.time()
        self._digest.update(f"{now_s!r}|{what}|".encode())
        self._events.append((now_s, "", "", what, None))

    @property
    def chain(self) -> str:
        return self._digest.hexdigest()

    def last_events(self) -> list[str]:
        lines = []
        for at_s, source, target, what, data in self._events:
            match what:
                case "frame":
                    size = sum(map(len, data))
                    text = f"{source} -> {target}  {kind_of_frame(data)}, {size} bytes"
                case "takes":
                    text = f"  {source} takes {kind_of(data)} for {target}"
                case _:
                    text = what
            lines.append(f"{at_s:12.4f}  {text}")
        return lines


def kind_of_frame(parts: list[bytes]) -> str:
    frame = FRAMES.decode(parts[0])
    if isinstance(frame, Data):
        return f"{kind_of(parts[1])} for {frame.header.target}, number {frame.seq}"
    return type(frame).__name__
