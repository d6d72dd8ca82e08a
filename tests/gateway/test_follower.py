"""Streams that break within a row, and are gone on with where the rows are others."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from actors.gateway.anthropic import read_messages
from actors.gateway.anthropic_replies import MessageStream
from actors.gateway.call import Row
from actors.gateway.dialect import Head, StreamWriter
from actors.gateway.follower import Follower
from actors.gateway.held import Held, Marks, Place, StreamId, read_event_id
from actors.gateway.inputs import Limits
from actors.gateway.native import read_generate
from actors.gateway.native_replies import GenerateStream
from actors.gateway.openai import read_chat, read_completion
from actors.gateway.replies import stream_writer
from actors.gateway.shape import Parsers
from messages.config import GatewayConfig
from messages.gateway import Delta, TokenLogprob
from messages.types import FinishReason, Usage, pack

LIMITS = Limits(GatewayConfig(), "M", 100, Parsers("hermes", "think"), context_len=64)
HEAD = Head("id-1", 1_700_000_000, "M")
STREAM = StreamId("ab" * 12, 77, "0f" * 8)
HI: Any = [{"role": "user", "content": "hi"}]
SCHEMA = {"type": "object"}
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": SCHEMA}}]
NAMED = {"type": "function", "function": {"name": "add"}}
CALLS = (
    "<think>so</think>a <tool_call>\n"
    '{"name": "add", "arguments": {"a": [1, 2]}}\n</tool_call>\n<tool_call>{"name": "add", "argu'
)


Make = Callable[[], StreamWriter]


def chat(**fields: Any) -> Make:
    body = {"model": "M", "messages": HI, "stream": True, **fields}
    ask = read_chat(msgspec.json.encode(body), LIMITS, lambda: 1)
    return lambda: stream_writer(ask, HEAD, ())


def completion(**fields: Any) -> Make:
    body = {"model": "M", "prompt": "p", "stream": True, **fields}
    ask = read_completion(msgspec.json.encode(body), LIMITS, lambda: 1)
    return lambda: stream_writer(ask, HEAD, ())


def messages() -> Make:
    tools = [{"name": "add", "input_schema": SCHEMA}]
    body = {"model": "M", "max_tokens": 5, "messages": HI, "tools": tools, "stream": True}
    ask = read_messages(msgspec.json.encode(body), LIMITS, lambda: 1, 9.0)
    return lambda: MessageStream(ask, HEAD, ())


def generate() -> Make:
    body = {"text": "p", "return_logprob": True, "stream": True}
    ask = read_generate(msgspec.json.encode(body), LIMITS, lambda: 1)
    return lambda: GenerateStream(ask, HEAD, ())


USAGE = {"stream_options": {"include_usage": True, "continuous_usage_stats": True}}
CASES: dict[str, tuple[str, Make]] = {
    "text": ("some words", completion(logprobs=1)),
    "echo": ("some words", completion(echo=True)),
    "chat": ("<think>so</think> it is", chat(logprobs=True, **USAGE)),
    "calls": (CALLS, chat(tools=TOOLS, logprobs=True)),
    "calls without more": (CALLS, chat(tools=TOOLS)),
    "a named call": ('{"a": 1}', chat(tools=TOOLS, tool_choice=NAMED, logprobs=True)),
    "messages": (CALLS, messages()),
    "native": ("some words", generate()),
}


def rows_of(text: str, ends: list[int], cuts: set[int], *, is_end_alone: bool) -> list[Row]:
    """One token up to each of `ends`; a row for each run of tokens between two cuts."""
    at = [0, *sorted(cuts), len(ends)]
    rows = []
    for begin, end in zip(at, at[1:], strict=False):
        if begin < end:
            chars = slice(ends[begin - 1] if begin else 0, ends[end - 1])
            told = tuple(TokenLogprob(b"x", token, float(-token)) for token in range(begin, end))
            spans = pack(ends[begin:end])
            usage = None if begin else Usage(3)
            ids = pack(range(begin, end))
            delta = Delta("r", 1, begin, end - begin, text[chars], ids, told, spans=spans)
            rows.append(Row(0, msgspec.structs.replace(delta, usage=usage)))
    last = {"finish": FinishReason.LENGTH, "usage": Usage(3, len(ends))}
    if is_end_alone:
        return [*rows, Row(0, Delta("r", 1, len(ends), 0, **last))]  # type: ignore[arg-type]
    return [*rows[:-1], Row(0, msgspec.structs.replace(rows[-1].delta, **last))]


def blocks_of(
    make: Make, rows: list[Row], marks: Marks, sizes: list[int]
) -> tuple[list[bytes], bytes]:
    """The events that come after `marks`, and the end; rows come in groups of these sizes."""
    held = Held(1)
    place = Place(held, marks)
    follower = Follower(place, make, str(STREAM))
    data = b""
    for size in [*sizes, len(rows)]:
        held.add(rows[:size])
        del rows[:size]
        data += follower.write(*place.take())
        place.check()
    return data.split(b"\n\n")[:-1], follower.writer.end(())


def told_by(blocks: list[bytes]) -> Any:
    """What the events come to: what goes on is joined, and tokens, which come with any of the
    text that they are part of, are apart."""
    parts: list[list[Any]] = []
    tokens: list[Any] = []
    for block in blocks:
        event = msgspec.json.decode(block.partition(b"data: ")[2])
        if "meta_info" in event:
            parts = [[event]]  # it says all so far
            continue
        for choice in event.get("choices", [event]):
            logprobs = choice.get("logprobs") or {}
            tokens += logprobs.get("content") or logprobs.get("token_logprobs") or ()
            delta = choice.get("delta") or {"text": choice.get("text")}
            for kind, value in flat(delta):
                if parts and parts[-1][0] == kind and isinstance(value, str):
                    parts[-1][1] += value
                elif value not in ("", None):
                    parts.append([kind, value])
            kinds = ("message", "content_block", "finish_reason", "usage")
            said = {kind: choice[kind] for kind in kinds if choice.get(kind)}
            if said or choice.get("type") in ("ping", "content_block_stop"):
                parts.append([choice.get("type"), said])
    return parts, tokens


def flat(delta: dict[str, Any]) -> list[tuple[str, Any]]:
    found = []
    for key, value in delta.items():
        if key not in ("type", "tool_calls"):
            found.append((key, value))
        for call in value if key == "tool_calls" else ():
            if call.get("id"):
                found.append(("call", [call["id"], call["function"]["name"]]))
            found.append((f"arguments {call['index']}", call["function"]["arguments"]))
    return found


@pytest.mark.parametrize("case", CASES)
@settings(max_examples=40)
@given(data=st.data())
def test_a_client_cut_off_at_any_event_gets_the_rest_in_whatever_rows(
    case: str, data: st.DataObject
) -> None:
    text, make = CASES[case]
    ends = sorted(data.draw(st.sets(st.integers(1, len(text) - 1), max_size=12)) | {len(text)})
    marks: Marks = ()
    got: list[bytes] = []
    for visit in range(4):
        cuts = data.draw(st.sets(st.integers(1, len(ends))))
        rows = rows_of(text, ends, cuts, is_end_alone=data.draw(st.booleans()))
        blocks, last = blocks_of(make, rows, marks, data.draw(st.lists(st.integers(1, 3))))
        if visit < 3:
            blocks = blocks[: data.draw(st.integers(0, len(blocks)))]
        got += blocks
        if blocks:
            name = re.match(rb"id: (\S+)\n", blocks[-1])
            assert name is not None
            found = read_event_id(name[1].decode())
            assert found is not None
            marks = found[1]
    rows = rows_of(text, ends, set(), is_end_alone=True)
    whole = make()
    expected = whole.write(rows).split(b"\n\n")[:-1]
    assert told_by(got) == told_by(expected)
    assert last == whole.end(())
