"""Tool-call and reasoning parsers: right results, and the same however the text is cut."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from actors.gateway.reasoning.base import REASONING_PARSERS, Reasoning
from actors.gateway.tools.base import TOOL_PARSERS, Arguments, Start, Text
from actors.gateway.tools.plain import Forced, Named

NAMES = ("get_weather", "add")  # as the request has them; the answers call the second one first
CALLS = [("add", {"a": 1, "b": [2, {"c": "}]"}]}), ("get_weather", {"city": 'S\\"F {x} "é'})]
V3 = "<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n{args}\n```<｜tool▁call▁end｜>"
V31 = "<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>{args}<｜tool▁call▁end｜>"


def dump(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def python(value: dict[str, Any]) -> str:
    return ", ".join(f"{key}={item!r}" for key, item in value.items())


def objects(key: str = "arguments") -> list[str]:
    return [dump({"name": name, key: args}) for name, args in CALLS]


WHOLE = {
    "hermes": "\n".join(f"<tool_call>\n{text}\n</tool_call>" for text in objects()),
    "json": f"[{', '.join(objects('parameters'))}]",
    "llama3": "<|python_tag|>" + "; ".join(objects("parameters")),
    "mistral": f"[TOOL_CALLS] [{', '.join(objects())}]",
    "pythonic": "[" + ", ".join(f"{name}({python(args)})" for name, args in CALLS) + "]",
    "deepseek": "<｜tool▁calls▁begin｜>"
    + "\n".join(V3.format(name=n, args=dump(a)) for n, a in CALLS)
    + "<｜tool▁calls▁end｜>",
    "deepseek_v31": "<｜tool▁calls▁begin｜>"
    + "".join(V31.format(name=n, args=dump(a)) for n, a in CALLS)
    + "<｜tool▁calls▁end｜>",
    "harmony": "<|start|>assistant".join(
        f"<|channel|>commentary to=functions.{n} <|constrain|>json<|message|>{dump(a)}<|call|>"
        for n, a in CALLS
    ),
    "mistral+": "".join(f"[TOOL_CALLS]{n}[ARGS]{dump(a)}" for n, a in CALLS),
    "llama3+": "\n".join(objects("parameters")),
    "hermes+": '<tool_call> {"arguments": {"a": 1, "b": [2, {"c": "}]"}]}, "x": 1, "name": "add"}',
}
CASES = {key: (key.rstrip("+"), text) for key, text in WHOLE.items()}


def read(parser: Any, chunks: Iterable[str]) -> tuple[str, str, list[list[Any]]]:
    """Reasoning, text and calls, joined; checks what holds for every stream."""
    reasoning, text, calls = [], [], []
    events = [event for chunk in chunks for event in parser.feed(chunk)] + parser.flush()
    for event in events:
        match event:
            case Text():
                assert event.text
                text.append(event.text)
            case Reasoning():
                assert event.text
                reasoning.append(event.text)
            case Start():
                assert event.call == len(calls), "indices are 0, 1, 2 …"
                calls.append([event.name, ""])
            case Arguments():
                assert event.call == len(calls) - 1 and event.text
                calls[-1][1] += event.text
    found = "".join(reasoning), "".join(text), calls
    json.dumps(found, ensure_ascii=False).encode()
    return found


def tool_parser(name: str) -> Any:
    return TOOL_PARSERS.get(name).make(NAMES)


@pytest.mark.parametrize("case", CASES)
def test_calls_are_found_character_by_character_and_at_once(case: str) -> None:
    name, text = CASES[case]
    expected = CALLS[: 1 if case == "hermes+" else 2]
    for chunks in ([text], list(text), [""] + [text[i : i + 3] for i in range(0, len(text), 3)]):
        _, content, calls = read(tool_parser(name), chunks)
        assert not content
        assert [(call, json.loads(args)) for call, args in calls] == expected


@pytest.mark.parametrize("case", CASES)
def test_every_cut_in_two_and_every_truncation_gives_the_whole_texts_result(case: str) -> None:
    name, text = CASES[case]
    for end in range(len(text) + 1):
        cut = text[:end]
        whole = read(tool_parser(name), [cut])
        assert read(tool_parser(name), list(cut)) == whole
        middle = end * 7 % (end + 1) if end % 2 else end // 2
        assert read(tool_parser(name), [cut[:middle], cut[middle:]]) == whole
        if not whole[2]:  # cut off before the name is known: it is text, and all of it
            assert whole[1].split() == cut.split() or case.startswith(("deep", "harm", "mis"))


@pytest.mark.parametrize("name", TOOL_PARSERS.names())
def test_plain_text_stays_as_it_is(name: str) -> None:
    for text in ("", "Hello.\n", " {x} and [y] < z > \n\n", "a <tool b", "   "):
        assert read(tool_parser(name), list(text)) == ("", text, [])


PIECES = st.sampled_from(
    [
        *"{}[]()\"'\\:,;=<>|/ \n`af1",
        r'"\ud800"',
        '{"name": "add", "arguments": {',
        '"parameters": ',
        '{"a": 1}',
        '"add"',
        "add(a=",
        "<tool_call>",
        "</tool_call>",
        "<think>",
        "</think>",
        "<|python_tag|>",
        "[TOOL_CALLS]",
        "[ARGS]",
        "<｜tool▁calls▁begin｜>",
        "<｜tool▁call▁begin｜>",
        "<｜tool▁sep｜>",
        "<｜tool▁call▁end｜>",
        "<|channel|>",
        "<|start|>",
        "<|message|>",
        "<|end|>",
        "analysis",
        "commentary to=functions.add",
        "```json\n",
        "function",
    ]
)


@settings(max_examples=150)
@given(st.lists(PIECES, max_size=14).map("".join), st.lists(st.integers(0, 200), max_size=6))
def test_any_text_reads_the_same_however_it_is_cut(text: str, places: list[int]) -> None:
    cuts = sorted({0, len(text), *(place % (len(text) + 1) for place in places)})
    chunks = [text[a:b] for a, b in zip(cuts, cuts[1:], strict=False)]
    for name in TOOL_PARSERS.names():
        whole = read(tool_parser(name), [text])
        assert read(tool_parser(name), chunks) == whole, name
        assert read(tool_parser(name), list(text)) == whole, name
    for name in REASONING_PARSERS.names():
        make = REASONING_PARSERS.get(name).make
        whole = read(make(), [text])
        assert read(make(), chunks) == whole, name
        assert read(make(), list(text)) == whole, name


@pytest.mark.parametrize("case", ["hermes", "mistral", "deepseek", "harmony"])
def test_text_around_calls_is_content(case: str) -> None:
    name, text = CASES[case]
    _, content, calls = read(tool_parser(name), list(f"Let me see.\n\n{text}"))
    assert (content, len(calls)) == ("Let me see.", 2)


def test_an_unknown_tool_is_a_call_where_the_format_is_marked() -> None:
    text = '<tool_call>{"name": "nope", "arguments": {}}</tool_call>'
    assert read(tool_parser("hermes"), [text])[2] == [["nope", "{}"]]
    assert read(tool_parser("json"), ['{"name": "nope", "arguments": {}}'])[2] == []


def test_arguments_given_as_a_string_or_not_at_all_are_an_object() -> None:
    text = '<tool_call>{"name": "add", "arguments": "{\\"a\\": 1}"}</tool_call>'
    assert read(tool_parser("hermes"), list(text))[2] == [["add", '{"a": 1}']]
    for text in ('{"name": "add"}', '{"name": "add", "arguments": null}'):
        assert read(tool_parser("json"), list(text)) == ("", "", [["add", "{}"]])


@pytest.mark.parametrize(
    ("parser", "text"),
    [
        (
            "hermes",
            r'<tool_call>{"name": "a\ud800", "arguments": "\ud83d\ude42\udc00"}</tool_call>',
        ),
        ("mistral", r'[TOOL_CALLS][{"name": "a\ud800", "arguments": "\ud83d\ude42\udc00"}]'),
        ("json", r'{"name": "add", "arguments": "\ud83d\ude42\udc00"}'),
        ("llama3", r'{"name": "add", "parameters": "\ud83d\ude42\udc00"}'),
        ("pythonic", r"[add(a='\U0001f642\udc00')]"),
    ],
)
def test_half_a_surrogate_pair_becomes_a_character_that_can_be_sent(parser: str, text: str) -> None:
    ((name, arguments),) = read(tool_parser(parser), list(text))[2]
    assert name in ("add", "a\ufffd") and "🙂\ufffd" in arguments


def test_what_breaks_off_after_the_name_is_a_call_that_is_cut_off() -> None:
    text = '<tool_call>{"name": "add", "arguments": {"a": '
    assert read(tool_parser("hermes"), list(text)) == ("", "", [["add", '{"a": ']])


def test_a_named_tool_gets_all_of_the_text() -> None:
    assert read(Named(["add"]), list('\n {"a": 1}')) == ("", "", [["add", '{"a": 1}']])
    assert read(Named(["add"]), []) == ("", "", [])


def test_of_calls_that_are_forced_nothing_is_text_wherever_they_are_cut_off() -> None:
    text = f" [\n {', '.join(objects())}\n]\n"
    whole = read(Forced(NAMES), [text])[2]
    assert [(name, json.loads(arguments)) for name, arguments in whole] == CALLS
    for end in range(len(text)):
        reasoning, said, calls = read(Forced(NAMES), list(text[:end]))
        assert read(Forced(NAMES), [text[:end]]) == (reasoning, said, calls)
        assert not reasoning and not said, f"{said!r} of {text[:end]!r}"
        for (name, arguments), (right, complete) in zip(calls, whole, strict=False):
            assert name == right and complete.startswith(arguments)


def test_pythonic_calls_execute_nothing() -> None:
    for text in ("[add(a=__import__('os'))]", "[add(*x)]", "[add(1)]", "[add(a=b(c=1))]"):
        assert read(tool_parser("pythonic"), [text]) == ("", text, [])
    deep = "[add(a=" + "[" * 5000 + "]" * 5000 + ")]"
    assert read(tool_parser("pythonic"), [deep])[1] == deep


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("think", "<think>\nhm, 1 < 2\n</think>\n\nYes.", ("hm, 1 < 2", "Yes.")),
        ("think", "No thought.", ("", "No thought.")),
        ("qwen3", "<think>\n\n</think>\n\nYes", ("", "Yes")),
        ("think", "<think>cut off ", ("cut off ", "")),
        ("think", "A <think> later </think>", ("", "A <think> later </think>")),
        ("deepseek-r1", "so\n</think>Yes", ("so", "Yes")),
        ("deepseek-r1", "<think>so</think>Yes", ("so", "Yes")),
        ("deepseek-r1", "never ends", ("never ends", "")),
        (
            "gpt-oss",
            "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>final<|message|>Yes",
            ("hm", "Yes"),
        ),
    ],
)
def test_reasoning_is_told_from_the_answer(name: str, text: str, expected: tuple[str, str]) -> None:
    make = REASONING_PARSERS.get(name).make
    assert read(make(), [text]) == (*expected, [])
    assert read(make(), list(text)) == (*expected, [])


def test_harmony_calls_pass_the_reasoning_parser_unharmed() -> None:
    text = "<|channel|>analysis<|message|>hm<|end|><|start|>assistant" + WHOLE["harmony"]
    reasoning, passed, _ = read(REASONING_PARSERS.get("gpt-oss").make(), list(text))
    assert reasoning == "hm"
    _, content, calls = read(tool_parser("harmony"), list(passed))
    assert not content
    assert [(name, json.loads(args)) for name, args in calls] == CALLS
