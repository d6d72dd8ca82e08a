"""The routes, driven as an ASGI application: statuses, shapes, and clients that leave."""

from __future__ import annotations

import asyncio
import gc
import random
import re
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest
from starlette.routing import Route

from actors.gateway.access import Access
from actors.gateway.call import Checked, Row
from actors.gateway.dialect import StreamWriter
from actors.gateway.doors.generate import Generate
from actors.gateway.http import App
from messages.system import State
from messages.types import Fault, Problem
from tests.gateway.street import CONTEXT, PATHS, Client, Street, V


def outcomes(street: Street) -> dict[str, float]:
    return {
        dict(labels)["outcome"]: value
        for (name, labels), value in street.cell.context.tally.counters.items()
        if name == "histrio_requests_total"
    }


async def test_a_chat_is_answered() -> None:
    street = Street()
    got = await street.ask(street.chat("one two three"))
    assert got.status == 200
    reply = got.json()
    assert reply["object"] == "chat.completion" and reply["model"] == "M"
    assert reply["id"].startswith("chatcmpl-")
    choice = reply["choices"][0]
    assert choice["message"] == {"role": "assistant", "content": "one two three", "refusal": None}
    assert choice["finish_reason"] == "stop" and choice["index"] == 0
    assert reply["usage"]["total_tokens"] == 6
    street.assert_idle()


async def test_a_chat_is_streamed() -> None:
    street = Street()
    got = await street.ask(
        street.chat("one two three", stream=True, stream_options={"include_usage": True})
    )
    assert got.status == 200 and got.headers["cache-control"] == "no-cache"
    events = got.events()
    text = "".join(e["choices"][0]["delta"].get("content", "") for e in events[:-1])
    assert text == "one two three"
    assert events[-1]["usage"]["completion_tokens"] == 3 and events[-1]["choices"] == []
    street.assert_idle()


async def test_a_completion_is_answered_and_streamed_alike() -> None:
    street = Street()
    plain, streamed = await street.finish(
        street.completion("a b c", max_tokens=2),
        street.completion("a b c", max_tokens=2, stream=True),
    )
    assert plain.json()["choices"][0]["text"] == "a b"
    assert plain.json()["choices"][0]["finish_reason"] == "length"
    assert plain.json()["object"] == "text_completion"
    events = streamed.events()
    assert "".join(e["choices"][0]["text"] for e in events) == "a b"
    assert [e["choices"][0]["finish_reason"] for e in events][-1] == "length"
    street.assert_idle()


# B065
async def test_several_prompts_and_choices_have_their_indices() -> None:
    street = Street()
    fields: dict[str, Any] = {"n": 2, "echo": True, "max_tokens": 3, "temperature": 1}
    prompts = ["one", "two", "three"]
    plain, streamed = await street.finish(
        street.completion(prompts, **fields), street.completion(prompts, stream=True, **fields)
    )
    reply = plain.json()
    assert [choice["index"] for choice in reply["choices"]] == list(range(6))
    for choice in reply["choices"]:
        assert choice["text"].startswith(prompts[choice["index"] // 2])
    assert reply["usage"]["prompt_tokens"] == 3
    for index in range(6):
        mine = [e["choices"][0] for e in streamed.events() if e["choices"][0]["index"] == index]
        assert "".join(c["text"] for c in mine) == reply["choices"][index]["text"]
    street.assert_idle()


# B031
async def test_echo_with_no_tokens_gives_the_prompt() -> None:
    street = Street()
    got = await street.ask(street.completion("red green blue", max_tokens=0, echo=True))
    assert got.status == 200 and got.json()["choices"][0]["text"] == "red green blue"
    assert got.json()["usage"]["completion_tokens"] == 0
    got = await street.ask(street.completion([5, 6], max_tokens=0, echo=True, stream=True))
    assert "".join(e["choices"][0]["text"] for e in got.events()) == "w5 w6"
    got = await street.ask(street.chat("hi", max_tokens=0))
    assert got.status == 400
    street.assert_idle()


# B019, B033
@pytest.mark.parametrize("stream", [False, True])
async def test_errors_have_their_status_also_where_a_stream_was_asked_for(stream: bool) -> None:
    street = Street()
    long = await street.ask(street.chat("word " * (2 * CONTEXT), stream=stream))
    assert long.status == 400
    assert long.error()["code"] == "context_length_exceeded"
    assert str(CONTEXT) in long.error()["message"] and "-" not in long.error()["message"]
    for fields in (
        {"temperature": -1},
        {"tool_choice": "required", "tools": []},
        {"response_format": {"type": "json_schema"}},
    ):
        got = await street.ask(street.chat("hi", stream=stream, **fields))
        assert got.status == 400 and got.error()["type"] == "invalid_request_error"
    street.assert_idle()
    assert outcomes(street) == {"refused": 4}


# B075
async def test_one_bad_prompt_of_a_list_runs_nothing() -> None:
    street = Street()
    got = await street.ask(street.completion(["fine", "word " * (2 * CONTEXT)], max_tokens=20))
    assert got.status == 400 and got.error()["param"] == "prompt"
    assert not street.back.running
    street.assert_idle()


# B191
@pytest.mark.parametrize(
    ("method", "path", "body", "status"),
    [
        ("GET", "/nope", None, 404),
        ("POST", "/v1/nope", {}, 404),
        ("GET", "/v1/chat/completions", None, 405),
        ("DELETE", "/v1/completions", None, 405),
        ("POST", "/health", {}, 405),
        ("POST", "/v1/chat/completions", b"{", 400),
        ("POST", "/v1/chat/completions", b"", 400),
        ("POST", "/v1/completions", b'{"temperature":NaN}', 400),
        ("POST", "/v1/completions", b"[" * 100_000, 400),
        ("POST", "/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]}, 400),
        ("POST", "/v1/completions", {"model": "other", "prompt": "x"}, 404),
        ("POST", "/v1/completions", {"model": "M", "prompt": "x", "max_tokens": "5"}, 400),
        ("GET", "/v1/models/other", None, 404),
    ],
)
async def test_every_error_is_the_error_object(
    method: str, path: str, body: Any, status: int
) -> None:
    street = Street()
    got = await street.ask(street.request(method, path, body))
    assert got.status == status
    got.error()
    if status == 405:
        assert "allow" in got.headers
    street.assert_idle()


async def test_the_model_is_listed() -> None:
    street = Street()
    got = await street.ask(street.request("GET", "/v1/models"))
    assert got.json()["data"][0]["id"] == "M" and got.json()["object"] == "list"
    got = await street.ask(street.request("GET", "/v1/models/M"))
    assert got.json()["max_model_len"] == CONTEXT


# B167
async def test_health_is_computed_from_the_tree() -> None:
    street = Street()
    for path in ("/health", "/ready"):
        assert (await street.ask(street.request("GET", path))).status == 200
    street.rows(State.RESTARTING)
    for path in ("/health", "/ready"):
        got = await street.ask(street.request("GET", path))
        assert got.status == 503
        assert got.json()["missing"] == [PATHS.worker]
        assert PATHS.worker in got.error()["message"]


# B171
async def test_a_draining_gateway_is_healthy_but_not_ready_and_finishes_what_runs() -> None:
    street = Street()
    running = street.chat("one two three", stream=True)
    await street.step()
    street.cell.drain()
    assert (await street.ask(street.request("GET", "/health"))).status == 200
    assert (await street.ask(street.request("GET", "/ready"))).status == 503
    refused = await street.ask(street.chat("hi"))
    assert refused.status == 503 and refused.headers["retry-after"] == "1"
    refused.error()
    got = await street.ask(running)
    assert got.events()[-1]["choices"][0]["finish_reason"] == "stop"
    assert street.cell.is_drained
    street.assert_idle()


async def test_metrics_actors_and_the_page_are_served() -> None:
    street = Street()
    got = await street.ask(street.request("GET", "/metrics"))
    assert got.body == b"histrio_x 1\n" and got.headers["content-type"].startswith("text/plain")
    got = await street.ask(street.request("GET", "/actors"))
    rows = {row["path"]: row for row in got.json()}
    assert rows[PATHS.worker]["pid"] == 2
    assert {"state", "incarnation", "restarts", "mailbox_depth"} <= set(rows["gateway"])
    got = await street.ask(street.request("GET", "/"))
    assert got.status == 200 and b"replica/worker" in got.body
    street.assert_idle()


# B155
async def test_above_the_limit_calls_get_503_and_each_gets_an_answer() -> None:
    street = Street(open_max=6)
    clients = [street.chat("one two", stream=i % 2 == 0) for i in range(60)]
    answers = await street.finish(*clients)
    statuses = [got.status for got in answers]
    assert statuses.count(200) + statuses.count(503) == 60 and statuses.count(200) == 6
    for got in answers:
        assert got.is_complete
        if got.status == 503:
            assert got.headers["retry-after"] == "1"
            assert got.error()["code"] == "overloaded"
    counts = outcomes(street)
    assert counts == {"stop": 6, "refused": 54}
    street.assert_idle()


# B023, B025: leaving in any state, plain and streamed
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("steps", [0, 1, 2, 3])
async def test_a_client_that_leaves_has_its_request_cancelled(stream: bool, steps: int) -> None:
    street = Street()
    client = street.chat("one two three four five six", stream=stream)
    for _ in range(steps):
        await street.step()
    client.drop()
    await street.ask(client)
    street.assert_idle()
    assert not client.got.is_complete
    if steps:
        assert len(street.back.cancelled) == 1
        assert outcomes(street) == {"abort": 1}


async def test_a_client_that_leaves_while_it_waits_in_the_queue_is_cancelled() -> None:
    street = Street()
    street.back.mute = True
    client = street.chat()
    await street.step()
    await street.step()
    client.drop()
    await street.step()
    await street.step()
    assert client.task.done() and len(street.back.cancelled) == 1
    assert not street.gateway.calls.open


async def test_a_client_that_leaves_before_its_body_is_whole_opens_nothing() -> None:
    street = Street()
    client = street.request("POST", "/v1/chat/completions", chunks=[b'{"mod'], ends=False)
    await street.step()
    client.drop()
    await street.ask(client)
    assert client.got.status is None
    street.assert_idle()


async def test_leaving_at_any_moment_leaves_nothing_behind() -> None:
    rng = random.Random(7)
    street = Street()
    for _ in range(50):
        client = street.completion(["a b c", "d e"], n=2, stream=rng.random() < 0.5, max_tokens=9)
        for _ in range(rng.randrange(40)):
            await asyncio.sleep(0)
        if rng.random() < 0.5:
            street.back.pump()
        for _ in range(rng.randrange(10)):
            await asyncio.sleep(0)
        client.drop()
        await street.ask(client)
    street.assert_idle()


# B167: what is lost for good is an error, in the stream too
async def test_a_loss_for_good_ends_the_stream_with_an_error_event() -> None:
    street = Street(recover_s=5.0)
    client = street.chat("one two three", stream=True)
    waiting = street.chat("four five", stream=False)
    await street.step()
    street.back.paused = True
    street.cell.down(PATHS.worker)
    await street.step()
    street.cell.advance(7.0)
    first, second = await street.finish(client, waiting)
    events = first.events()
    assert first.status == 200 and events[-1]["error"]["code"] == "interrupted"
    assert second.status == 503 and second.error()["code"] == "interrupted"
    assert outcomes(street) == {"error": 2}


async def test_a_crash_behind_the_gateway_is_not_noticed() -> None:
    street = Street()
    client = street.chat("one two three four", stream=True)
    await street.step()
    await street.step()
    street.back.running.clear()  # the crash
    street.cell.down(PATHS.scheduler)
    street.cell.up(PATHS.scheduler)
    got = await street.ask(client)
    text = "".join(e["choices"][0]["delta"].get("content", "") for e in got.events())
    assert text == "one two three four"
    street.assert_idle()


# B027
@pytest.mark.parametrize("stood_s", [0.0, 3.0, 600.0])
async def test_a_stalled_client_is_cut(stood_s: float) -> None:
    """But not for the time in which this process itself stood still."""
    street = Street(stream_stall_s=5.0)
    client = street.chat("one two three four five six", stream=True)
    gate = asyncio.Event()
    send = client.send

    async def slow_send(message: Any) -> None:
        if message["type"] == "http.response.body" and not client.aborted:
            await gate.wait()
        await send(message)

    client.send = slow_send  # type: ignore[method-assign]
    client.task.cancel()
    client.task = asyncio.create_task(street.app(client.scope, client.receive, client.send))
    for _ in range(4):
        await street.step()
    street.cell.now_s += stood_s
    street.cell.advance(2.0)
    assert not client.aborted
    street.cell.advance(6.0)
    assert client.aborted
    gate.set()
    await street.ask(client)
    street.assert_idle()


# B183
async def test_a_body_over_the_limit_is_refused_without_being_read() -> None:
    street = Street(body_bytes_max=1000)
    headers = {"content-length": "300000000"}
    client = street.request("POST", "/v1/completions", chunks=[b"x"], headers=headers, ends=False)
    client.drop()
    got = await street.ask(client)
    assert got.status == 413 and got.headers["connection"] == "close"
    got.error()
    endless = street.request("POST", "/v1/completions", chunks=[b"x" * 400] * 50)
    got = await street.ask(endless)
    assert got.status == 413
    assert endless.messages.qsize() <= 1  # what followed was thrown away
    for encoding in ("gzip", "br"):
        got = await street.ask(
            street.request("POST", "/v1/completions", b"x", headers={"content-encoding": encoding})
        )
        assert got.status == 415
    street.assert_idle()


# B185
async def test_a_body_that_does_not_come_is_a_408() -> None:
    street = Street(body_timeout_s=0.0)
    client = street.request("POST", "/v1/completions", chunks=[b"{"], ends=False)
    await street.step()
    client.drop()  # ends the lingering
    got = await street.ask(client)
    assert got.status == 408 and got.error()["code"] == "request_timeout"


async def test_a_body_that_says_it_is_no_json_is_refused() -> None:
    street = Street()
    for media, status in (
        ("text/plain", 400),
        ("application/x-www-form-urlencoded", 400),
        ("application/json; charset=utf-8", 200),
        ("application/vnd.api+json", 200),
    ):
        body = {"model": "M", "prompt": "a"}
        got = await street.ask(
            street.request("POST", "/v1/completions", body, headers={"content-type": media})
        )
        assert got.status == status


async def test_the_request_id_is_echoed_or_made() -> None:
    street = Street()
    for given, is_kept in (("abc-1", True), ("x" * 129, False), ("", False)):
        got = await street.ask(street.request("GET", "/health", headers={"x-request-id": given}))
        assert (got.headers["x-request-id"] == given) is is_kept
        assert got.headers["x-request-id"]
    got = await street.ask(street.chat("hi"))
    assert got.json()["id"] == "chatcmpl-" + got.headers["x-request-id"]


# B181
async def test_probes_are_not_logged_and_requests_once(capsys: pytest.CaptureFixture[str]) -> None:
    street = Street()
    for path in ("/health", "/ready", "/metrics"):
        for _ in range(5):
            await street.ask(street.request("GET", path))
    assert capsys.readouterr().err == ""
    await street.ask(street.chat("hi"))
    await street.ask(street.chat("hi", temperature=9))
    client = street.chat("one two three")
    await street.step()
    client.drop()
    await street.ask(client)
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 3
    assert not [line for line in lines if "Traceback" in line]
    assert "status=200" in lines[0] and "status=400" in lines[1] and "status=499" in lines[2]


async def test_requests_are_counted_by_route_and_status() -> None:
    street = Street()
    for path in ("/health", "/a", "/b", "/v1/models/x"):
        await street.ask(street.request("GET", path))
    counts = {
        (dict(labels)["path"], dict(labels)["status"]): value
        for (name, labels), value in street.cell.context.tally.counters.items()
        if name == "histrio_http_requests_total"
    }
    assert counts == {
        ("/health", "200"): 1,
        ("other", "404"): 2,
        ("/v1/models/{model}", "404"): 1,
    }


async def test_a_bug_is_a_500_without_its_details(monkeypatch: pytest.MonkeyPatch) -> None:
    street = Street()

    def broken(*args: Any) -> None:
        raise KeyError("/secret/path")

    monkeypatch.setattr(street.gateway, "open", broken)
    got = await street.ask(street.chat("hi"))
    assert got.status == 500 and got.error()["code"] == "internal_error"
    assert b"secret" not in got.body and b"KeyError" not in got.body


async def test_want_of_memory_is_the_gateways_end_and_no_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its process ends with it, so that clients come back: to another, or to its next life."""
    street = Street()
    crashed: list[BaseException] = []
    monkeypatch.setattr(street.gateway.context, "crash", crashed.append)

    def broken(*args: Any) -> None:
        raise MemoryError

    monkeypatch.setattr(street.gateway, "open", broken)
    client = street.chat("hi")
    got = await street.ask(client)
    assert client.aborted and not got.status and not got.body
    assert [type(error) for error in crashed] == [MemoryError]


class Broken:
    """Of a stream: everything but its last words fails."""

    def __init__(self, writer: StreamWriter, is_dumb: bool) -> None:
        self.writer = writer
        self.is_dumb = is_dumb

    def write(self, rows: list[Row]) -> bytes:
        raise KeyError("/secret/path")

    def end(self, checked: Sequence[Checked]) -> bytes:
        raise KeyError("/secret/path")

    def fail(self, problem: Problem) -> bytes:
        if self.is_dumb:
            raise KeyError("/secret/path")
        return self.writer.fail(problem)


@pytest.mark.parametrize("is_dumb", [False, True])
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/v1/messages"])
async def test_a_bug_in_a_stream_is_its_last_event(
    path: str, is_dumb: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    street = Street()
    (generate,) = (
        route.app
        for route in street.app.router.routes
        if isinstance(route, Route) and route.path == path
    )
    assert isinstance(generate, Generate)
    stream = generate.dialect.stream
    assert stream is not None
    broken = generate.dialect._replace(stream=lambda *asked: Broken(stream(*asked), is_dumb))
    monkeypatch.setattr(generate, "dialect", broken)
    client = streamed(street, path, **{"x-request-id": "mine"})
    got = await street.ask(client)
    assert got.status == 200 and b"secret" not in got.body and b"KeyError" not in got.body
    assert client.aborted is is_dumb
    assert (b"The server failed on this request." in got.body) is not is_dumb
    told = capsys.readouterr().err
    assert "request failed" in told and "client_request=mine" in told
    street.assert_idle()


async def test_token_ids_at_the_border_of_the_vocabulary() -> None:
    street = Street()
    assert (await street.ask(street.completion([V - 1]))).status == 200
    got = await street.ask(street.completion([V]))
    assert got.status == 400 and got.error()["param"] == "prompt"


async def test_the_answers_are_strict_json() -> None:
    street = Street()
    got = await street.ask(street.chat("naïve 猫 🦊 \u2028 \x00 end"))
    assert msgspec.json.decode(got.body)["choices"][0]["message"]["content"]


async def test_an_admin_may_have_an_actor_restarted() -> None:
    street = Street()
    for app, key, status in (
        (App(street.gateway), "secret", 403),  # no admin key is set
        (App(street.gateway, Access((), ("secret",))), "", 401),
        (App(street.gateway, Access(("mine",), ("secret",))), "mine", 403),
        (App(street.gateway, Access((), ("secret",))), "secret", 202),
    ):
        street.app = app
        headers = {"authorization": f"Bearer {key}"} if key else {}
        got = await street.ask(
            street.request("POST", "/actors/replica/worker/restart", headers=headers)
        )
        assert got.status == status, (key, got.body)
    assert street.cell.restarts_asked == ["replica/worker"]
    assert got.json() == {"restarting": "replica/worker"}
    nobody = await street.ask(street.request("POST", "/actors/nobody/restart", headers=headers))
    assert nobody.status == 404
    assert street.cell.restarts_asked == ["replica/worker"]


async def test_a_body_is_read_without_the_collector_of_garbage() -> None:
    """B189: it takes several times as long as the reading, and all streams wait for it."""
    street = Street()
    seen: list[bool] = []
    (place,) = [
        route.endpoint for route in street.app.router.routes if route.path == "/v1/completions"
    ]
    read = place.dialect.read

    def watched(*given: Any) -> Any:
        seen.append(gc.isenabled())
        return read(*given)

    place.dialect = place.dialect._replace(read=watched)
    for body in ({"model": "M", "prompt": "a"}, {"model": "M", "prompt": 5}):
        await street.ask(street.request("POST", "/v1/completions", body))
        assert gc.isenabled()
    assert seen == [False, False]


# Signs of life

PINGS = {
    "/v1/chat/completions": b": ping\n\n",
    "/v1/completions": b": ping\n\n",
    "/v1/responses": b": ping\n\n",
    "/v1/messages": b'event: ping\ndata: {"type":"ping"}\n\n',
    "/generate": b": ping\n\n",
}


def streamed(street: Street, path: str, **headers: str) -> Client:
    body: dict[str, Any] = {"stream": True}
    if path == "/generate":
        body["text"] = "one two three"
    elif path == "/v1/completions":
        body |= {"model": "M", "prompt": "one two three"}
    elif path == "/v1/responses":
        body |= {"model": "M", "input": "one two three"}
    else:
        messages = [{"role": "user", "content": "one two three"}]
        body |= {"model": "M", "messages": messages, "max_tokens": 9}
    return street.request("POST", path, body, headers=headers)


def wordless(body: bytes) -> bytes:
    """Without times and ids."""
    return re.sub(rb"[0-9a-f.-]", b"", body)


async def pass_time(street: Street, seconds: float) -> None:
    await street.step()
    street.cell.advance(seconds)
    for _ in range(5):
        await street.step()


@pytest.mark.parametrize(
    ("path", "resumed"), [*((path, False) for path in PINGS), ("/v1/chat/completions", True)]
)
async def test_a_stream_that_waits_gives_a_sign_of_life_and_then_its_events(
    path: str, resumed: bool
) -> None:
    headers = {"x-stream-resume": "1"} if resumed else {}
    ping = PINGS[path]
    street = Street(ping_s=10.0)
    street.back.paused = True
    client = streamed(street, path, **headers)
    await pass_time(street, 9.0)
    assert client.got.status is None  # an error would still have its status
    await pass_time(street, 11.0)
    assert client.got.status == 200 and client.got.body == ping
    await pass_time(street, 10.0)
    assert client.got.body == ping * 2
    street.back.paused = False
    for _ in range(2):
        await street.step()
    begun = client.got.body
    assert len(begun) > len(ping * 2)
    street.back.paused = True
    await pass_time(street, 21.0)
    assert client.got.body.endswith(ping)  # between two events as well
    street.back.paused = False
    got = await street.ask(client)
    quiet = Street(ping_s=0.0)
    other = await quiet.ask(streamed(quiet, path, **headers))
    if resumed:
        assert got.body.count(b"data: ") == other.body.count(b"data: ")
    else:
        assert wordless(got.body.replace(ping, b"")) == wordless(other.body.replace(ping, b""))
    street.cell.advance(1.0)
    if not resumed:
        street.assert_idle()


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages", "/v1/responses"])
async def test_a_failure_after_a_sign_of_life_is_an_event(path: str) -> None:
    street = Street(ping_s=10.0)
    street.back.paused = True
    client = streamed(street, path)
    await pass_time(street, 21.0)
    assert client.got.status == 200
    (open_call,) = street.gateway.calls.open.values()
    street.gateway.calls._fail(open_call, Problem(fault=Fault.INTERNAL, message="It broke."))
    got = await street.ask(client)
    assert got.is_complete and b"It broke." in got.body.removeprefix(PINGS[path])
    street.back.paused = False
    await street.settle()


@pytest.mark.parametrize(("ping_s", "path"), [(0.0, "/v1/chat/completions"), (10.0, "/api/chat")])
async def test_where_signs_are_off_or_cannot_be_skipped_there_are_none(
    ping_s: float, path: str
) -> None:
    street = Street(ping_s=ping_s)
    street.back.paused = True
    client = streamed(street, path)
    await pass_time(street, 50.0)
    assert client.got.status is None
    street.back.paused = False
    assert (await street.ask(client)).status == 200
    street.assert_idle()
