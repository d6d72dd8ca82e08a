"""This file measures `tell` to handler on one loop: messages a second, by kind of message.

It does not know any room.
"""

from __future__ import annotations

import asyncio
import gc
import importlib
import importlib.util
import sys
import time
from collections.abc import Sequence
from typing import Any

from actors.runtime import Actor, MailboxSpec, Ref
from actors.runtime.recorder import SIZE, Recorder
from actors.runtime.spec import Child, Supervisor
from actors.runtime.system import System
from bench.command import parser_of
from bench.mailbox_peers import PEERS
from bench.report import Report
from messages.base import Message

ABOUT = """\
Messages a second from `tell` to handler on one loop, by kind of message.

  python -m app bench mailbox
  python -m app bench mailbox --rounds 5 --peers

The sender tells in bursts that fit into the mailbox, and the next burst goes when the last message
of the one before has been handled.
"""
BURST_LEN = 1000
TARGET = 300_000  # messages a second, that are aimed at


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


async def measure(
    message: Any, count: int, *, encode_always: bool = False, records: bool = False
) -> float:
    """Messages a second from `tell` to handler, perhaps with a flight recorder as in a child."""
    tree = Supervisor(
        name="root",
        children=(
            Child(name="sink", factory="bench.mailbox:Sink"),
            Child(name="source", factory="bench.mailbox:Source"),
        ),
    )
    system = System(tree, encode_always=encode_always)
    if records:
        system.node.recorder = Recorder(bytearray(SIZE))
    await system.start()
    source, sink = system.local("source"), system.local("sink")
    assert isinstance(source, Source) and isinstance(sink, Sink)
    source.message, source.left = message, count
    source.done = asyncio.Event()
    gc.collect()
    began_s = time.perf_counter()
    system.tell("source", Go())
    await source.done.wait()
    took_s = time.perf_counter() - began_s
    assert sink.count == count, (sink.count, count)
    await system.stop()
    return count / took_s


CASES: tuple[tuple[str, Message, dict[str, bool]], ...] = (
    ("small, by reference", Token(1, 2, 3), {}),
    ("small, by reference, recorded", Token(1, 2, 3), {"records": True}),
    ("text and buffer, by reference", Chunk("r1", "some text", bytes(64)), {}),
    ("small, encoded and decoded", Token(1, 2, 3), {"encode_always": True}),
)


def main(argv: Sequence[str] | None = None) -> int:
    """Prints one row for each kind of message, and one for each other library there is."""
    parser = parser_of("mailbox", ABOUT)
    parser.add_argument("--count", type=int, default=300_000, help="messages of each kind")
    parser.add_argument("--rounds", type=int, default=3, help="the best of so many counts")
    parser.add_argument("--peers", action="store_true", help="other libraries too, if installed")
    parser.add_argument("--json", action="store_true", help="one JSON object a line")
    options = parser.parse_args(argv)
    count = max(BURST_LEN, options.count // BURST_LEN * BURST_LEN)
    report = Report("mailbox", as_json=options.json, target=f"{TARGET:,} messages/s, the first")
    for case, message, how in CASES:
        rates = [asyncio.run(measure(message, count, **how)) for _ in range(options.rounds)]
        add_row(report, "histrio", case, rates)
    if options.peers:
        for name, (module, peer) in PEERS.items():
            if importlib.util.find_spec(module) is None:
                report.add(library=name, case="not installed")
                continue
            # The slow ones get fewer messages; a rate is a rate.
            add_row(report, name, "an int, by reference", [peer(count // 10) for _ in range(2)])
    report.close()
    return 0


def add_row(report: Report, library: str, case: str, rates: Sequence[float]) -> None:
    rate = max(rates)
    report.add(library=library, case=case, messages_per_s=rate, us_each=1e6 / rate)


if __name__ == "__main__":
    # The tree's factories name this module: run by name it would exist twice.
    sys.exit(importlib.import_module("bench.mailbox").main())
