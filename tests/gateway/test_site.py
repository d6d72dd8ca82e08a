"""The real socket: time limits, bytes that are no HTTP, clients that read slowly or leave."""

from __future__ import annotations

import asyncio
import gc
import socket
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any, TypeVar

import msgspec
import pytest

from actors.gateway.site import Connection, Site
from tests.gateway.street import Street, until_true

T = TypeVar("T")


class Place:
    """A street whose site listens on a real port."""

    def __init__(self, street: Street, site: Site, port: int) -> None:
        self.street = street
        self.site = site
        self.port = port

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await asyncio.open_connection("127.0.0.1", self.port)

    async def until(self, waited: Awaitable[T]) -> T:
        """Runs the back end until `waited` is done."""
        task = asyncio.ensure_future(waited)
        while not task.done():
            await asyncio.sleep(0)
            self.street.back.pump()
        return task.result()

    async def exchange(self, data: bytes) -> bytes:
        """Sends, and reads until the server closes."""
        reader, writer = await self.connect()
        writer.write(data)
        got = await self.until(reader.read())
        writer.close()
        return got

    async def until_true(self, holds: Callable[[], object], *, pump: bool = True) -> None:
        await until_true(holds, self.street.back.pump if pump else bool)

    async def until_idle(self) -> None:
        gateway = self.street.gateway
        await self.until_true(lambda: not gateway.calls.open and not len(gateway.recovery.ledger))


@asynccontextmanager
async def listening(**settings: Any) -> AsyncIterator[Place]:
    street = Street(port=0, **settings)
    site = Site(street.gateway)
    host, port = await site.open()
    assert host == "127.0.0.1" and port
    try:
        yield Place(street, site, port)
    finally:
        await site.close()


def request(body: Any, *, path: str = "/v1/chat/completions", close: bool = True) -> bytes:
    data = body if isinstance(body, bytes) else msgspec.json.encode(body)
    end = "connection: close\r\n" if close else ""
    head = f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-length: {len(data)}\r\n{end}\r\n"
    return head.encode() + data


def chat(text: str, **fields: Any) -> dict[str, Any]:
    return {"model": "M", "messages": [{"role": "user", "content": text}], **fields}


def parts(response: bytes) -> tuple[int, bytes, bytes]:
    """Status, head, body of a response that is not chunked."""
    head, _, body = response.partition(b"\r\n\r\n")
    return int(head.split()[1]), head.lower(), body


def error_of(body: bytes) -> dict[str, Any]:
    error: dict[str, Any] = msgspec.json.decode(body)["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return error


async def test_a_chat_over_a_socket() -> None:
    async with listening() as place:
        status, _, body = parts(await place.exchange(request(chat("one two"))))
        assert status == 200
        assert msgspec.json.decode(body)["choices"][0]["message"]["content"] == "one two"
        got = await place.exchange(request(chat("one two", stream=True)))
        assert b"\r\n\r\n" in got and b"data: [DONE]\n\n\r\n0\r\n\r\n" in got
        assert got.count(b"[DONE]") == 1


async def test_two_requests_share_a_connection() -> None:
    async with listening() as place:
        data = request(chat("a b"), close=False) + request(chat("c d"))
        got = await place.exchange(data)
        assert got.count(b"HTTP/1.1 200") == 2 and got.index(b'"a b"') < got.index(b'"c d"')


# B185
async def test_headers_that_do_not_come_are_refused_and_the_connection_ends() -> None:
    async with listening(header_timeout_s=0.05) as place:
        for sent in (b"", b"POST /v1/chat/comp", b"GET /health HTTP/1.1\r\nx: "):
            status, head, body = parts(await place.exchange(sent))
            assert status == 408 and b"connection: close" in head
            assert error_of(body)["code"] == "request_timeout"


async def test_headers_of_a_second_request_have_the_same_limit() -> None:
    # Long enough for the first one to be sent, even where others have the core meanwhile.
    async with listening(header_timeout_s=1.0, keep_alive_s=60) as place:
        first = b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n"
        got = await place.exchange(first + b"GET /hea")
        assert got.startswith(b"HTTP/1.1 200") and b"HTTP/1.1 408" in got


async def test_a_body_that_does_not_come_is_refused_and_the_connection_ends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("actors.gateway.exchange.LINGER_S", 0.05)
    async with listening(body_timeout_s=0.05) as place:
        head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n\r\n{"
        status, head, body = parts(await place.exchange(head))
        assert status == 408 and b"connection: close" in head
        error_of(body)


async def test_an_idle_connection_ends_after_its_time() -> None:
    async with listening(keep_alive_s=0.05) as place:
        got = await place.exchange(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
        assert got.startswith(b"HTTP/1.1 200")


async def test_nothing_holds_a_connection_that_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[weakref.ref[asyncio.Transport]] = []
    begin = Connection.connection_made

    def connection_made(self: Connection, transport: asyncio.Transport) -> None:
        made.append(weakref.ref(transport))
        begin(self, transport)

    monkeypatch.setattr(Connection, "connection_made", connection_made)
    async with listening(keep_alive_s=3600, header_timeout_s=3600) as place:
        for sent in (request(chat("one")), b"no http\r\n\r\n"):
            await place.exchange(sent)
        await place.until_true(lambda: not place.site.state.connections)
        await asyncio.sleep(0)
        gc.collect()
        assert [ref() for ref in made] == [None, None]


# B183
async def test_a_large_body_is_refused_while_it_is_being_sent() -> None:
    async with listening(body_bytes_max=1000) as place:
        status, _, body = parts(await place.exchange(request(b"x" * 2_000_000)))
        assert status == 413
        error_of(body)


async def test_bytes_that_are_no_http_get_the_error_object() -> None:
    async with listening() as place:
        for sent in (b"\x80\x04\x95 pickle\r\n\r\n", b"GET / HTTP/9.9.9\r\n\r\n"):
            status, _, body = parts(await place.exchange(sent))
            assert status == 400
            error_of(body)


async def test_headers_without_end_are_refused() -> None:
    async with listening() as place:
        got = await place.exchange(b"GET / HTTP/1.1\r\n" + b"x: y\r\n" * 20_000)
        assert parts(got)[0] == 400


# B023, B025
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("how", ["close", "abort", "half"])
async def test_a_client_that_hangs_up_has_its_request_cancelled(stream: bool, how: str) -> None:
    async with listening() as place:
        place.street.back.mute = True
        reader, writer = await place.connect()
        writer.write(request(chat("one two", stream=stream), close=False))
        await place.until_true(lambda: place.street.gateway.calls.open, pump=False)
        place.street.back.pump()
        if how == "half":
            writer.write_eof()
        elif how == "abort":
            writer.transport.abort()
        else:
            writer.close()
        await place.until_true(lambda: not place.street.gateway.calls.open, pump=False)
        place.street.back.pump()
        assert len(place.street.back.cancelled) == 1
        writer.close()
        del reader


async def test_a_client_that_hangs_up_at_once_leaves_nothing() -> None:
    async with listening() as place:
        for i in range(30):
            _, writer = await place.connect()
            writer.write(request(chat("one two three", stream=i % 2 == 0), close=False))
            await writer.drain()
            for _ in range(i):
                await asyncio.sleep(0)
            writer.transport.abort()
        state = place.site.state
        await place.until_true(lambda: not state.tasks and not state.connections)
        await place.until_idle()
        place.street.back.pump()
        assert not place.street.gateway.calls.streams


# B027
async def test_a_client_that_does_not_read_is_cut_and_its_connection_ends() -> None:
    async with listening(stream_bytes_max=20_000) as place:
        reader, writer = await place.connect()
        transport = writer.transport
        transport.pause_reading()  # type: ignore[attr-defined]
        transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        word = "x" * 20_000
        text = " ".join([word] * 60)
        writer.write(request(chat(text, stream=True), close=False))
        await place.until_true(lambda: "histrio_streams_cut_total" in place.street.cell.counters)
        await place.until_true(lambda: not place.site.state.connections)
        await place.until_idle()
        writer.close()
        del reader


async def test_a_taken_port_is_named() -> None:
    async with listening() as place:
        other = Street(port=place.port)
        with pytest.raises(OSError, match=f"cannot listen on 127.0.0.1:{place.port}"):
            await Site(other.gateway).open()


async def test_after_close_the_port_is_free_and_open_streams_have_ended() -> None:
    async with listening() as place:
        place.street.back.mute = True
        reader, writer = await place.connect()
        writer.write(request(chat("one two", stream=True), close=False))
        await place.until_true(lambda: place.street.gateway.calls.open, pump=False)
        place.street.cell.stop()
        await place.site.close()
        status, _, body = parts(await reader.read())
        assert status == 503
        error_of(body)
        writer.close()
        again = Site(Street(port=place.port).gateway)
        assert (await again.open())[1] == place.port
        await again.close()


async def test_a_response_in_two_writes_does_not_wait_for_an_acknowledgement() -> None:
    async with listening() as place:
        _, writer = await place.connect()
        await place.until_true(lambda: place.site.state.connections)
        (connection,) = place.site.state.connections
        own = connection.transport.get_extra_info("socket")
        assert own.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
        writer.close()
        await writer.wait_closed()
