"""This file reads Mistral's formats, the older and the newer.

    [TOOL_CALLS][{"name": "f", "arguments": {"a": 1}}, …]
    [TOOL_CALLS]f[ARGS]{"a": 1}[TOOL_CALLS]g{"b": 2}

The markers are special tokens. Its templates take ids of nine letters and digits only.
"""

from __future__ import annotations

from collections.abc import Sequence

from actors.gateway.tools.base import TOOL_PARSERS, Machine, Signature, Tag, Tags, ToolFormat
from actors.gateway.tools.scan import ValueScan
from actors.gateway.tools.schemas import array_schema

BEGIN, ARGS, ID = "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"
NAME_LEN_MAX = 256


class Mistral(Machine):
    def __init__(self, names: Sequence[str]) -> None:
        super().__init__(names)
        self.state = "text"  # text | marked | array | name | arguments
        self.value = ValueScan()
        self.raw = ""

    def run(self, is_end: bool) -> None:
        while self.buffer or is_end:
            if self.is_in_object:
                if not self.run_object(is_end):
                    return
            elif self.state == "text":
                if self.say_until((BEGIN,), is_end) is None:
                    return
                self.state, self.raw = "marked", BEGIN
            elif self.state == "arguments":
                used = self.value.feed(self.buffer)
                self.arguments(self.buffer[:used])
                self.buffer = self.buffer[used:]
                if not (self.value.is_done or self.value.is_broken):
                    return
                self.state = "text"
            elif not self.step(is_end):
                return

    def step(self, is_end: bool) -> bool:
        """What stands after the marker: an array, or a name."""
        if self.state == "marked":
            if not self.skip_blanks():
                return self.give_up(is_end)
            self.state = "array" if self.buffer[0] == "[" else "name"
            if self.state == "array":
                self.raw += "["
                self.buffer = self.buffer[1:]
            return True
        if self.state == "array":
            if not self.skip_blanks():
                if self.is_after_call and is_end:
                    return False
                return self.give_up(is_end)
            if self.buffer[0] == "{":
                self.open_object(self.raw)
                self.raw = ""
            elif self.buffer[0] == "," and self.is_after_call:
                self.buffer = self.buffer[1:]
            elif self.buffer[0] == "]" and self.is_after_call:
                self.buffer = self.buffer[1:]
                self.state = "text"
            else:
                return self.give_up(True)
            return True
        return self.step_name(is_end)

    def step_name(self, is_end: bool) -> bool:
        """`f[CALL_ID]…[ARGS]{` or `f{`."""
        brace = self.buffer.find("{")
        if brace < 0:
            if len(self.buffer) > NAME_LEN_MAX:
                return self.give_up(True)
            return self.give_up(is_end)
        head = self.buffer[:brace]
        name = head.partition(ARGS)[0].partition(ID)[0].strip()
        if not name or len(head) > NAME_LEN_MAX or any(c.isspace() for c in name):
            return self.give_up(True)
        self.buffer = self.buffer[brace:]
        self.start(name)
        self.state, self.value = "arguments", ValueScan()
        return True

    def give_up(self, is_sure: bool) -> bool:
        """It is no call; or, when that is not sure, more text is needed."""
        if not is_sure:
            return False
        raw, self.raw = self.raw, ""
        self.state = "text"
        if raw and not self.is_after_call:
            self.say(raw)
        return True


def tags(tools: Sequence[Signature]) -> Tags:
    """Both forms; the tokenizers of the older one write a blank behind the marker."""
    array = array_schema(tools)
    older = [Tag(BEGIN, BEGIN + blank, array) for blank in ("", " ")]
    return Tags([*older, *(Tag(BEGIN, f"{BEGIN}{tool.name}{ARGS}", tool.schema) for tool in tools)])


TOOL_PARSERS.register("mistral")(ToolFormat(Mistral, shows_special=True, short_ids=True, tags=tags))
