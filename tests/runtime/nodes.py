"""This file is the fixture of the transport tests: an inbound that records, and ways to wait."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from actors.runtime.transport.base import Inbound
from messages.base import Address, Header, Message
from messages.system import Reason

DEADLINE_S = 240.0  # of a test that would fail, on however busy a machine


class Recorder(Inbound):
    """What arrived at one node."""

    def __init__(self) -> None:
        self.arrived: list[tuple[str, Header, bytes]] = []
        self.ups: list[tuple[str, int]] = []
        self.downs: list[tuple[str, Reason]] = []
        self.on_arrive: Callable[[str, Header, bytes], None] = lambda node, header, body: None
        self._changed = asyncio.Event()

    def arrive(self, node: str, header: Header, body: Message | bytes | memoryview) -> None:
        assert not isinstance(body, Message)
        self.arrived.append((node, header, bytes(body)))
        self._changed.set()
        self.on_arrive(node, header, bytes(body))

    def link_up(self, node: str, incarnation: int) -> None:
        self.ups.append((node, incarnation))
        self._changed.set()

    def link_down(self, node: str, reason: Reason) -> None:
        self.downs.append((node, reason))
        self._changed.set()

    @property
    def numbers(self) -> list[int | None]:
        return [header.question for _, header, _ in self.arrived]

    async def until(self, condition: Callable[[], bool]) -> None:
        """Waits for something that arrives; fails after DEADLINE_S."""
        async with asyncio.timeout(DEADLINE_S):
            while not condition():
                self._changed.clear()
                await self._changed.wait()


def header_to(node: str, number: int, *, deadline_s: float | None = None) -> Header:
    return Header(Address(node, "x", 1), question=number, deadline_s=deadline_s)


async def until(condition: Callable[[], bool]) -> None:
    """Waits for something that makes no event of its own; fails after DEADLINE_S."""
    async with asyncio.timeout(DEADLINE_S):
        while not condition():  # noqa: ASYNC110 - there is no event to wait for
            await asyncio.sleep(0.005)
