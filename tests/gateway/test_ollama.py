"""Bodies of the Ollama dialect to calls, rows to its lines and bodies: one field at a time."""

from __future__ import annotations

from itertools import count
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from actors.gateway.dialect import Head, Ready
from actors.gateway.errors import Refused
from actors.gateway.inputs import Limits
from actors.gateway.ollama import read_chat, read_generate
from actors.gateway.ollama_replies import ChatLines, GenerateLines
from actors.gateway.openai import Ask
from actors.gateway.shape import Parsers
from messages.config import GatewayConfig
from messages.gateway import TokenLogprob
from messages.types import Fault, FinishReason, Problem
from tests.gateway.street import Street
from tests.gateway.test_anthropic import ANSWERS, JSON, name_of, rows, turns

LIMITS = Limits(GatewayConfig(), "M", 100, Parsers("hermes", "think"), context_len=64)
PLAIN = LIMITS._replace(parsers=Parsers())
HI: Any = [{"role": "user", "content": "hi"}]
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}


def chat(limits: Limits = LIMITS, **fields: Any) -> Ask:
    body = {"model": "M", "messages": HI, **fields}
    return read_chat(msgspec.json.encode(body), limits, lambda: 7, 9.0)


def generate(limits: Limits = LIMITS, **fields: Any) -> Ask:
    body = {"model": "M", "prompt": "hi", **fields}
    return read_generate(msgspec.json.encode(body), limits, lambda: 7, 9.0)


def kwargs(ask: Ask) -> Any:
    found = ask.call.prompts[0].chat
    assert found is not None
    return msgspec.json.decode(found.template_kwargs_json or b"{}")


OPTIONS = [
    ({"temperature": 0}, "temperature", 0.0),
    ({}, "temperature", 0.8),
    ({"top_k": 3}, "top_k", 3),
    ({}, "top_k", 40),
    ({"top_k": -1}, "top_k", 0),
    ({"top_p": 0.5}, "top_p", 0.5),
    ({}, "top_p", 0.9),
    ({"min_p": 0.1}, "min_p", 0.1),
    ({"seed": 5}, "seed", 5),
    ({}, "seed", 7),
    ({"num_predict": 9}, "max_tokens", 9),
    ({"num_predict": -1}, "max_tokens", 0),
    ({}, "max_tokens", 0),
    ({"repeat_penalty": 1.1}, "repetition_penalty", 1.1),
    ({"presence_penalty": 0.5}, "presence_penalty", 0.5),
    ({"frequency_penalty": 0.5}, "frequency_penalty", 0.5),
]


@pytest.mark.parametrize(("options", "name", "value"), OPTIONS, ids=str)
def test_an_option_is_honoured(options: Any, name: str, value: Any) -> None:
    for ask in (chat(options=options), generate(options=options)):
        assert getattr(ask.call.sampling, name) == value
    raw = generate(raw=True, options=options)
    assert getattr(raw.call.sampling, name) == value


HONOURED: list[tuple[dict[str, Any], Any, Any]] = [
    ({}, lambda ask: ask.stream, True),
    ({"stream": False}, lambda ask: ask.stream, False),
    ({"options": {"stop": ["a"]}}, lambda ask: ask.call.stop.strings, ("a",)),
    ({"format": "json"}, lambda ask: ask.call.grammar.text, '{"type":"object"}'),
    ({"format": {"type": "array"}}, lambda ask: ask.call.grammar.text, '{"type":"array"}'),
    ({"think": True}, kwargs, {"enable_thinking": True}),
    ({"think": False}, kwargs, {"enable_thinking": False}),
    ({"think": "low"}, kwargs, {"enable_thinking": True, "reasoning_effort": "low"}),
    ({"logprobs": True, "top_logprobs": 2}, lambda ask: ask.logprobs, 2),
    ({"model": "M:latest"}, lambda ask: len(ask.call.prompts), 1),
]


@pytest.mark.parametrize(("fields", "look", "value"), HONOURED, ids=name_of)
def test_a_field_is_honoured(fields: dict[str, Any], look: Any, value: Any) -> None:
    assert look(chat(**fields)) == value
    assert look(generate(**fields)) == value


@pytest.mark.parametrize(
    "fields",
    [
        {"keep_alive": "5m"},
        {"options": {"num_ctx": 8, "num_gpu": 1, "mirostat": 0, "tfs_z": 1.0}},
        {"format": "", "think": None},
    ],
    ids=str,
)
def test_a_field_is_taken_and_changes_nothing(fields: dict[str, Any]) -> None:
    assert chat(**fields) == chat()
    assert generate(**fields) == generate()


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"options": {"temperature": "hot"}}, "options.temperature"),
        ({"options": {"mirostat": 1}}, "options.mirostat"),
        ({"options": {"tfs_z": 0.5}}, "options.tfs_z"),
        ({"options": {"typical_p": 0.5}}, "options.typical_p"),
        ({"format": "xml"}, "format"),
        ({"think": "much"}, "think"),
        ({"stream": "yes"}, "stream"),
        ({"model": "X"}, "model"),
        ({"top_logprobs": 2}, "top_logprobs"),
    ],
    ids=str,
)
def test_a_field_is_refused_by_its_name(fields: dict[str, Any], param: str) -> None:
    for read in (chat, generate):
        with pytest.raises(Refused) as caught:
            read(**fields)
        assert caught.value.problem.param == param


@pytest.mark.parametrize(
    ("read", "fields", "param"),
    [
        (chat, {"messages": [{"role": "user", "images": ["x"]}]}, "messages[0].images"),
        (chat, {"messages": [{"role": "ghost"}]}, "messages[0].role"),
        (chat, {"tools": [TOOL, TOOL]}, "tools"),
        (generate, {"images": ["x"]}, "images"),
        (generate, {"template": "{{ x }}"}, "template"),
        (generate, {"context": [1, 2]}, "context"),
        (generate, {"suffix": "end"}, "suffix"),
    ],
)
def test_a_field_of_one_route_is_refused_by_its_name(
    read: Any, fields: dict[str, Any], param: str
) -> None:
    with pytest.raises(Refused) as caught:
        read(**fields)
    assert caught.value.problem.param == param


def test_thinking_is_refused_of_a_model_that_does_not() -> None:
    with pytest.raises(Refused) as caught:
        chat(PLAIN, think=True)
    assert "does not support thinking" in caught.value.problem.message
    assert chat(PLAIN, think=False)


def test_a_body_without_a_prompt_asks_for_the_model_only() -> None:
    for read, fields in ((chat, {"messages": []}), (generate, {"prompt": ""})):
        with pytest.raises(Ready) as ready:
            read(**fields)
        assert msgspec.json.decode(ready.value.body)["done_reason"] == "load"


def test_a_conversation_with_tools_is_what_templates_know() -> None:
    call = {"function": {"name": "add", "arguments": {"a": 1}}}
    ask = chat(
        messages=[
            *HI,
            {"role": "assistant", "content": "", "thinking": "hm", "tool_calls": [call]},
            {"role": "tool", "content": "2", "tool_name": "add"},
        ],
        tools=[TOOL],
    )
    _, said, result = turns(ask)
    assert said["reasoning_content"] == "hm"
    assert said["tool_calls"][0]["function"] == {"name": "add", "arguments": {"a": 1}}
    assert result == {"role": "tool", "content": "2", "name": "add", "tool_call_id": "add"}
    assert ask.shape.tool_parser == "hermes" and ask.shape.names == ("add",)


def test_a_generated_text_has_its_system_or_is_raw() -> None:
    assert turns(generate(system="be"))[0] == {"role": "system", "content": "be"}
    raw = generate(raw=True, system="be")
    assert raw.call.prompts[0].text == "hi"


FIELDS = ["messages", "prompt", "options", "format", "think", "tools", "system", "raw", "context"]


@settings(max_examples=150)
@given(st.dictionaries(st.sampled_from(FIELDS), JSON))
def test_whatever_the_body_it_is_read_or_refused(fields: dict[str, Any]) -> None:
    for read in (chat, generate):
        try:
            assert read(**fields).call.prompts
        except Refused as error:
            assert error.problem.fault is Fault.INVALID
        except Ready:
            pass


# Answers


def head() -> Head:
    ticks = count(101)
    return Head("id", 100, "M", 100.0, lambda: float(next(ticks)))


def lines_of(data: bytes) -> list[Any]:
    assert data.endswith(b"\n")
    return [msgspec.json.decode(line) for line in data.split(b"\n")[:-1]]


def both(ask: Ask, kind: Any, given_rows: Any) -> tuple[list[Any], Any]:
    stream = kind(ask, head(), [])
    data = b"".join(stream.write([row]) for row in given_rows) + stream.end([])
    whole = kind(ask, head(), [])
    whole.add(given_rows)
    return lines_of(data), msgspec.json.decode(whole.body([]))


@settings(max_examples=120)
@given(st.sampled_from(ANSWERS), st.lists(st.integers(0, 90), max_size=12))
def test_the_joined_lines_are_the_answer(text: str, cuts: list[int]) -> None:
    places = sorted({0, len(text), *(cut for cut in cuts if cut < len(text))})
    chunks = [text[a:b] for a, b in zip(places, places[1:], strict=False)] or [""]
    lines, whole = both(chat(tools=[TOOL]), ChatLines, rows(chunks))
    assert [line["done"] for line in lines] == [False] * (len(lines) - 1) + [True]
    message = whole["message"]
    assert "".join(line["message"]["content"] for line in lines) == message["content"]
    thinking = "".join(line["message"].get("thinking", "") for line in lines)
    assert thinking == message.get("thinking", "")
    calls = [call for line in lines for call in line["message"].get("tool_calls", [])]
    assert calls == message.get("tool_calls", [])
    assert all(call["function"]["name"] == "add" for call in calls)


def test_the_last_line_has_counts_and_nanoseconds() -> None:
    lines, whole = both(generate(), GenerateLines, rows(["a", "b", "c"], FinishReason.LENGTH))
    for last in (lines[-1], whole):
        assert last["done_reason"] == "length"
        assert (last["prompt_eval_count"], last["eval_count"]) == (5, 3)
        assert last["prompt_eval_duration"] == 1_000_000_000
        assert last["total_duration"] == last["prompt_eval_duration"] + last["eval_duration"]
        assert last["created_at"].endswith("Z")
    assert whole["response"] == "abc" == "".join(line["response"] for line in lines)


def test_log_probabilities_go_with_their_text() -> None:
    ask = chat(logprobs=True, top_logprobs=1)
    (row,) = rows(["é"])
    token = TokenLogprob("é".encode(), 5, -0.5, ((b"\xc3", 6, float("-inf")),))
    row = row._replace(delta=msgspec.structs.replace(row.delta, logprobs=(token,)))
    lines, whole = both(ask, ChatLines, [row])
    for logprobs in (lines[0]["logprobs"], whole["logprobs"]):
        (entry,) = logprobs
        assert entry["token"] == "é" and entry["logprob"] == -0.5
        assert entry["top_logprobs"][0]["logprob"] == -9999.0


def test_a_stream_that_fails_ends_with_one_error() -> None:
    stream = ChatLines(chat(), head(), [])
    data = stream.write(rows(["a", "b"])[:1]) + stream.fail(Problem(Fault.UNAVAILABLE, "lost"))
    assert lines_of(data)[-1] == {"error": "lost"}


# The routes


async def test_the_routes_answer_and_stream() -> None:
    street = Street()
    body = {"model": "M", "messages": [{"role": "user", "content": "one two three"}]}
    stream, plain, text, load = await street.finish(
        street.request("POST", "/api/chat", body),
        street.request("POST", "/api/chat", {**body, "stream": False}),
        street.request("POST", "/api/generate", {"model": "M", "prompt": "a b", "stream": False}),
        street.request("POST", "/api/generate", {"model": "M"}),
    )
    assert stream.headers["content-type"] == "application/x-ndjson"
    assert "".join(x["message"]["content"] for x in lines_of(stream.body)) == "one two three"
    assert plain.json()["message"] == {"role": "assistant", "content": "one two three"}
    assert text.json()["response"] == "a b"
    assert load.json()["done_reason"] == "load"
    street.assert_idle()


async def test_the_model_is_listed_and_shown() -> None:
    street = Street()
    tags, running, show, version = await street.finish(
        street.request("GET", "/api/tags"),
        street.request("GET", "/api/ps"),
        street.request("POST", "/api/show", {"name": "M"}),
        street.request("GET", "/api/version"),
    )
    assert [card["name"] for card in tags.json()["models"]] == ["M"]
    assert running.json()["models"][0]["context_length"] == 64
    assert show.json()["model_info"]["model.context_length"] == 64
    assert version.json()["version"]
    street.assert_idle()


@pytest.mark.parametrize(
    ("method", "path", "body", "status"),
    [
        ("POST", "/api/chat", b"{", 400),
        ("POST", "/api/chat", {"model": "X", "messages": HI}, 404),
        ("POST", "/api/show", {"model": "X"}, 404),
        ("POST", "/api/show", {}, 400),
        ("POST", "/api/pull", {"model": "X"}, 404),
        ("GET", "/api/chat", None, 405),
        ("POST", "/api/generate", {"model": "M", "prompt": "w " * 200}, 400),
    ],
)
async def test_errors_have_the_dialects_shape(
    method: str, path: str, body: Any, status: int
) -> None:
    street = Street()
    got = await street.ask(street.request(method, path, body))
    assert got.status == status
    assert list(got.json()) == ["error"] and isinstance(got.json()["error"], str)
    street.assert_idle()
