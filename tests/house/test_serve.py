"""A real server in each placement, and the official client.

Texts are compared with each other: in float32 the same prompt has one answer, alone or in a crowd.
"""

from __future__ import annotations

import contextlib
import re
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import openai
import psutil
import pytest

from tests.house.server import WAIT_S, Server, eventually

PROMPTS = ["The house", "Once upon a time there was", "x", "0123 éà 🙂", "many rooms " * 20]


def complete(server: Server, prompt: Any, **keywords: Any) -> Any:
    keywords = {"max_tokens": 24, "temperature": 0, **keywords}
    return server.client().completions.create(model=server.model(), prompt=prompt, **keywords)


def text_of(server: Server, prompt: Any, **keywords: Any) -> str:
    return str(complete(server, prompt, **keywords).choices[0].text)


def streamed(server: Server, prompt: Any, **keywords: Any) -> tuple[str, str | None, Any]:
    """Text, finish reason and usage of a streamed completion."""
    stream = complete(
        server, prompt, stream=True, stream_options={"include_usage": True}, **keywords
    )
    text, finish, usage = "", None, None
    for chunk in stream:
        usage = chunk.usage or usage
        for choice in chunk.choices:
            text += choice.text
            finish = choice.finish_reason or finish
    return text, finish, usage


@pytest.mark.parametrize("prompt", PROMPTS)
def test_a_streamed_answer_is_the_plain_one(server: Server, prompt: str) -> None:
    plain = complete(server, prompt)
    text, finish, usage = streamed(server, prompt)
    assert text == plain.choices[0].text
    assert finish == plain.choices[0].finish_reason
    assert usage.prompt_tokens == plain.usage.prompt_tokens
    assert usage.completion_tokens == plain.usage.completion_tokens


def test_a_chat_streams_what_it_answers(server: Server) -> None:
    client, model = server.client(), server.model()
    messages: Any = [{"role": "user", "content": "Hello"}]
    plain = client.chat.completions.create(
        model=model, messages=messages, max_tokens=20, temperature=0
    )
    stream = client.chat.completions.create(
        model=model, messages=messages, max_tokens=20, temperature=0, stream=True
    )
    text = "".join(choice.delta.content or "" for chunk in stream for choice in chunk.choices)
    assert text == plain.choices[0].message.content


def test_a_crowd_gets_the_answers_that_each_would_get_alone(server: Server) -> None:
    prompts = [f"{PROMPTS[i % 5]} {i}" for i in range(24)]
    alone = [text_of(server, prompt) for prompt in prompts]
    with ThreadPoolExecutor(12) as pool:
        crowd = list(pool.map(lambda prompt: streamed(server, prompt)[0], prompts))
    assert crowd == alone


def test_a_seeded_sample_is_the_same_again(server: Server) -> None:
    first = text_of(server, "The house", temperature=1.0, seed=7)
    assert text_of(server, "The house", temperature=1.0, seed=7) == first
    others = {text_of(server, "The house", temperature=1.0, seed=seed) for seed in range(8, 13)}
    assert others - {first}


def test_prompts_in_a_list_are_answered_in_order(server: Server) -> None:
    found = complete(server, PROMPTS[:3])
    assert [choice.index for choice in found.choices] == [0, 1, 2]
    assert [choice.text for choice in found.choices] == [
        text_of(server, prompt) for prompt in PROMPTS[:3]
    ]


def test_token_ids_are_a_prompt(server: Server) -> None:
    assert complete(server, [42, 71, 78, 78, 81]).usage.prompt_tokens == 5


def test_an_unknown_model_is_404(server: Server) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        server.client().completions.create(model="nonsense", prompt="x")
    assert caught.value.param == "model"


@pytest.mark.parametrize(
    ("field", "value"),
    [("temperature", -1), ("max_tokens", "many"), ("top_p", 2), ("n", 0)],
)
def test_a_bad_field_is_400_and_named(server: Server, field: str, value: Any) -> None:
    body = {"model": server.model(), "prompt": "x", field: value}
    answer = httpx.post(server.url + "/v1/completions", json=body, timeout=WAIT_S)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == field


def test_a_prompt_longer_than_the_context_is_400(server: Server) -> None:
    with pytest.raises(openai.BadRequestError):
        complete(server, [42] * 600)
    # And the server goes on.
    assert complete(server, "x").choices[0].text


def test_health_ready_and_models_answer(server: Server) -> None:
    assert server.status("/health") == 200
    assert server.status("/ready") == 200
    model = server.model()
    assert server.status(f"/v1/models/{model}") == 200
    assert server.status("/v1/models/nonsense") == 404


def test_actors_shows_every_room_and_what_it_has_done(server: Server) -> None:
    rooms = {"gateway", "tokenizer", "router", "replica/scheduler", "replica/cache"}
    rooms |= {"replica/worker", "detokenizer", "metrics"}
    complete(server, "x")
    eventually(
        lambda: all(server.rows()[room]["handled_count"] for room in rooms), "all have worked"
    )
    rows = server.rows()
    assert rooms <= set(rows)
    for row in rows.values():
        assert row["state"] == "running"
        assert row["incarnation"] == 1
        assert row["restarts"] == 0
        assert row["pid"] > 0


def test_metrics_count_what_was_served(server: Server) -> None:
    before = server.metric("histrio_requests_total")
    complete(server, "x")
    # Actors flush what they count on a timer.
    eventually(lambda: server.metric("histrio_requests_total") > before, "a request is counted")


def test_clients_that_leave_free_what_they_held(server: Server) -> None:
    body = {
        "model": server.model(),
        "prompt": "x",
        "max_tokens": 480,
        "ignore_eos": True,
        "stream": True,
    }
    with contextlib.ExitStack() as streams, httpx.Client(timeout=WAIT_S) as client:
        for _ in range(6):
            url = server.url + "/v1/completions"
            answer = streams.enter_context(client.stream("POST", url, json=body))
            next(answer.iter_lines())
        assert server.metric("histrio_streams_open") >= 0  # it answers meanwhile
    # Gauges are flushed on a timer, so that an old 0 proves nothing: the counter comes first.
    aborted = 'histrio_requests_total{outcome="abort"'
    eventually(lambda: server.metric(aborted) > 0, "aborts are counted")
    eventually(lambda: server.metric("histrio_requests_running") == 0, "nothing runs any more")
    eventually(lambda: server.metric('histrio_pages{state="leased"') == 0, "no page is leased")
    eventually(lambda: server.metric("histrio_streams_open") == 0, "no stream is open")
    assert complete(server, "x").choices[0].text


def test_a_stop_expression_ends_the_text_where_it_first_matches(server: Server) -> None:
    base = text_of(server, PROMPTS[0], max_tokens=48)
    middle = base[len(base) // 2 : len(base) // 2 + 3]
    expression = ".{0,4}" + re.escape(middle) + "|never{3}"
    compiled = re.compile(expression)
    ends = [
        (end, begin)
        for end in range(1, len(base) + 1)
        for begin in range(end)
        if compiled.fullmatch(base, begin, end)
    ]
    end, begin = ends[0]
    for keep in (False, True):
        extra = {"stop_regex": [expression], "no_stop_trim": keep}
        keywords: dict[str, Any] = {"max_tokens": 48, "extra_body": extra}
        plain = complete(server, PROMPTS[0], **keywords).choices[0]
        assert plain.text == base[: end if keep else begin]
        assert (plain.finish_reason, plain.matched_stop) == ("stop", expression)
        assert streamed(server, PROMPTS[0], **keywords)[:2] == (plain.text, "stop")
    for wrong in ("^a", "a*", "(", "(a{900}){900}"):
        with pytest.raises(openai.BadRequestError) as caught:
            complete(server, "x", extra_body={"stop_regex": wrong})
        assert caught.value.body["param"] == "stop_regex"  # type: ignore[index]


def test_the_server_says_where_it_is_once_it_answers(server: Server) -> None:
    eventually(lambda: f"Serving tiny-llama on {server.url}" in server.said(), "it says so")


def test_nothing_but_the_http_port_listens(server: Server) -> None:
    """B187: what parts say to one another goes through files that are this user's alone."""
    listening = {
        (connection.laddr.ip, connection.laddr.port)
        for process in (psutil.Process(server.process.pid), *server.children())
        for connection in process.net_connections("inet")
        if connection.status in (psutil.CONN_LISTEN, psutil.CONN_NONE)
    }
    assert listening == {("127.0.0.1", server.port)}
