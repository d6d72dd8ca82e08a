"""This file reads reasoning between `<think>` and `</think>`, at the beginning of the answer.

Two kinds: `think` (also `qwen3`) reasons only if it writes `<think>` itself; `deepseek-r1` (also
`qwen3-thinking`) begins inside, since its template writes `<think>` into the prompt.
"""

from __future__ import annotations

from actors.gateway.reasoning.base import REASONING_PARSERS, Event, Reasoning, ReasoningFormat
from actors.gateway.tools.base import Text, split

BEGIN, END = "<think>", "</think>"


class Think:
    """`is_open`: the answer begins inside."""

    def __init__(self, is_open: bool = False) -> None:
        self.is_open = is_open
        self.state = "begin"  # begin | inside | after | answer
        self.buffer = ""
        self._blank = ""  # at the end of the reasoning so far: dropped if it ends here
        self._has_begun = False

    def feed(self, text: str) -> list[Event]:
        return self._run(text, False)

    def flush(self) -> list[Event]:
        return self._run("", True)

    @property
    def is_thinking(self) -> bool | None:
        if self.state == "begin":
            return True if self.is_open else None
        return self.state == "inside"

    def _run(self, text: str, is_end: bool) -> list[Event]:
        self.buffer += text
        events: list[Event] = []
        if self.state == "begin":
            self._begin(is_end)
        if self.state == "inside":
            self._think(events, is_end)
        if self.state == "after":
            self.buffer = self.buffer.lstrip()
            if self.buffer:
                self.state = "answer"
        if self.state == "answer" and self.buffer:
            events.append(Text(self.buffer))
            self.buffer = ""
        return events

    def _begin(self, is_end: bool) -> None:
        text = self.buffer.lstrip()
        if len(text) < len(BEGIN) and BEGIN.startswith(text) and not is_end:
            return
        if text.startswith(BEGIN):
            self.buffer = text[len(BEGIN) :]
            self.state = "inside"
        else:
            self.state = "inside" if self.is_open else "answer"

    def _think(self, events: list[Event], is_end: bool) -> None:
        text, marker, self.buffer = split(self.buffer, (END,), is_end)
        if not self._has_begun:
            text = text.lstrip()
        text = self._blank + text
        body = text.rstrip()
        self._blank = text[len(body) :]
        if body:
            self._has_begun = True
            events.append(Reasoning(body))
        if marker is not None:
            self.state = "after"
        elif is_end and self._blank:
            events.append(Reasoning(self._blank))
            self._blank = ""


REASONING_PARSERS.register("think", "qwen3")(ReasoningFormat(Think, begin=BEGIN, end=END))
REASONING_PARSERS.register("deepseek-r1", "qwen3-thinking")(
    ReasoningFormat(lambda: Think(is_open=True), end=END, is_open=True)
)
