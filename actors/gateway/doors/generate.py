"""This file is every route that makes a call: the table of dialects, and the way of one exchange.

It does not know dialects: a body becomes a call, and rows become bytes, as the table's row says.
Laws: a response starts only when its first event is known, so that errors have their status; a
client that leaves has its call closed, in whatever state it is.
"""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from actors.gateway import anthropic, native, ollama, tokens
from actors.gateway.dialect import Asked, Dialect, Head, Ready
from actors.gateway.errors import Refused, unavailable
from actors.gateway.exchange import STREAM_HEADERS, Exchange, Gone, HttpRefused, read_rows
from actors.gateway.openai import read_chat, read_completion
from actors.gateway.replies import plain_writer, stream_writer

if TYPE_CHECKING:
    from actors.gateway.actor import Gateway, Stream

DIALECTS: tuple[Dialect, ...] = (
    Dialect("/v1/chat/completions", "chatcmpl-", read_chat, plain_writer, stream_writer),
    Dialect("/v1/completions", "cmpl-", read_completion, plain_writer, stream_writer),
    *anthropic.DIALECTS,
    *ollama.DIALECTS,
    *native.DIALECTS,
    *tokens.DIALECTS,
)


def generate_routes(gateway: Gateway) -> list[Route]:
    return [
        Route(dialect.path, Generate(gateway, dialect), methods=["POST"]) for dialect in DIALECTS
    ]


class Generate:
    """A route that makes calls, as an ASGI application of its own: Starlette's request and
    response objects would hide a client that leaves."""

    def __init__(self, gateway: Gateway, dialect: Dialect) -> None:
        self.gateway = gateway
        self.dialect = dialect

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        gateway, dialect = self.gateway, self.dialect
        exchange: Exchange = scope["exchange"]
        created_s = time.time()
        try:
            ask = await self.read_ask(exchange, created_s)
        except Ready as ready:
            await exchange.respond(200, ready.body)
            return
        answer_id = dialect.prefix + exchange.made_id
        stream = gateway.open(ask.call, exchange.made_id)
        stream.on_cut = exchange.abort
        stream.names = (answer_id, exchange.made_id)
        if exchange.given_id is not None:
            stream.names += (exchange.given_id,)
        stream.request_names = () if dialect.names is None else dialect.names(ask)
        head = Head(answer_id, int(created_s), gateway.limits.model, created_s, time.time)
        watcher = asyncio.create_task(self.watch(exchange, stream))
        try:
            answer_by = self.answer_stream if ask.stream else self.answer_plain
            await answer_by(exchange, ask, head, stream)
        finally:
            watcher.cancel()
            stream.close()

    async def read_ask(self, exchange: Exchange, created_s: float) -> Asked:
        gateway = self.gateway
        config = gateway.config
        try:
            if not gateway.is_open:
                raise Refused(unavailable("The server is shutting down."))
            body = await exchange.read_body(config.body_bytes_max, config.body_timeout_s)
            return self.dialect.read(body, gateway.limits, gateway.draw_seed, created_s)
        except (Refused, HttpRefused):
            gateway.context.count("histrio_requests_total", outcome="refused")
            raise

    async def watch(self, exchange: Exchange, stream: Stream) -> None:
        """Closes the call when its client leaves; the reader then finds its stream closed."""
        while (await exchange.receive())["type"] != "http.disconnect":
            pass
        stream.close()

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
        self, exchange: Exchange, ask: Asked, head: Head, stream: Stream
    ) -> None:
        assert self.dialect.stream is not None, f"{self.dialect.path} has no streams"
        rows = await read_rows(stream)
        writer = self.dialect.stream(ask, head, stream.checked)
        content_type = (b"content-type", self.dialect.media)
        await exchange.start(200, (content_type, *STREAM_HEADERS))
        last = b""
        try:
            while rows:
                data = writer.write(rows)
                if stream.is_done:  # the last rows and the end go in one write
                    last = data
                    break
                if data:
                    await exchange.write(data)
                rows = await read_rows(stream)
            last += writer.end(stream.checked)
        except Refused as refused:
            last = writer.fail(refused.problem)
        except Gone:
            raise
        await exchange.write_last(last)
