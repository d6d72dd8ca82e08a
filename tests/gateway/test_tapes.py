"""Responses made in the background and streamed: live, again, from anywhere, by several clients."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from actors.gateway.http import App
from actors.gateway.responses.tape import EVENT_BYTES, Tape
from actors.runtime.context import Reply
from messages.config import Paths
from messages.gateway import Recall, Recalled
from messages.types import Fault, Problem
from tests.gateway.street import Client, Street, until_true
from tests.gateway.test_responses import create


def events_of(client: Client) -> list[dict[str, Any]]:
    blocks = client.got.body.decode().split("\n\n")
    assert blocks.pop() == ""
    events = []
    for block in blocks:
        name, data = block.split("\n")
        events.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {events[-1]['type']}"
    return events


def kinds_of(events: list[dict[str, Any]]) -> list[str]:
    return [event["type"].removeprefix("response.") for event in events]


def again(street: Street, response_id: str, query: str = "stream=true") -> Client:
    client = street.request("GET", f"/v1/responses/{response_id}")
    client.scope["query_string"] = query.encode()
    return client


def begun(street: Street, **fields: Any) -> Client:
    return create(street, background=True, stream=True, **fields)


async def id_of(street: Street, client: Client) -> str:
    while b"response.created" not in client.got.body:
        await street.step()
    found: str = events_of(client)[0]["response"]["id"]
    return found


async def test_a_background_stream_says_how_far_it_is() -> None:
    street = Street()
    street.back.paused = True
    client = begun(street)
    response_id = await id_of(street, client)
    assert kinds_of(events_of(client)) == ["created", "queued"]
    assert [event["response"]["status"] for event in events_of(client)] == ["queued", "queued"]
    street.back.paused = False
    await street.finish(client)
    events = events_of(client)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    kinds = kinds_of(events)
    assert kinds[:3] == ["created", "queued", "in_progress"] and kinds[-1] == "completed"
    kept = await street.ask(street.request("GET", f"/v1/responses/{response_id}"))
    assert kept.json() == events[-1]["response"]
    assert kept.json()["output"][0]["content"][0]["text"] == "one two three"
    street.assert_idle()
    assert not street.app.responses.tapes.changed


async def test_every_place_can_be_come_back_to() -> None:
    street = Street()
    client = begun(street)
    response_id = await id_of(street, client)
    await street.finish(client)
    events = events_of(client)
    for after in range(len(events)):
        query = f"stream=true&starting_after={after}"
        late = again(street, response_id, query)
        await street.finish(late)
        assert events_of(late) == events[after + 1 :]
    whole = again(street, response_id)
    await street.finish(whole)
    assert whole.got.body == client.got.body


async def test_who_comes_back_while_it_is_made_gets_the_rest_as_it_comes() -> None:
    street = Street()
    client = begun(street, input="one two three four five six")
    response_id = await id_of(street, client)
    while client.got.body.count(b"output_text.delta") < 2 * 2:
        await street.step()
    client.drop()
    await street.step()
    had = events_of(client)
    late = again(street, response_id, f"stream=true&starting_after={had[-1]['sequence_number']}")
    beside = again(street, response_id)
    await street.finish(late, beside)
    rest = events_of(late)
    assert kinds_of(rest)[-1] == "completed" and "output_text.delta" in kinds_of(rest)
    assert had + rest == events_of(beside)
    assert not street.back.cancelled, "its client's leaving ends nothing"
    street.assert_idle()


async def test_a_client_that_leaves_while_nothing_comes_is_let_go() -> None:
    street = Street()
    street.back.mute = True
    client = begun(street)
    response_id = await id_of(street, client)
    client.drop()
    for _ in range(5):
        await street.step()
    assert client.task.done() and not client.got.is_complete
    assert len(street.gateway.calls.open) == 1
    late = again(street, response_id)
    await street.step()
    cancelled = await street.ask(street.request("POST", f"/v1/responses/{response_id}/cancel"))
    assert cancelled.json()["status"] == "cancelled"
    await street.finish(late)
    assert late.got.is_complete and kinds_of(events_of(late)) == ["created", "queued"]


async def test_a_failure_is_the_last_event_and_is_kept() -> None:
    street = Street()
    client = begun(street, input=" ".join(["word"] * 100))
    response_id = await id_of(street, client)
    await street.finish(client)
    assert kinds_of(events_of(client))[-1] == "failed"
    late = again(street, response_id)
    await street.finish(late)
    assert late.got.body == client.got.body


@pytest.mark.parametrize(
    ("query", "param"),
    [
        ("stream=yes", "stream"),
        ("stream=true&starting_after=-1", "starting_after"),
        ("stream=true&starting_after=x", "starting_after"),
        ("stream=true&starting_after=99999999999999999999", "starting_after"),
        ("starting_after=1", "starting_after"),
    ],
)
async def test_wrong_places_are_refused_by_name(query: str, param: str) -> None:
    street = Street()
    client = begun(street)
    response_id = await id_of(street, client)
    await street.finish(client)
    got = await street.ask(again(street, response_id, query))
    assert got.status == 400 and got.error()["param"] == param


async def test_only_what_was_streamed_in_the_background_can_be_streamed_again() -> None:
    street = Street()
    for fields in ({}, {"background": True}):
        made = (await street.ask(create(street, **fields))).json()
        got = await street.ask(again(street, made["id"]))
        assert got.status == 400 and got.error()["param"] == "stream"
    assert (await street.ask(again(street, "resp_none00"))).status == 404
    assert (await street.ask(again(street, "resp_none00", "stream=true"))).status == 404


async def test_the_tape_counts_among_what_is_kept() -> None:
    street = Street(responses_max=5)
    for fields in ({}, {"background": True, "stream": True}):
        await street.ask(create(street, **fields))
    await street.settle()
    store = street.app.responses.store
    store.check()
    plain, taped = store._kept.values()
    assert plain.tape is None and taped.tape is not None
    taped.tape.check()
    assert taped.bytes_len > plain.bytes_len + taped.tape.bytes_len // 2


async def test_a_response_whose_tape_is_cut_is_kept_itself() -> None:
    street = Street(responses_bytes_max=8_000)
    client = begun(street, input=" ".join(["word"] * 30))
    response_id = await id_of(street, client)
    await street.finish(client)
    await street.settle()
    assert kinds_of(events_of(client))[-1] == "output_text.delta", "the events end early"
    street.app.responses.store.check()
    kept = await street.ask(street.request("GET", f"/v1/responses/{response_id}"))
    assert kept.status == 200 and kept.json()["status"] == "completed"
    assert kept.json()["output"][0]["content"][0]["text"] == " ".join(["word"] * 30)
    late = again(street, response_id)
    await street.finish(late)
    assert late.got.body == client.got.body


async def test_the_tape_of_another_gateway_is_asked_for_until_its_end() -> None:
    street = Street()
    street.gateway.paths = Paths(gateways=("gateway", "other"))
    street.app = App(street.gateway)
    theirs = f"resp_{'a' * 24}01"
    events = [b'event: e\ndata: {"type":"e","sequence_number":%d,"x":1}\n\n' % n for n in range(5)]
    there, asked = 2, []

    def other(path: str, message: Any) -> Reply:
        assert path == "other" and isinstance(message, Recall) and message.verb == "events"
        asked.append(message.after)
        data = b"".join(events[message.after : there])
        return Reply(Recalled(data, is_over=there == len(events)))

    street.cell.answer = other
    client = again(street, theirs, "stream=true&starting_after=0")
    while client.got.body.count(b"event: ") < 1:
        await street.step()
    assert not client.got.is_complete
    there = 5
    await until_true(client.task.done)
    assert client.got.body == b"".join(events[1:]) and client.got.is_complete
    assert asked[0] == 1 and asked[-1] == 2

    street.cell.answer = lambda path, message: Reply(
        Recalled(problem=Problem(Fault.NOT_FOUND, "Gone.", "response_id"))
    )
    assert (await street.ask(again(street, theirs))).status == 404


async def test_another_gateway_is_given_events_from_a_place() -> None:
    street = Street()
    client = begun(street)
    response_id = await id_of(street, client)
    await street.finish(client)
    whole = await street.app.responses.local(Recall(response_id, "events"))
    assert whole.data == client.got.body and whole.is_over
    last = len(events_of(client)) - 1
    rest = await street.app.responses.local(Recall(response_id, "events", last))
    assert rest.data and client.got.body.endswith(rest.data) and rest.data.count(b"\n\n") == 1


def event(number: int, size: int) -> bytes:
    return b'data: {"type":"e","sequence_number":%d,"x":"%s"}\n\n' % (number, b"x" * size)


@given(
    sizes=st.lists(st.integers(0, 300), max_size=12),
    bytes_max=st.integers(0, 4000),
    takes=st.integers(1, 600),
)
def test_a_tape_is_taken_from_in_any_pieces_and_is_bounded(
    sizes: list[int], bytes_max: int, takes: int
) -> None:
    tape = Tape(bytes_max)
    for number, size in enumerate(sizes):
        tape.add(event(number, size))
        tape.check()
    whole = b"".join(event(number, size) for number, size in enumerate(sizes))
    place, data = 0, b""
    while place < len(tape.events):
        part, place = tape.take(place, takes)
        assert part
        data += part
    assert whole.startswith(data) and (data == whole or tape.is_cut)
    if not tape.is_cut:
        tape.end()
        assert sum(map(len, tape.events)) + (EVENT_BYTES - 2) * len(sizes) <= bytes_max
    assert tape.take(place + 5, takes) == (b"", place + 5)
