"""Tools, reasoning and constraints: what is asked of a chat, and how its answer is written."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import jsonschema
import msgspec
import pytest

from actors.gateway.call import Row
from actors.gateway.errors import Refused
from actors.gateway.inputs import Limits
from actors.gateway.openai import Ask, read_chat, read_completion
from actors.gateway.replies import Head, plain_writer, stream_writer
from actors.gateway.shape import Parsers, parsers_of
from kernels.registry import UnknownName
from messages.config import GatewayConfig
from messages.gateway import Delta, TokenLogprob
from messages.tokenizer import Dialect
from messages.types import Fault, FinishReason, Grammar, Usage, pack

HERMES = Parsers("hermes", "think")
HEAD = Head("chatcmpl-x", 1, "M")
ADD = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
TOOLS = [
    {"type": "function", "function": {"name": "add", "parameters": ADD, "strict": True}},
    {"type": "function", "function": {"name": "now", "description": "the time"}},
]
NAMED = {"type": "function", "function": {"name": "add"}}
OBJ = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
NOW = '<tool_call>{"name": "now", "arguments": {}}</tool_call>'


def chat(parsers: Parsers = HERMES, **fields: Any) -> Ask:
    body = {"model": "M", "messages": [{"role": "user", "content": "hi"}], **fields}
    limits = Limits(GatewayConfig(), "M", 100, parsers)
    return read_chat(msgspec.json.encode(body), limits, lambda: 7)


def completion(**fields: Any) -> Ask:
    body = {"model": "M", "prompt": "hi", **fields}
    return read_completion(msgspec.json.encode(body), Limits(GatewayConfig(), "M", 100), lambda: 7)


def param_of(read: Any, **fields: Any) -> str | None:
    with pytest.raises(Refused) as caught:
        read(**fields)
    assert caught.value.problem.fault is Fault.INVALID
    return caught.value.problem.param


def rows_of(
    chunks: Sequence[str], finish: FinishReason = FinishReason.STOP, *, logprobs: bool = False
) -> list[Row]:
    rows = []
    for index, text in enumerate(chunks):
        is_end = index == len(chunks) - 1
        delta = Delta(
            "r",
            1,
            index,
            1,
            text,
            pack([index]),
            (TokenLogprob(text.encode(), index, -1.0),) if logprobs else (),
            finish if is_end else None,
            usage=Usage(3, len(chunks)) if is_end else None,
        )
        rows.append(Row(0, delta))
    return rows


def plain(ask: Ask, text: str, finish: FinishReason = FinishReason.STOP) -> dict[str, Any]:
    writer = plain_writer(ask, HEAD, ())
    writer.add(rows_of([text], finish))
    choice: dict[str, Any] = json.loads(writer.body(()))["choices"][0]
    return choice


def streamed(ask: Ask, rows: list[Row]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The chunks put together as a client does it, and the chunks."""
    writer = stream_writer(ask, HEAD, ())
    data = b"".join(writer.write([row]) for row in rows) + writer.end(())
    events = [
        json.loads(line[6:]) for line in data.split(b"\n\n") if line[6:] and b"[DONE]" not in line
    ]
    message: dict[str, Any] = {}
    finish = None
    for event in events:
        (choice,) = event["choices"]
        finish = choice["finish_reason"] or finish
        for key, value in choice["delta"].items():
            if key != "tool_calls":
                message[key] = message.get(key, "") + value
                continue
            for part in value:
                calls = message.setdefault("tool_calls", [])
                if "id" in part:
                    assert part["index"] == len(calls) and part["type"] == "function"
                    calls.append(
                        {
                            "id": part["id"],
                            "type": "function",
                            "function": {"name": part["function"]["name"], "arguments": ""},
                        }
                    )
                else:
                    assert set(part) == {"index", "function"}
                calls[part["index"]]["function"]["arguments"] += part["function"]["arguments"]
    return {"message": message, "finish_reason": finish}, events


def same(ask: Ask, text: str, finish: FinishReason = FinishReason.STOP) -> dict[str, Any]:
    """The plain answer, after holding the streamed one against it."""
    whole = plain(ask, text, finish)
    for chunks in (list(text) or [""], [text]):
        got, _ = streamed(ask, rows_of(chunks, finish))
        assert (got["message"].get("content") or None) == (whole["message"]["content"] or None)
        for key in ("tool_calls", "reasoning_content"):
            assert got["message"].get(key) == whole["message"].get(key), key
        assert got["finish_reason"] == whole["finish_reason"]
    return whole


def test_calls_are_read_and_given_ids_and_the_reason_tells_of_them() -> None:
    """B111."""
    whole = same(chat(tools=TOOLS), f"Well.\n{CALL}\n{NOW}")
    assert whole["message"]["content"] == "Well."
    first, second = whole["message"]["tool_calls"]
    assert first["function"] == {"name": "add", "arguments": '{"a": 1}'}
    assert second["function"] == {"name": "now", "arguments": "{}"}
    assert first["id"] != second["id"] and first["id"].startswith("call_")
    assert whole["finish_reason"] == "tool_calls"
    assert same(chat(tools=TOOLS), CALL)["message"]["content"] is None


def test_only_the_first_call_counts_where_calls_may_not_be_parallel() -> None:
    whole = same(chat(tools=TOOLS, parallel_tool_calls=False), CALL + NOW)
    assert [call["function"]["name"] for call in whole["message"]["tool_calls"]] == ["add"]


def test_an_answer_that_is_cut_off_reads_the_same_in_both_modes() -> None:
    """B123."""
    ask = chat(tools=TOOLS)
    text = f"Hm. {CALL}"
    for end in range(len(text) + 1):
        whole = same(ask, text[:end], FinishReason.LENGTH)
        assert whole["finish_reason"] == "length"


def test_required_and_named_calls_end_as_openai_has_it() -> None:
    """B113."""
    text = '[{"name": "add", "arguments": {"a": 1}}]'
    required = same(chat(tools=TOOLS, tool_choice="required"), text)
    assert required["finish_reason"] == "tool_calls"
    assert required["message"]["tool_calls"][0]["function"]["arguments"] == '{"a": 1}'
    named = same(chat(tools=TOOLS, tool_choice=NAMED), '{"a": 1}')
    assert named["finish_reason"] == "stop"
    assert named["message"]["tool_calls"][0]["function"] == {"name": "add", "arguments": '{"a": 1}'}
    assert (
        same(chat(tools=TOOLS, tool_choice=NAMED), '{"a"', FinishReason.LENGTH)["finish_reason"]
        == "length"
    )


@pytest.mark.parametrize("choice", ["required", NAMED])
@pytest.mark.parametrize("finish", [FinishReason.LENGTH, FinishReason.STOP])
def test_a_forced_call_that_is_cut_off_leaves_no_content(choice: Any, finish: FinishReason) -> None:
    text = '{"a": 1}'
    if choice == "required":
        text = (
            f'[\n\n{{\n"name": "add", "arguments": {text}}}, {{"name": "now", "arguments": {{}}}}]'
        )
    ask = chat(tools=TOOLS, tool_choice=choice)
    counts = []
    for end in range(len(text) + 1):
        message = same(ask, text[:end], finish)["message"]
        assert not message["content"], message
        counts.append(len(message.get("tool_calls", ())))
    assert counts == sorted(counts) and counts[-1] == (2 if choice == "required" else 1)
    thoughts = "<think>\nhm\n</think>\n\n"
    message = same(ask, thoughts + text[:9], finish)["message"]
    assert message["reasoning_content"] == "hm" and not message["content"]


@pytest.mark.parametrize("choice", ["required", NAMED])
def test_a_tool_that_is_not_strict_is_held_to_what_can_be_held(choice: Any) -> None:
    tags = {"type": "array", "items": {"type": "string"}, "uniqueItems": True}
    either = {"oneOf": [{"type": "integer"}, {"minimum": 1}]}
    given = {
        "type": "object",
        "properties": {"not": tags, "if": {"const": {"not": 1}}, "a": either},
        "if": {"required": ["a"]},
        "then": {"minProperties": 2},
        "not": {"required": ["b"]},
        "$defs": {"contains": {"contains": True, "type": "array"}},
    }

    def held(strict: bool | None) -> dict[str, Any]:
        function = {"name": "add", "parameters": given, "strict": strict}
        ask = chat(tools=[{"type": "function", "function": function}], tool_choice=choice)
        assert ask.call.grammar is not None
        form: dict[str, Any] = json.loads(ask.call.grammar.text)
        return form["$defs"]["t0"] if choice == "required" else form

    assert held(True) == given
    loose = {
        "type": "object",
        "properties": {
            "not": {"type": "array", "items": {"type": "string"}},
            "if": {"const": {"not": 1}},
            "a": {"anyOf": [{"type": "integer"}, {"minimum": 1}]},
        },
        "$defs": {"contains": {"type": "array"}},
    }
    assert held(False) == held(None) == loose
    for value in ({"not": ["x"], "a": 1.5}, {"not": [], "if": {"not": 1}}, {"not": 1}, {"a": "b"}):
        if jsonschema.Draft202012Validator(given).is_valid(value):
            jsonschema.validate(value, loose)


def test_without_a_choice_of_tools_text_is_text() -> None:
    """B117."""
    for fields in ({"tool_choice": "none"}, {"tool_choice": "none", "tools": TOOLS}, {}):
        whole = same(chat(**fields), CALL)
        assert whole["message"]["content"] == CALL and "tool_calls" not in whole["message"]
        assert whole["finish_reason"] == "stop"


def test_reasoning_is_a_field_of_its_own() -> None:
    text = "<think>\nhm\n</think>\n\nYes."
    whole = same(chat(), text)
    assert whole["message"]["reasoning_content"] == "hm" and whole["message"]["content"] == "Yes."
    assert "reasoning_content" not in same(chat(), "Yes.")["message"]
    assert same(chat(separate_reasoning=False), text)["message"]["content"] == text
    hidden = same(chat(include_reasoning=False), text)["message"]
    assert hidden["content"] == "Yes." and "reasoning_content" not in hidden
    r1 = Parsers("", "deepseek-r1")
    assert same(chat(r1), "hm</think>Yes.")["message"]["reasoning_content"] == "hm"
    off = chat(r1, chat_template_kwargs={"enable_thinking": False})
    assert same(off, "Yes.")["message"]["content"] == "Yes."
    called = same(chat(tools=TOOLS), f"<think>{NOW}</think>{CALL}")["message"]
    assert called["reasoning_content"] == NOW and len(called["tool_calls"]) == 1


def test_log_probabilities_of_every_token_are_there_once() -> None:
    ask = chat(tools=TOOLS, logprobs=True)
    text = f"<think>a</think>b {CALL}"
    _, events = streamed(ask, rows_of(list(text), logprobs=True))
    tokens = [
        row["token"]
        for event in events
        if event["choices"][0]["logprobs"]
        for row in event["choices"][0]["logprobs"]["content"]
    ]
    assert "".join(tokens) == text


def grammar_of(ask: Ask) -> Grammar:
    assert ask.call.grammar is not None
    return ask.call.grammar


def test_tools_that_must_be_called_are_forced_by_a_grammar() -> None:
    named = grammar_of(chat(tools=TOOLS, tool_choice=NAMED))
    assert (named.kind, json.loads(named.text), named.param) == ("json_schema", ADD, "tools")
    assert (named.begin, named.end) == ("<think>", "</think>")
    schema = json.loads(grammar_of(chat(tools=TOOLS, tool_choice="required")).text)
    assert schema["minItems"] == 1 and "maxItems" not in schema
    names = [item["properties"]["name"]["const"] for item in schema["items"]["anyOf"]]
    assert names == ["add", "now"] and schema["$defs"]["t0"] == ADD
    single = chat(tools=TOOLS, tool_choice="required", parallel_tool_calls=False)
    assert json.loads(grammar_of(single).text)["maxItems"] == 1
    nested = {"$defs": {"x": {"$ref": "#"}}, "properties": {"y": {"$ref": "#/$defs/x"}}}
    tool = {"type": "function", "function": {"name": "f", "parameters": nested}}
    moved = json.loads(grammar_of(chat(tools=[tool], tool_choice="required")).text)["$defs"]["t0"]
    assert moved["properties"]["y"]["$ref"] == "#/$defs/t0/$defs/x"
    assert moved["$defs"]["x"]["$ref"] == "#/$defs/t0"


def test_tools_go_to_the_template_only_where_they_may_be_called() -> None:
    prompt = chat(tools=TOOLS).call.prompts[0].chat
    assert prompt is not None and json.loads(prompt.tools_json) == TOOLS
    bare = chat(tools=TOOLS, tool_choice="none").call.prompts[0].chat
    assert bare is not None and not bare.tools_json


def allowed(mode: str, *names: str) -> dict[str, Any]:
    tools = [{"type": "function", "function": {"name": name}} for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [5]}, "tools[0]"),
        ({"tools": {}}, "tools"),
        ({"tools": [{"type": "function"}]}, "tools[0]"),
        ({"tools": [{"type": "web", "function": {"name": "f"}}]}, "tools[0].type"),
        ({"tools": [{"type": "function", "function": {"name": ""}}]}, "tools[0].function.name"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
        ({"tools": TOOLS + TOOLS}, "tools"),
        ({"tools": TOOLS[:1] * 200}, "tools"),
        ({"tools": TOOLS, "tool_choice": "always"}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": {"type": "function"}}, "tool_choice"),
        (
            {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "no"}}},
            "tool_choice",
        ),
        ({"tools": TOOLS, "tool_choice": {"type": "allowed_tools"}}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": allowed("some", "add")}, "tool_choice.allowed_tools.mode"),
        ({"tools": TOOLS, "tool_choice": allowed("auto")}, "tool_choice.allowed_tools.tools"),
        ({"tools": TOOLS, "tool_choice": allowed("auto", "no")}, "tool_choice"),
        ({"tool_choice": allowed("auto", "add")}, "tools"),
        ({"tools": TOOLS, "tool_choice": NAMED, "ignore_eos": True}, "ignore_eos"),
        ({"parallel_tool_calls": "yes"}, "parallel_tool_calls"),
    ],
)
def test_wrong_tools_are_refused_by_name(fields: dict[str, Any], param: str) -> None:
    assert param_of(chat, **fields) == param


SCHEMA = {"type": "json_schema", "json_schema": {"name": "o", "schema": OBJ, "strict": True}}


@pytest.mark.parametrize(
    ("fields", "kind", "text"),
    [
        ({"response_format": {"type": "json_object"}}, "json_schema", {"type": "object"}),
        ({"response_format": SCHEMA}, "json_schema", OBJ),
        ({"json_schema": json.dumps(OBJ)}, "json_schema", OBJ),
        ({"guided_json": OBJ}, "json_schema", OBJ),
        ({"guided_choice": ["a", "b"]}, "choice", ["a", "b"]),
        ({"structured_outputs": {"json": OBJ}}, "json_schema", OBJ),
        ({"structured_outputs": {"json_object": True}}, "json_schema", {"type": "object"}),
        ({"structured_outputs": {"choice": ["a"]}}, "choice", ["a"]),
    ],
)
def test_every_dialects_constraint_is_read(fields: dict[str, Any], kind: str, text: Any) -> None:
    for ask in (chat(Parsers(), **fields), completion(**fields)):
        grammar = grammar_of(ask)
        assert (grammar.kind, json.loads(grammar.text)) == (kind, text)
        assert grammar.param == next(iter(fields)) and not grammar.end


TAG = {
    "structures": [{"begin": "<f=add>", "schema": OBJ, "end": "</f>"}],
    "triggers": ["<g", "<f="],
}
ROW = {"trigger": "<f=", "begin": "<f=add>", "schema": OBJ, "end": "</f>"}


def test_structural_tags_are_read_in_each_form() -> None:
    for fields in (
        {"response_format": {"type": "structural_tag", **TAG}},
        {"structural_tag": TAG},
        {"structural_tag": json.dumps(TAG)},
        {"structured_outputs": {"structural_tag": TAG}},
    ):
        grammar = grammar_of(completion(**fields))
        assert (grammar.kind, json.loads(grammar.text)) == ("structural_tag", [ROW])
    for wrong in (
        {"triggers": ["<x"]},
        {"triggers": []},
        {"structures": []},
        {"structures": [{"begin": "<f=", "schema": 5}]},
        {"structures": [{"schema": OBJ}]},
    ):
        found = param_of(completion, response_format={"type": "structural_tag", **TAG, **wrong})
        assert found and found.startswith("response_format")
    newer = {"type": "structural_tag", "format": {"type": "const_string", "value": "x"}}
    for fields, place in (
        ({"response_format": newer}, "response_format"),
        ({"structural_tag": newer}, "structural_tag"),
        ({"structural_tag": json.dumps(newer)}, "structural_tag"),
        ({"structured_outputs": {"structural_tag": newer}}, "structured_outputs.structural_tag"),
    ):
        assert param_of(completion, **fields) == f"{place}.format"


def test_strict_tools_keep_to_their_schema_where_the_model_chooses_to_call() -> None:
    grammar = grammar_of(chat(tools=TOOLS))
    assert (grammar.kind, grammar.param, grammar.end) == ("structural_tag", "tools", "</think>")
    add, now = json.loads(grammar.text)
    assert add["begin"] == '<tool_call>\n{"name": "add", "arguments": ' and add["schema"] == ADD
    assert now["schema"] == {"type": "object"} and now["trigger"] == "<tool_call>"
    loose = [{**TOOLS[0], "function": {**TOOLS[0]["function"], "strict": False}}]
    assert chat(tools=loose).call.grammar is None
    assert chat(Parsers("pythonic"), tools=TOOLS).call.grammar is None


def test_expressions_and_grammars_are_read_as_they_are() -> None:
    for name in ("regex", "guided_regex"):
        assert grammar_of(completion(**{name: "a+"})) == Grammar("regex", "a+", param=name)
    for name in ("ebnf", "guided_grammar"):
        assert grammar_of(completion(**{name: "x"})) == Grammar("ebnf", "x", param=name)
    assert completion(structured_outputs=None).call.grammar is None
    assert completion(response_format={"type": "text"}).call.grammar is None
    neutral = {"disable_fallback": False, "disable_any_whitespace": False}
    neutral |= {"disable_additional_properties": None, "whitespace_pattern": None}
    given = {"regex": "a+", "json_object": False, "choice": None, **neutral}
    read = completion(structured_outputs=given, guided_decoding_backend="xgrammar")
    assert grammar_of(read) == Grammar("regex", "a+", param="structured_outputs")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"response_format": {"type": "json"}}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}},
            "response_format.json_schema",
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": "not a schema"}}},
            "response_format",
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": None}}},
            "response_format",
        ),
        ({"json_schema": "{"}, "json_schema"),
        ({"guided_choice": []}, "guided_choice"),
        ({"regex": "a", "ebnf": "b"}, "ebnf"),
        ({"structured_outputs": {"regex": "a", "json": {}}}, "structured_outputs"),
        ({"structured_outputs": {}}, "structured_outputs"),
        ({"structured_outputs": {"regex": None, "json_object": False}}, "structured_outputs"),
        ({"structured_outputs": {"disable_fallback": None}}, "structured_outputs"),
        ({"structured_outputs": {"regexx": "a"}}, "structured_outputs.regexx"),
        ({"structured_outputs": {"regex": "a", "x": None}}, "structured_outputs.x"),
        ({"structured_outputs": {"regex": 5}}, "structured_outputs.regex"),
        *(
            ({"structured_outputs": {"regex": "a", name: value}}, f"structured_outputs.{name}")
            for name, value in (
                ("disable_fallback", True),
                ("disable_any_whitespace", True),
                ("disable_additional_properties", True),
                ("whitespace_pattern", "[ ]?"),
            )
        ),
        ({"guided_json": {}, "guided_whitespace_pattern": " "}, "guided_whitespace_pattern"),
        ({"regex": "a", "min_tokens": 2}, "min_tokens"),
        ({"regex": 5}, "regex"),
    ],
)
def test_wrong_constraints_are_refused_by_name(fields: dict[str, Any], param: str) -> None:
    """B095."""
    assert param_of(chat, **fields) == param
    assert param_of(completion, **fields) == param


def test_what_is_too_long_to_be_looked_at_is_refused_unread() -> None:
    """B099, B189: reading a schema of megabytes would hold up all streams of the gateway."""
    schema = {"enum": ["x" * 1000] * 600}
    for name, value in (
        ("response_format", {"type": "json_schema", "json_schema": {"schema": schema}}),
        ("json_schema", schema),
        ("guided_json", json.dumps(schema)),
        ("structured_outputs", {"json": schema}),
        ("structural_tag", {"structures": [schema], "triggers": ["x"]}),
    ):
        assert param_of(completion, **{name: value}) == name
    tools = [
        {"type": "function", "function": {"name": f"f{i}", "parameters": schema}} for i in range(4)
    ]
    assert param_of(chat, tools=tools) == "tools"
    assert chat(tools=tools[:2]).shape.names == ("f0", "f1")


def test_parsers_come_from_the_settings_or_the_template() -> None:
    note = Dialect("hermes", "think")
    assert parsers_of(GatewayConfig(), note) == HERMES
    assert parsers_of(GatewayConfig(), Dialect()) == Parsers()
    config = GatewayConfig(tool_parser="mistral", reasoning_parser="none")
    assert parsers_of(config, note) == Parsers("mistral", "")
    with pytest.raises(UnknownName):
        parsers_of(GatewayConfig(tool_parser="nope"), note)


def test_ids_of_mistral_are_nine_letters_and_its_special_tokens_are_seen() -> None:
    ask = chat(Parsers("mistral"), tools=TOOLS)
    assert not ask.call.stop.skip_special
    (call,) = same(ask, '[TOOL_CALLS]add[ARGS]{"a": 1}')["message"]["tool_calls"]
    assert len(call["id"]) == 9 and call["id"].isalnum()
    assert chat(tools=TOOLS).call.stop.skip_special
