"""The bench's HTTP client: any split of a response gives the same body, and a cut is noticed."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.client import CUT, Client, Response

EVENTS = (
    b'data: {"choices":[{"text":"a"}]}\n\n'
    b': a comment\n\ndata: {"choices":[{"delta":{"content":"\xc3\xa9"}}]}\n\n'
    b'data: {"choices":[{"finish_reason":"length"}]}\n\n'
    b'data: {"choices":[],"usage":{"prompt_tokens":3,"completion_tokens":2}}\n\n'
    b"data: [DONE]\n\n"
)


def chunked(body: bytes, sizes: list[int]) -> bytes:
    out, at = b"", 0
    for size in [*sizes, len(body)]:
        part = body[at : at + size]
        at += len(part)
        out += b"%x\r\n%s\r\n" % (len(part), part) if part else b""
    return out + b"0\r\n\r\n"


def head(*lines: bytes) -> bytes:
    return b"\r\n".join((b"HTTP/1.1 200 OK", *lines, b"", b""))


@given(
    st.binary(max_size=200),
    st.lists(st.integers(1, 40), max_size=8),
    st.lists(st.integers(1, 30), max_size=40),
)
def test_any_split_of_a_chunked_body_gives_the_body(
    body: bytes, chunks: list[int], splits: list[int]
) -> None:
    wire = head(b"Transfer-Encoding: chunked") + chunked(body, chunks)
    response, found, at = Response(), b"", 0
    for size in [*splits, len(wire)]:
        found += response.feed(wire[at : at + size])
        at += size
        if at >= len(wire):
            break
    assert found == body
    assert response.complete
    assert response.status == 200


@given(st.binary(max_size=60), st.integers(1, 20))
def test_any_split_of_a_body_with_a_length_gives_the_body(body: bytes, size: int) -> None:
    wire = head(b"content-length: %d" % len(body)) + body
    response = Response()
    parts = [response.feed(wire[at : at + size]) for at in range(0, len(wire), size)]
    assert b"".join(parts) == body
    assert response.complete


@pytest.mark.parametrize("wire", [b"SSH-2.0-x\r\n\r\n", b"\r\n\r\n", b"HTTP/1.1 abc\r\n\r\n"])
def test_what_is_not_http_is_an_error(wire: bytes) -> None:
    with pytest.raises(ValueError, match=r".+"):
        Response().feed(wire)


@contextlib.asynccontextmanager
async def answering(*parts: bytes) -> AsyncIterator[tuple[str, list[bytes]]]:
    """A server that takes one request a connection, writes `parts`, and closes."""
    heard: list[bytes] = []

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        request = await reader.readuntil(b"\r\n\r\n")
        length = next(
            int(line.split(b":")[1])
            for line in request.split(b"\r\n")
            if line.lower().startswith(b"content-length")
        )
        heard.append(request + await reader.readexactly(length))
        for part in parts:
            writer.write(part)
            await writer.drain()
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    host, port = server.sockets[0].getsockname()
    try:
        yield f"http://{host}:{port}/v1", heard
    finally:
        server.close()
        await server.wait_closed()


async def test_a_stream_is_read_to_its_end() -> None:
    answer = head(b"Content-Type: text/event-stream", b"Transfer-Encoding: chunked")
    async with answering(answer, chunked(EVENTS, [7, 50])) as (url, heard):
        outcome = await Client(url).stream("/v1/completions", {"prompt": "x"})
    assert outcome.error is None
    assert outcome.text == "aé"
    assert (outcome.prompt_tokens, outcome.completion_tokens) == (3, 2)
    assert outcome.finish == "length"
    assert len(outcome.arrivals_s) == 2
    # A base address that ends in /v1 is not doubled.
    assert heard[0].startswith(b"POST /v1/completions HTTP/1.1\r\n")
    assert msgspec.json.decode(heard[0].partition(b"\r\n\r\n")[2]) == {"prompt": "x"}


async def test_a_stream_that_is_cut_is_an_error() -> None:
    answer = head(b"Content-Type: text/event-stream", b"Content-Length: 10000")
    async with answering(answer, EVENTS) as (url, _):
        outcome = await Client(url).stream("/v1/completions", {})
    assert outcome.error == CUT


async def test_a_chunked_stream_without_its_last_chunk_was_cut_after_the_event_that_came() -> None:
    answer = head(b"Content-Type: text/event-stream", b"Transfer-Encoding: chunked")
    events = b'id: 1.a\ndata: {"choices":[{"text":"x"}]}\n\nid: 1.b\ndata: {"choices"'
    async with answering(answer, b"%x\r\n%s\r\n" % (len(events), events)) as (url, heard):
        headers = {"Last-Event-ID": "1.z"}
        outcome = await Client(url).stream("/v1/completions", {}, headers=headers)
    assert (outcome.error, outcome.text, outcome.event_id) == (CUT, "x", "1.a")
    assert b"\r\nLast-Event-ID: 1.z\r\n" in heard[0]


async def test_an_error_status_is_an_error_with_its_text() -> None:
    answer = b"HTTP/1.1 503 Busy\r\nContent-Length: 4\r\n\r\nbusy"
    async with answering(answer) as (url, _):
        outcome = await Client(url).stream("/v1/completions", {})
    assert outcome.error == "status 503: busy"


async def test_an_error_within_a_stream_is_an_error() -> None:
    event = b'data: {"error":{"message":"gone"}}\n\n'
    answer = head(b"Content-Type: text/event-stream", b"Content-Length: %d" % len(event))
    async with answering(answer, event) as (url, _):
        outcome = await Client(url).stream("/v1/completions", {})
    assert outcome.error is not None
    assert "gone" in outcome.error


async def test_nobody_there_is_an_error() -> None:
    async with answering() as (url, _):
        pass
    outcome = await Client(url).stream("/v1/completions", {})
    assert outcome.error is not None
    assert outcome.error.startswith("no connection")
