"""Clients that lose their connection and come back for the rest of their stream."""

from __future__ import annotations

import random
from typing import Any

import msgspec
import pytest

from tests.gateway.street import Answered, Client, Street

WORDS = "one two three four five six seven eight nine ten"
RESUME = {"x-stream-resume": "1"}


def ask(street: Street, last: str = "", **fields: Any) -> Client:
    body = {"model": "M", "messages": [{"role": "user", "content": WORDS}], "stream": True}
    headers = {"last-event-id": last} if last else RESUME
    return street.request("POST", "/v1/chat/completions", body | fields, headers=headers)


def parts(got: Answered) -> tuple[dict[int, str], str, list[Any]]:
    """The texts, the last id, and the other events, of what has come so far."""
    texts: dict[int, str] = {}
    last, others = "", []
    for block in got.body.split(b"\n\n")[:-1]:
        for line in block.split(b"\n"):
            name, _, value = line.partition(b": ")
            if name == b"id":
                last = value.decode()
            elif value == b"[DONE]":
                others.append("done")
            else:
                for choice in msgspec.json.decode(value)["choices"]:
                    text = choice["delta"].get("content") or ""
                    texts[choice["index"]] = texts.get(choice["index"], "") + text
                    if "role" in choice["delta"]:
                        others.append(f"role {choice['index']}")
                    if choice["finish_reason"]:
                        others.append(f"{choice['finish_reason']} {choice['index']}")
    return texts, last, others


async def lose(street: Street, client: Client, steps: int) -> Answered:
    """The connection breaks after some steps; `got` is what had come."""
    for _ in range(steps):
        await street.step()
    client.drop()
    for _ in range(20):
        if client.task.done():
            break
        await street.step()
    return client.got


async def test_ids_are_sent_only_where_they_were_asked_for() -> None:
    street = Street()
    plain = await street.ask(street.chat(WORDS, stream=True))
    assert b"id: " not in plain.body.replace(b'"id":', b"")
    assert "x-stream-id" not in plain.headers
    street.assert_idle()


async def test_a_stream_with_ids_is_the_same_stream() -> None:
    street = Street(resume_s=0.0)
    got = await street.ask(ask(street))
    texts, last, others = parts(got)
    assert texts == {0: WORDS}
    assert others == ["role 0", "stop 0", "done"]
    assert last == f"{got.headers['x-stream-id']}.{len(WORDS)}et10"


@pytest.mark.parametrize("way", ["get", "post"])
@pytest.mark.parametrize("choices", [1, 3])
async def test_who_comes_back_gets_the_rest(way: str, choices: int) -> None:
    for steps in range(1, 12):
        street = Street()
        first = await lose(street, ask(street, n=choices), steps)
        texts, last, others = parts(first)
        if not last:
            continue  # nothing had come
        await street.settle()  # it has gone on meanwhile
        if way == "post":
            again = ask(street, last, n=choices)
        else:
            path = f"/v1/streams/{first.headers['x-stream-id']}"
            again = street.request("GET", path, headers={"last-event-id": last})
        rest = await street.ask(again)
        assert rest.status == 200
        more, _, ends = parts(rest)
        # A call that was checked first is sent as ids, whose words the back end makes up.
        whole = WORDS if choices == 1 else " ".join(f"w{i}" for i in range(10))
        joined = {i: texts.get(i, "") + more.get(i, "") for i in range(choices)}
        assert joined == dict.fromkeys(range(choices), whole)
        assert ends[-1] == "done"
        found = sorted(word for word in others + ends if word != "done")
        assert found == sorted(f"{word} {i}" for i in range(choices) for word in ("role", "stop"))
        assert not street.back.cancelled


async def test_another_gateway_computes_it_again_and_sends_the_rest() -> None:
    for steps in range(2, 12):
        street, other = Street(), Street()
        first = await lose(street, ask(street), steps)
        texts, last, _ = parts(first)
        rest = await other.ask(ask(other, last))
        more, _, ends = parts(rest)
        assert texts[0] + more.get(0, "") == WORDS
        assert ends[-2:] == ["stop 0", "done"] or ends == ["done"]
        assert rest.headers["x-stream-id"] == first.headers["x-stream-id"]
        assert "role 0" not in ends


async def test_who_comes_back_where_no_more_streams_are_kept_gets_the_rest_alone() -> None:
    for steps in range(2, 12):
        street, other = Street(), Street(resume_streams_max=1)
        first = await lose(street, ask(street), steps)
        texts, last, _ = parts(first)
        reading = ask(other)  # fills the shelf, and is being read
        await other.step()
        rest = await other.ask(ask(other, last))
        more, _, ends = parts(rest)
        assert texts[0] + more.get(0, "") == WORDS
        assert "role 0" not in ends
        await other.settle()
        assert reading.task.done()
        assert len(other.gateway.calls.open) == 0


async def test_it_is_computed_again_with_the_seed_that_was_drawn() -> None:
    street, other = Street(), Street()
    client = ask(street)
    await street.step()
    sent = [entry[0].sampling.seed for entry in street.back.running.values()]
    await street.step()
    first = await lose(street, client, 2)
    await other.step()
    client = ask(other, parts(first)[1])
    await other.step()
    assert [entry[0].sampling.seed for entry in other.back.running.values()] == sent
    await other.finish(client)


async def test_who_does_not_come_back_is_cancelled() -> None:
    street = Street(resume_s=0.0)
    first = await lose(street, ask(street), 4)
    await street.settle()
    assert street.back.cancelled
    path = f"/v1/streams/{first.headers['x-stream-id']}"
    assert (await street.ask(street.request("GET", path))).status == 404
    street.assert_idle()


async def test_a_stream_waits_for_its_client_and_no_longer_than_there_is_room() -> None:
    street = Street(resume_streams_max=1)
    first = await lose(street, ask(street), 4)
    await lose(street, ask(street), 4)
    path = f"/v1/streams/{first.headers['x-stream-id']}"
    assert (await street.ask(street.request("GET", path))).status == 404
    assert len(street.back.cancelled) == 1


async def test_without_room_a_stream_is_served_without_ids() -> None:
    street = Street(resume_streams_max=1)
    holder = ask(street)
    await street.step()
    got = await street.ask(ask(street))
    assert "x-stream-id" not in got.headers
    await street.finish(holder)


async def test_a_stream_can_be_followed_again_from_its_beginning() -> None:
    street = Street()
    got = await street.ask(ask(street))
    path = f"/v1/streams/{got.headers['x-stream-id']}"
    again = await street.ask(street.request("GET", path))
    assert parts(again) == parts(got)


@pytest.mark.parametrize("last", ["1", "x.1", "0" * 56, "0" * 56 + ".x"])
async def test_a_wrong_event_id_is_a_400(last: str) -> None:
    street = Street()
    got = await street.ask(ask(street, last))
    assert got.status == 400
    assert "Last-Event-ID" in got.error()["message"]
    street.assert_idle()


async def test_a_refused_call_is_refused_as_ever() -> None:
    street = Street()
    got = await street.ask(ask(street, messages=[{"role": "user", "content": "x " * 100}]))
    assert got.status == 400
    assert got.error()["code"] == "context_length_exceeded"


async def test_connections_that_break_again_and_again_lose_nothing() -> None:
    rng = random.Random(3)
    for _ in range(20):
        street = Street()
        text, client = "", ask(street)
        for _ in range(8):
            got = await lose(street, client, rng.randrange(2, 6))
            texts, last, ends = parts(got)
            text += texts.get(0, "")
            if "done" in ends:
                break
            client = ask(street, last) if last else client
        else:
            texts, _, _ = parts(await street.ask(ask(street, last)))
            text += texts.get(0, "")
        assert text == WORDS


async def test_from_every_event_the_rest_is_what_came_after_it() -> None:
    street = Street()
    got = await street.ask(ask(street, n=2))
    blocks = got.body.split(b"\n\n")[:-1]
    assert len(blocks) > 20
    path = f"/v1/streams/{got.headers['x-stream-id']}"
    for index, block in enumerate(blocks[:-1]):
        last = block.split(b"\n")[0].removeprefix(b"id: ").decode()
        again = await street.ask(street.request("GET", path, headers={"last-event-id": last}))
        assert again.body.split(b"\n\n")[:-1] == blocks[index + 1 :]


async def test_a_gateway_that_ends_waits_for_no_client() -> None:
    street = Street()
    await lose(street, ask(street), 4)
    resumes = street.app.resumes
    (kept,) = resumes.kept.values()
    assert kept.expiry is not None
    resumes.close()
    assert kept.expiry.cancelled()
    assert not resumes.kept and not resumes.shelf.held
    resumes.check()
