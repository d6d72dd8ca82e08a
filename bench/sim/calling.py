"""This file is what chats of a simulated world that call tools have got, and what they must get.

It does not know connections or faults. What the calls are is read from the whole text of an answer,
once, and held against its JSON where that is complete; where the model chooses, against the tools
that strict calls fit, and against what it is known to write. Laws that an answer is held to, in
whatever pieces and visits it comes: calls come in order, each with one id and one name; arguments
are a prefix of the reference; an end has all of them, and the reason that a caller acts upon.
"""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal, NamedTuple

import msgspec

from actors.gateway.reading import Reader
from actors.gateway.shape import JSON, NAMED, Shape
from actors.gateway.tools.base import Arguments, Start, Text
from bench.sim.answers import Answer
from bench.sim.habit import ARGUMENTS, FORMS
from bench.sim.oracle import Right
from bench.sim.scenario import CALLED, CHOICE_WAYS, TOOLS, Ask
from bench.sim.text import END
from messages.types import FinishReason


class Look(msgspec.Struct, forbid_unknown_fields=True):
    """What a strict call of the first tool has."""

    at: Literal["the house", "the letter"]
    count: int | msgspec.UnsetType = msgspec.field(name="for", default=msgspec.UNSET)


class Book(msgspec.Struct, forbid_unknown_fields=True):
    """And of the second."""

    days: Annotated[list[int], msgspec.Meta(min_length=2)]
    is_small: bool


KINDS: dict[str, type[msgspec.Struct]] = {"look": Look, CALLED: Book}


class Said(NamedTuple):
    """What the text of one choice comes to."""

    content: str
    calls: list[tuple[str, str]]  # name, and arguments as they were written
    finish: str


def said_in(ask: Ask, right: Right) -> Said:
    reader = Reader(shape_of(ask), "", 0)
    content = ""
    calls: list[tuple[str, str]] = []
    for event in [*reader.feed(right.text), *reader.flush()]:
        match event:
            case Text():
                content += event.text
            case Start():
                calls.append((event.name, ""))
            case Arguments():
                name, before = calls[event.call]
                calls[event.call] = (name, before + event.text)
    said = Said(content, calls, reader.finish_reason(right.finish))
    if ask.tools in CHOICE_WAYS:
        assert_chosen(ask, right, said)
    elif right.matched == END:
        assert_complete(ask.tools, right.text, said)
    return said


def shape_of(ask: Ask) -> Shape:
    """How its answer is to be read."""
    names = tuple(tool["function"]["name"] for tool in TOOLS)
    if ask.tools in ("named", "allowed"):
        names = (CALLED,)
    parser = NAMED if ask.tools == "named" else JSON
    if ask.tools in CHOICE_WAYS:
        parser = ask.form
    return Shape(tool_parser=parser, names=names, single=ask.tools.endswith("single"))


def assert_complete(tools: str, text: str, said: Said) -> None:
    """A text that came to its own end, against what any reader of JSON makes of it."""
    value = json.loads(text)
    expected = [(CALLED, value)] if tools == "named" else []
    if tools != "named":
        expected = [(call["name"], call["arguments"]) for call in value]
    found = [(name, json.loads(arguments)) for name, arguments in said.calls]
    assert found == expected, f"{found} in {text!r}"
    assert not said.content, f"{said.content!r} beside the calls of {text!r}"


def assert_chosen(ask: Ask, right: Right, said: Said) -> None:
    """Text or calls, as the model has it."""
    form, text, calls = FORMS[ask.form], right.text, said.calls
    is_over = right.matched == END  # else its last call may be cut off
    is_strict = ask.tools != "loose" and form.is_held
    if ask.tools.endswith("single"):
        assert len(calls) <= 1, f"{calls} where one is allowed"
    if is_strict:
        for name, arguments in calls if is_over else calls[:-1]:
            assert_fits(ask, name, arguments)
    for script, (name, words) in zip(form.scripts, ARGUMENTS, strict=True):
        if text.startswith(script) and name in shape_of(ask).names:
            assert calls, f"no call in {text!r}"
            found = (calls[0][0], json.loads(calls[0][1]))
            assert found == (name, json.loads(words)), f"{found} in {text!r}"
    if form.trigger not in text:
        assert not calls and said.content == text, f"{calls} and {said.content!r} of {text!r}"
    ends = "tool_calls" if calls and right.finish is FinishReason.STOP else right.finish.value
    assert said.finish == ends, f"{said.finish}, not {ends}, of {text!r}"


def assert_fits(ask: Ask, name: str, arguments: str) -> None:
    assert name in shape_of(ask).names, f"{name} was not to be called"
    try:
        msgspec.json.decode(arguments, type=KINDS[name])
    except msgspec.MsgspecError as error:
        raise AssertionError(f"{name} was called with {arguments!r}: {error}") from error


class ChatAnswer(Answer):
    """What one client has got of a chat, over all its connections."""

    def __init__(self, client: Any) -> None:
        super().__init__(client)
        self.said = [said_in(self.ask, right) for right in self.rights]
        self.calls: list[list[tuple[str, str]]] = [[] for _ in self.rights]
        self.ids: list[list[str]] = [[] for _ in self.rights]

    @property
    def is_within_call(self) -> bool:  # type: ignore[override]
        return self.ask.tools in CHOICE_WAYS and any(
            calls and calls[-1] != said.calls[len(calls) - 1]
            for calls, said in zip(self.calls, self.said, strict=True)
        )

    def take_choice(self, index: int, choice: dict[str, Any]) -> None:
        delta = choice.get("delta") or choice.get("message") or {}
        self.texts[index] += delta.get("content") or ""
        for nth, call in enumerate(delta.get("tool_calls") or ()):
            self.take_call(index, call.get("index", nth), call)

    def take_call(self, index: int, nth: int, call: dict[str, Any]) -> None:
        calls, ids = self.calls[index], self.ids[index]
        function = call["function"]
        if nth == len(calls):
            calls.append((function["name"], ""))
            ids.append(call["id"])
            assert len(set(ids)) == len(ids), f"two calls have one id: {ids}"
        else:
            assert nth == len(calls) - 1, f"call {nth} after {len(calls)} calls"
            assert not function.get("name"), f"call {nth} has two names"
        name, before = calls[nth]
        calls[nth] = (name, before + function.get("arguments", ""))

    def check(self) -> None:
        for text, calls, said in zip(self.texts, self.calls, self.said, strict=True):
            assert said.content.startswith(text), f"{text!r} is not {said.content!r}"
            assert len(calls) <= len(said.calls), f"{calls}, not {said.calls}"
            for got, right in zip(calls, said.calls, strict=False):
                assert got[0] == right[0] and right[1].startswith(got[1]), f"{got}, not {right}"

    def assert_ends(self) -> None:
        assert self.texts == [said.content for said in self.said], self.texts
        assert self.calls == [said.calls for said in self.said], (self.calls, self.said)
        assert self.finishes == [said.finish for said in self.said], self.finishes

    def told(self, choice: dict[str, Any]) -> list[float]:
        return [entry["logprob"] for entry in choice["logprobs"]["content"]]


def answer_of(client: Any) -> Answer:
    ask: Ask = client.ask
    return ChatAnswer(client) if ask.tools else Answer(client)
