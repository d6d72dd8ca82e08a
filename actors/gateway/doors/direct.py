"""This file writes streams without waking their tasks: what a turn of the loop brought is written
by one callback for all of them.

It does not know dialects. A stream's task begins and ends its response, and takes over whenever the
client is too slow for the socket; between, most events go from the gateway's handler to the socket
by way of this file. Laws: what is written for one stream is in order, whoever writes it; a line
whose task is writing is left to it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

from actors.gateway.call import Row
from actors.gateway.dialect import StreamWriter

if TYPE_CHECKING:
    from actors.gateway.stream import Stream

# Writes part of a body; False: the client has not taken what was written before.
Write = Callable[[bytes], bool]


class Direct:
    """All lines of one gateway that have something to write."""

    def __init__(self) -> None:
        self.due: list[Line] = []

    def soon(self, line: Line) -> None:
        if not self.due:
            asyncio.get_running_loop().call_soon(self.flush)
        self.due.append(line)

    def flush(self) -> None:
        due, self.due = self.due, []
        for line in due:
            line.flush()


class Line:
    """One stream's way to its socket."""

    __slots__ = ("_direct", "_stream", "_write", "_writer", "error", "is_busy", "is_due")

    def __init__(self, direct: Direct, stream: Stream, writer: StreamWriter, write: Write) -> None:
        self._direct = direct
        self._stream = stream
        self._writer = writer
        self._write = write
        self.is_busy = True  # its task writes
        self.is_due = False
        self.error: Exception | None = None  # our bug, to be raised by the task

        stream.wake = self.wake

    async def run(self, reading: Awaitable[list[Row]]) -> list[Row]:
        """Called by the task: rows are written without it until they need it again."""
        self.is_busy = False
        try:
            return await reading
        finally:
            self.is_busy = True
            if self.error is not None:
                raise self.error

    def wake(self) -> None:
        """The stream has rows."""
        if self.is_busy:
            self._stream.ready.set()
        elif not self.is_due:
            self.is_due = True
            self._direct.soon(self)

    def flush(self) -> None:
        self.is_due = False
        stream = self._stream
        outbox = stream.outbox
        if self.is_busy or outbox.is_over:
            stream.ready.set()
            return
        try:
            data = self._writer.write(outbox.take())
            if data and not self._write(data):
                self.is_busy = True  # until its task has seen to it that the client reads
                stream.ready.set()
        except Exception as error:
            self.error = error
            self.is_busy = True
            stream.ready.set()
