"""This file writes streams without waking their tasks: what a turn of the loop brought is written
by one callback for all of them.

It does not know dialects. A stream's task begins and ends its response, and takes over whenever the
client is too slow for the socket; between, most events go from the gateway's handler to the socket
by way of this file. Laws: what is written for one stream is in order, whoever writes it; a line
whose task is writing is left to it; a turn of the loop sees to a bounded number of lines, so that
ten thousand streams which begin at once do not stop everything else.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

from actors.gateway.call import Row
from actors.gateway.dialect import StreamWriter

if TYPE_CHECKING:
    from actors.gateway.stream import Stream

# Writes part of a body; False: the client has not taken what was written before.
Write = Callable[[bytes], bool]


# Of one turn. A write costs some 10 µs, but a task that is woken begins or ends a response: 300.
LINES_A_TURN = 64


class Direct:
    """All lines of one gateway that have something to write, or a task to be woken."""

    def __init__(self) -> None:
        self.due: deque[Line] = deque()
        self.is_called = False

    def soon(self, line: Line) -> None:
        self.due.append(line)
        self._call()

    def flush(self) -> None:
        self.is_called = False
        for _ in range(min(LINES_A_TURN, len(self.due))):
            self.due.popleft().flush()
        if self.due:
            self._call()

    def _call(self) -> None:
        if not self.is_called:
            self.is_called = True
            asyncio.get_running_loop().call_soon(self.flush)


class Line:
    """One stream's way to its socket."""

    __slots__ = ("_direct", "_stream", "_write", "_writer", "error", "is_busy", "is_due")

    def __init__(self, direct: Direct, stream: Stream) -> None:
        self._direct = direct
        self._stream = stream
        self._writer: StreamWriter | None = None
        self._write: Write | None = None
        self.is_busy = True  # its task writes
        self.is_due = False
        self.error: Exception | None = None  # our bug, to be raised by the task

        stream.wake = self.wake

    def begin(self, writer: StreamWriter, write: Write | None) -> None:
        """The response has begun. Without `write` all of it is the task's."""
        self._writer, self._write = writer, write

    async def run(self, reading: Awaitable[list[Row] | None]) -> list[Row] | None:
        """Called by the task: rows are written without it until they need it again."""
        self.is_busy = self._write is None
        try:
            return await reading
        finally:
            self.is_busy = True
            if self.error is not None:
                raise self.error

    def wake(self) -> None:
        """The stream has rows, or its end."""
        if not self.is_due:
            self.is_due = True
            self._direct.soon(self)

    def flush(self) -> None:
        self.is_due = False
        stream = self._stream
        outbox = stream.outbox
        if self.is_busy or outbox.is_over:
            stream.ready.set()
            return
        assert self._writer is not None and self._write is not None, "not busy before it began"
        try:
            data = self._writer.write(outbox.take())
            if data:
                stream.is_quiet = False
                if not self._write(data):
                    self.is_busy = True  # until its task has seen to it that the client reads
                    stream.ready.set()
        except Exception as error:
            self.error = error
            self.is_busy = True
            stream.ready.set()
