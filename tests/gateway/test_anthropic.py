"""Bodies of the Anthropic dialect to calls, rows to its messages and events."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from actors.gateway.access import Access
from actors.gateway.anthropic import read_count, read_messages
from actors.gateway.anthropic_replies import MessageStream, MessageWriter
from actors.gateway.call import Row
from actors.gateway.dialect import Head
from actors.gateway.errors import Refused
from actors.gateway.http import App
from actors.gateway.inputs import Limits
from actors.gateway.openai import Ask
from actors.gateway.shape import Parsers
from messages.config import GatewayConfig
from messages.gateway import Delta
from messages.types import Fault, FinishReason, Problem, Usage
from tests.gateway.street import CONTEXT, Street

LIMITS = Limits(GatewayConfig(), "M", 100, Parsers("hermes", "think"), context_len=64)
HEAD = Head("msg_1", 1_700_000_000, "M")
HI: Any = [{"role": "user", "content": "hi"}]
TOOL = {"name": "add", "description": "adds", "input_schema": {"type": "object"}}


def read(**fields: Any) -> Ask:
    body = {"model": "M", "max_tokens": 5, "messages": HI, **fields}
    return read_messages(msgspec.json.encode(body), LIMITS, lambda: 7, 9.0)


def refused(**fields: Any) -> Problem:
    with pytest.raises(Refused) as caught:
        read(**fields)
    return caught.value.problem


def turns(ask: Ask) -> list[Any]:
    chat = ask.call.prompts[0].chat
    assert chat is not None
    found: list[Any] = msgspec.json.decode(chat.messages_json)
    return found


def kwargs(ask: Ask) -> Any:
    chat = ask.call.prompts[0].chat
    assert chat is not None
    return msgspec.json.decode(chat.template_kwargs_json or b"{}")


def tools(ask: Ask) -> Any:
    chat = ask.call.prompts[0].chat
    assert chat is not None
    return msgspec.json.decode(chat.tools_json or b"null")


def name_of(value: Any) -> str:
    """Of a case: what it says, never where a function lies."""
    return "" if callable(value) else str(value)[:60]


HONOURED: list[tuple[dict[str, Any], Any, Any]] = [
    ({"max_tokens": 9}, lambda ask: ask.call.sampling.max_tokens, 9),
    ({"temperature": 0.5}, lambda ask: ask.call.sampling.temperature, 0.5),
    ({"top_p": 0.5}, lambda ask: ask.call.sampling.top_p, 0.5),
    ({"top_k": 3}, lambda ask: ask.call.sampling.top_k, 3),
    ({"stop_sequences": ["a", "b"]}, lambda ask: ask.call.stop.strings, ("a", "b")),
    ({"stream": True}, lambda ask: ask.stream, True),
    ({"system": "be"}, lambda ask: turns(ask)[0], {"role": "system", "content": "be"}),
    (
        {"system": [{"type": "text", "text": "be"}, {"type": "text", "text": " it"}]},
        lambda ask: turns(ask)[0]["content"],
        "be it",
    ),
    ({"thinking": {"type": "disabled"}}, kwargs, {"enable_thinking": False}),
    ({"thinking": {"type": "enabled", "budget_tokens": 9}}, kwargs, {"enable_thinking": True}),
    (
        {"thinking": {"type": "adaptive", "display": "omitted"}},
        lambda ask: ask.shape.shows_reasoning,
        False,
    ),
    ({"output_config": {"effort": "low"}}, kwargs, {"reasoning_effort": "low"}),
    (
        {"output_config": {"format": {"type": "json_schema", "schema": {"type": "array"}}}},
        lambda ask: ask.call.grammar.text,
        '{"type":"array"}',
    ),
    (
        {"output_format": {"type": "json_schema", "schema": {"type": "array"}}},
        lambda ask: ask.call.grammar.kind,
        "json_schema",
    ),
    (
        {"tools": [TOOL]},
        tools,
        [
            {
                "type": "function",
                "function": {
                    "name": "add",
                    "parameters": {"type": "object"},
                    "description": "adds",
                },
            }
        ],
    ),
    ({"tools": [TOOL]}, lambda ask: (ask.shape.tool_parser, ask.shape.names), ("hermes", ("add",))),
    (
        {"tools": [TOOL], "tool_choice": {"type": "any"}},
        lambda ask: (ask.shape.tool_parser, ask.call.grammar is not None),
        ("array", True),
    ),
    (
        {"tools": [TOOL], "tool_choice": {"type": "tool", "name": "add"}},
        lambda ask: ask.shape.tool_parser,
        "named",
    ),
    ({"tools": [TOOL], "tool_choice": {"type": "none"}}, lambda ask: ask.shape.tool_parser, ""),
    (
        {"tools": [TOOL], "tool_choice": {"type": "auto", "disable_parallel_tool_use": True}},
        lambda ask: ask.shape.single,
        True,
    ),
]


@pytest.mark.parametrize(("fields", "look", "value"), HONOURED, ids=name_of)
def test_a_field_is_honoured(fields: dict[str, Any], look: Any, value: Any) -> None:
    assert look(read(**fields)) == value


@pytest.mark.parametrize(
    "fields",
    [
        {"metadata": {"user_id": "u"}},
        {"service_tier": "auto"},
        {"cache_control": {"type": "ephemeral"}},
        {"system": None, "tools": None, "tool_choice": None, "stop_sequences": None},
        {"container": None, "mcp_servers": [], "context_management": {}},
        {"tool_choice": {"type": "auto"}},
        {"nobody_knows": 1},
    ],
    ids=str,
)
def test_a_field_is_taken_and_changes_nothing(fields: dict[str, Any]) -> None:
    assert read(**fields) == read()


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"temperature": 1.5}, "temperature"),
        ({"top_p": "x"}, "top_p"),
        ({"stop_sequences": [""]}, "stop_sequences"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "nobody", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": []}]}, "messages[0].content"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]},
            "messages[0].content[0].type",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "text"}]}]},
            "messages[0].content[0].text",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "tool_result"}]}]},
            "messages[0].content[0].tool_use_id",
        ),
        (
            {"messages": [{"role": "assistant", "content": [{"type": "tool_use", "id": "1"}]}]},
            "messages[0].content[0].name",
        ),
        ({"system": [{"type": "image"}]}, "system[0].type"),
        ({"tools": [{"type": "web_search_20250305", "name": "web"}]}, "tools[0].type"),
        ({"tools": [TOOL, TOOL]}, "tools"),
        ({"tools": [{"name": "has space"}]}, "tools[0].name"),
        ({"tools": [TOOL, {"name": "now"}]}, "tools[1].input_schema"),
        ({"tools": [{"name": "now", "input_schema": None}]}, "tools[0].input_schema"),
        ({"tool_choice": {"type": "any"}}, "tools"),
        ({"tools": [TOOL], "tool_choice": {"type": "tool"}}, "tool_choice.name"),
        ({"tools": [TOOL], "tool_choice": {"type": "tool", "name": "no"}}, "tool_choice"),
        ({"thinking": {"type": "often"}}, "thinking.type"),
        ({"container": "c"}, "container"),
        ({"mcp_servers": [{}]}, "mcp_servers"),
        ({"context_management": {"edits": [1]}}, "context_management"),
        ({"output_format": {"type": "json_schema"}}, "output_format.schema"),
    ],
    ids=name_of,
)
def test_a_field_is_refused_by_its_name(fields: dict[str, Any], param: str) -> None:
    problem = refused(**fields)
    assert problem.fault is Fault.INVALID
    assert problem.param == param


def test_an_unknown_model_is_not_found() -> None:
    assert refused(model="X").fault is Fault.NOT_FOUND


def test_a_conversation_with_tools_is_what_templates_know() -> None:
    ask = read(
        messages=[
            {"role": "user", "content": "add"},
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "hm", "signature": "s"},
                    {"type": "redacted_thinking", "data": "x"},
                    {"type": "text", "text": "well"},
                    {"type": "tool_use", "id": "c1", "name": "add", "input": {"a": 1}},
                ],
            },
            {
                "role": "user",
                "content": [
                    {"type": "text", "text": "so?"},
                    {
                        "type": "tool_result",
                        "tool_use_id": "c1",
                        "content": [{"type": "text", "text": "2"}],
                    },
                ],
            },
        ],
        tools=[TOOL],
    )
    _, said, result, asked = turns(ask)
    assert said["content"] == "well" and said["reasoning_content"] == "hm"
    function = {"name": "add", "arguments": {"a": 1}}
    assert said["tool_calls"] == [{"id": "c1", "type": "function", "function": function}]
    assert result == {"role": "tool", "content": "2", "tool_call_id": "c1"}
    assert asked == {"role": "user", "content": "so?"}


def test_an_answer_that_has_begun_goes_on() -> None:
    chat = read(messages=[*HI, {"role": "assistant", "content": "I"}]).call.prompts[0].chat
    assert chat is not None and chat.continue_final_message and not chat.add_generation_prompt
    fresh = read().call.prompts[0].chat
    assert fresh is not None and fresh.add_generation_prompt


def test_counting_generates_nothing_and_refuses_no_length() -> None:
    body = msgspec.json.encode({"model": "M", "messages": HI, "tools": [TOOL]})
    call = read_count(body, LIMITS, lambda: 7).call
    assert call.prompt_only and call.measure


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=6),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["type", "text", "name", "content", "x"]), inner, max_size=3
        )
    ),
    max_leaves=8,
)
FIELDS = ["max_tokens", "messages", "system", "tools", "tool_choice", "thinking", "output_config"]


@settings(max_examples=150)
@given(st.dictionaries(st.sampled_from(FIELDS), JSON))
def test_whatever_the_body_it_is_read_or_refused(fields: dict[str, Any]) -> None:
    body = msgspec.json.encode({"model": "M", "max_tokens": 5, "messages": HI, **fields})
    for reader in (read_messages, read_count):
        try:
            assert reader(body, LIMITS, lambda: 7).call.prompts
        except Refused as error:
            assert error.problem.fault is Fault.INVALID


# Answers


def rows(
    chunks: list[str], finish: FinishReason = FinishReason.STOP, matched: Any = None
) -> list[Row]:
    found = []
    for index, text in enumerate(chunks):
        is_last = index + 1 == len(chunks)
        usage = Usage(prompt_tokens=5, cached_tokens=2) if index == 0 else None
        if is_last:
            usage = Usage(prompt_tokens=5, completion_tokens=len(chunks), cached_tokens=2)
        delta = Delta(
            request="c.0",
            attempt=1,
            index=index,
            token_count=1,
            text=text,
            finish=finish if is_last else None,
            matched=matched if is_last else None,
            usage=usage,
        )
        found.append(Row(0, delta))
    return found


def events_of(data: bytes) -> list[Any]:
    found = []
    for block in data.decode().split("\n\n")[:-1]:
        name, line = block.split("\n")
        event = msgspec.json.decode(line.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        found.append(event)
    return found


def streamed(ask: Ask, given_rows: list[Row]) -> list[Any]:
    writer = MessageStream(ask, HEAD, [])
    data = b"".join(writer.write([row]) for row in given_rows)
    return events_of(data + writer.end([]))


def whole(ask: Ask, given_rows: list[Row]) -> Any:
    writer = MessageWriter(ask, HEAD, [])
    writer.add(given_rows)
    return msgspec.json.decode(writer.body([]))


def gathered(events: list[Any]) -> Any:
    """The message that a client makes of the events; asserts their order."""
    assert events[0]["type"] == "message_start" and events[-1]["type"] == "message_stop"
    message = events[0]["message"]
    is_open = False
    arguments = ""
    kinds = [event["type"] for event in events]
    if "content_block_start" in kinds:  # the ping, once, where the public API sends it
        assert kinds.index("ping") == kinds.index("content_block_start") + 1 == 2
    assert kinds.count("ping") == min(1, kinds.count("content_block_start"))
    for event in events[1:-1]:
        kind = event["type"]
        if kind == "content_block_start":
            assert not is_open and event["index"] == len(message["content"])
            message["content"].append(event["content_block"])
            is_open, arguments = True, ""
        elif kind == "content_block_delta":
            assert is_open and event["index"] == len(message["content"]) - 1
            block, delta = message["content"][-1], event["delta"]
            if delta["type"] == "input_json_delta":
                arguments += delta["partial_json"]
            else:
                name = delta["type"].removesuffix("_delta")
                block[name] += delta[name]
        elif kind == "content_block_stop":
            assert is_open
            is_open = False
            if arguments:
                message["content"][-1]["input"] = msgspec.json.decode(arguments)
        elif kind == "ping":
            assert set(event) == {"type"}
        else:
            assert kind == "message_delta" and not is_open and event is events[-2]
            message.update(event["delta"])
            message["usage"] = event["usage"]
    return message


CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
ANSWERS = [
    "just text",
    "<think>hm, hm</think>So it is.",
    "<think>hm</think>Well.\n" + CALL,
    CALL + "\n" + CALL.replace("1", "2"),
    "",
]


@settings(max_examples=120)
@given(st.sampled_from(ANSWERS), st.lists(st.integers(0, 90), max_size=12))
def test_a_stream_says_what_the_message_says(text: str, cuts: list[int]) -> None:
    ask = read(tools=[TOOL])
    places = sorted({0, len(text), *(cut for cut in cuts if cut < len(text))})
    chunks = [text[a:b] for a, b in zip(places, places[1:], strict=False)] or [""]
    given_rows = rows(chunks)
    assert gathered(streamed(ask, given_rows)) == whole(ask, given_rows)


def test_a_forced_call_that_is_cut_off_leaves_no_text() -> None:
    ask = read(tools=[TOOL], tool_choice={"type": "any"})
    text = '[\n{"name": "add", "arguments": {"a": 1}},\n {"name": "add", "arguments": {}}]'
    for end in range(len(text) + 1):
        message = whole(ask, rows([text[:end]], FinishReason.LENGTH))
        assert {block["type"] for block in message["content"]} <= {"tool_use"}
        events = streamed(ask, rows(list(text[:end]) or [""], FinishReason.LENGTH))
        begun = [event["content_block"] for event in events if "content_block" in event]
        assert [(block["type"], block["id"]) for block in begun] == [
            (block["type"], block["id"]) for block in message["content"]
        ]


def test_blocks_are_what_the_text_says() -> None:
    message = whole(read(tools=[TOOL]), rows(["<think>hm</think>Well.\n" + CALL]))
    thinking, text, use = message["content"]
    assert thinking == {"type": "thinking", "thinking": "hm", "signature": ""}
    assert text["text"].strip() == "Well."
    assert use["name"] == "add" and use["input"] == {"a": 1} and use["id"]
    assert message["stop_reason"] == "tool_use"
    assert message["usage"]["input_tokens"] == 3
    assert message["usage"]["cache_read_input_tokens"] == 2


@pytest.mark.parametrize(
    ("finish", "matched", "reason", "sequence"),
    [
        (FinishReason.STOP, None, "end_turn", None),
        (FinishReason.STOP, 2, "end_turn", None),
        (FinishReason.STOP, "END", "stop_sequence", "END"),
        (FinishReason.LENGTH, None, "max_tokens", None),
    ],
)
def test_reasons_to_stop_have_their_names(
    finish: FinishReason, matched: Any, reason: str, sequence: str | None
) -> None:
    given_rows = rows(["a"], finish, matched)
    for message in (whole(read(), given_rows), gathered(streamed(read(), given_rows))):
        assert message["stop_reason"] == reason and message["stop_sequence"] == sequence


def test_a_stream_that_fails_ends_with_one_error() -> None:
    writer = MessageStream(read(), HEAD, [])
    data = writer.write(rows(["a", "b"])[:1]) + writer.fail(Problem(Fault.UNAVAILABLE, "lost"))
    assert events_of(data)[-1] == {
        "type": "error",
        "error": {"type": "api_error", "message": "lost"},
    }


def test_an_aborted_stream_ends_with_one_error() -> None:
    writer = MessageStream(read(), HEAD, [])
    events = events_of(writer.write(rows(["a"], FinishReason.ABORT)) + writer.end([]))
    assert [event["type"] for event in events].count("error") == 1
    assert events[-1]["type"] == "error"
    plain = MessageWriter(read(), HEAD, [])
    plain.add(rows(["a"], FinishReason.ABORT))
    with pytest.raises(Refused):
        plain.body([])


# The route


async def test_the_route_answers_streams_and_counts() -> None:
    street = Street()
    body: Any = {"model": "M", "max_tokens": 2, "messages": HI}
    body["messages"] = [{"role": "user", "content": "one two three"}]
    plain, stream, count = await street.finish(
        street.request("POST", "/v1/messages", body),
        street.request("POST", "/v1/messages", {**body, "stream": True}),
        street.request("POST", "/v1/messages/count_tokens", {**body, "max_tokens": None}),
    )
    assert plain.json()["content"] == [{"type": "text", "text": "one two"}]
    assert plain.json()["id"].startswith("msg_") and plain.headers["request-id"]
    assert stream.headers["content-type"].startswith("text/event-stream")
    assert gathered(events_of(stream.body))["content"] == plain.json()["content"]
    assert count.json() == {"input_tokens": 3}
    street.assert_idle()


async def test_a_prompt_is_counted_that_no_context_holds() -> None:
    street = Street()
    body = {"model": "M", "messages": [{"role": "user", "content": "word " * 2 * CONTEXT}]}
    got = await street.ask(street.request("POST", "/v1/messages/count_tokens", body))
    assert got.json() == {"input_tokens": 2 * CONTEXT}
    street.assert_idle()


@pytest.mark.parametrize(
    ("method", "path", "body", "status", "kind"),
    [
        ("POST", "/v1/messages", {}, 400, "invalid_request_error"),
        ("POST", "/v1/messages", b"{", 400, "invalid_request_error"),
        (
            "POST",
            "/v1/messages",
            {"model": "X", "max_tokens": 1, "messages": HI},
            404,
            "not_found_error",
        ),
        ("GET", "/v1/messages", None, 405, "invalid_request_error"),
        ("POST", "/v1/messages/batches", {}, 404, "not_found_error"),
    ],
    ids=["empty", "no json", "model", "method", "path"],
)
async def test_errors_have_the_dialects_shape(
    method: str, path: str, body: Any, status: int, kind: str
) -> None:
    street = Street()
    got = await street.ask(street.request(method, path, body))
    assert got.status == status
    assert got.json()["type"] == "error" and got.json()["error"]["type"] == kind
    assert got.json()["error"]["message"]
    street.assert_idle()


async def test_a_body_that_is_too_large_has_its_type() -> None:
    street = Street(body_bytes_max=1000)
    client = street.request("POST", "/v1/messages", chunks=[b"x" * 400] * 50)
    got = await street.ask(client)
    assert got.status == 413 and got.json()["error"]["type"] == "request_too_large"


async def test_a_full_house_is_overloaded() -> None:
    street = Street(open_max=1)
    street.back.mute = True
    body = {"model": "M", "max_tokens": 2, "messages": HI}
    first = street.request("POST", "/v1/messages", body)
    await street.step()
    got = street.request("POST", "/v1/messages", body)
    await street.step()
    assert got.got.status == 529 and got.got.headers["retry-after"]
    assert got.got.json()["error"]["type"] == "overloaded_error"
    first.drop()
    await street.settle()


async def test_a_key_may_come_as_the_client_sends_it() -> None:
    street = Street()
    street.app = App(street.gateway, Access(keys=["k"]))
    body = {"model": "M", "max_tokens": 2, "messages": HI}
    without = await street.ask(street.request("POST", "/v1/messages", body))
    assert without.status == 401 and without.json()["error"]["type"] == "authentication_error"
    keyed = await street.ask(
        street.request("POST", "/v1/messages", body, headers={"x-api-key": "k"})
    )
    assert keyed.status == 200
    other = await street.ask(street.request("GET", "/api/tags"))
    assert other.status == 401 and isinstance(other.json()["error"], str)
