"""The Responses API: what is read, written, kept, and what the official client makes of it."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import httpx
import msgspec
import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st

from actors.gateway.call import Call, Prompt, Row
from actors.gateway.dialect import Head
from actors.gateway.errors import Refused
from actors.gateway.http import App
from actors.gateway.inputs import Limits
from actors.gateway.openai import Ask
from actors.gateway.responses.reading import decode_responses, input_items, read_items
from actors.gateway.responses.reading import read_responses as read
from actors.gateway.responses.store import Kept, ResponseStore
from actors.gateway.responses.writing import ResponseWriter, output_text
from actors.gateway.shape import Shape
from actors.runtime.context import Reply
from messages.config import GatewayConfig, Paths
from messages.gateway import Delta, Recall, Recalled
from messages.responses import (
    InputItem,
    OutputCall,
    OutputMessage,
    OutputReasoning,
    ResponsesBody,
    ResponsesReply,
)
from messages.types import Fault, FinishReason, Problem, Usage
from tests.gateway.street import Answered, Client, Street
from tests.gateway.test_site import listening

LIMITS = Limits(config=GatewayConfig(), model="M", vocab_size=100)
BODY = {"model": "M", "input": "one two three"}
TOOL = {"type": "function", "name": "f", "parameters": {"type": "object", "properties": {}}}


def ask_of(**fields: Any) -> Ask:
    body = decode_responses(msgspec.json.encode({**BODY, **fields}))
    return read(body, input_items(body), LIMITS, lambda: 7, 0.0)


def messages_of(*items: dict[str, Any]) -> list[dict[str, Any]]:
    return read_items(msgspec.convert(list(items), list[InputItem]))


# What is read


def test_a_string_is_what_the_user_says_after_the_instructions() -> None:
    ask = ask_of(instructions="Be brief.", max_output_tokens=5, temperature=0.5)
    chat = ask.call.prompts[0].chat
    assert chat is not None
    assert msgspec.json.decode(chat.messages_json) == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "one two three"},
    ]
    assert ask.call.sampling.max_tokens == 5 and ask.call.sampling.temperature == 0.5


def test_items_become_turns() -> None:
    call = {"type": "function_call", "call_id": "c1", "name": "f", "arguments": "{}"}
    assert messages_of(
        {"role": "developer", "content": "a"},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "b"}]},
        {"type": "reasoning", "id": "r", "content": [{"type": "reasoning_text", "text": "hm"}]},
        {"role": "assistant", "content": [{"type": "output_text", "text": "c"}]},
        call,
        {**call, "call_id": "c2"},
        {"type": "function_call_output", "call_id": "c1", "output": "1"},
        {"type": "function_call_output", "call_id": "c2", "output": "2"},
        call,
    ) == [
        {"role": "developer", "content": "a"},
        {"role": "user", "content": "b"},
        {
            "role": "assistant",
            "content": "c",
            "reasoning_content": "hm",
            "tool_calls": [
                {"id": i, "type": "function", "function": {"name": "f", "arguments": "{}"}}
                for i in ("c1", "c2")
            ],
        },
        {"role": "tool", "tool_call_id": "c1", "content": "1"},
        {"role": "tool", "tool_call_id": "c2", "content": "2"},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [
                {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
            ],
        },
    ]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": []}, "input"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type"),
        ({"input": [{"role": "user"}]}, "input[0]"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
            "input[0].content[0].type",
        ),
        ({"input": [{"type": "function_call", "name": "f"}]}, "input[0]"),
        ({"input": [{"type": "function_call_output", "call_id": "c"}]}, "input[0]"),
        ({"input": [{"role": "robot", "content": "x"}]}, "input[0].role"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"temperature": 3}, "temperature"),
        ({"truncation": "auto"}, "truncation"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"prompt": {"id": "p"}}, "prompt"),
        ({"background": True, "store": False}, "background"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": [TOOL], "tool_choice": {"type": "mcp"}}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": {"type": "allowed_tools", "tools": [5]}}, "tool_choice"),
        ({"tool_choice": "required"}, "tools"),
        ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format.schema"),
        ({"text": {"format": {"type": "yaml"}}}, "text.format.type"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
        ({"model": "other"}, "model"),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_name(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(Refused) as refused:
        ask_of(**fields)
    assert refused.value.problem.param == param
    assert refused.value.problem.fault in (Fault.INVALID, Fault.NOT_FOUND)
    assert "messages" not in refused.value.problem.message or "chat" in param


JSON: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 3) | st.sampled_from(["", "a", "user", "function"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["type", "role", "content", "text", "name", "call_id", "id"]),
            inner,
            max_size=4,
        )
    ),
    max_leaves=12,
)


@given(
    st.dictionaries(
        st.sampled_from([field for field in ResponsesBody.__struct_fields__ if field != "model"]),
        JSON,
        max_size=4,
    )
)
def test_any_body_is_an_ask_or_a_refusal_in_words_of_this_dialect(fields: dict[str, Any]) -> None:
    try:
        ask_of(**fields)
    except Refused as refused:
        problem = refused.problem
        assert problem.fault in (Fault.INVALID, Fault.NOT_FOUND) and problem.message
        first = (problem.param or "input").split(".")[0].split("[")[0]
        assert first in ResponsesBody.__struct_fields__, problem


def test_tools_and_formats_are_those_of_the_chat() -> None:
    ask = ask_of(tools=[TOOL], tool_choice={"type": "function", "name": "f"})
    assert ask.shape.names == ("f",) and ask.call.grammar is not None
    entry = {"type": "function", "name": "f"}
    for mode, kind in (("auto", "structural_tag"), ("required", "json_schema")):
        choice = {"type": "allowed_tools", "mode": mode, "tools": [entry]}
        ask = ask_of(tools=[TOOL, {**TOOL, "name": "g"}], tool_choice=choice)
        assert ask.shape.names == ("f",)
        assert ask.call.grammar is not None and ask.call.grammar.kind == kind
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    ask = ask_of(text={"format": {"type": "json_schema", "name": "x", "schema": schema}})
    assert ask.call.grammar is not None and ask.call.grammar.kind == "json_schema"
    assert ask_of(include=["message.output_text.logprobs"]).logprobs == 0
    assert ask_of(top_logprobs=2).logprobs == 2


# What is written


def written(
    chunks: list[str], shape: Shape, finish: FinishReason = FinishReason.STOP
) -> tuple[list[dict[str, Any]], ResponsesReply]:
    """The events of an answer that comes in these chunks, and the reply."""
    ask = Ask(Call(prompts=(Prompt(text="x"),)), True, True, False, None, None, False, shape)
    body = decode_responses(msgspec.json.encode(BODY))
    writer = ResponseWriter(body, ask, Head("resp_1", 5, "M"))
    data = writer.begin()
    for i, text in enumerate(chunks):
        is_last = i + 1 == len(chunks)
        delta = Delta(
            request="r",
            attempt=1,
            index=i,
            token_count=1,
            text=text,
            finish=finish if is_last else None,
            usage=Usage(3, len(chunks), 2) if is_last else None,
        )
        data += writer.write([Row(0, delta)])
    data += writer.end(9)
    events = []
    for block in data.decode().split("\n\n")[:-1]:
        kind, body_line = block.split("\n")
        event = msgspec.json.decode(body_line.removeprefix("data: "))
        assert kind == "event: " + event["type"]
        events.append(event)
    return events, writer.reply


def check_laws(events: list[dict[str, Any]], reply: ResponsesReply) -> None:
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert [e["type"] for e in events[:2]] == ["response.created", "response.in_progress"]
    assert events[-1]["response"] == msgspec.to_builtins(reply)
    items = []
    opened: dict[str, Any] | None = None
    texts: list[str] = []
    for event in events[2:-1]:
        kind = event["type"].removeprefix("response.")
        assert event["output_index"] == len(items)
        if kind == "output_item.added":
            assert opened is None
            opened, texts = event["item"], []
            assert opened is not None and opened["status"] == "in_progress"
        elif kind == "output_item.done":
            assert opened is not None and event["item"]["id"] == opened["id"]
            items.append(event["item"])
            opened = None
        else:
            assert opened is not None and event["item_id"] == opened["id"]
            if kind.endswith(".delta"):
                texts.append(event["delta"])
            elif "content_part" not in kind:
                whole = event["arguments"] if "arguments" in event else event["text"]
                assert whole == "".join(texts)
    assert opened is None
    assert items == msgspec.to_builtins(reply)["output"]


THINKS = Shape(
    tool_parser="hermes", names=("f", "g"), reasoning_parser="qwen3", thoughts_parser="qwen3"
)
CALLS = (
    "<think>let me see</think>Sure. "
    '<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>\n'
    '<tool_call>{"name": "g", "arguments": {}}</tool_call>'
)


@given(st.sets(st.integers(1, len(CALLS) - 1)))
def test_however_the_text_is_cut_the_reply_is_the_same(cuts: set[int]) -> None:
    ends = [0, *sorted(cuts), len(CALLS)]
    events, reply = written([CALLS[a:b] for a, b in zip(ends, ends[1:], strict=False)], THINKS)
    check_laws(events, reply)
    reasoning, message, first, second = reply.output
    assert isinstance(reasoning, OutputReasoning) and reasoning.content[0].text == "let me see"
    assert isinstance(message, OutputMessage) and message.content[0].text.strip() == "Sure."
    assert isinstance(first, OutputCall) and isinstance(second, OutputCall)
    assert (first.name, msgspec.json.decode(first.arguments)) == ("f", {"a": 1})
    assert (second.name, msgspec.json.decode(second.arguments)) == ("g", {})
    assert first.call_id != second.call_id
    assert reply.status == "completed" and reply.usage is not None
    assert 1 <= reply.usage.output_tokens_details.reasoning_tokens <= reply.usage.output_tokens


def test_an_answer_cut_by_its_limit_is_incomplete() -> None:
    events, reply = written(["one", " two"], Shape(), FinishReason.LENGTH)
    check_laws(events, reply)
    assert reply.status == "incomplete" and reply.incomplete_details is not None
    assert reply.output[-1].status == "incomplete" and events[-1]["type"] == "response.incomplete"
    assert reply.usage is not None and reply.usage.total_tokens == 5


def test_a_forced_call_that_is_cut_off_leaves_no_text() -> None:
    shape = ask_of(tools=[TOOL], tool_choice="required").shape
    text = '[\n{"name": "f", "arguments": {"a": 1}},\n {"name": "f", "arguments": {}}]'
    for end in range(len(text) + 1):
        events, reply = written(list(text[:end]) or [""], shape, FinishReason.LENGTH)
        check_laws(events, reply)
        assert output_text(reply.output) == ""
        assert len(reply.output) == 1 or all(isinstance(x, OutputCall) for x in reply.output)


def test_an_answer_without_text_has_an_empty_message() -> None:
    events, reply = written([""], Shape())
    check_laws(events, reply)
    assert output_text(reply.output) == "" and len(reply.output) == 1


# What is kept


def kept(number: int, text: str, made: bool = True) -> Kept:
    _, reply = written([text], Shape())
    reply = msgspec.structs.replace(reply, id=f"resp_{number}")
    return Kept(reply, (), (), None if made else lambda: None)


@given(st.lists(st.tuples(st.integers(0, 6), st.integers(0, 3), st.booleans()), max_size=40))
def test_the_store_keeps_the_newest_within_its_limits(steps: list[tuple[int, int, bool]]) -> None:
    base = kept(0, "").bytes_len
    store = ResponseStore(4, base * 4 + 40)
    order: list[int] = []
    for number, length, made in steps:
        if number in order:
            order.remove(number)
        store.put(kept(number, "x" * 20 * length, made))
        order.append(number)
        store.check()
        order = [n for n in order if store.get(f"resp_{n}") is not None]
        assert len(store) == len(order)
    if order and all(entry[2] for entry in steps):
        newest = steps[-1][0]
        assert store.get(f"resp_{newest}") is not None or store.bytes_len == 0


def test_a_store_of_no_size_keeps_nothing() -> None:
    store = ResponseStore(0, 1)
    store.put(kept(1, "x"))
    store.check()
    assert len(store) == 0


# Over HTTP


def create(street: Street, **fields: Any) -> Client:
    return street.request("POST", "/v1/responses", {**BODY, **fields})


async def test_an_answer_goes_on_from_the_one_before() -> None:
    street = Street()
    first = (await street.ask(create(street))).json()
    assert first["status"] == "completed"
    assert first["output"][0]["content"][0]["text"] == "one two three"
    again = {"input": "four", "previous_response_id": first["id"], "instructions": "zero"}
    second = (await street.ask(create(street, **again))).json()
    assert second["previous_response_id"] == first["id"]
    text = second["output"][0]["content"][0]["text"]
    assert text == "zero one two three one two three four"
    third = {"input": "five", "previous_response_id": second["id"]}
    text = (await street.ask(create(street, **third))).json()["output"][0]["content"][0]["text"]
    assert text.startswith("one two three one") and "zero one" in text  # its instructions are gone
    got = await street.ask(street.request("GET", f"/v1/responses/{first['id']}"))
    assert got.json() == first
    street.app.responses.store.check()
    street.assert_idle()


async def test_what_is_not_kept_cannot_be_gone_on_from() -> None:
    street = Street(responses_max=1)
    ids = [(await street.ask(create(street))).json()["id"] for _ in range(2)]
    loose = (await street.ask(create(street, store=False))).json()["id"]
    for gone in (ids[0], loose):
        got = await street.ask(create(street, previous_response_id=gone))
        assert got.status == 400 and got.error()["code"] == "previous_response_not_found"
        got = await street.ask(street.request("GET", f"/v1/responses/{gone}"))
        assert got.status == 404 and got.error()["param"] == "response_id"
    path = f"/v1/responses/{ids[1]}"
    got = await street.ask(street.request("DELETE", path))
    assert got.json() == {"id": ids[1], "object": "response", "deleted": True}
    assert (await street.ask(street.request("DELETE", path))).status == 404


async def test_what_was_asked_is_listed() -> None:
    street = Street()
    items = [{"role": "user", "content": word} for word in ("a", "b", "c")]
    made = (await street.ask(create(street, input=items))).json()

    async def listed(query: str) -> Answered:
        client = street.request("GET", f"/v1/responses/{made['id']}/input_items")
        client.scope["query_string"] = query.encode()
        return await street.ask(client)

    page = (await listed("limit=2&order=asc")).json()
    assert [item["content"][0]["text"] for item in page["data"]] == ["a", "b"]
    assert page["has_more"] is True
    page = (await listed(f"order=asc&after={page['last_id']}")).json()
    assert [item["content"][0]["text"] for item in page["data"]] == ["c"]
    assert page["has_more"] is False and (await listed("")).json()["first_id"] == page["last_id"]
    for query in ("limit=0", "limit=x", "order=up", "after=nothing"):
        assert (await listed(query)).status == 400


async def test_a_background_answer_is_made_without_its_client() -> None:
    street = Street()
    street.back.paused = True
    made = (await street.ask(create(street, background=True))).json()
    assert made["status"] == "queued" and made["output"] == []
    path = f"/v1/responses/{made['id']}"
    assert (await street.ask(street.request("GET", path))).json()["status"] == "queued"
    street.back.paused = False
    await street.settle()
    done = (await street.ask(street.request("GET", path))).json()
    assert done["status"] == "completed" and done["usage"]["output_tokens"] == 3
    cancelled = await street.ask(street.request("POST", path + "/cancel"))
    assert cancelled.json() == done
    street.assert_idle()


@pytest.mark.parametrize("way", ["cancel", "delete"])
async def test_a_background_answer_can_be_stopped(way: str) -> None:
    street = Street()
    street.back.mute = True
    made = (await street.ask(create(street, background=True))).json()
    await street.step()
    path = f"/v1/responses/{made['id']}"
    if way == "cancel":
        got = await street.ask(street.request("POST", path + "/cancel"))
        assert got.json()["status"] == "cancelled"
        refused = await street.ask(create(street, previous_response_id=made["id"]))
        assert refused.status == 400
    else:
        assert (await street.ask(street.request("DELETE", path))).status == 200
        await street.settle()
        assert (await street.ask(street.request("GET", path))).status == 404
    for _ in range(40):
        street.cell.advance(1.0)
        await street.step()
    assert not street.gateway.calls.open and not street.app.responses.tasks


async def test_only_a_background_answer_can_be_cancelled() -> None:
    street = Street()
    made = (await street.ask(create(street))).json()
    got = await street.ask(street.request("POST", f"/v1/responses/{made['id']}/cancel"))
    assert got.status == 400


async def test_another_gateway_is_asked_for_what_it_keeps() -> None:
    street = Street()
    street.gateway.paths = Paths(gateways=("gateway", "other"))
    street.app = App(street.gateway)
    own = (await street.ask(create(street))).json()
    assert own["id"].endswith("00")
    theirs = f"resp_{'a' * 24}01"
    asked: list[Recall] = []

    def other(path: str, message: Any) -> Reply:
        assert path == "other"
        asked.append(message)
        if message.verb == "history":
            return Reply(Recalled(b'[{"role": "user", "content": "from there"}]'))
        problem = Problem(fault=Fault.NOT_FOUND, message="Gone.", param="response_id")
        return Reply(Recalled(problem=problem))

    street.cell.answer = other
    made = (await street.ask(create(street, previous_response_id=theirs))).json()
    assert made["output"][0]["content"][0]["text"] == "from there one two three"
    got = await street.ask(street.request("GET", f"/v1/responses/{theirs}"))
    assert got.status == 404
    assert [(message.response, message.verb) for message in asked] == [
        (theirs, "history"),
        (theirs, "get"),
    ]
    street.gateway.site = SimpleNamespace(app=street.app)  # type: ignore[assignment]
    for verb, found in (("get", own["id"]), ("history", "one two three")):
        answer = await street.app.responses.local(Recall(own["id"], verb))
        assert answer.problem is None and found.encode() in answer.data
    street.cell.tell(Recall("resp_none00", "get"))
    (reply,) = street.cell.replies
    assert isinstance(reply, Recalled) and reply.problem is not None


async def test_a_client_that_leaves_has_its_call_closed() -> None:
    street = Street()
    client = create(street, stream=True, input="one two three four five six")
    while b"output_text.delta" not in client.got.body:
        await street.step()
    client.drop()
    await street.finish(client)
    assert street.back.cancelled and not len(street.app.responses.store)
    street.assert_idle()


async def test_a_failure_within_a_stream_is_its_last_event() -> None:
    street = Street()
    client = create(street, stream=True, input="one two three four")
    while b"output_text.delta" not in client.got.body:
        await street.step()
    open_call = next(iter(street.gateway.calls.open.values()))
    street.gateway.calls._fail(open_call, Problem(fault=Fault.INTERNAL, message="It broke."))
    await street.finish(client)
    last = client.got.body.decode().strip().split("\n\n")[-1]
    assert last.startswith("event: response.failed\n")
    assert msgspec.json.decode(last.split("data: ")[1])["response"]["error"] == {
        "code": "server_error",
        "message": "It broke.",
    }


async def test_the_official_client_understands_all_of_it() -> None:
    async with listening() as place:
        base = f"http://127.0.0.1:{place.port}/v1"
        async with (
            httpx.AsyncClient() as web,
            openai.AsyncOpenAI(base_url=base, api_key="x", http_client=web) as client,
        ):
            made = await place.until(client.responses.create(model="M", input="one two"))
            assert made.output_text == "one two" and made.status == "completed"
            assert made.usage is not None and made.usage.input_tokens == 2

            async def stream() -> tuple[list[str], str]:
                kinds, text = [], ""
                async with client.responses.stream(
                    model="M", input="three", previous_response_id=made.id
                ) as events:
                    async for event in events:
                        kinds.append(event.type)
                        if event.type == "response.output_text.delta":
                            text += event.delta
                    final = await events.get_final_response()
                assert final.output_text == text
                return kinds, text

            kinds, text = await place.until(stream())
            assert text == "one two one two three"
            assert kinds[0] == "response.created" and kinds[-1] == "response.completed"
            found = await place.until(client.responses.retrieve(made.id))
            assert found.output_text == "one two"
            page = await place.until(client.responses.input_items.list(made.id))
            assert len(page.data) == 1
            late = await place.until(
                client.responses.create(model="M", input="one", background=True)
            )
            while late.status in ("queued", "in_progress"):
                late = await place.until(client.responses.retrieve(late.id))
            assert late.status == "completed"
            places: list[int] = []

            async def begin() -> tuple[str, list[int]]:
                numbers, name = [], ""
                stream = await client.responses.create(
                    model="M", input="one two", background=True, stream=True
                )
                async for event in stream:
                    numbers.append(event.sequence_number)
                    if event.type == "response.completed":
                        name = event.response.id
                return name, numbers

            name, numbers = await place.until(begin())
            assert numbers == list(range(len(numbers)))

            async def resume() -> None:
                stream = await client.responses.retrieve(name, stream=True, starting_after=3)
                places.extend([event.sequence_number async for event in stream])

            await place.until(resume())
            assert places == numbers[4:]
            await place.until(client.responses.delete(made.id))
            with pytest.raises(openai.NotFoundError):
                await place.until(client.responses.retrieve(made.id))
            with pytest.raises(openai.BadRequestError):
                await place.until(client.responses.create(model="M", input="x", truncation="auto"))
            await asyncio.sleep(0)
