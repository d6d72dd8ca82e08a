"""This file is one HTTP exchange: a body in within its limits, one response out.

It does not know routes nor what anything means. Laws: a client that does not read, or does not
send, keeps nothing longer than the settings say; a refusal of a body that is still coming can be
read.
"""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Awaitable, Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import msgspec
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from actors.gateway.call import Row
from actors.gateway.errors import Answer, Refused, answer_http, is_anthropic, voiced
from messages.types import Problem

if TYPE_CHECKING:
    from actors.gateway.stream import Stream

JSON = b"application/json"
STREAM_HEADERS = (
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # proxies shall pass events on at once
)
SSE_HEADERS = ((b"content-type", b"text/event-stream; charset=utf-8"), *STREAM_HEADERS)
# After a refusal of a body that is still being sent: how much is read and thrown away, so that the
# client gets to read the refusal instead of a reset.
LINGER_S = 2.0
LINGER_BYTES = 16 << 20


class HttpRefused(Exception):
    """A refusal that HTTP itself makes."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.answer = answer_http(status, message)


class Gone(Exception):
    """The client has left; nobody reads an answer."""


def usable_id(given: str) -> str | None:
    """What a client calls its request, where that can be said back and logged."""
    return given if 0 < len(given) <= 128 and given.isascii() and given.isprintable() else None


class Exchange:
    """One HTTP request and its response."""

    def __init__(
        self, scope: Scope, receive: Receive, send: Send, made_id: str, stall_s: float
    ) -> None:
        self.stall_s = stall_s
        self.scope = scope
        self.receive = receive
        self._send = send
        self.made_id = made_id  # ours, also the id of the call
        self.given_id = usable_id(self.header(b"x-request-id") or "")
        self.status: int | None = None
        self.extra_headers: tuple[tuple[bytes, bytes], ...] = ()  # of every response
        self.is_body_read = scope["method"] in ("GET", "HEAD")
        # What ends a stream of events that has begun, where the server fails.
        self.fail: Callable[[Problem], bytes] | None = None

    def header(self, name: bytes) -> str | None:
        for key, value in self.scope["headers"]:
            if key == name:
                text: str = value.decode("latin-1")
                return text
        return None

    def abort(self) -> None:
        """Ends the connection at once, whatever is still in its buffers."""
        abort(self.scope)

    async def send(self, message: Message) -> None:
        """What the routes send by: adds the request id, and remembers the status."""
        if message["type"] == "http.response.start":
            self.status = message["status"]
            request_id = self.given_id or self.made_id
            message["headers"] = [
                *message["headers"],
                (b"x-request-id", request_id.encode()),
                *self.extra_headers,
            ]
            if is_anthropic(self.scope["path"]):
                message["headers"].append((b"request-id", request_id.encode()))
        await self._send(message)

    async def start(self, status: int, headers: Iterable[tuple[bytes, bytes]]) -> None:
        await self.bounded(
            self.send({"type": "http.response.start", "status": status, "headers": list(headers)})
        )

    @property
    def piece(self) -> Callable[[bytes], bool] | None:
        """Writes part of a chunked body at once; False: the client is slow. None: no such way."""
        if self.scope.get("http_version") != "1.1":
            return None
        found: Callable[[bytes], bool] | None = self.scope.get("state", {}).get("piece")
        return found

    async def write(self, body: bytes) -> None:
        """Part of a body. It waits for a slow client; the gateway looks after its stream."""
        await self._send({"type": "http.response.body", "body": body, "more_body": True})

    async def write_last(self, body: bytes) -> None:
        await self.bounded(
            self._send({"type": "http.response.body", "body": body, "more_body": False})
        )

    async def bounded(self, sending: Awaitable[None]) -> None:
        """Ends the connection of a client that does not read."""
        try:
            async with asyncio.timeout(self.stall_s):
                await sending
        except TimeoutError:
            self.abort()

    async def respond(
        self, status: int, body: bytes, headers: tuple[tuple[bytes, bytes], ...] = ()
    ) -> None:
        """A whole JSON response. With the request's body still coming, the connection ends."""
        if status >= 400:
            status, body = voiced(self.scope["path"], status, body)
        base = ((b"content-type", JSON), (b"content-length", str(len(body)).encode()))
        if self.is_body_read:
            await self.start(status, (*base, *headers))
            await self.write_last(body)
            return
        await self.start(status, (*base, *headers, (b"connection", b"close")))
        await self.write(body)
        await self.linger()
        await self.write_last(b"")

    async def refuse(self, refusal: Answer) -> None:
        headers: tuple[tuple[bytes, bytes], ...] = ()
        if refusal.retry_after_s is not None:
            headers = ((b"retry-after", str(refusal.retry_after_s).encode()),)
        await self.respond(refusal.status, refusal.body, headers)

    async def read_body(
        self, bytes_max: int, timeout_s: float, *, media: str = "application/json"
    ) -> bytes:
        """The whole body. Raises HttpRefused (413, 415, 408), Gone."""
        encoding = self.header(b"content-encoding")
        if encoding is not None and encoding.lower() != "identity":
            raise HttpRefused(415, "Encoded bodies are not accepted.")
        given = (self.header(b"content-type") or "application/json").partition(";")[0].strip()
        is_json = media == "application/json" and given.lower().endswith("+json")
        if given.lower() != media and not is_json:
            kind = "JSON" if media == "application/json" else "a form"
            raise HttpRefused(400, f"The body must be {kind} (`Content-Type: {media}`).")
        length = self.header(b"content-length") or ""
        too_large = f"The body is larger than {bytes_max} bytes."
        if length.isdigit() and int(length[:20]) > bytes_max:
            raise HttpRefused(413, too_large)
        chunks = []
        total = 0
        try:
            async with asyncio.timeout(timeout_s):
                while True:
                    message = await self.receive()
                    if message["type"] == "http.disconnect":
                        raise Gone
                    chunk = message.get("body", b"")
                    total += len(chunk)
                    if total > bytes_max:
                        raise HttpRefused(413, too_large)
                    chunks.append(chunk)
                    if not message.get("more_body", False):
                        self.is_body_read = True
                        return b"".join(chunks)
        except TimeoutError:
            message_text = f"The body did not arrive within {timeout_s:g} seconds."
            raise HttpRefused(408, message_text) from None

    async def linger(self) -> None:
        """Throws away what the client still sends, within bounds."""
        total = 0
        try:
            async with asyncio.timeout(LINGER_S):
                while total < LINGER_BYTES:
                    message = await self.receive()
                    total += len(message.get("body", b""))
                    if message["type"] == "http.disconnect" or not message.get("more_body"):
                        return
        except TimeoutError:
            return


def abort(scope: Scope) -> None:
    """Ends the request's connection, where the server knows how."""
    found = scope.get("state", {}).get("abort")
    if found is not None:
        found()


def json_response(value: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    body = msgspec.json.encode(value)
    return Response(body, status, headers, media_type="application/json")


@contextmanager
def uncollected() -> Iterator[None]:
    """For the reading of a body: values of JSON are no garbage in circles, and the collector, which
    looks at all objects of the process whenever some thousand have come, takes several times as
    long as the reading itself. Nothing may be awaited within."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


async def read_rows(stream: Stream) -> list[Row]:
    """The next rows. Raises Refused when the call failed, Gone when the client has left."""
    while (rows := await read_news(stream)) is None:
        pass
    return rows


async def read_news(stream: Stream) -> list[Row] | None:
    """The same, but None where the client should get a sign of life."""
    try:
        return await stream.news()
    except Refused:
        if stream.is_closed:
            raise Gone from None
        raise
