"""This file is the street of a simulated world: connections to a gateway, at the level of ASGI.

It stands where `actors/gateway/site.py` has its socket, and keeps that one's promises: who closes
lets answers go out for a while, who dies resets every connection. It does not know what is asked or
what is right. An exchange runs in its gateway's process: it stands still when that is stopped.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import msgspec

from actors.gateway.actor import Gateway
from actors.gateway.http import App
from actors.gateway.site import CLOSE_GRACE_S
from messages.types import Fault, Problem


class Lost(Exception):
    """The connection is gone: with its gateway."""


class Event(NamedTuple):
    """One event of a stream."""

    id: str  # empty: it has none
    data: Any  # None: the end


class Exchange:
    """One HTTP request and its response, as the client's end sees it."""

    def __init__(
        self,
        method: str,
        path: str,
        body: bytes = b"",
        headers: dict[str, str] | None = None,
        *,
        pause_s: float = 0.0,
        leaves_after: int | None = None,
        is_torn: bool = False,
    ) -> None:
        self.pause_s = pause_s  # of a slow reader, at each piece
        self.leaves_after = leaves_after  # events
        self.is_torn = is_torn  # who leaves has lost what lay behind these in the same piece
        self.status: int | None = None
        self.headers: dict[str, str] = {}
        self.body = b""
        self.is_complete = False
        self.is_cut = False
        self.has_left = False
        self.on_leave: Callable[[], None] = lambda: None
        self.fault: AssertionError | None = None  # of the server: a broken law of ASGI
        self.over = asyncio.Event()
        self.inbox: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self.inbox.put_nowait({"type": "http.request", "body": body, "more_body": False})
        path, _, query = path.partition("?")
        given = {"content-type": "application/json"} | (headers or {})
        self.scope = {
            "type": "http",
            "method": method,
            "path": path,
            "headers": [(name.encode(), value.encode()) for name, value in given.items()],
            "query_string": query.encode(),
            "state": {"abort": self.cut},
        }

    def cut(self) -> None:
        """By the other end: reset, or ended."""
        if not self.is_complete:
            self.is_cut = True
        self.inbox.put_nowait({"type": "http.disconnect"})
        self.over.set()

    async def receive(self) -> Any:
        return await self.inbox.get()

    async def send(self, message: Any) -> None:
        if self.is_cut or self.has_left:
            return  # bytes to a connection that is no more
        if message["type"] == "http.response.start":
            self.hold(self.status is None, "a second response")
            self.status = message["status"]
            self.headers = {name.decode(): value.decode() for name, value in message["headers"]}
            return
        self.hold(self.status is not None and not self.is_complete, "bytes after the end")
        self.body += message.get("body", b"")
        if not message.get("more_body", False):
            self.is_complete = True
            self.inbox.put_nowait({"type": "http.disconnect"})
            return
        if self.pause_s:
            await self.pause()
        if self.leaves_after is not None and not self.has_left:
            if self.body.count(b"data: ") > self.leaves_after:
                if self.is_torn:
                    ends = [match.end() for match in re.finditer(b"\n\n", self.body)]
                    self.body = self.body[: ends[self.leaves_after]]
                self.leave()

    async def pause(self) -> None:
        """The time of a slow reader. Who writes to it waits no longer than the connection lasts."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self.pause_s):
                await self.over.wait()

    def hold(self, is_so: bool, what: str) -> None:
        if not is_so:
            self.fault = AssertionError(what)
            raise self.fault

    def leave(self) -> None:
        self.has_left = True
        self.on_leave()
        self.inbox.put_nowait({"type": "http.disconnect"})
        self.over.set()

    def json(self) -> Any:
        return msgspec.json.decode(self.body)

    def problem(self) -> Problem:
        """Of a refusal."""
        after = self.headers.get("retry-after")
        return problem_of(self.status or 0, self.json()["error"], after)

    def events(self) -> list[Event]:
        """Those that have come whole."""
        found = []
        for block in self.body.split(b"\n\n")[:-1]:
            name = ""
            for line in block.split(b"\n"):
                field, _, value = line.partition(b": ")
                if field == b"id":
                    name = value.decode()
                elif field == b"data":
                    is_end = value == b"[DONE]"
                    found.append(Event(name, None if is_end else msgspec.json.decode(value)))
        return found


def problem_of(status: int, error: dict[str, Any], retry_after: str | None) -> Problem:
    fault = {503: Fault.UNAVAILABLE, 400: Fault.INVALID}.get(status, Fault.INTERNAL)
    if error["code"] in ("overloaded", "queue_full"):
        fault = Fault.OVERLOADED
    return Problem(
        fault=fault,
        message=error["message"],
        param=error.get("param"),
        code=error["code"],
        retry_after_s=None if retry_after is None else float(retry_after),
    )


class SimSite:
    """The door of one life of a gateway."""

    def __init__(self, gateway: Gateway, context: contextvars.Context) -> None:
        self.app = App(gateway)
        self.context = context  # of its process
        self.open: dict[Exchange, asyncio.Task[None]] = {}
        self.is_closed = False

    async def serve(self, exchange: Exchange) -> None:
        """Returns when the client has the answer, has left, or has lost the connection."""
        if self.is_closed:
            exchange.cut()
            return
        loop = asyncio.get_running_loop()
        coroutine = self.app(exchange.scope, exchange.receive, exchange.send)
        task = loop.create_task(coroutine, context=self.context)
        self.open[exchange] = task

        def done(task: asyncio.Task[None]) -> None:
            self.open.pop(exchange, None)
            exchange.over.set()

        task.add_done_callback(done)
        await exchange.over.wait()
        if exchange.fault is not None:
            raise exchange.fault
        if task.done() and not task.cancelled():
            task.result()

    async def close(self) -> None:
        self.is_closed = True
        await self.app.batches.close()
        if self.open:
            await asyncio.wait(list(self.open.values()), timeout=CLOSE_GRACE_S)
        self.cut()

    def cut(self) -> None:
        self.is_closed = True
        self.app.batches.cut()
        self.app.resumes.close()
        for exchange in list(self.open):
            exchange.cut()
