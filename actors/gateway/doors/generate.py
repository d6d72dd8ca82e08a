"""This file is every route that makes a call: the table of dialects, and the way of one exchange.

It does not know dialects: a body becomes a call, and rows become bytes, as the table's row says.
Laws: a response starts only when its first event is known, so that errors have their status, or
when that has taken so long that a proxy might give it up; a client that leaves has its call closed,
in whatever state it is.
"""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from actors.gateway import anthropic, embeddings, native, ollama, parsing, scoring, tokens
from actors.gateway.dialect import Asked, Dialect, Head, Ready, time_from
from actors.gateway.doors.asking import body_of, counting_refusals, watch
from actors.gateway.doors.direct import Direct, Line
from actors.gateway.doors.resume import Resumes
from actors.gateway.errors import Refused
from actors.gateway.exchange import (
    STREAM_HEADERS,
    Exchange,
    read_news,
    read_rows,
    uncollected,
)
from actors.gateway.held import Marks, StreamId
from actors.gateway.openai import read_chat, read_completion
from actors.gateway.replies import plain_writer, stream_writer

if TYPE_CHECKING:
    from actors.gateway.actor import Gateway
    from actors.gateway.stream import Stream

DIALECTS: tuple[Dialect, ...] = (
    Dialect("/v1/chat/completions", "chatcmpl-", read_chat, plain_writer, stream_writer),
    Dialect("/v1/completions", "cmpl-", read_completion, plain_writer, stream_writer),
    *anthropic.DIALECTS,
    *ollama.DIALECTS,
    *native.DIALECTS,
    *parsing.DIALECTS,
    *tokens.DIALECTS,
    *embeddings.DIALECTS,
    *scoring.DIALECTS,
)


def generate_routes(gateway: Gateway, resumes: Resumes) -> list[Route]:
    direct = Direct()
    return [
        *(
            Route(dialect.path, Generate(gateway, dialect, resumes, direct), methods=["POST"])
            for dialect in DIALECTS
        ),
        Route("/v1/streams/{stream}", resumes, methods=["GET"]),
    ]


class Generate:
    """A route that makes calls, as an ASGI application of its own: Starlette's request and
    response objects would hide a client that leaves."""

    def __init__(
        self, gateway: Gateway, dialect: Dialect, resumes: Resumes, direct: Direct
    ) -> None:
        self.gateway = gateway
        self.dialect = dialect
        self.resumes = resumes
        self.direct = direct

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        gateway, dialect = self.gateway, self.dialect
        exchange: Exchange = scope["exchange"]
        created_s = time.time()
        now_s = time_from(created_s, gateway.context.now_s)
        wish = self.resumes.wish(exchange, dialect)
        try:
            ask = await self.read_ask(exchange, created_s, wish)
        except Ready as ready:
            await exchange.respond(200, ready.body)
            return
        if wish is not None and self.is_kept(wish):
            await self.resumes.follow(exchange, self.resumes.kept[str(wish[0])], wish[1])
            return
        answer_id = dialect.prefix + (exchange.made_id if wish is None else wish[0].call)
        stream = gateway.open(ask.call, exchange.made_id)
        stream.on_cut = exchange.abort
        stream.names = (answer_id, exchange.made_id)
        if exchange.given_id is not None:
            stream.names += (exchange.given_id,)
        stream.request_names = () if dialect.names is None else dialect.names(ask)
        head = Head(answer_id, int(created_s), gateway.limits.model, created_s, now_s)
        if wish is not None and ask.stream:
            name, marks = wish
            kept = self.resumes.keep(name, dialect, ask, head, stream, is_back=bool(marks))
            if kept is not None:
                stream.on_cut = None
                await self.resumes.follow(exchange, kept, marks)
                return
        line = Line(self.direct, stream)
        watcher = asyncio.create_task(watch(exchange, stream))
        try:
            if ask.stream:
                await self.answer_stream(exchange, ask, head, stream, line)
            else:
                await self.answer_plain(exchange, ask, head, stream)
        finally:
            watcher.cancel()
            stream.close()

    def is_kept(self, wish: tuple[StreamId, Marks] | None) -> bool:
        """It is for a stream that is held here."""
        return wish is not None and str(wish[0]) in self.resumes.kept

    async def read_ask(
        self, exchange: Exchange, created_s: float, wish: tuple[StreamId, Marks] | None
    ) -> Asked:
        """A call without a seed has that of the stream it wishes for, or one is drawn."""
        gateway = self.gateway
        with counting_refusals(gateway):
            needs_place = self.dialect.needs_place and not self.is_kept(wish)
            body = await body_of(gateway, exchange, needs_place=needs_place)
            draw = gateway.draw_seed if wish is None else lambda: wish[0].seed
            with uncollected():
                return self.dialect.read(body, gateway.limits, draw, created_s)

    async def answer_plain(
        self, exchange: Exchange, ask: Asked, head: Head, stream: Stream
    ) -> None:
        rows = await read_rows(stream)
        writer = self.dialect.plain(ask, head, stream.checked)
        while rows:
            writer.add(rows)
            rows = await read_rows(stream)
        await exchange.respond(200, writer.body(stream.checked))

    async def answer_stream(
        self, exchange: Exchange, ask: Asked, head: Head, stream: Stream, line: Line
    ) -> None:
        dialect = self.dialect
        assert dialect.stream is not None, f"{dialect.path} has no streams"
        stream.pings = bool(dialect.ping)
        try:
            while (rows := await read_news(stream)) is None:
                await self.start(exchange)
                await exchange.write(dialect.ping)
        except Refused as refused:
            if exchange.status is None:
                raise
            await exchange.write_last(dialect.stream(ask, head, ()).fail(refused.problem))
            return
        writer = dialect.stream(ask, head, stream.checked)
        await self.start(exchange)
        exchange.fail = writer.fail
        last = b""
        line.begin(writer, exchange.piece)
        try:
            while rows is None or rows:
                data = dialect.ping if rows is None else writer.write(rows)
                if stream.is_done:  # the last rows and the end go in one write
                    last = data
                    break
                if data:
                    stream.is_quiet = rows is None
                    await exchange.write(data)
                rows = await line.run(read_news(stream))
            last += writer.end(stream.checked)
        except Refused as refused:
            last = writer.fail(refused.problem)
        await exchange.write_last(last)

    async def start(self, exchange: Exchange) -> None:
        """Begins the response, if it has not begun with a sign of life."""
        if exchange.status is None:
            await exchange.start(200, ((b"content-type", self.dialect.media), *STREAM_HEADERS))
