"""This file reads the formats of DeepSeek V3, R1 (first below) and V3.1.

<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f
```json
{"a": 1}
```<｜tool▁call▁end｜><｜tool▁calls▁end｜>

    <｜tool▁call▁begin｜>f<｜tool▁sep｜>{"a": 1}<｜tool▁call▁end｜>  (in the same outer pair)
"""

from __future__ import annotations

from collections.abc import Sequence

from actors.gateway.tools.base import TOOL_PARSERS, Machine, Signature, Tag, Tags, ToolFormat
from actors.gateway.tools.scan import ValueScan

CALLS, CALL, SEP = "<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>"
CALL_END, CALLS_END = "<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>"


class DeepSeek(Machine):
    def __init__(self, names: Sequence[str]) -> None:
        super().__init__(names)
        self.state = "text"  # text | head | name | open | arguments
        self.raw = ""  # of a call whose name is not known yet
        self.name = ""
        self.value = ValueScan()

    def run(self, is_end: bool) -> None:
        while self.buffer or is_end:
            if not getattr(self, f"run_{self.state}")(is_end):
                return

    def run_text(self, is_end: bool) -> bool:
        marker = self.say_until((CALLS, CALL, CALL_END, CALLS_END), is_end)
        if marker == CALL:
            self.state, self.raw = "head", CALL
        elif marker in (CALL_END, CALLS_END) and not self.is_after_call:
            self.say(marker)
        return marker is not None

    def run_head(self, is_end: bool) -> bool:
        """Up to the separator: the word `function`, or the name itself."""
        text, marker = self.read_until((SEP, CALL_END), is_end)
        self.raw += text
        self.name += text
        if marker is None:
            return self.give_up(is_end)
        self.raw += marker
        if marker == CALL_END:
            return self.give_up(True)
        self.name = self.name.strip()
        if self.name in ("function", ""):
            self.name, self.state = "", "name"
        else:
            self.begin()
        return True

    def run_name(self, is_end: bool) -> bool:
        """The name's own line."""
        text, marker = self.read_until(("\n", CALL_END), is_end)
        self.raw += text
        self.name += text
        if marker is None:
            return self.give_up(is_end)
        self.raw += marker
        if marker == CALL_END or not self.name.strip():
            return self.give_up(True)
        self.name = self.name.strip()
        self.begin()
        return True

    def run_open(self, is_end: bool) -> bool:
        """Blanks and the fence before the arguments."""
        place = self.buffer.find("{")
        end = self.buffer.find("<")
        if place >= 0 and (end < 0 or place < end):
            self.buffer = self.buffer[place:]
            self.state, self.value = "arguments", ValueScan()
            return True
        if end >= 0:
            self.buffer = self.buffer[end:]
            self.state = "tail"
            self.arguments("{}")
            return True
        self.buffer = ""
        return False

    def run_arguments(self, is_end: bool) -> bool:
        used = self.value.feed(self.buffer)
        self.arguments(self.buffer[:used])
        self.buffer = self.buffer[used:]
        if self.value.is_done or self.value.is_broken:
            self.state = "tail"
        return bool(self.buffer)

    def run_tail(self, is_end: bool) -> bool:
        """What is left of the call, the fence's end."""
        _, marker = self.read_until((CALL_END,), is_end)
        if marker is not None:
            self.state = "text"
        return marker is not None

    def begin(self) -> None:
        self.start(self.name)
        self.name = self.raw = ""
        self.state = "open"

    def give_up(self, is_sure: bool) -> bool:
        if is_sure:
            self.state = "text"
            self.say(self.raw)
            self.name = self.raw = ""
        return is_sure


def tags(tools: Sequence[Signature]) -> Tags:
    """Both forms. The markers around all calls are free, like text."""
    first = [
        Tag(CALL, f"{CALL}function{SEP}{tool.name}\n```json\n", tool.schema, f"\n```{CALL_END}")
        for tool in tools
    ]
    return Tags(
        [*first, *(Tag(CALL, f"{CALL}{tool.name}{SEP}", tool.schema, CALL_END) for tool in tools)]
    )


TOOL_PARSERS.register("deepseek", "deepseek_v3", "deepseek_v31")(
    ToolFormat(DeepSeek, shows_special=True, tags=tags)
)
