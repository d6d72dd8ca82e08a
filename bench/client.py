"""This file is an HTTP client that costs little: it shares the cores with the server it measures.

It knows HTTP/1.1 and server-sent events as far as an OpenAI-compatible server uses them: one
request a connection, a body that is chunked, has a length, or ends with the connection. It does not
know what is measured; it notes when things arrive.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable, Mapping
from typing import NamedTuple
from urllib.parse import SplitResult, urlsplit

import msgspec


class Delta(msgspec.Struct, gc=False):
    content: str | None = None


class Logprobs(msgspec.Struct, gc=False):
    token_logprobs: list[float | None] = []  # of completions


class Choice(msgspec.Struct, gc=False):
    index: int = 0
    text: str | None = None
    delta: Delta | None = None
    finish_reason: str | None = None
    token_ids: list[int] | None = None  # with `return_token_ids`
    logprobs: Logprobs | None = None


class Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0


class Chunk(msgspec.Struct):
    choices: list[Choice] = []
    usage: Usage | None = None
    error: msgspec.Raw = msgspec.Raw()


CUT = "the connection was cut"
DECODER = msgspec.json.Decoder(Chunk)


class Said(NamedTuple):
    """What one choice of a request has come to."""

    ids: tuple[int, ...] = ()
    text: str = ""
    finish: str | None = None
    logprobs: tuple[float | None, ...] = ()

    def then(self, more: Said) -> Said:
        """With what the next event or connection brings."""
        return Said(
            self.ids + more.ids,
            self.text + more.text,
            more.finish or self.finish,
            self.logprobs + more.logprobs,
        )


class Outcome(NamedTuple):
    """What became of one request. Times are of the loop's clock."""

    sent_s: float
    arrivals_s: tuple[float, ...]  # of each event that carried text
    done_s: float
    text: str = ""
    prompt_tokens: int = 0
    completion_tokens: int = 0
    finish: str | None = None
    error: str | None = None
    choices: tuple[Choice, ...] = ()  # of its events, in order
    status: int = 0
    headers: Mapping[bytes, bytes] = {}
    event_id: str = ""  # the last, to come back with

    @property
    def ids(self) -> tuple[int, ...]:
        """Of all choices, as they came."""
        return tuple(token for choice in self.choices for token in choice.token_ids or ())

    def said(self) -> dict[int, Said]:
        """By choice."""
        found: dict[int, Said] = {}
        for choice in self.choices:
            logprobs = choice.logprobs.token_logprobs if choice.logprobs else ()
            more = Said(
                tuple(choice.token_ids or ()),
                choice.text or (choice.delta.content if choice.delta else None) or "",
                choice.finish_reason,
                tuple(logprobs),
            )
            found[choice.index] = found.get(choice.index, Said()).then(more)
        return found


class Response:
    """Takes bytes of a response, gives those of its body. Pure: no socket in sight."""

    def __init__(self) -> None:
        self.status = 0
        self.headers: dict[bytes, bytes] = {}
        self.complete = False
        self._buffer = b""
        self._left: int | None = None  # of the body or of the chunk; None: until the end
        self._chunked = False

    def feed(self, data: bytes) -> bytes:
        """Returns the part of the body that has become known. Raises ValueError: not HTTP."""
        self._buffer += data
        if not self.status and not self._feed_head():
            return b""
        if self._chunked:
            return self._feed_chunks()
        found, self._buffer = self._buffer, b""
        if self._left is not None:
            self._left -= len(found)
            self.complete = self._left <= 0
        return found

    def _feed_head(self) -> bool:
        head, mark, rest = self._buffer.partition(b"\r\n\r\n")
        if not mark:
            return False
        first, *lines = head.split(b"\r\n")
        words = first.split(b" ", 2)
        if len(words) < 2 or not words[0].startswith(b"HTTP/1."):
            raise ValueError("not an HTTP/1.1 response")
        self.status = int(words[1])
        for line in lines:
            name, _, value = line.partition(b":")
            self.headers[name.strip().lower()] = value.strip()
        self._chunked = b"chunked" in self.headers.get(b"transfer-encoding", b"")
        if b"content-length" in self.headers:
            self._left = int(self.headers[b"content-length"])
        self.complete = self._left == 0 and not self._chunked
        self._buffer = rest
        return True

    def _feed_chunks(self) -> bytes:
        found = []
        while self._buffer:
            if self._left is None:
                line, mark, rest = self._buffer.partition(b"\r\n")
                if not mark:
                    break
                self._left, self._buffer = int(line.split(b";")[0], 16), rest
                if self._left == 0:
                    self.complete = True
                    break
            if len(self._buffer) < self._left + 2:  # with the line end that follows
                break
            found.append(self._buffer[: self._left])
            self._buffer = self._buffer[self._left + 2 :]
            self._left = None
        return b"".join(found)


class Connection(asyncio.Protocol):
    """One request on one connection. `done` is set when the response has ended, or cannot."""

    def __init__(self, head: bytes, body: bytes) -> None:
        loop = asyncio.get_running_loop()
        self.now = loop.time
        self.done: asyncio.Future[None] = loop.create_future()
        self.request = head + body
        self.response = Response()
        self.sent_s = 0.0
        self.arrivals_s: list[float] = []
        self.texts: list[str] = []
        self.choices: list[Choice] = []
        self.ids_len = 0
        self.heard: Callable[[Connection], None] | None = None  # after each event
        self.usage = Usage()
        self.finish: str | None = None
        self.error: str | None = None
        self.event_id = ""  # of the last event that carried one, to come back with
        self.body = b""
        self.transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        transport.write(self.request)

    def data_received(self, data: bytes) -> None:
        try:
            self.body += self.response.feed(data)
            if self.response.headers.get(b"content-type", b"").startswith(b"text/event-stream"):
                self._take_events()
        except (ValueError, msgspec.MsgspecError) as error:
            self._end(f"unreadable response: {error}")
            return
        if self.response.complete:
            self._end(None)

    def connection_lost(self, exc: Exception | None) -> None:
        # A body without a length ends so; any other was cut.
        headers = self.response.headers
        whole = self.response.status and not (
            b"content-length" in headers or b"transfer-encoding" in headers
        )
        self._end(None if whole and exc is None else CUT)

    def _take_events(self) -> None:
        *events, self.body = self.body.replace(b"\r\n", b"\n").split(b"\n\n")
        for event in events:
            for line in event.split(b"\n"):
                if line.startswith(b"id:"):
                    self.event_id = line[3:].strip().decode("ascii")
                elif line.startswith(b"data:") and line[5:].strip() != b"[DONE]":
                    self._take_chunk(DECODER.decode(line[5:]))

    def _take_chunk(self, chunk: Chunk) -> None:
        if bytes(chunk.error) not in (b"", b"null"):
            self.error = bytes(chunk.error).decode("utf-8", "replace")
        if chunk.usage is not None:
            self.usage = chunk.usage
        for choice in chunk.choices:
            text = choice.text or (choice.delta.content if choice.delta else None)
            if text:
                self.arrivals_s.append(self.now())
                self.texts.append(text)
            self.ids_len += len(choice.token_ids or ())
            self.finish = choice.finish_reason or self.finish
        self.choices += chunk.choices
        if self.heard is not None:
            self.heard(self)

    def _end(self, error: str | None) -> None:
        if self.done.done():
            return
        self.error = self.error or error
        if self.transport is not None:
            self.transport.close()
        self.done.set_result(None)


class Client:
    """Sends requests to one server."""

    def __init__(self, url: str, *, key: str = "", timeout_s: float = 600.0) -> None:
        self.url: SplitResult = urlsplit(url if "//" in url else f"http://{url}")
        self.key = key
        self.timeout_s = timeout_s
        # The address of a server may be given with or without its `/v1`.
        self.base = self.url.path.rstrip("/").removesuffix("/v1")

    async def stream(
        self,
        path: str,
        body: dict[str, object],
        heard: Callable[[Connection], None] | None = None,
        headers: Mapping[str, str] = {},
    ) -> Outcome:
        """POSTs `body` and reads events to the end. Never raises for what the server does. `heard`
        is called after each event."""
        content = msgspec.json.encode(body)
        sent_s = asyncio.get_running_loop().time()
        connection: Connection | None = None
        error = None
        try:
            async with asyncio.timeout(self.timeout_s):
                connection = await self._open("POST", path, content, headers)
                connection.heard = heard
                await connection.done
        except TimeoutError:
            error = f"not through within {self.timeout_s:g} s"
        except OSError as failure:
            error = f"no connection: {failure.strerror or failure}"
        done_s = asyncio.get_running_loop().time()
        if connection is None:
            return Outcome(sent_s, (), done_s, error=error)
        if connection.transport is not None:
            connection.transport.close()
        error = error or connection.error
        if connection.response.status != 200 and error is None:
            shown = connection.body[:300].decode("utf-8", "replace")
            error = f"status {connection.response.status}: {shown}"
        return Outcome(
            sent_s,
            tuple(connection.arrivals_s),
            done_s,
            "".join(connection.texts),
            connection.usage.prompt_tokens,
            connection.usage.completion_tokens,
            connection.finish,
            error,
            tuple(connection.choices),
            connection.response.status,
            connection.response.headers,
            connection.event_id,
        )

    async def get(self, path: str) -> tuple[int, bytes]:
        """Status and body. Raises OSError: nobody there; TimeoutError; ValueError: not HTTP."""
        async with asyncio.timeout(self.timeout_s):
            connection = await self._open("GET", path, b"")
            await connection.done
        if connection.error:
            raise ValueError(connection.error)
        return connection.response.status, connection.body

    async def _open(
        self, method: str, path: str, content: bytes, headers: Mapping[str, str] = {}
    ) -> Connection:
        host = self.url.hostname or "127.0.0.1"
        secure = self.url.scheme == "https"
        port = self.url.port or (443 if secure else 80)
        head = f"{method} {self.base}{path} HTTP/1.1\r\nHost: {self.url.netloc}\r\n"
        head += f"Content-Type: application/json\r\nContent-Length: {len(content)}\r\n"
        head += f"Authorization: Bearer {self.key}\r\n" if self.key else ""
        head += "".join(f"{name}: {value}\r\n" for name, value in headers.items())
        head += "Connection: close\r\n\r\n"
        loop = asyncio.get_running_loop()
        _, connection = await loop.create_connection(
            lambda: Connection(head.encode("latin-1"), content),
            host,
            port,
            ssl=ssl.create_default_context() if secure else None,
        )
        return connection
