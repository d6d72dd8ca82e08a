"""This file reads calls that are bare JSON: an array of them, or objects one after another.

    [{"name": "f", "arguments": {"a": 1}}, {"name": "g", "parameters": {}}]

`json` takes this for calls only where the answer begins so and names a tool of the request.
`Forced` and `Named` are for answers whose whole text is what a grammar has forced: such an array,
or one call's arguments. Nothing of that is text for the reader, wherever it is cut off.
"""

from __future__ import annotations

from collections.abc import Sequence

from actors.gateway.tools.base import (
    TOOL_PARSERS,
    Arguments,
    Event,
    Machine,
    Signature,
    Start,
    Tag,
    Tags,
    ToolFormat,
)
from actors.gateway.tools.schemas import array_schema, call_schema

PYTHON_TAG = "<|python_tag|>"


class JsonCalls(Machine):
    """`separators` may stand between objects; `prefix` before the first."""

    separators = ","
    prefix = ""
    is_array = True

    def __init__(self, names: Sequence[str]) -> None:
        super().__init__(names)
        self.state = "begin"
        self.raw = ""  # read, and not yet known to be markers or text
        self.in_array = False

    def run(self, is_end: bool) -> None:
        while self.buffer or is_end:
            if self.is_in_object:
                if not self.run_object(is_end, is_known=True):
                    return
                self.state = "next" if self.is_after_call else "text"
                self.raw = ""
            elif self.state == "text":
                self.say(self.buffer)
                self.buffer = ""
                return
            elif not self.step(is_end):
                return

    def step(self, is_end: bool) -> bool:
        """One character or marker between objects; False: more is needed, or nothing is left."""
        buffer = self.buffer
        character = buffer[:1]
        if character and character.isspace():
            blanks = buffer[: len(buffer) - len(buffer.lstrip())]
            self.raw += blanks
            self.buffer = buffer[len(blanks) :]
            return True
        if (
            self.state == "begin"
            and self.prefix
            and self.prefix.startswith(buffer[: len(self.prefix)])
        ):
            if len(buffer) < len(self.prefix) and not is_end:
                return False
            if buffer.startswith(self.prefix):
                self.raw += self.prefix
                self.buffer = buffer[len(self.prefix) :]
                self.state = "prefixed"
                return True
        if character == "[" and self.is_array and self.state == "begin":
            self.in_array = True
            self.state = "element"
            self.raw += character
            self.buffer = buffer[1:]
            return True
        if character == "{":
            self.open_object(self.raw)
            return True
        if (
            self.state == "next"
            and character
            and (character in self.separators or (self.in_array and character == "]"))
        ):
            self.raw += character
            self.buffer = buffer[1:]
            return True
        if not character and self.is_after_call:
            self.raw = ""
            return False
        self.state = "text"
        if self.raw:
            self.say(self.raw)
            self.raw = ""
        return bool(self.buffer)


class Llama(JsonCalls):
    """Llama 3: one object, or several with `;` between; sometimes behind its tag."""

    separators = ";,"
    prefix = PYTHON_TAG
    is_array = False


class Forced(JsonCalls):
    """Everything is an array of calls: what is no call is the beginning of one, or its markers."""

    def say(self, text: str) -> None:
        pass


class Named:
    """Everything is the arguments of the tool `name`."""

    def __init__(self, names: Sequence[str]) -> None:
        (self.name,) = names
        self.has_started = False

    def feed(self, text: str) -> list[Event]:
        if not self.has_started:
            text = text.lstrip()
            if not text:
                return []
            self.has_started = True
            return [Start(0, self.name), Arguments(0, text)]
        return [Arguments(0, text)] if text else []

    def flush(self) -> list[Event]:
        return []


def json_tags(tools: Sequence[Signature]) -> Tags:
    """An array of calls, or one call."""
    keys = ("arguments", "parameters")
    array, one = array_schema(tools, keys), call_schema(tools, keys)
    return Tags([Tag("[", "", array), Tag("{", "", one)], is_first=True)


def llama_tags(tools: Sequence[Signature]) -> Tags:
    return Tags(
        [Tag("{", "", call_schema(tools, ("parameters",)))],
        is_first=True,
        prefixes=("", PYTHON_TAG),
        between=(";", "; ", "\n"),
    )


TOOL_PARSERS.register("json")(ToolFormat(JsonCalls, tags=json_tags))
TOOL_PARSERS.register("llama3", "llama3_json")(ToolFormat(Llama, tags=llama_tags))
