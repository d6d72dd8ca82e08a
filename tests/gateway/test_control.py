"""The operator's routes: who may, what the parts are asked, and what an abort leaves behind."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from actors.gateway.access import Access
from actors.gateway.controls import Controls
from actors.gateway.http import App
from actors.runtime.context import Outcome, Reply, TimedOut
from messages.base import Message
from messages.cache import Clear, Cleared
from messages.config import Paths
from messages.gateway import Abort
from messages.scheduler import Continue, Inspect, Load, Pause
from tests.gateway.street import Answered, Street

LOAD = Load(
    running_count=1,
    waiting_count=2,
    used_len=32,
    capacity_len=1024,
    waiting_len=9,
    running_max=64,
    is_paused=False,
    prompt_tokens=100,
    cached_tokens=50,
)
KEY = {"authorization": "Bearer k"}


class House(Street):
    """A street with an admin key, whose scheduler and cache answer."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.app = App(self.gateway, Access(admin_keys=["k"]))
        self.asked: list[tuple[str, Message]] = []
        self.leased_counts = [0]  # one for each time the cache is asked, the last for ever
        self.is_deaf = False
        self.cell.answer = self.answer

    def answer(self, path: str, message: Message) -> Outcome:
        self.asked.append((path, message))
        if self.is_deaf:
            return TimedOut(5.0)
        if isinstance(message, Clear):
            leased = self.leased_counts[0]
            self.leased_counts = self.leased_counts[1:] or [leased]
            return Reply(Cleared(0 if leased else 3, leased))
        return Reply(LOAD)

    async def control(self, path: str, body: Any = None, method: str = "POST") -> Answered:
        return await self.ask(self.request(method, path, body, headers=KEY))


@pytest.mark.parametrize("method", ["GET", "POST"])
async def test_the_cache_is_flushed_when_nobody_runs(method: str) -> None:
    house = House()
    got = await house.control("/flush_cache", method=method)
    assert got.status == 200 and got.json()["success"] and "3 pages" in got.json()["message"]
    assert house.asked == [("replica/cache", Clear())]


async def test_a_flush_under_load_is_refused_or_waits() -> None:
    house = House()
    house.leased_counts = [5]
    got = await house.control("/flush_cache")
    assert got.status == 400 and got.error()["code"] == "requests_running"
    client = house.request("POST", "/flush_cache", headers=KEY)
    client.scope["query_string"] = b"timeout=0.05"
    house.leased_counts = [5, 0]
    await client.task
    assert client.got.status == 200
    for wrong in (b"timeout=x", b"timeout=-1", b"timeout=1e9", b"timeout=nan"):
        client = house.request("POST", "/flush_cache", headers=KEY)
        client.scope["query_string"] = wrong
        assert (await house.ask(client)).error()["param"] == "timeout"


@pytest.mark.parametrize(
    ("path", "body", "asked"),
    [
        ("/pause_generation", {"mode": "retract"}, Pause(retract=True)),
        ("/pause_generation", {"mode": "in_place"}, Pause()),
        ("/pause_generation", {"mode": "abort"}, Pause()),
        ("/pause_generation", None, Pause()),
        ("/continue_generation", None, Continue()),
        ("/continue_generation", {}, Continue()),
    ],
)
async def test_the_scheduler_is_paused_and_goes_on(path: str, body: Any, asked: Message) -> None:
    house = House()
    got = await house.control(path, body)
    assert got.status == 200 and got.json()["success"]
    assert house.asked == [("replica/scheduler", asked)]


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/pause_generation", {"mode": "for ever"}, "mode"),
        ("/pause_generation", b"{", None),
        ("/abort_request", {}, "rid"),
        ("/abort_request", {"rid": ""}, "rid"),
        ("/abort_request", {"rid": 5}, "rid"),
        ("/abort_request", {"abort_all": "yes"}, "abort_all"),
        ("/abort_request", b"", None),
    ],
)
async def test_a_wrong_order_is_refused_by_name(path: str, body: Any, param: str | None) -> None:
    house = House()
    got = await house.control(path, body)
    assert got.status == 400 and got.error()["param"] == param
    assert house.asked == []


@pytest.mark.parametrize(
    "path", ["/flush_cache", "/pause_generation", "/continue_generation", "/server_info"]
)
async def test_a_part_that_does_not_answer_is_unavailable(path: str) -> None:
    house = House()
    house.is_deaf = True
    got = await house.control(path, method="GET" if path == "/server_info" else "POST")
    assert got.status == 503 and got.headers["retry-after"]


@pytest.mark.parametrize(
    "path", ["/flush_cache", "/abort_request", "/pause_generation", "/continue_generation"]
)
async def test_without_the_operators_key_nothing_happens(path: str) -> None:
    house = House()
    street = await house.ask(house.request("POST", path, {"abort_all": True}))
    assert street.status == 401
    house.app = App(house.gateway)
    assert (await house.control(path, {"abort_all": True})).status == 403
    assert house.asked == []


async def test_loads_have_sglangs_names() -> None:
    house = House()
    (load,) = (await house.control("/v1/loads", method="GET")).json()["loads"]
    assert load["num_running_reqs"] == 1 and load["num_total_reqs"] == 3
    assert load["token_usage"] == 32 / 1024 and load["cache_hit_rate"] == 0.5
    assert house.asked == [("replica/scheduler", Inspect())]


@pytest.mark.parametrize("prefix", ["", "get_"])
async def test_what_the_server_says_of_itself_is_an_allow_list(prefix: str) -> None:
    house = House(api_key_file="/secret/keys", admin_key_file="/secret/admin")
    server = await house.control(f"/{prefix}server_info", method="GET")
    model = await house.control(f"/{prefix}model_info", method="GET")
    assert server.json()["model"] == model.json()
    assert model.json()["served_model_name"] == "M" and model.json()["context_length"] == 64
    assert b"secret" not in server.body and b"127.0.0.1" not in server.body


# Aborts


async def begun(house: House) -> None:
    """Each has its first token."""
    for _ in range(3):
        await house.step()


@pytest.mark.parametrize(
    ("body", "ended"),
    [
        ({"rid": "job-1"}, [True, False, False]),
        ({"rid": "job-"}, [True, True, False]),
        ({"rid": "nobody"}, [False, False, False]),
        ({"abort_all": True}, [True, True, True]),
    ],
    ids=str,
)
async def test_requests_are_aborted_by_id_by_prefix_or_all(body: Any, ended: list[bool]) -> None:
    house = House()
    text = "a b c d e f g h"
    native = house.request("POST", "/generate", {"text": text, "rid": "job-1"})
    chat = {"model": "M", "messages": [{"role": "user", "content": text}]}
    given = house.request("POST", "/v1/chat/completions", chat, headers={"x-request-id": "job-2"})
    other = house.completion(text)
    await begun(house)
    assert (await house.control("/abort_request", body)).json()["success"]
    answers = await house.finish(native, given, other)
    reasons = [
        answers[0].json()["meta_info"]["finish_reason"]["type"],
        answers[1].json()["choices"][0]["finish_reason"],
        answers[2].json()["choices"][0]["finish_reason"],
    ]
    assert [reason == "abort" for reason in reasons] == ended
    for answer in answers:
        assert answer.status == 200 and b"a" in answer.body, "what has come is kept"
    for answer in answers[1:]:
        usage = answer.json()["usage"]
        assert usage["prompt_tokens"] == 8 and usage["completion_tokens"] > 0
    house.assert_idle()


async def test_our_own_ids_are_names_too() -> None:
    house = House()
    stream = house.chat("a b c d e f", stream=True)
    await begun(house)
    answer_id = msgspec.json.decode(stream.got.body.split(b"\n\n")[0][6:])["id"]
    assert (await house.control("/abort_request", {"rid": answer_id})).status == 200
    (got,) = await house.finish(stream)
    assert got.events()[-1]["choices"][0]["finish_reason"] == "abort"
    house.assert_idle()


async def test_one_prompt_of_a_batch_is_aborted_and_the_others_go_on() -> None:
    house = House()
    text = "a b c d e f"
    client = house.request("POST", "/generate", {"text": [text, text], "rid": ["x", "y"]})
    await begun(house)
    await house.control("/abort_request", {"rid": "y"})
    first, second = (await house.ask(client)).json()
    assert first["meta_info"]["finish_reason"]["type"] == "stop"
    assert second["meta_info"]["finish_reason"]["type"] == "abort"
    assert len(second["output_ids"]) < len(first["output_ids"])
    house.assert_idle()


async def test_what_has_not_begun_is_aborted_too() -> None:
    house = House()
    house.back.mute = True
    plain = house.completion("a b c")
    several = house.completion(["a", "b"], stream=True)
    message = house.request(
        "POST",
        "/v1/messages",
        {"model": "M", "max_tokens": 3, "messages": [{"role": "user", "content": "a"}]},
    )
    await begun(house)
    await house.control("/abort_request", {"abort_all": True})
    # The back end is asked to end them; the clients do not wait for that.
    one, two, three = await house.finish(plain, several, message)
    assert one.json()["choices"][0]["finish_reason"] == "abort"
    assert two.status == 200 and two.body.count(b'"abort"') == 2
    assert three.status == 503 and three.json()["type"] == "error"
    assert len(house.back.cancelled) == 4
    assert not house.gateway.calls.open and not house.gateway.calls.streams


async def test_the_other_gateways_are_told() -> None:
    house = House()
    paths = Paths(gateways=("gateway", "fronts/1/gateway"))
    house.gateway.controls = Controls(house.gateway.context, paths, ())
    house.gateway.abort("job-")
    assert house.cell.take() == [("fronts/1/gateway", Abort("job-"))]
    client = house.request("POST", "/generate", {"text": "a b c d", "rid": "job-9"})
    await begun(house)
    house.cell.tell(Abort("job-"))
    got = await house.ask(client)
    assert got.json()["meta_info"]["finish_reason"]["type"] == "abort"
    house.assert_idle()
