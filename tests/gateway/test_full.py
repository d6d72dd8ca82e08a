"""A full house over a real socket: who is turned away costs nothing, and is told to come again."""

from __future__ import annotations

import asyncio
import errno
import socket

import pytest

from tests.gateway.street import Client
from tests.gateway.test_site import Place, chat, error_of, listening, parts, request

PATHS = ("/v1/chat/completions", "/v1/messages", "/generate")


def ask(path: str = PATHS[0], *, close: bool = False, more: str = "") -> bytes:
    data = request(chat("one two"), path=path, close=close)
    return data.replace(b"\r\n\r\n", b"\r\n" + more.encode() + b"\r\n", 1)


async def fill(place: Place) -> Client:
    """Takes the one place that there is, until the back end goes on."""
    place.street.back.paused = True
    holder = place.street.completion("a b c")
    await place.until_true(lambda: place.street.gateway.calls.is_full)
    return holder


async def answer_to(
    place: Place, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *pieces: bytes
) -> tuple[int, bytes, bytes]:
    """Of a request that comes in these pieces."""
    for piece in pieces:
        writer.write(piece)
        for _ in range(20):
            await asyncio.sleep(0)
    head = await place.until(reader.readuntil(b"\r\n\r\n"))
    length = int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0])
    return parts(head + await place.until(reader.readexactly(length)))


async def test_who_is_turned_away_keeps_the_connection_and_is_served_on_it_later() -> None:
    async with listening(places=1) as place:
        holder = await fill(place)
        reader, writer = await place.connect()
        for _ in range(3):
            status, head, body = await answer_to(place, reader, writer, ask())
            assert status == 503 and b"\r\nretry-after: 1\r\n" in head
            assert error_of(body)["code"] == "overloaded"
        place.street.back.paused = False
        await place.street.finish(holder)
        status, _, _ = await answer_to(place, reader, writer, ask())
        assert status == 200
        writer.close()
        await place.until_idle()


@pytest.mark.parametrize("path", PATHS)
async def test_the_answer_is_the_one_of_the_ordinary_way(path: str) -> None:
    """Which a request takes whose bytes do not come at once."""
    async with listening(places=1) as place:
        holder = await fill(place)
        data = ask(path, more="x-request-id: mine\r\n")
        reader, writer = await place.connect()
        quick = await answer_to(place, reader, writer, data)
        writer.write(data[:30])
        connection = place.site.state.connections.copy().pop()
        await place.until_true(lambda: connection.conn.trailing_data[0], pump=False)
        slow = await answer_to(place, reader, writer, data[30:])
        writer.close()
        place.street.back.paused = False
        await place.street.finish(holder)
    assert (quick[0], quick[2]) == (slow[0], slow[2])
    assert set(quick[1].split(b"\r\n")) == set(slow[1].split(b"\r\n"))
    assert b"\r\nx-request-id: mine" in quick[1]


async def test_who_has_said_it_all_when_the_connection_is_made_never_gets_one() -> None:
    async with listening(places=1) as place:
        holder = await fill(place)
        with socket.create_connection(("127.0.0.1", place.port)) as sock:
            sock.sendall(ask(close=True))
            made = len(place.site.state.connections)
            reader, writer = await asyncio.open_connection(sock=sock)
            status, head, body = parts(await place.until(reader.read()))
            writer.close()
        assert status == 503 and b"\r\nconnection: close" in head
        assert error_of(body)["code"] == "overloaded"
        assert len(place.site.state.connections) == made == 0
        place.street.back.paused = False
        await place.street.finish(holder)


async def test_without_room_for_another_file_the_next_come_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("actors.gateway.site.RETRY_S", 0.01)
    async with listening() as place:
        listener = place.site.listener
        assert listener is not None
        failures = [OSError(errno.EMFILE, "too many"), OSError(errno.ENFILE, "too many")]

        class Bound:
            """Fails a few times."""

            def accept(self) -> tuple[socket.socket, object]:
                if failures:
                    raise failures.pop()
                return bound.accept()

            def fileno(self) -> int:
                return bound.fileno()

            def close(self) -> None:
                bound.close()

        bound = listener.bound
        monkeypatch.setattr(listener, "bound", Bound())
        assert parts(await place.exchange(request(chat("one two"))))[0] == 200
        assert not failures


async def test_the_connection_ends_where_the_client_says_so() -> None:
    async with listening(places=1) as place:
        holder = await fill(place)
        status, head, _ = parts(await place.exchange(ask(close=True)))
        assert status == 503 and b"\r\nconnection: close" in head
        place.street.back.paused = False
        await place.street.finish(holder)


async def test_who_has_no_key_is_not_told_that_the_house_is_full(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("HISTRIO_API_KEYS", "secret")
    async with listening(places=1) as place:
        holder = await fill(place)
        reader, writer = await place.connect()
        given = ask(more="authorization: Bearer secret\r\n")
        assert (await answer_to(place, reader, writer, given))[0] == 503
        writer.close()
        for more in ("", "authorization: Bearer other\r\n"):
            assert parts(await place.exchange(ask(close=True, more=more)))[0] == 401
        place.street.back.paused = False
        await place.street.finish(holder)


async def test_who_asks_for_no_place_is_answered_in_a_full_house() -> None:
    async with listening(places=1) as place:
        holder = await fill(place)
        got = await place.exchange(b"GET /health HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
        assert got.startswith(b"HTTP/1.1 200")
        loads = request({"model": "M"}, path="/api/generate")  # loads the model, which is loaded
        assert (await place.exchange(loads)).startswith(b"HTTP/1.1 200")
        place.street.back.paused = False
        await place.street.finish(holder)


async def test_the_turned_away_are_counted_and_told_to_the_log_together() -> None:
    async with listening(places=1) as place:
        holder = await fill(place)
        reader, writer = await place.connect()
        for _ in range(5):
            await answer_to(place, reader, writer, ask())
        counters = place.street.gateway.context.tally.counters
        assert counters["histrio_requests_total", (("outcome", "refused"),)] == 5
        labels = (("path", PATHS[0]), ("status", "503"))
        assert counters["histrio_http_requests_total", labels] == 5
        writer.close()
        place.street.back.paused = False
        await place.street.finish(holder)
