"""This file is the reader's end of one call.

It does not know how rows come, nor what reads them. Local: a stream never leaves its node, and its
owner and its readers share one loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Protocol

from actors.gateway.call import Call, Checked, Row
from actors.gateway.errors import Refused, respelled
from actors.gateway.outbox import Outbox


class Owner(Protocol):
    """Who made the stream."""

    def close(self, stream: Stream) -> None:
        """The reader has gone."""

    def forget(self, stream: Stream) -> None:
        """Its end has been read."""


class Bell:
    """Wakes the one reader that waits. It is not remembered: who waits has looked before."""

    __slots__ = ("_waiter",)

    def __init__(self) -> None:
        self._waiter: asyncio.Future[None] | None = None

    def set(self) -> None:
        waiter, self._waiter = self._waiter, None
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    def wait(self) -> asyncio.Future[None]:
        assert self._waiter is None or self._waiter.done(), "a stream has one reader"
        self._waiter = asyncio.get_running_loop().create_future()
        return self._waiter


class Stream:
    """`read` gives all rows that wait, [] after the last; it raises `Refused` when the call failed,
    after the rows that came before, in the words of the call's dialect. Whoever stops reading early
    calls `close`.
    """

    def __init__(self, owner: Owner, call_id: str, call: Call) -> None:
        self.call_id = call_id
        self.call = call
        self.checked: list[Checked] = []  # the prompts, where the call was checked first
        self.on_cut: Callable[[], None] | None = None  # called when the reader is given up
        self.is_closed = False  # by its reader
        self.names: tuple[str, ...] = ()  # what a client may call it by, to abort it
        self.request_names: tuple[str, ...] = ()  # the same of each of its prompts
        self.outbox = Outbox()
        self.ready = Bell()
        # What is called when rows have come: wakes the reader, or does its work.
        self.wake: Callable[[], object] = self.ready.set
        self.pings = False  # whether its reader uses `news`, and tells its client of silences
        self.is_quiet = False  # nothing has been written for it since the last beat
        self._is_silent = False  # its reader shall be told
        self._owner = owner

    async def read(self) -> list[Row]:
        outbox = self.outbox
        while not outbox.rows and not outbox.is_over:
            await self.ready.wait()
        return self._take()

    async def news(self) -> list[Row] | None:
        """As `read`, but None where there is nothing for a while: the client may want a sign."""
        outbox = self.outbox
        while not outbox.rows and not outbox.is_over:
            if self._is_silent:
                self._is_silent = False
                return None
            await self.ready.wait()
        return self._take()

    def _take(self) -> list[Row]:
        self._is_silent = False
        outbox = self.outbox
        rows = outbox.take()
        if not rows:
            self._owner.forget(self)
            if outbox.problem is not None:
                raise Refused(respelled(outbox.problem, self.call.spelling))
        return rows

    def named(self, prefix: str) -> set[int]:
        """The choices of those prompts whose name begins so."""
        each = self.call.choice_count
        return {
            choice
            for index, name in enumerate(self.request_names)
            if name and name.startswith(prefix)
            for choice in range(index * each, (index + 1) * each)
        }

    def beat(self) -> None:
        """The clock: who has got nothing since the beat before is told so."""
        if self.pings and self.is_quiet:
            self._is_silent = True
            self.ready.set()
        self.is_quiet = True

    @property
    def is_done(self) -> bool:
        """All rows have been read, and the call has not failed."""
        return self.outbox.is_over and not self.outbox.rows and self.outbox.problem is None

    async def __aiter__(self) -> AsyncIterator[Row]:
        try:
            while rows := await self.read():
                for row in rows:
                    yield row
        finally:
            self.close()

    def close(self) -> None:
        """Nobody reads any more: what still runs is cancelled. Harmless after the end."""
        self._owner.close(self)
