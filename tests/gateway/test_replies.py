"""Rows to chunks and bodies: both say the same, in the dialect's shape."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from actors.gateway.call import Checked, Row
from actors.gateway.errors import body as error_body
from actors.gateway.inputs import Limits
from actors.gateway.openai import Ask, read_chat, read_completion
from actors.gateway.replies import Head, plain_writer, stream_writer
from actors.gateway.sse import MARK, Template, encode, frame
from messages.config import GatewayConfig
from messages.gateway import Delta, TokenLogprob
from messages.types import Fault, FinishReason, Problem, Usage, pack

LIMITS = Limits(config=GatewayConfig(), model="M", vocab_size=100)
HEAD = Head("id-1", 1700000000, "M")


def ask_of(is_chat: bool, prompt: Any = "p", **fields: Any) -> Ask:
    if is_chat:
        body = {"model": "M", "messages": [{"role": "user", "content": "x"}], **fields}
        return read_chat(msgspec.json.encode(body), LIMITS, lambda: 1)
    return read_completion(
        msgspec.json.encode({"model": "M", "prompt": prompt, **fields}), LIMITS, lambda: 1
    )


def row(
    choice: int, text: str = "", index: int = 0, finish: FinishReason | None = None, **fields: Any
) -> Row:
    if finish is not None:
        fields.setdefault("usage", Usage(prompt_tokens=5, completion_tokens=index + 1))
    delta = Delta(
        request=f"c.{choice}",
        attempt=1,
        index=index,
        token_count=1,
        text=text,
        finish=finish,
        **fields,
    )
    return Row(choice, delta)


def events_of(data: bytes) -> list[Any]:
    """The decoded events, `[DONE]` as a string; asserts the framing."""
    assert data.endswith(b"\n\n")
    events: list[Any] = []
    for block in data[:-2].split(b"\n\n"):
        assert block.startswith(b"data: ") and b"\n" not in block and b"\r" not in block
        payload = block[6:]
        events.append("[DONE]" if payload == b"[DONE]" else msgspec.json.decode(payload))
    return events


def stream(ask: Ask, rows: list[list[Row]], checked: list[Checked] | None = None) -> list[Any]:
    writer = stream_writer(ask, HEAD, checked or [])
    data = b"".join(writer.write(batch) for batch in rows)
    return events_of(data + writer.end(checked or []))


def plain(ask: Ask, rows: list[list[Row]], checked: list[Checked] | None = None) -> Any:
    writer = plain_writer(ask, HEAD, checked or [])
    for batch in rows:
        writer.add(batch)
    return msgspec.json.decode(writer.body(checked or []))


# B015, B017, B013
def test_a_chat_stream_has_role_texts_one_finish_and_done() -> None:
    rows = [[row(0, "He")], [row(0, "llo", 1), row(0, "!", 2, FinishReason.STOP, matched="#")]]
    events = stream(ask_of(True, stream=True), rows)
    assert events[-1] == "[DONE]" and events.count("[DONE]") == 1
    chunks = events[:-1]
    for chunk in chunks:
        assert chunk["object"] == "chat.completion.chunk" and chunk["id"] == "id-1"
        assert (chunk["created"], chunk["model"]) == (1700000000, "M")
        assert "usage" not in chunk
        choice = chunk["choices"][0]
        assert {"index", "delta", "finish_reason", "logprobs"} <= set(choice)
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert deltas == [
        {"role": "assistant", "content": ""},
        {"content": "He"},
        {"content": "llo"},
        {"content": "!"},
        {},
    ]
    assert [c["choices"][0]["finish_reason"] for c in chunks] == [None] * 4 + ["stop"]
    assert chunks[-1]["choices"][0]["matched_stop"] == "#"


def test_an_empty_answer_still_has_a_role_and_a_finish() -> None:
    events = stream(ask_of(True, stream=True), [[row(0, "", 0, FinishReason.STOP)]])
    assert [e["choices"][0]["delta"] for e in events[:-1]] == [
        {"role": "assistant", "content": ""},
        {},
    ]
    assert events[-2]["choices"][0]["finish_reason"] == "stop"


def test_each_choice_has_its_own_role_and_finish() -> None:
    rows = [
        [row(1, "b"), row(0, "a")],
        [row(0, "", 1, FinishReason.STOP)],
        [row(1, "", 1, FinishReason.LENGTH)],
    ]
    choices = [e["choices"][0] for e in stream(ask_of(True, stream=True, n=2), rows)[:-1]]
    for index, reason in ((0, "stop"), (1, "length")):
        mine = [c for c in choices if c["index"] == index]
        assert [c["delta"].get("role") for c in mine] == ["assistant", None, None]
        assert [c["finish_reason"] for c in mine if c["finish_reason"]] == [reason]


# B011
@pytest.mark.parametrize("is_chat", [True, False])
@pytest.mark.parametrize("options", [None, {}, {"include_usage": False}, {"include_usage": True}])
def test_usage_comes_once_and_only_where_asked_for(is_chat: bool, options: Any) -> None:
    ask = ask_of(is_chat, stream=True, stream_options=options)
    events = stream(ask, [[row(0, "a")], [row(0, "b", 1, FinishReason.LENGTH)]])
    usages = [e.get("usage") for e in events[:-1]]
    if options != {"include_usage": True}:
        assert usages == [None] * len(usages)
        return
    details = {"completion_tokens_details": {"reasoning_tokens": 0}} if is_chat else {}
    assert usages[-1] == {
        "prompt_tokens": 5,
        "completion_tokens": 2,
        "total_tokens": 7,
        "prompt_tokens_details": {"cached_tokens": 0},
        **details,
    }
    assert events[-2]["choices"] == []
    assert all("usage" in e and e["usage"] is None for e in events[:-2])


# B065
def test_several_prompts_count_each_prompt_once_and_every_completion() -> None:
    ask = ask_of(False, ["one", "two", "three"], n=2, echo=True)
    rows = [
        [
            row(i, f"<{i}>", 0, FinishReason.LENGTH, usage=Usage(10 + i // 2, 3, i // 2))
            for i in range(6)
        ]
    ]
    reply = plain(ask, rows)
    texts = ["one<0>", "one<1>", "two<2>", "two<3>", "three<4>", "three<5>"]
    assert [(c["index"], c["text"]) for c in reply["choices"]] == list(enumerate(texts))
    assert reply["usage"]["prompt_tokens"] == 10 + 11 + 12
    assert reply["usage"]["completion_tokens"] == 18
    assert reply["usage"]["prompt_tokens_details"]["cached_tokens"] == 3


# B055 for prompts given as ids, and plain equals stream
def test_echo_of_ids_shows_their_text() -> None:
    ask = ask_of(False, [1, 2], echo=True, stream=True)
    checked = [Checked(token_count=2, ids=b"", text="Once upon")]
    rows = [[row(0, " a", 0, FinishReason.LENGTH)]]
    events = stream(ask, rows, checked)
    assert "".join(e["choices"][0]["text"] for e in events[:-1]) == "Once upon a"
    assert plain(ask, rows, checked)["choices"][0]["text"] == "Once upon a"


# B031
def test_a_prompt_alone_is_echoed_with_no_completion_tokens() -> None:
    ask = ask_of(False, "red green blue", max_tokens=0, echo=True)
    checked = [Checked(token_count=3)]
    reply = plain(ask, [], checked)
    assert reply["choices"][0]["text"] == "red green blue"
    assert reply["choices"][0]["finish_reason"] == "length"
    assert reply["usage"]["prompt_tokens"] == 3 and reply["usage"]["completion_tokens"] == 0
    options = {"stream": True, "stream_options": {"include_usage": True}}
    ask = ask_of(False, "red green blue", max_tokens=0, echo=True, **options)
    events = stream(ask, [], checked)
    assert "".join(e["choices"][0]["text"] for e in events[:-2]) == "red green blue"
    assert events[-2]["usage"]["total_tokens"] == 3


# B051, B053
def test_logprobs_are_finite_and_their_tokens_are_text() -> None:
    neg = float("-inf")
    entry = TokenLogprob(b" the", 5, -0.5, ((b" the", 5, -0.5), (b"\xe4\xbb", 6, neg)))
    odd = TokenLogprob(b"\xe4\xbb", 6, float("nan"), ((b"\xe4\xbb", 6, neg), (b"x", 7, neg)))
    rows = [[row(0, " the", 0, logprobs=(entry,))], [row(0, "", 1, FinishReason.STOP)]]
    ask = ask_of(True, logprobs=True, top_logprobs=2)
    content = plain(ask, rows)["choices"][0]["logprobs"]["content"]
    assert content[0]["token"] == " the" and bytes(content[0]["bytes"]) == b" the"
    assert content[0]["top_logprobs"][1]["logprob"] == -9999.0
    assert bytes(content[0]["top_logprobs"][1]["bytes"]) == b"\xe4\xbb"
    events = stream(ask_of(True, logprobs=True, top_logprobs=2, stream=True), rows)
    assert events[1]["choices"][0]["logprobs"]["content"] == content

    ask = ask_of(False, logprobs=2)
    rows = [[row(0, " the", 0, logprobs=(entry, odd), finish=FinishReason.LENGTH)]]
    logprobs = plain(ask, rows)["choices"][0]["logprobs"]
    assert logprobs["tokens"] == [" the", "bytes:\\xe4\\xbb"]
    assert logprobs["token_logprobs"] == [-0.5, -9999.0]
    assert logprobs["text_offset"] == [0, 4]
    assert logprobs["top_logprobs"][0] == {" the": -0.5, "bytes:\\xe4\\xbb": -9999.0}


def test_a_token_held_back_has_its_logprob_in_a_chunk_without_text() -> None:
    half = TokenLogprob(b"\xf0\x9f", 1, -1.0)
    rest = TokenLogprob("🦊".encode()[2:], 2, -1.0)
    rows = [
        [row(0, "", 0, logprobs=(half,))],
        [row(0, "🦊", 1, logprobs=(rest,))],
        [row(0, "", 2, FinishReason.STOP)],
    ]
    events = stream(ask_of(False, logprobs=0, stream=True), rows)
    assert [e["choices"][0]["text"] for e in events[:-1]] == ["", "🦊", ""]
    offsets = [e["choices"][0]["logprobs"]["text_offset"] for e in events[:2]]
    assert offsets == [[0], [0]]
    assert events[0]["choices"][0]["logprobs"]["top_logprobs"] is None


def test_a_stream_that_fails_ends_with_the_error_object_and_done() -> None:
    writer = stream_writer(ask_of(True, stream=True), HEAD, [])
    writer.write([row(0, "a")])
    problem = Problem(fault=Fault.UNAVAILABLE, message="gone")
    events = events_of(writer.fail(problem))
    assert events == [msgspec.json.decode(error_body(problem)), "[DONE]"]
    assert set(events[0]["error"]) == {"message", "type", "param", "code"}


TEXTS = st.lists(st.text(max_size=6), min_size=1, max_size=8)


# B029
@settings(max_examples=100)
@given(st.lists(TEXTS, min_size=1, max_size=3), st.booleans(), st.randoms())
def test_streamed_and_plain_answers_say_the_same(
    choices: list[list[str]], is_chat: bool, order: Any
) -> None:
    pending = [
        [row(i, t, k, FinishReason.STOP if k == len(ts) - 1 else None) for k, t in enumerate(ts)]
        for i, ts in enumerate(choices)
    ]
    rows: list[list[Row]] = []
    while any(pending):
        index = order.choice([i for i, left in enumerate(pending) if left])
        rows.append([pending[index].pop(0)])
    ask = ask_of(is_chat, stream=True, stream_options={"include_usage": True}, n=len(choices))
    events = stream(ask, rows)
    reply = plain(ask, rows)
    assert events[-2]["usage"] == reply["usage"]
    for index, texts in enumerate(choices):
        mine = [e["choices"][0] for e in events[:-2] if e["choices"][0]["index"] == index]
        said = "".join(c["delta"].get("content", "") if is_chat else c["text"] for c in mine)
        whole = reply["choices"][index]
        assert said == "".join(texts)
        assert said == (whole["message"]["content"] if is_chat else whole["text"])
        assert [c["finish_reason"] for c in mine if c["finish_reason"]] == ["stop"]


@given(st.text())
def test_a_filled_template_is_the_encoded_event(text: str) -> None:
    event = {"a": [1, {"text": MARK}], "b": "x"}
    whole = {"a": [1, {"text": text}], "b": "x"}
    assert Template(event).fill(text) == frame(encode(whole))


def test_an_event_without_its_mark_is_no_template() -> None:
    with pytest.raises(AssertionError):
        Template({"a": "x"})


def test_ids_of_tokens_come_in_every_chunk_and_in_the_plain_answer() -> None:
    checked = [Checked(token_count=2, ids=pack([7, 8]))]
    for is_chat in (True, False):
        rows = [
            [row(0, "a", 0, token_ids=pack([1]))],
            [row(0, "", 1, token_ids=pack([2]))],  # half a character
            [row(0, "é", 2, FinishReason.STOP, token_ids=pack([3]))],
        ]
        ask = ask_of(is_chat, return_token_ids=True, stream=True)
        writer = stream_writer(ask, HEAD, checked)
        data = b"".join(writer.write(some) for some in rows) + writer.end(checked)
        events = [event for event in events_of(data) if event != "[DONE]"]
        chunks = [event["choices"][0] for event in events]
        assert [i for chunk in chunks for i in chunk["token_ids"]] == [1, 2, 3]
        told = [part.get("prompt_token_ids") for part in (events if is_chat else chunks)]
        assert told == [[7, 8]] + [None] * (len(told) - 1)
        whole = plain(ask_of(is_chat, return_token_ids=True), rows, checked)
        assert whole["choices"][0]["token_ids"] == [1, 2, 3]
        prompt = whole if is_chat else whole["choices"][0]
        assert prompt["prompt_token_ids"] == [7, 8]


def test_usage_so_far_comes_in_every_chunk_where_it_was_asked_for() -> None:
    for is_chat in (True, False):
        options = {"include_usage": True, "continuous_usage_stats": True}
        ask = ask_of(is_chat, stream=True, stream_options=options)
        rows = [
            [row(0, "a", 0, usage=Usage(prompt_tokens=5))],
            [row(0, "b", 1)],
            [row(0, "c", 2, FinishReason.STOP)],
        ]
        events = [event for event in stream(ask, rows) if event != "[DONE]"]
        counts = [event["usage"]["completion_tokens"] for event in events if event["choices"]]
        assert counts == sorted(counts) and counts[-1] == 3
        assert counts[0] == (0 if is_chat else 1)  # a chat's first chunk has only the role
        assert {event["usage"]["prompt_tokens"] for event in events} == {5}
        assert events[-1]["choices"] == [] and events[-1]["usage"]["total_tokens"] == 8


def test_usage_so_far_is_that_of_the_chunks_choice_and_at_last_of_all() -> None:
    """As SGLang and vLLM have it."""
    for is_chat in (True, False):
        options = {"include_usage": True, "continuous_usage_stats": True}
        ask = ask_of(is_chat, n=2, stream=True, stream_options=options)
        rows = [
            [
                row(choice, "a", 0, usage=Usage(prompt_tokens=5, cached_tokens=4))
                for choice in (0, 1)
            ],
            [row(0, "b", 1), row(1, "b", 1)],
            [row(1, "c", 2, FinishReason.STOP), row(0, "c", 2, FinishReason.STOP)],
        ]
        events = [event for event in stream(ask, rows) if event != "[DONE]"]
        for choice in (0, 1):
            own = [
                e["usage"] for e in events if e["choices"] and e["choices"][0]["index"] == choice
            ]
            counts = [usage["completion_tokens"] for usage in own]
            assert counts == sorted(counts) and counts[-1] == 3
            assert {usage["total_tokens"] - usage["completion_tokens"] for usage in own} == {5}
            assert {usage["prompt_tokens_details"]["cached_tokens"] for usage in own} == {4}
        assert events[-1]["usage"]["completion_tokens"] == 6
        assert events[-1]["usage"]["prompt_tokens"] == 5


def test_the_most_likely_completions_are_shown_and_all_are_counted() -> None:
    ask = ask_of(False, best_of=3, n=2)
    rows = [
        [
            row(choice, text, 0, FinishReason.STOP, logprobs=(TokenLogprob(b"x", 1, value),))
            for choice, (text, value) in enumerate([("mid", -2.0), ("bad", -9.0), ("top", -1.0)])
        ]
    ]
    answer = plain(ask, rows)
    assert [choice["text"] for choice in answer["choices"]] == ["top", "mid"]
    assert [choice["index"] for choice in answer["choices"]] == [0, 1]
    assert answer["choices"][0]["logprobs"] is None
    assert answer["usage"]["completion_tokens"] == 3


def told(index: int, *texts: str) -> Row:
    rows = tuple(
        TokenLogprob(
            t.encode(), ord(t[0]), -1.0, ((t.encode(), ord(t[0]), -1.0), (b"z", 122, -2.0))
        )
        for t in texts
    )
    return Row(0, Delta("c.0", 1, 0, 0, prompt_logprobs=rows, prompt_index=index))


def test_an_echoed_prompt_has_its_log_probabilities_before_those_of_the_answer() -> None:
    own = (TokenLogprob(b"d", 100, -3.0, ((b"d", 100, -3.0),)),)
    rows = [
        [told(0, "a", "bb")],
        [told(1, "bb")],  # again: a chunk that was computed twice
        [told(2, "c"), row(0, "d", 0, FinishReason.STOP, logprobs=own)],
    ]
    lists = plain(ask_of(False, "abbc", echo=True, logprobs=1), rows)["choices"][0]
    assert lists["text"] == "abbcd"
    assert lists["logprobs"] == {
        "tokens": ["a", "bb", "c", "d"],
        "token_logprobs": [None, -1.0, -1.0, -3.0],
        "top_logprobs": [None, {"bb": -1.0}, {"c": -1.0}, {"d": -3.0}],
        "text_offset": [0, 1, 3, 4],
    }
    only = plain(ask_of(False, "abbc", echo=True, logprobs=1, max_tokens=0), rows)
    assert only["choices"][0]["text"] == "abbc"
    assert only["choices"][0]["logprobs"]["tokens"] == ["a", "bb", "c"]
    assert only["usage"]["completion_tokens"] == 0
    for is_chat in (True, False):
        whole = plain(ask_of(is_chat, prompt_logprobs=2), rows)
        found = (whole if is_chat else whole["choices"][0])["prompt_logprobs"]
        assert found[0] is None and len(found) == 3
        assert found[2]["99"] == {"logprob": -1.0, "rank": 1, "decoded_token": "c"}
