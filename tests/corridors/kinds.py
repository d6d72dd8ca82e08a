"""This file makes the nodes of the corridor suite: one kind for each transport there is."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

from actors.runtime.codec import as_message, node_decoder
from actors.runtime.link import Limits
from actors.runtime.transport.base import Transport
from actors.runtime.transport.memory import MemoryHub, MemoryTransport, Weather
from actors.runtime.transport.zmq import ZmqTransport
from messages.base import Address, Header, Message
from messages.system import Reason

WINDOW_COUNT = 200  # of every transport here
DEADLINE_S = 240.0  # of a test that would fail, on however busy a machine

Make = Callable[[str, int], Transport]


@asynccontextmanager
async def by_reference() -> AsyncIterator[Make]:
    hub = MemoryHub()
    yield lambda node, incarnation: MemoryTransport(hub, node, incarnation, count_max=WINDOW_COUNT)


@asynccontextmanager
async def encoded() -> AsyncIterator[Make]:
    hub = MemoryHub(encodes=True)
    yield lambda node, incarnation: MemoryTransport(hub, node, incarnation, count_max=WINDOW_COUNT)


@asynccontextmanager
async def seeded() -> AsyncIterator[Make]:
    hub = MemoryHub(encodes=True, weather=Weather(7, delay_s_max=0.005))
    yield lambda node, incarnation: MemoryTransport(hub, node, incarnation, count_max=WINDOW_COUNT)


@asynccontextmanager
async def zmq_ipc() -> AsyncIterator[Make]:
    with tempfile.TemporaryDirectory(prefix="hz") as directory:
        yield lambda node, incarnation: ZmqTransport(
            node,
            incarnation,
            run="r",
            run_dir=Path(directory),
            token=b"t" * 32,
            hang_s=DEADLINE_S,
            limits=Limits(count_max=WINDOW_COUNT),
        )


KINDS = (by_reference, encoded, seeded, zmq_ipc)


class Seat:
    """One node of a test: its transport, and what it heard."""

    def __init__(self, node: str, incarnation: int, transport: Transport) -> None:
        self.node = node
        self.incarnation = incarnation
        self.transport = transport
        self.arrived: list[tuple[str, Header, Message]] = []
        self.links: list[tuple[str, int | None]] = []  # up with incarnation, down with None
        self.reasons: list[Reason] = []
        self.on_arrive: Callable[[str, int], object] = lambda node, number: None
        self._changed = asyncio.Event()

    def arrive(self, node: str, header: Header, body: Message | bytes | memoryview) -> None:
        if not isinstance(body, Message):
            body = bytes(body)
        message: Message = as_message(node_decoder, body)
        self.arrived.append((node, header, message))
        assert header.question is not None
        self.on_arrive(node, header.question)
        self._changed.set()

    def link_up(self, node: str, incarnation: int) -> None:
        self.links.append((node, incarnation))
        self._changed.set()

    def link_down(self, node: str, reason: Reason) -> None:
        self.links.append((node, None))
        self.reasons.append(reason)
        self._changed.set()

    def connect(self, other: Seat) -> None:
        self.transport.connect(other.node, other.incarnation, other.transport.endpoint)

    def send(
        self, other: Seat, number: int, message: Message, *, by_s: float | None = None
    ) -> bool:
        target = Address(other.node, "x", 1)
        header = Header(target, Address(self.node, "y", 1), question=number, deadline_s=by_s)
        return self.transport.send(other.node, header, message)

    def from_node(self, node: str) -> list[int | None]:
        return [header.question for source, header, _ in self.arrived if source == node]

    async def until(self, condition: Callable[[], bool]) -> None:
        """Waits until it holds, looking whenever something has happened here."""
        async with asyncio.timeout(DEADLINE_S):
            while not condition():
                self._changed.clear()
                await self._changed.wait()
