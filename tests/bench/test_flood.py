"""The client that floods: any split of an answer counts the same, a request has one outcome."""

from __future__ import annotations

import asyncio
import socket

from hypothesis import example, given
from hypothesis import strategies as st

from bench.flood import Answer, Flood, Wave, Wire, post

EVENTS = [b'data: {"choices":[{"text":"a0"}]}\n\n', b"data: {}\n\n", b"data: [DONE]\n\n"]
STREAM = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
STREAM += b"".join(b"%x\r\n%b\r\n" % (len(event), event) for event in EVENTS) + b"0\r\n\r\n"
REFUSAL = b"HTTP/1.1 503 Busy\r\nretry-after: 1\r\ncontent-length: 2\r\n\r\n{}"


def read_split(data: bytes, sizes: list[int]) -> Answer:
    with socket.socket() as sock:
        wire = Wire(sock)
        answer = Answer(0.0, 0.0, None, None, 0, 0, False, False)
        wire.ask(b"", answer)
        at, ends = 0, False
        for size in [*sizes, len(data)]:
            if part := data[at : at + size]:
                assert not ends, "an end before the end"
                ends = wire.feed(part, 1.0)
            at += size
        assert ends
    return answer


@given(st.lists(st.integers(1, 30), max_size=40))
@example([1, 1, 1, 1, 1, 1, 1, 1, 25, 30, 30, 30, 30, 1, 1])  # the last chunk begins a read
def test_any_split_of_an_answer_is_read_the_same(sizes: list[int]) -> None:
    stream = read_split(STREAM, sizes)
    assert (stream.status, stream.events, stream.is_whole) == (200, 3, True)
    refusal = read_split(REFUSAL, sizes)
    assert (refusal.status, refusal.retries, refusal.is_whole) == (503, True, True)


async def test_each_request_has_its_outcome_and_connections_are_used_again() -> None:
    answers = [STREAM, REFUSAL, b""]  # the last: the connection is cut
    accepted = asked = 0

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal accepted, asked
        accepted += 1
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                await reader.readexactly(int(head.split(b"Content-Length: ")[1].split()[0]))
                answer = answers[asked % 3]
                asked += 1
                if not answer:
                    break
                writer.write(answer)
        except asyncio.IncompleteReadError:
            pass
        writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        wave = Wave(
            port=port, requests=[post("/", {"a": 1})], seconds=60.0, clients=1, requests_max=9
        )
        found = await asyncio.to_thread(Flood(wave).run)
    assert [answer.status for answer in found.answers] == [200, 503, 0] * 3
    assert [answer.done_s is not None for answer in found.answers] == [True, True, False] * 3
    assert accepted == 3 and len(found.late_s) == 9
