"""Requests that are refused without reading all of HTTP: none is taken for another than it is."""

from __future__ import annotations

import h11
import pytest
from hypothesis import given
from hypothesis import strategies as st

from actors.gateway.plain import read_plain

PATH = b"/v1/completions"
PATHS = frozenset({PATH})
BODY = b'{"prompt": "\r\n\r\n"}'
HEAD = b"Host: x\r\nX-Request-Id:  mine \r\nContent-Length: %d\r\n" % len(BODY)


def post(more: bytes = b"", first: bytes = b"POST /v1/completions HTTP/1.1") -> bytes:
    return first + b"\r\n" + HEAD + more + b"\r\n" + BODY


def test_a_request_that_has_come_as_a_whole_is_read() -> None:
    found = read_plain(post(), PATHS)
    assert found is not None
    assert (found.path, found.headers[b"x-request-id"], found.closes) == (
        "/v1/completions",
        b"mine",
        False,
    )
    closing = read_plain(post(b"Connection: Close\r\n"), PATHS)
    assert closing is not None and closing.closes


@pytest.mark.parametrize(
    "data",
    [
        post(first=b"GET /v1/completions HTTP/1.1"),
        post(first=b"POST /v1/completions HTTP/1.0"),
        post(first=b"POST /v1/completions?a=b HTTP/1.1"),
        post(first=b"POST  /v1/completions HTTP/1.1"),
        post(first=b"POST /v1/other HTTP/1.1"),
        post().replace(b"Host: x\r\n", b""),
        post(b"Host: y\r\n"),
        post(b"Content-Length: 1\r\n"),
        post(b"Transfer-Encoding: chunked\r\n"),
        post(b"Expect: 100-continue\r\n"),
        post(b"Upgrade: h2c\r\n"),
        post(b"Connection: upgrade\r\n"),
        post(b"Origin: https://x\r\n"),
        post(b"Last-Event-ID: x\r\n"),
        post(b"X: a\nTransfer-Encoding: chunked\r\n"),
        post(b"X: a\r folded\r\n"),
        post(b" folded: a\r\n"),
        post(b"Transfer-Encoding : chunked\r\n"),
        post(b"X: \x00\r\n"),
        post(b"no colon\r\n"),
        post(b": no name\r\n"),
        post(b"Many: " + b"x" * 10_000 + b"\r\n"),
        post().replace(b"Length: 1", b"Length: +1"),
        post().replace(b"Length: 1", b"Length: -1"),
    ],
)
def test_what_is_not_plain_is_left_to_who_reads_all_of_http(data: bytes) -> None:
    assert read_plain(data, PATHS) is None


@given(st.integers(0, len(post()) - 1), st.binary(min_size=1, max_size=20))
def test_neither_a_part_of_a_request_nor_one_with_more_behind_it_is_plain(
    size: int, more: bytes
) -> None:
    assert read_plain(post()[:size], PATHS) is None
    assert read_plain(post() + more, PATHS) is None


NAMES = st.sampled_from(
    [b"A", b"x-request-id", b"Authorization", b"content-length", b"transfer-encoding", b"b c", b""]
)
VALUES = st.one_of(
    st.sampled_from([b"", b"0", b"4", b"chunked", b"x\ny: z", b"a\tb"]), st.binary(max_size=6)
)


@given(st.lists(st.tuples(NAMES, VALUES), max_size=5))
def test_what_is_plain_is_the_same_to_a_reader_of_all_of_http(
    lines: list[tuple[bytes, bytes]],
) -> None:
    data = post(b"".join(b"%b:%b\r\n" % line for line in lines))
    found = read_plain(data, PATHS)
    if found is None:
        return
    reader = h11.Connection(h11.SERVER)
    reader.receive_data(data)
    request = reader.next_event()
    assert isinstance(request, h11.Request)
    assert request.target == PATH
    assert dict(request.headers) == found.headers
    body = reader.next_event()
    assert isinstance(body, h11.Data) and bytes(body.data) == BODY
    assert isinstance(reader.next_event(), h11.EndOfMessage)
    assert reader.trailing_data == (b"", False)
