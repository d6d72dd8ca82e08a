"""Strict tools where the model chooses to call: every format that can be held is held.

A random choice among the tokens that the default engine allows stands for the model; what it says
is read by the format's own parser, and every call must fit its schema.
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest

from actors.gateway.constraint import call_tags
from actors.gateway.inputs import Limits
from actors.gateway.openai import Ask, read_chat
from actors.gateway.shape import Parsers
from actors.gateway.tools.base import TOOL_PARSERS, Signature
from actors.tokenizer.grammar import check_grammar
from kernels.batch import Constraint
from kernels.constrain import BadGrammar, Constrainer, TokenTable, load_engine
from kernels.grammar.xgrammar import tags_of
from messages.config import GatewayConfig
from messages.types import Grammar
from tests.gateway.test_parsers import read
from tests.gateway.test_shape import TOOLS
from tests.kernels.driver import ints

ADD = {
    "type": "object",
    "properties": {"a": {"type": "integer", "minimum": 5, "maximum": 7}},
    "required": ["a"],
    "additionalProperties": False,
}
TOGGLE = {
    "type": "object",
    "properties": {"on": {"$ref": "#/$defs/flag"}},
    "required": ["on"],
    "additionalProperties": False,
    "$defs": {"flag": {"type": "boolean"}},
}
SCHEMAS = {"add": ADD, "toggle": TOGGLE}
SIGNATURES = [Signature(name, schema) for name, schema in SCHEMAS.items()]
# Formats, and those of their markers that are special tokens of the models that speak them.
DEEPSEEK = ["calls▁begin", "call▁begin", "sep", "call▁end", "calls▁end"]
SPECIALS: dict[str, list[str]] = {
    "hermes": [],
    "llama3": ["<|python_tag|>", "<|eom_id|>"],
    "mistral": ["[TOOL_CALLS]", "[ARGS]"],
    "deepseek": [f"<｜tool▁{name}｜>" for name in DEEPSEEK],
    "gpt-oss": ["<|start|>", "<|channel|>", "<|message|>", "<|constrain|>", "<|end|>"],
    "json": [],
}
HEAD = "<|channel|>commentary to=functions."
TOOL_CALL = "<｜tool▁call▁begin｜>"
# How an answer goes that calls `add` with @: some of the ways that a model has.
ANSWERS = {
    "hermes": ['Well.\n<tool_call>\n{"name": "add", "arguments": @}\n</tool_call>'],
    "llama3": [
        '{"name": "add", "parameters": @}',
        '<|python_tag|>{"name": "toggle", "parameters": {"on": true}}; {"name": "add", '
        '"parameters": @}',
    ],
    "mistral": [
        '[TOOL_CALLS] [{"name": "toggle", "arguments": {"on": true}}, '
        '{"name": "add", "arguments": @}]',
        'Well.[TOOL_CALLS]toggle[ARGS]{"on": false}[TOOL_CALLS]add[ARGS]@',
    ],
    "deepseek": [
        f"Hm <｜tool▁calls▁begin｜>{TOOL_CALL}function<｜tool▁sep｜>add\n```json\n@\n```"
        "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        f"<｜tool▁calls▁begin｜>{TOOL_CALL}add<｜tool▁sep｜>@<｜tool▁call▁end｜>",
    ],
    "gpt-oss": [
        f"<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant{HEAD}add"
        " <|constrain|>json<|message|>@",
        f"{HEAD}add<|message|>@",
    ],
    "json": ['[{"name": "add", "arguments": @}]', '{"name": "add", "parameters": @}'],
}
CASES = [(name, answer) for name, answers in ANSWERS.items() for answer in answers]


class Model:
    """A vocabulary of bytes and a format's special tokens, held to the format's tags."""

    def __init__(self, form: str, *, specials: Sequence[str] | None = None) -> None:
        self.form = form
        self.specials = SPECIALS[form] if specials is None else list(specials)
        self.pieces = [b"</s>", *(text.encode() for text in self.specials)]
        first = len(self.pieces)
        self.pieces += [bytes([byte]) for byte in range(256)]
        special = frozenset(range(first))
        table = TokenTable(self.pieces, special, (0,), len(self.pieces))
        self.constrainer = Constrainer(load_engine("auto", table), table)
        tags = TOOL_PARSERS.get(form).tags
        assert tags is not None
        self.grammar = call_tags(tags(SIGNATURES), "tools")
        check_grammar(self.grammar)
        self.begin()

    def begin(self) -> None:
        self.constrainer.clear()
        self.constrainer.open(0, Constraint(self.grammar.kind, self.grammar.text), [])
        self.said = b""

    def ids(self, text: str) -> list[int]:
        ids: list[int] = []
        while text:
            special = next((s for s in self.specials if text.startswith(s)), None)
            if special is not None:
                ids.append(self.pieces.index(special.encode()))
                text = text[len(special) :]
            else:
                ids += [self.pieces.index(bytes([byte])) for byte in text[0].encode()]
                text = text[1:]
        return ids

    def allowed(self) -> list[int]:
        masks = self.constrainer.masks(ints([0]))
        assert masks is not None and not len(masks.broken)
        return [int(i) for i in np.flatnonzero(masks.allowed(len(self.pieces))[0])]

    def take(self, token: int) -> None:
        self.constrainer.take(ints([0]), ints([token]))
        self.said += self.pieces[token] if token else b""

    def says(self, text: str) -> bool:
        """Whether it may say all of that."""
        for token in self.ids(text):
            if token not in self.allowed():
                return False
            self.take(token)
        return True

    def calls(self) -> list[list[Any]]:
        text = self.said.decode("utf-8", "replace")
        return read(TOOL_PARSERS.get(self.form).make(tuple(SCHEMAS)), [text])[2]


def model_of(form: str) -> Model:
    if form not in MODELS:
        MODELS[form] = Model(form)
    MODELS[form].begin()
    return MODELS[form]


MODELS: dict[str, Model] = {}


@pytest.mark.parametrize(("form", "answer"), CASES)
def test_a_call_that_fits_may_be_said_and_is_read(form: str, answer: str) -> None:
    model = model_of(form)
    assert model.says(answer.replace("@", '{"a": 6}'))
    assert 0 in model.allowed(), "the answer may end there"
    name, arguments = model.calls()[-1]
    assert (name, json.loads(arguments)) == ("add", {"a": 6})


@pytest.mark.parametrize(("form", "answer"), CASES)
def test_a_call_that_does_not_fit_cannot_be_said(form: str, answer: str) -> None:
    for wrong in ('{"a": 8}', '{"b": 6}', '{"a": "6"}', "{}", '{"a": 6, "b": 1}', "[]"):
        assert not model_of(form).says(answer.replace("@", wrong)), wrong
    assert not model_of(form).says(answer.replace("add", "sub").replace("@", '{"a": 6}'))


@pytest.mark.parametrize("form", ANSWERS)
def test_text_without_calls_is_free(form: str) -> None:
    for text in ("", "Hello!\n", ' x {"name": "sub", "arguments": 5} [1] \n', "é 🦊 <tool"):
        model = model_of(form)
        assert model.says(text) and 0 in model.allowed()
        assert model.calls() == []


@pytest.mark.parametrize("form", ANSWERS)
def test_whatever_is_said_at_random_every_call_fits_its_schema(form: str) -> None:
    rng = random.Random(form)
    found = 0
    for _ in range(40):
        model = model_of(form)
        hints = [model.ids(answer.partition("@")[0]) for answer in ANSWERS[form]]
        hint = list(rng.choice(hints))[: rng.randrange(1, 80)]
        for _ in range(160):
            allowed = model.allowed()
            wanted = hint.pop(0) if hint else 0
            if wanted not in allowed or rng.random() < 0.02:
                closing = [i for i in allowed if model.pieces[i] in b'"}],' and model.pieces[i]]
                wanted = rng.choice(closing if closing and rng.random() < 0.5 else allowed)
            if wanted == 0:
                break
            model.take(wanted)
        else:
            continue
        for name, arguments in model.calls():
            found += 1
            jsonschema.validate(json.loads(arguments), SCHEMAS[name])
    assert found >= 5, "some of them were calls"


def test_markers_that_are_no_special_tokens_are_text() -> None:
    """A model that was trained on the marks of another one's format."""
    for form in ("mistral", "deepseek", "llama3"):
        model = Model(form, specials=())
        for answer in ANSWERS[form]:
            model.begin()
            assert model.says(answer.replace("@", '{"a": 5}')), answer
            model.begin()
            assert not model.says(answer.replace("@", '{"a": 4}')), answer


def test_what_a_second_engine_cannot_hold_it_refuses() -> None:
    hermes = json.loads(model_of("hermes").grammar.text)
    assert len(tags_of(hermes)["format"]["tags"]) == 2
    for form in ("llama3", "mistral", "deepseek", "gpt-oss", "json"):
        with pytest.raises(BadGrammar, match="xgrammar"):
            tags_of(json.loads(model_of(form).grammar.text), frozenset(SPECIALS[form]))


# What a chat asks for


def chat(parser: str, **fields: Any) -> Ask:
    body = {"model": "M", "messages": [{"role": "user", "content": "hi"}], **fields}
    limits = Limits(GatewayConfig(), "M", 100, Parsers(parser, ""))
    return read_chat(json.dumps(body).encode(), limits, lambda: 7)


def test_the_page_says_which_formats_are_held() -> None:
    """The table of docs/api/openai.md, against the registry and what a chat is given."""
    page = (Path(__file__).parents[2] / "docs/api/openai.md").read_text("utf-8")
    rows = {}
    for line in page.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if len(cells) == 3 and cells[1] in ("kept", "not kept"):
            rows |= dict.fromkeys((name.strip(" `") for name in cells[0].split(",")), cells[1])
    assert set(rows) == set(TOOL_PARSERS.names())
    for name, word in rows.items():
        is_kept = TOOL_PARSERS.get(name).tags is not None
        assert (word == "kept") == is_kept, name
        grammar = chat(name, tools=TOOLS).call.grammar
        assert (grammar is not None) == is_kept, name
        if grammar is not None:
            assert (grammar.kind, grammar.param) == ("structural_tag", "tools")


def allowed(mode: str, *names: str, form: str = "hermes", **fields: Any) -> Ask:
    entries = [{"type": "function", "function": {"name": name}} for name in names]
    choice = {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": entries}}
    return chat(form, tools=TOOLS, tool_choice=choice, **fields)


def shown_of(ask: Ask) -> list[str]:
    prompt = ask.call.prompts[0].chat
    assert prompt is not None
    return [tool["function"]["name"] for tool in json.loads(prompt.tools_json)]


def grammar_of(ask: Ask) -> Grammar:
    assert ask.call.grammar is not None
    return ask.call.grammar


def test_allowed_tools_bars_the_others_and_the_prompt_still_shows_them() -> None:
    ask = allowed("auto", "now")
    assert ask.shape.names == ("now",)
    assert [row["begin"] for row in json.loads(grammar_of(ask).text)] == [
        '<tool_call>\n{"name": "now", "arguments": '
    ]
    assert shown_of(ask) == ["add", "now"]
    forced = allowed("required", "now", parallel_tool_calls=False)
    schema = json.loads(grammar_of(forced).text)
    assert [item["properties"]["name"]["const"] for item in schema["items"]["anyOf"]] == ["now"]
    assert schema["maxItems"] == 1 and forced.shape.tool_parser == "array"
    assert shown_of(forced) == ["add", "now"]
    assert allowed("auto", "now", "now") == ask, "a name that is given twice is one tool"


def test_where_the_others_cannot_be_barred_the_prompt_does_not_show_them() -> None:
    ask = allowed("auto", "now", form="pythonic")
    assert ask.call.grammar is None
    assert shown_of(ask) == ["now"] and ask.shape.names == ("now",)


def test_all_tools_allowed_is_the_choice_of_the_model() -> None:
    loose = [{"type": "function", "function": {"name": "f"}}]
    entry = {"type": "function", "function": {"name": "f"}}
    choice = {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [entry]}}
    assert chat("hermes", tools=loose, tool_choice=choice) == chat("hermes", tools=loose)
