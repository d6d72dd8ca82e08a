"""Tokens of reasoning: counted one by one, the same however they come."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from actors.gateway.call import Row
from actors.gateway.responses.writing import ResponseWriter
from actors.gateway.shape import Parsers
from actors.gateway.thoughts import Thoughts
from messages.gateway import Delta
from messages.responses import ResponsesBody
from messages.types import FinishReason, Usage, pack
from tests.gateway.test_shape import HEAD, HERMES, chat, plain_writer, stream_writer

H = "<|channel|>analysis<|message|>hm<|end|>"
FINAL = "<|start|>assistant<|channel|>final<|message|>Yes"
CALL = "<|start|>assistant<|channel|>commentary to=functions.f<|message|>{}<|call|>"
# Format, text, and which parts of it are reasoning: up to this, and from each of these on.
TEXTS = [
    ("think", "<think>hm, so</think>\n\nYes.", [(0, 21)]),
    ("think", " \n<think>\n</think>Yes", [(0, 18)]),
    ("think", "<thin air", []),
    ("think", "Yes. <think>no</think>", []),
    ("think", "<think>cut o", [(0, 12)]),
    ("deepseek-r1", "so it is</think>Yes", [(0, 16)]),
    ("deepseek-r1", "<think>so</think>Yes", [(0, 17)]),
    ("deepseek-r1", "never ends", [(0, 10)]),
    ("gpt-oss", H + FINAL, [(0, len(H))]),
    (
        "gpt-oss",
        H + CALL + f"<|start|>assistant{H}" + FINAL,
        [(0, len(H)), (len(H + CALL), len(H + CALL) + 18 + len(H))],
    ),
    ("gpt-oss", FINAL, []),
]


def dull(parts: list[tuple[int, int]], sizes: list[int]) -> int:
    """Tokens of these sizes whose text touches a part, or that stand in one."""
    place, count = 0, 0
    for size in sizes:
        begin, end = place, place + size
        count += any(begin < b and max(end, begin + 1) > a for a, b in parts)
        place = end
    return count


def deltas_of(text: str, sizes: list[int], groups: list[int], late: int) -> list[Delta]:
    """The tokens in deltas of `groups` tokens, with `late` characters held back until the end."""
    spans = [sum(sizes[: i + 1]) for i in range(len(sizes))]
    deltas: list[Delta] = []
    at, shown = 0, 0
    while at < len(spans):
        count = groups[len(deltas) % len(groups)]
        mine = spans[at : at + count]
        at += len(mine)
        is_end = at >= len(spans)
        to = len(text) if is_end else max(shown, mine[-1] - late)
        end: dict[str, Any] = {}
        if is_end:
            end = {"finish": FinishReason.STOP, "usage": Usage(3, len(spans))}
        deltas.append(
            Delta(
                "r",
                1,
                at - len(mine),
                len(mine),
                text[shown:to],
                pack(mine),
                spans=pack(mine),
                **end,
            )
        )
        shown = to
    return deltas


def cut(text: str, places: list[int]) -> list[int]:
    edges = sorted({0, len(text), *(place % (len(text) + 1) for place in places)})
    return [b - a for a, b in zip(edges, edges[1:], strict=False)]


@settings(max_examples=400)
@given(
    case=st.sampled_from(TEXTS),
    places=st.lists(st.integers(0, 200), max_size=40),
    empty=st.lists(st.integers(0, 40), max_size=4),
    groups=st.lists(st.integers(1, 5), min_size=1, max_size=6),
    late=st.integers(0, 12),
)
def test_the_count_is_that_of_the_tokens_however_they_come(
    case: tuple[str, str, list[tuple[int, int]]],
    places: list[int],
    empty: list[int],
    groups: list[int],
    late: int,
) -> None:
    form, text, parts = case
    sizes = cut(text, places)
    for place in empty:  # tokens without text; not before the first, where nothing is decided
        sizes.insert(1 + place % len(sizes), 0)
    thoughts = Thoughts(form)
    for delta in deltas_of(text, sizes, groups, late):
        thoughts.see(delta)
    edges = {b for _, b in parts} | {a for a, _ in parts}
    if 0 in sizes and any(sum(sizes[:i]) in edges for i, size in enumerate(sizes) if not size):
        assert abs(thoughts.count - dull(parts, sizes)) <= sizes.count(0)
        return
    assert thoughts.count == dull(parts, sizes)


@pytest.mark.parametrize(("form", "text", "parts"), TEXTS)
def test_a_token_a_character(form: str, text: str, parts: list[tuple[int, int]]) -> None:
    for sizes in ([1] * len(text), [len(text)], [3] * (len(text) // 3) + [len(text) % 3 or 3]):
        sizes = sizes if sum(sizes) == len(text) else cut(text, list(range(0, len(text), 3)))
        for groups in ([1], [2, 3], [100]):
            thoughts = Thoughts(form)
            for delta in deltas_of(text, sizes, groups, 0):
                thoughts.see(delta)
            assert thoughts.count == dull(parts, sizes)


def test_what_a_stop_string_keeps_back_is_counted_where_it_stood() -> None:
    """`stop` met within the reasoning: the tokens of the match have no text, and are reasoning."""
    thoughts = Thoughts("think")
    spans = pack([7, 10, 13])
    thoughts.see(Delta("r", 1, 0, 3, "<think>ab", spans=spans, finish=FinishReason.STOP))
    assert thoughts.count == 3
    thoughts = Thoughts("think")
    thoughts.see(Delta("r", 1, 0, 2, "<think>a</think>", spans=pack([8, 16])))
    thoughts.see(Delta("r", 1, 2, 2, "", spans=pack([18, 18]), finish=FinishReason.STOP))
    assert thoughts.count == 2


def usage_of(events: bytes) -> dict[str, Any]:
    rows = [json.loads(line[6:]) for line in events.split(b"\n\n") if line.startswith(b"data: {")]
    found: dict[str, Any] = rows[-1]["usage"]
    return found


@settings(max_examples=60)
@given(
    places=st.lists(st.integers(0, 200), max_size=30),
    groups=st.lists(st.integers(1, 4), min_size=1, max_size=5),
    late=st.integers(0, 9),
)
def test_a_streams_usage_is_that_of_the_plain_answer_in_both_dialects(
    places: list[int], groups: list[int], late: int
) -> None:
    text = "<think>hm, so</think>\n\nYes."
    sizes = cut(text, places)
    expected = dull([(0, 21)], sizes)
    rows = [Row(0, delta) for delta in deltas_of(text, sizes, groups, late)]
    ask = chat(HERMES, stream=True, stream_options={"include_usage": True})
    assert ask.call.stop.want_spans
    stream = stream_writer(ask, HEAD, ())
    usage = usage_of(stream.write(rows) + stream.end(()))
    plain = plain_writer(ask, HEAD, ())
    plain.add(rows)
    assert json.loads(plain.body(()))["usage"] == usage
    assert usage["completion_tokens_details"] == {"reasoning_tokens": expected}
    assert expected <= usage["completion_tokens"] == len(sizes)

    writer = ResponseWriter(ResponsesBody(model="M", input="x"), ask, HEAD)
    writer.begin()
    writer.write(rows)
    writer.end(5)
    assert writer.reply.usage is not None
    assert writer.reply.usage.output_tokens_details.reasoning_tokens == expected


def test_choices_add_up_and_hidden_reasoning_counts() -> None:
    ask = chat(HERMES, n=2, include_reasoning=False)
    writer = plain_writer(ask, HEAD, ())
    for choice, text in enumerate(("<think>a</think>b", "plain")):
        for delta in deltas_of(text, [1] * len(text), [1], 0):
            writer.add([Row(choice, delta)])
    details = json.loads(writer.body(()))["usage"]["completion_tokens_details"]
    assert details == {"reasoning_tokens": 16}


def test_where_nothing_thinks_the_count_is_nothing_and_no_spans_are_asked_for() -> None:
    ask = chat(Parsers())
    assert not ask.call.stop.want_spans
    writer = plain_writer(ask, HEAD, ())
    writer.add([Row(0, delta) for delta in deltas_of("<think>a</think>", [16], [1], 0)])
    details = json.loads(writer.body(()))["usage"]["completion_tokens_details"]
    assert details == {"reasoning_tokens": 0}


def test_reasoning_that_is_not_told_apart_is_counted_all_the_same() -> None:
    for streams in (False, True):
        options = {"stream": True, "stream_options": {"include_usage": True}} if streams else {}
        ask = chat(separate_reasoning=False, **options)
        deltas = deltas_of("<think>a</think>b", [1] * 17, [1], 0)
        if streams:
            stream = stream_writer(ask, HEAD, ())
            body = stream.write([Row(0, delta) for delta in deltas]) + stream.end(())
            chunks = [json.loads(part[6:]) for part in body.decode().strip().split("\n\n")[:-1]]
            usage = chunks[-1]["usage"]
            texts = [choice["delta"].get("content", "") for c in chunks for choice in c["choices"]]
            content = "".join(text or "" for text in texts)
        else:
            writer = plain_writer(ask, HEAD, ())
            writer.add([Row(0, delta) for delta in deltas])
            answer = json.loads(writer.body(()))
            usage, content = answer["usage"], answer["choices"][0]["message"]["content"]
        assert usage["completion_tokens_details"] == {"reasoning_tokens": 16}
        assert content == "<think>a</think>b"
