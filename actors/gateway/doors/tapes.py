"""This file streams responses that are made in the background, live or again, behind any event.

It does not know how one is made: `responses.py` records its events on a tape. With several gateways
on one port, the tape of another is asked for, now and then as long as it is being written.
Laws: a client gets each event once and in order; its leaving ends nothing but its own stream.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from typing import TYPE_CHECKING

from starlette.requests import Request
from starlette.types import Receive, Scope, Send

from actors.gateway.dialect import PING
from actors.gateway.errors import Refused, invalid
from actors.gateway.exchange import SSE_HEADERS, Exchange, Gone
from actors.gateway.responses.store import Kept
from actors.gateway.responses.tape import Tape
from messages.gateway import Recall, Recalled

if TYPE_CHECKING:
    from actors.gateway.doors.responses import Responses

ASK_AGAIN_S = 0.1  # how often another gateway is asked for the events of its response
TAKEN_BYTES = 1 << 18  # of events at once


class Tapes:
    """Those of one gateway."""

    def __init__(self, responses: Responses) -> None:
        self.responses = responses
        self.changed: dict[str, asyncio.Event] = {}  # of those that are being written

    def begin(self, response_id: str, events: bytes) -> Tape:
        tape = Tape(self.responses.store.bytes_max // 2)  # what is left is for the response itself
        self.changed[response_id] = asyncio.Event()
        tape.add(events)
        return tape

    def record(self, response_id: str, tape: Tape | None, events: bytes) -> None:
        if tape is not None:
            tape.add(events)
            self.changed[response_id].set()

    def end(self, response_id: str, tape: Tape | None) -> None:
        if tape is not None:
            tape.end()
            self.changed.pop(response_id).set()

    def local(self, kept: Kept, place: int) -> Recalled:
        """Events of a response that is kept here. Raises Refused."""
        return taken(tape_of(kept), place)

    async def follow(self, exchange: Exchange, response_id: str, place: int) -> None:
        """Writes the events from `place` on until the last, or until the client leaves. Raises
        Refused where there are none."""
        tape = None
        changed = self.changed.get(response_id)
        if self.responses.owner(response_id) is None:
            tape = tape_of(self.responses.find(response_id))
        found = await self.take(response_id, tape, place)
        await exchange.start(200, SSE_HEADERS)
        gone = asyncio.Event()
        loop = asyncio.get_running_loop()
        ping_s = self.responses.gateway.config.ping_s or math.inf
        written_s = loop.time()
        watcher = asyncio.create_task(watch(exchange, gone))
        try:
            while True:
                data = found.data
                if not data and loop.time() - written_s >= ping_s:
                    data = PING
                if data:
                    await exchange.bounded(exchange.write(data))
                    written_s = loop.time()
                    place += found.data.count(b"\n\n")
                if found.is_over:
                    break
                if not found.data:
                    await wait(changed, gone, ping_s)
                if gone.is_set():
                    raise Gone
                found = await self.take(response_id, tape, place)
        except Refused:  # of another gateway: it has been deleted meanwhile, or that one is lost
            pass
        finally:
            watcher.cancel()
        await exchange.write_last(b"")

    async def take(self, response_id: str, tape: Tape | None, place: int) -> Recalled:
        if tape is not None:
            return taken(tape, place)
        return await self.responses.recalled(Recall(response_id, "events", place))


def tape_of(kept: Kept) -> Tape:
    if kept.tape is None:
        message = "Only a response made with `background` and `stream` can be streamed again."
        raise invalid(message, "stream")
    return kept.tape


def taken(tape: Tape, place: int) -> Recalled:
    data, place = tape.take(place, TAKEN_BYTES)
    return Recalled(data, is_over=tape.is_over and place >= len(tape.events))


async def watch(exchange: Exchange, gone: asyncio.Event) -> None:
    while (await exchange.receive())["type"] != "http.disconnect":
        pass
    gone.set()


async def wait(changed: asyncio.Event | None, gone: asyncio.Event, wait_s: float) -> None:
    """For more of a tape that has nothing now, or for the client's leaving; not for ever."""
    if changed is None:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(gone.wait(), ASK_AGAIN_S)
        return
    changed.clear()
    waits = [asyncio.create_task(event.wait()) for event in (changed, gone)]
    try:
        timeout_s = None if wait_s == math.inf else wait_s
        await asyncio.wait(waits, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in waits:
            task.cancel()


class Retrieve:
    """GET /v1/responses/{response_id}, an ASGI application of its own, since it may be a stream."""

    def __init__(self, responses: Responses) -> None:
        self.responses = responses

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        exchange: Exchange = scope["exchange"]
        response_id = scope["path_params"]["response_id"]
        query = Request(scope).query_params
        wanted = query.get("stream", "false")
        if wanted not in ("true", "false"):
            raise invalid("`stream` must be true or false.", "stream")
        after = query.get("starting_after")
        if after is not None and not (after.isascii() and after.isdigit() and len(after) < 16):
            raise invalid("`starting_after` must be the number of an event.", "starting_after")
        if after is not None and wanted == "false":
            raise invalid("`starting_after` needs `stream` to be true.", "starting_after")
        if wanted == "true":
            place = 0 if after is None else int(after) + 1
            await self.responses.tapes.follow(exchange, response_id, place)
            return
        await exchange.respond(200, await self.responses.recall(response_id, "get"))
