"""This file measures `tell` to handler on one loop: messages a second, by kind of message.

`python -m bench.mailbox`. It does not know any room. The sender tells in bursts that fit into the
mailbox, and the next burst goes when the last message of the one before has been handled.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import sys
import time
from collections.abc import Sequence
from typing import Any

import msgspec

from actors.runtime import Actor, MailboxSpec, Ref
from actors.runtime.spec import Child, Supervisor
from actors.runtime.system import System
from messages.base import Message

BURST_LEN = 1000
TARGET = 300_000  # messages a second, DESIGN section 6


class Token(Message, frozen=True):
    """As small as messages get."""

    request: int
    index: int
    token: int


class Chunk(Message, frozen=True):
    """With text and a buffer, whose sizes count for the mailbox' bound."""

    request: str
    text: str
    ids: bytes


class Last(Message, frozen=True):
    """Ends a burst."""


class Go(Message, frozen=True):
    """Sends a burst."""


class Sink(Actor):
    """Handles and counts."""

    accepts = Token | Chunk | Last
    mailbox = MailboxSpec(count_max=2 * BURST_LEN)

    def __init__(self) -> None:
        self.count = 0

    async def on_start(self) -> bytes:
        self.source: Ref[Go] = self.context.peer("source")
        return b""

    def on_token(self, message: Token) -> None:
        self.count += 1

    def on_chunk(self, message: Chunk) -> None:
        self.count += 1

    def on_last(self, message: Last) -> None:
        self.source.tell(Go())


class Source(Actor):
    """Sends bursts of a message until it has sent enough."""

    accepts = Go

    def __init__(self) -> None:
        self.message: Any = None
        self.left = 0
        self.done: asyncio.Event | None = None

    async def on_start(self) -> bytes:
        self.sink: Ref[Any] = self.context.peer("sink")
        return b""

    def on_go(self, message: Go) -> None:
        if self.left <= 0:
            assert self.done is not None
            self.done.set()
            return
        self.left -= BURST_LEN
        sink, body = self.sink, self.message
        for _ in range(BURST_LEN):
            sink.tell(body)
        sink.tell(Last())


async def measure(message: Any, count: int, *, encode_always: bool) -> float:
    """Messages a second from `tell` to handler."""
    tree = Supervisor(
        name="root",
        children=(
            Child(name="sink", factory="bench.mailbox:Sink"),
            Child(name="source", factory="bench.mailbox:Source"),
        ),
    )
    system = System(tree, encode_always=encode_always)
    await system.start()
    source, sink = system.local("source"), system.local("sink")
    # As a module run by name this file exists twice: the actors' one is told by its own messages.
    assert source is not None and sink is not None
    source.message, source.left = message, count  # type: ignore[attr-defined]
    source.done = asyncio.Event()  # type: ignore[attr-defined]
    gc.collect()
    began_s = time.perf_counter()
    system.tell("source", next(iter(source.handlers))())
    await source.done.wait()  # type: ignore[attr-defined]
    took_s = time.perf_counter() - began_s
    assert sink.count == count, (sink.count, count)  # type: ignore[attr-defined]
    await system.stop()
    return count / took_s


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="bench mailbox", description=__doc__)
    parser.add_argument("--count", type=int, default=300_000, help="messages of each kind")
    parser.add_argument("--rounds", type=int, default=3, help="the best of so many counts")
    parser.add_argument("--json", action="store_true", help="one JSON object a line")
    options = parser.parse_args(argv)
    from bench import mailbox  # the module that the tree's factories name

    count = max(BURST_LEN, options.count // BURST_LEN * BURST_LEN)
    cases = (
        ("small, by reference", mailbox.Token(1, 2, 3), False),
        ("text and buffer, by reference", mailbox.Chunk("r1", "some text", bytes(64)), False),
        ("small, encoded and decoded", mailbox.Token(1, 2, 3), True),
    )
    if not options.json:
        sys.stdout.write(f"{'tell to handler, one loop':32}{'messages/s':>14}{'us each':>10}\n")
    for name, message, encode_always in cases:
        rate = max(
            asyncio.run(measure(message, count, encode_always=encode_always))
            for _ in range(options.rounds)
        )
        if options.json:
            row = {"bench": "mailbox", "case": name, "count": count, "messages_per_s": rate}
            sys.stdout.write(msgspec.json.encode(row).decode() + "\n")
        else:
            sys.stdout.write(f"{name:32}{rate:14,.0f}{1e6 / rate:10.2f}\n")
    if not options.json:
        sys.stdout.write(f"target (small, by reference){TARGET:18,}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
