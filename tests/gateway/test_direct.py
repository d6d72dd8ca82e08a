"""Streams whose events are written without their task: the same bytes, in order, whoever writes."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from actors.gateway.replies import CompletionStream
from tests.gateway.street import Client, Street, until_true

WORDS = " ".join(f"word{i}" for i in range(40))


class Socket:
    """Takes pieces; `is_slow` says when the client does not read."""

    def __init__(self, client: Client, is_slow: Callable[[], bool] = bool) -> None:
        self.client = client
        self.is_slow = is_slow
        self.piece_count = 0
        client.scope["http_version"] = "1.1"
        client.scope["state"]["piece"] = self.write

    def write(self, data: bytes) -> bool:
        got = self.client.got
        assert got.status == 200 and not got.is_complete
        got.body += data
        self.piece_count += 1
        return not self.is_slow()


async def ask(street: Street) -> bytes:
    got = await street.ask(street.completion(WORDS, stream=True, max_tokens=40))
    return got.body


def without_ids(body: bytes) -> bytes:
    return b"\n".join(line.partition(b'"model"')[2] or line for line in body.split(b"\n"))


async def test_the_stream_is_the_one_that_its_task_would_write() -> None:
    street = Street()
    expected = await ask(street)
    client = street.completion(WORDS, stream=True, max_tokens=40)
    socket = Socket(client)
    (got,) = await street.finish(client)
    assert without_ids(got.body) == without_ids(expected)
    assert socket.piece_count >= 35  # the first event and the end are the task's
    street.assert_idle()


async def test_a_slow_client_is_its_tasks_business_and_gets_all_in_order() -> None:
    street = Street()
    expected = await ask(street)
    for seed in range(20):
        rng = random.Random(seed)
        client = street.completion(WORDS, stream=True, max_tokens=40)
        socket = Socket(client, lambda rng=rng: rng.random() < 0.4)  # type: ignore[misc]
        (got,) = await street.finish(client)
        assert without_ids(got.body) == without_ids(expected)
        assert 0 < socket.piece_count < 40
    street.assert_idle()


async def test_several_streams_are_written_in_one_turn() -> None:
    street = Street()
    clients = [street.completion(WORDS, stream=True, max_tokens=40) for _ in range(8)]
    sockets = [Socket(client) for client in clients]
    found = await street.finish(*clients)
    bodies = {without_ids(got.body) for got in found}
    assert len(bodies) == 1
    assert all(socket.piece_count >= 35 for socket in sockets)
    street.assert_idle()


async def test_a_client_that_leaves_is_cancelled() -> None:
    street = Street()
    client = street.completion(WORDS, stream=True, max_tokens=40)
    Socket(client)
    for _ in range(6):
        await street.step()
    client.drop()
    await street.finish(client)
    assert len(street.back.cancelled) == 1
    street.assert_idle()


async def test_a_bug_in_a_writer_ends_its_stream_and_no_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    street = Street()
    good = street.completion(WORDS, stream=True, max_tokens=40)
    bad = street.completion(WORDS, stream=True, max_tokens=40)
    Socket(good)
    Socket(bad)
    for _ in range(6):
        await street.step()
    write = CompletionStream.write
    failing: list[CompletionStream] = []

    def fail_once(self: CompletionStream, rows: object) -> bytes:
        if not failing:
            failing.append(self)
        if self is failing[0]:
            raise RuntimeError("a bug")
        return write(self, rows)  # type: ignore[arg-type]

    monkeypatch.setattr(CompletionStream, "write", fail_once)
    await street.finish(good, bad)
    told = [b"The server failed" in client.got.body for client in (good, bad)]
    assert sorted(told) == [False, True]
    assert not good.aborted and not bad.aborted
    street.assert_idle()


async def test_streams_that_begin_and_end_at_once_do_so_in_helpings(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("actors.gateway.doors.direct.LINES_A_TURN", 4)
    street = Street()
    street.back.paused = True
    clients = [street.completion("a b c", stream=True) for _ in range(40)]
    for client in clients:
        Socket(client)
    await until_true(lambda: len(street.back.running) == len(clients), street.back.pump)
    for tokens in range(1, 4):
        street.back.paused = False
        street.back.pump()  # one for each
        street.back.paused = True
        counts = [0]
        await until_true(
            lambda tokens=tokens, counts=counts: counts[-1] == len(clients),  # type: ignore[misc]
            lambda tokens=tokens, counts=counts: counts.append(  # type: ignore[misc]
                sum(client.got.body.count(b"data: ") >= tokens for client in clients)
            ),
        )
        steps = [after - before for before, after in zip(counts, counts[1:], strict=False)]
        assert max(steps) <= 4
    await street.finish(*clients)
    street.assert_idle()
