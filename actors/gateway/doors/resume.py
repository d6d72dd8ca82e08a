"""This file lets a client come back to its stream: the stream goes on without it for a while, and
what it has missed is written to its next connection.

It does not know dialects or how marks cut a stream (`held.py`). A task reads the stream into what
is held, whether or not anybody is connected; each connection follows that from its own place. Laws:
only streams that were asked for so are held; one that nobody follows for `resume_s` is closed, its
generation cancelled and its text forgotten.
"""

from __future__ import annotations

import asyncio
import secrets
from typing import TYPE_CHECKING

from starlette.types import Receive, Scope, Send

from actors.gateway.dialect import SSE, Asked, Dialect, Head, StreamWriter
from actors.gateway.errors import Refused, unavailable
from actors.gateway.exchange import STREAM_HEADERS, Exchange, Gone, HttpRefused
from actors.gateway.follower import Follower
from actors.gateway.held import (
    SECRET_CHARS,
    SEED_CHARS,
    Held,
    Marks,
    Place,
    Shelf,
    StreamId,
    read_event_id,
    read_stream_id,
)

if TYPE_CHECKING:
    from actors.gateway.actor import Gateway
    from actors.gateway.stream import Stream

SHELF_BYTES_MAX = 64 << 20  # of all that nobody reads just now
LONGEST = 4  # times `stream_bytes_max`: the most that is held of one stream


class Kept:
    """One stream that can be come back to."""

    def __init__(
        self, name: StreamId, dialect: Dialect, ask: Asked, head: Head, stream: Stream
    ) -> None:
        self.name = str(name)
        self.dialect = dialect
        self.ask = ask
        self.head = head
        self.stream = stream
        self.held = Held(ask.call.request_count)
        self.changed = asyncio.Event()
        self.silence_count = 0  # how often nothing has come for a while
        self.expiry: asyncio.TimerHandle | None = None
        self.task: asyncio.Task[None] | None = None

    def writer(self) -> StreamWriter:
        """For one connection, from the beginning."""
        assert self.dialect.stream is not None
        return self.dialect.stream(self.ask, self.head, self.stream.checked)


class Resumes:
    """Those of one gateway."""

    def __init__(self, gateway: Gateway) -> None:
        self.gateway = gateway
        self.config = gateway.config
        self.shelf = Shelf(self.config.resume_streams_max, SHELF_BYTES_MAX)
        self.kept: dict[str, Kept] = {}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """GET /v1/streams/{stream}: what comes after `Last-Event-ID`, or all of it."""
        exchange: Exchange = scope["exchange"]
        name = scope["path_params"]["stream"]
        kept = self.kept.get(name) if read_stream_id(name) is not None else None
        if kept is None:
            message = (
                "There is no such stream here. Repeat the request that began it,"
                " with the header Last-Event-ID."
            )
            raise HttpRefused(404, message)
        marks: Marks = ()
        last = exchange.header(b"last-event-id")
        if last:
            stream, marks = self.read(last)
            if str(stream) != name:
                raise HttpRefused(400, "Last-Event-ID is of another stream.")
        await self.follow(exchange, kept, marks)

    def wish(self, exchange: Exchange, dialect: Dialect) -> tuple[StreamId, Marks] | None:
        """What stream a client wants to begin or to go on with; None: just an answer.

        Raises HttpRefused.
        """
        if dialect.media != SSE:
            return None
        last = exchange.header(b"last-event-id")
        if last:
            return self.read(last)
        asked = (exchange.header(b"x-stream-resume") or "").strip().lower()
        if asked in ("", "0", "false", "no"):
            return None
        seed = self.gateway.draw_seed() & ((1 << 4 * SEED_CHARS) - 1)
        return StreamId(exchange.made_id, seed, secrets.token_hex(SECRET_CHARS // 2)), ()

    def read(self, text: str) -> tuple[StreamId, Marks]:
        found = read_event_id(text)
        if found is None:
            raise HttpRefused(400, "Last-Event-ID is not an id of an event that was sent here.")
        return found

    def keep(
        self,
        name: StreamId,
        dialect: Dialect,
        ask: Asked,
        head: Head,
        stream: Stream,
        *,
        is_back: bool,
    ) -> Kept | None:
        """Begins to hold a stream. None: there is no room, so it is served as any other. But who is
        back for one has the beginning: that stream is held for this connection alone."""
        for old in self.shelf.excess(1):
            self.drop(old)
        kept = Kept(name, dialect, ask, head, stream)
        if self.shelf.put(kept.name, kept.held):
            self.kept[kept.name] = kept
        elif not is_back:
            return None
        stream.pings = True
        kept.task = asyncio.create_task(self.pump(kept))
        return kept

    async def pump(self, kept: Kept) -> None:
        """From the gateway to what is held, to the end."""
        held, stream = kept.held, kept.stream
        bytes_max = LONGEST * self.config.stream_bytes_max
        problem = None
        try:
            while (rows := await stream.news()) is None or rows:
                if rows is None:
                    kept.silence_count += 1
                else:
                    held.add(rows)
                    stream.is_quiet = False
                kept.changed.set()
                if held.bytes_len > bytes_max:
                    raise Refused(unavailable("The stream is too long to be kept."))
        except Refused as refused:
            problem = refused.problem
        finally:
            held.end(problem)
            kept.changed.set()
            stream.close()
        for old in self.shelf.excess():
            self.drop(old)

    async def follow(self, exchange: Exchange, kept: Kept, marks: Marks) -> None:
        """Writes what comes after `marks`, until the stream ends or the client leaves."""
        self.attach(kept)
        is_gone = False

        async def watch() -> None:
            nonlocal is_gone
            while (await exchange.receive())["type"] != "http.disconnect":
                pass
            is_gone = True
            kept.changed.set()

        watcher = asyncio.create_task(watch())
        place = Place(kept.held, marks)
        silence_count = kept.silence_count
        follower: Follower | None = None
        try:
            while not place.is_at_end:
                known, fresh = place.take()
                if not known and not fresh:
                    kept.changed.clear()
                    await kept.changed.wait()
                    if is_gone:
                        raise Gone
                    if silence_count != kept.silence_count:
                        silence_count = kept.silence_count
                        await self.start(exchange, kept)
                        await exchange.bounded(exchange.write(kept.dialect.ping))
                    continue
                if follower is None:
                    await self.start(exchange, kept)
                    follower = Follower(place, kept.writer, kept.name)
                data = follower.write(known, fresh)
                if data:
                    await exchange.bounded(exchange.write(data))
            await self.finish(exchange, kept, None if follower is None else follower.writer)
        finally:
            watcher.cancel()
            self.detach(kept)

    async def start(self, exchange: Exchange, kept: Kept) -> None:
        if exchange.status is not None:
            return
        headers = (
            (b"content-type", kept.dialect.media),
            (b"x-stream-id", kept.name.encode()),
            *STREAM_HEADERS,
        )
        await exchange.start(200, headers)

    async def finish(self, exchange: Exchange, kept: Kept, writer: StreamWriter | None) -> None:
        """Raises Refused: it failed before its first event."""
        problem = kept.held.problem
        if problem is not None and exchange.status is None:
            raise Refused(problem)
        if writer is None:
            await self.start(exchange, kept)
            writer = kept.writer()
        if problem is not None:
            await exchange.write_last(writer.fail(problem))
        else:
            await exchange.write_last(writer.end(kept.stream.checked))

    def attach(self, kept: Kept) -> None:
        if self.kept.get(kept.name) is kept:
            self.shelf.readers[kept.name] += 1
        if kept.expiry is not None:
            kept.expiry.cancel()
            kept.expiry = None

    def detach(self, kept: Kept) -> None:
        if self.kept.get(kept.name) is not kept:
            kept.stream.close()  # nobody else can come to it
            return
        self.shelf.readers[kept.name] -= 1
        if not self.shelf.readers[kept.name]:
            loop = asyncio.get_running_loop()
            kept.expiry = loop.call_later(self.config.resume_s, self.drop, kept.name)

    def drop(self, name: str) -> None:
        """Nobody has come back for it: what still runs of it is cancelled."""
        self.shelf.remove(name)
        kept = self.kept.pop(name, None)
        if kept is None:
            return
        if kept.expiry is not None:
            kept.expiry.cancel()
        kept.stream.close()

    def close(self) -> None:
        """The gateway has ended: nobody can come back to it."""
        for kept in self.kept.values():
            self.shelf.remove(kept.name)
            if kept.expiry is not None:
                kept.expiry.cancel()
        self.kept.clear()

    def check(self) -> None:
        self.shelf.check()
        assert set(self.kept) == set(self.shelf.held)
