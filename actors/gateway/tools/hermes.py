"""This file reads the format of Hermes, Qwen 2.5 and 3, and many others.

    <tool_call>
    {"name": "f", "arguments": {"a": 1}}
    </tool_call>

It does not know the tools: a call of an unknown one is a call, so that its caller can say so.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

from actors.gateway.tools.base import TOOL_PARSERS, Machine, Signature, Tag, Tags, ToolFormat

BEGIN, END = "<tool_call>", "</tool_call>"


class Hermes(Machine):
    raw = ""  # BEGIN and blanks, when they have been read and the object has not begun

    def run(self, is_end: bool) -> None:
        while self.buffer or is_end:
            if self.is_in_object:
                if not self.run_object(is_end):
                    return
            elif self.raw:
                text = self.buffer.lstrip()
                self.raw += self.buffer[: len(self.buffer) - len(text)]
                self.buffer = text
                if not text and not is_end:
                    return
                raw, self.raw = self.raw, ""
                if text.startswith("{"):
                    self.open_object(raw)
                else:
                    self.say(raw)
            else:
                marker = self.say_until((BEGIN, END), is_end)
                if marker is None:
                    return
                if marker == BEGIN:
                    self.raw = BEGIN
                elif not self.is_after_call:
                    self.say(END)


def tags(tools: Sequence[Signature]) -> Tags:
    return Tags(
        [
            Tag(
                BEGIN,
                f'{BEGIN}\n{{"name": {json.dumps(tool.name)}, "arguments": ',
                tool.schema,
                f"}}\n{END}",
            )
            for tool in tools
        ]
    )


TOOL_PARSERS.register("hermes", "qwen", "qwen25")(ToolFormat(Hermes, tags=tags))
