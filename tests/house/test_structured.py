"""Constrained answers, tools and reasoning of a real server, by the official client.

The model is random, so that what fits is the constraint's doing. Cases of the reports by number.
"""

from __future__ import annotations

import json
import os
import re
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from tests.house.server import WAIT_S, Server, eventually
from tests.house.tiny import TEMPLATE

OBJ = {
    "type": "object",
    "properties": {"a": {"type": "integer", "maximum": 999}, "b": {"enum": ["x", "y\n", None]}},
    "required": ["a", "b"],
    "additionalProperties": False,
}
ONE = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"]}
TOOLS: Any = [
    {
        "type": "function",
        "function": {"name": "add", "parameters": {**ONE, "additionalProperties": False}},
    },
    {"type": "function", "function": {"name": "now"}},
]
NAMED = {"type": "function", "function": {"name": "add"}}


@pytest.fixture(scope="module")
def house(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """One server for this module, in processes as `serve` has it."""
    # A template that takes tools and does not show them: they would fill this small context.
    template = tmp_path_factory.mktemp("template") / "chat.jinja"
    template.write_text("{# tools #}" + TEMPLATE, "utf-8")
    words = ("--chat-template", str(template), "--grammar-timeout", "50")
    found = Server(tiny, tmp_path_factory.mktemp("logs"), *words)
    try:
        yield found.wait_ready()
    finally:
        found.close()


def chat(server: Server, **keywords: Any) -> Any:
    messages: Any = [{"role": "user", "content": "Hello"}]
    keywords = {"max_tokens": 200, "temperature": 1.0, "seed": 5, "messages": messages, **keywords}
    return server.client().chat.completions.create(model=server.model(), **keywords)


def text_of(server: Server, **keywords: Any) -> str:
    (choice,) = chat(server, **keywords).choices
    assert choice.finish_reason == "stop"
    return str(choice.message.content)


def form(schema: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}


def joined(stream: Any) -> tuple[str, list[list[str]], str | None]:
    """Text, calls and the reason of a stream."""
    text, calls, finish = "", [], None
    for chunk in stream:
        (choice,) = chunk.choices
        text += choice.delta.content or ""
        finish = choice.finish_reason or finish
        for part in choice.delta.tool_calls or ():
            if part.id:
                calls.append([part.function.name, ""])
            calls[part.index][1] += part.function.arguments or ""
    return text, calls, finish


def test_answers_fit_their_schema_plain_and_streamed(house: Server) -> None:
    for seed in range(4):
        text = text_of(house, response_format=form(OBJ), seed=seed)
        value = json.loads(text)
        assert set(value) == {"a", "b"} and type(value["a"]) is int and value["a"] <= 999
        stream = chat(house, response_format=form(OBJ), seed=seed, stream=True)
        assert joined(stream) == (text, [], "stop")


def test_expressions_choices_and_grammars_are_kept_to_also_against_the_end_token(
    house: Server,
) -> None:
    """B103."""
    bias = {"2": 100.0}  # the end of the sequence
    for seed in range(5):
        extra: dict[str, Any] = {"seed": seed, "logit_bias": bias}
        assert re.fullmatch("[a-f]{6}", text_of(house, extra_body={"regex": "[a-f]{6}"}, **extra))
        choice = text_of(house, extra_body={"guided_choice": ["left", "right"]}, **extra)
        assert choice in ("left", "right")
        ebnf = text_of(house, extra_body={"ebnf": 'root ::= "yes" | "no" root'}, **extra)
        assert re.fullmatch("(no)*yes", ebnf)
        said = text_of(house, response_format=form({"type": "string", "enum": ["é🙂"]}), **extra)
        assert json.loads(said) == "é🙂"


def test_samples_and_neighbours_have_their_own_place(house: Server) -> None:
    """B105."""
    found = chat(house, response_format=form(OBJ), n=4, temperature=1.5)
    assert all(set(json.loads(choice.message.content)) == {"a", "b"} for choice in found.choices)
    free = chat(house, max_tokens=30, temperature=0).choices[0].message.content

    def one(seed: int) -> str:
        if seed % 2:
            return str(chat(house, max_tokens=30, temperature=0).choices[0].message.content)
        return text_of(house, response_format=form(OBJ), seed=seed)

    with ThreadPoolExecutor(8) as pool:
        for seed, text in enumerate(pool.map(one, range(8))):
            if seed % 2:
                assert text == free
            else:
                assert set(json.loads(text)) == {"a", "b"}


def test_a_cut_off_answer_says_so(house: Server) -> None:
    """B109."""
    whole = text_of(house, response_format=form(OBJ))
    for count in (1, 2, 3):
        (choice,) = chat(house, response_format=form(OBJ), max_tokens=count).choices
        assert choice.finish_reason == "length" and whole.startswith(choice.message.content)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    "schema",
    [
        {"type": "objekt"},
        {"type": "string", "pattern": "("},
        {"$ref": "#"},
        {"$ref": "http://127.0.0.1:9/s.json"},
        {"type": "integer", "minimum": 5, "maximum": 4},
        {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(5000)}},
    ],
    ids=lambda schema: str(schema)[:40],
)
def test_wrong_schemas_are_refused_and_the_server_goes_on(
    house: Server, schema: Any, stream: bool
) -> None:
    """B095, B097, B099, B107."""
    with pytest.raises(openai.BadRequestError) as caught:
        chat(house, response_format=form(schema), stream=stream)
    assert caught.value.body["param"] == "response_format"  # type: ignore[index]
    assert house.status("/health") == 200


def nested(depth: int) -> Any:
    if not depth:
        return {"type": "integer"}
    branches = [
        {"type": "object", "properties": {f"k{i}": nested(depth - 1)}, "required": [f"k{i}"]}
        for i in range(4)
    ]
    return {"oneOf": branches}


WIDE = {f"p{i}": {"type": "string"} for i in range(5000)}
COSTLY = [
    nested(8),
    nested(6),
    {"type": "object", "properties": WIDE},
    {"type": "array", "maxItems": 100_000, "items": OBJ},
]


def test_costly_schemas_hold_up_neither_health_nor_streams_nor_other_schemas(house: Server) -> None:
    """B099."""
    free: dict[str, Any] = {"max_tokens": 60, "temperature": 0, "extra_body": {"ignore_eos": True}}
    expected = joined(chat(house, stream=True, **free))

    def costly(schema: Any) -> int:
        try:
            chat(house, response_format=form(schema), max_tokens=4)
        except openai.APIStatusError as error:
            return error.status_code
        return 200

    with ThreadPoolExecutor(12) as pool:
        asked = [pool.submit(costly, schema) for schema in COSTLY]
        streams = [pool.submit(lambda: joined(chat(house, stream=True, **free))) for _ in range(3)]
        good = [pool.submit(text_of, house, response_format=form({"const": n})) for n in range(4)]
        healths = [house.status("/health")]
        while wait((*asked, *streams, *good), 0.02).not_done:
            healths.append(house.status("/health"))
        assert {future.result() for future in asked} <= {200, 400}
        assert all(future.result() == expected for future in streams)
        assert [future.result() for future in good] == ["0", "1", "2", "3"]
    assert set(healths) == {200}
    assert json.loads(text_of(house, response_format=form(OBJ)))


@pytest.mark.parametrize(("choice", "finish"), [("required", "tool_calls"), (NAMED, "stop")])
def test_forced_calls_fit_the_tool_and_end_alike_in_both_modes(
    house: Server, choice: Any, finish: str
) -> None:
    """B113."""
    keywords: Any = {"tools": TOOLS, "tool_choice": choice, "parallel_tool_calls": False}
    keywords["max_tokens"] = None
    (plain,) = chat(house, **keywords).choices
    assert plain.finish_reason == finish and plain.message.content is None
    (call,) = plain.message.tool_calls
    arguments = json.loads(call.function.arguments)
    assert set(arguments) == ({"a"} if call.function.name == "add" else set())
    stream = chat(house, stream=True, **keywords)
    assert joined(stream) == ("", [[call.function.name, call.function.arguments]], finish)


@pytest.mark.parametrize("choice", ["required", NAMED])
def test_a_forced_call_that_is_cut_off_leaves_no_content(house: Server, choice: Any) -> None:
    keywords: Any = {"tools": TOOLS, "tool_choice": choice}
    for count in range(1, 40, 4):
        (plain,) = chat(house, max_tokens=count, **keywords).choices
        assert not plain.message.content, plain
        calls = [
            [call.function.name, call.function.arguments] for call in plain.message.tool_calls or ()
        ]
        stream = chat(house, max_tokens=count, stream=True, **keywords)
        assert joined(stream) == ("", calls, plain.finish_reason)


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        (
            "/v1/responses",
            {
                "input": "x",
                "text": {"format": {"type": "json_schema", "name": "x", "schema": {"not": {}}}},
            },
            "text.format",
        ),
        ("/generate", {"text": "x", "sampling_params": {"regex": "("}}, "sampling_params.regex"),
        ("/v1/completions", {"prompt": "x", "structured_outputs": {}}, "structured_outputs"),
    ],
)
def test_a_wrong_constraint_is_named_as_the_dialect_does(
    house: Server, path: str, fields: dict[str, Any], param: str
) -> None:
    got = httpx.post(house.url + path, json={"model": house.model(), **fields}, timeout=WAIT_S)
    assert (got.status_code, got.json()["error"]["param"]) == (400, param)


def test_the_history_of_calls_goes_on(house: Server) -> None:
    """B119, B121."""
    for arguments in ('{"a": "x', "", "null", '"text"', "[1]", "{}"):
        call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": arguments}}
        messages: Any = [
            {"role": "user", "content": "hi"},
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "other", "content": [{"type": "text", "text": "3"}]},
        ]
        assert chat(house, messages=messages, max_tokens=3).choices
    first: Any = [{"role": "tool", "tool_call_id": "c", "content": ""}]
    assert chat(house, messages=first, max_tokens=3).choices


@pytest.mark.parametrize("room", ["replica/scheduler", "replica/worker"])
def test_a_constrained_stream_goes_on_when_its_parts_are_killed(house: Server, room: str) -> None:
    keywords: dict[str, Any] = {"extra_body": {"regex": "([a-f]{4}-){80}end"}, "max_tokens": 450}
    expected = text_of(house, **keywords)
    pid = house.pid_of(room)
    text, killed = "", False
    for chunk in chat(house, stream=True, **keywords):
        text += chunk.choices[0].delta.content or ""
        if not killed and len(text) > 20:
            killed = True
            os.kill(pid, signal.SIGKILL)
    assert text == expected
    house.wait_back(room, pid)


def idle(server: Server) -> Callable[[], bool]:
    return lambda: all(
        line.endswith((" 0", " 0.0"))
        for line in server.get("/metrics").text.splitlines()
        if line.startswith(("histrio_requests_running", "histrio_requests_waiting"))
    )


def test_nothing_is_left_running(house: Server) -> None:
    eventually(idle(house), "the house is idle")
