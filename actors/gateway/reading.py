"""This file reads one choice's text as its `Shape` says: reasoning, answer, calls.

It does not know chunks or bodies; `replies.py` writes what comes out here.
Laws: joined events are the same however the text is cut, so that streamed and plain answers agree;
ids are a function of the answer's id, the choice and the call, so that nothing is drawn twice.
"""

from __future__ import annotations

import hashlib

from actors.gateway.reasoning.base import REASONING_PARSERS, Reasoning
from actors.gateway.shape import JSON, NAMED, Shape
from actors.gateway.tools.base import TOOL_PARSERS, Arguments, Start, Text, ToolParser
from actors.gateway.tools.plain import Forced, Named
from messages.types import FinishReason

Event = Reasoning | Text | Start | Arguments
LETTERS = "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"


class Reader:
    """Reads one choice of the answer `answer_id`."""

    def __init__(self, shape: Shape, answer_id: str, choice: int) -> None:
        self.shape = shape
        self.source = f"{answer_id}/{choice}"
        self.call_count = 0
        self.short_ids = False
        self._reasoning = (
            REASONING_PARSERS.get(shape.reasoning_parser).make() if shape.reasoning_parser else None
        )
        self._tools: ToolParser | None = None
        if shape.tool_parser == NAMED:
            self._tools = Named(shape.names)
        elif shape.tool_parser == JSON:
            self._tools = Forced(shape.names)
        elif shape.tool_parser:
            form = TOOL_PARSERS.get(shape.tool_parser)
            self._tools = form.make(shape.names)
            self.short_ids = form.short_ids

    def feed(self, text: str) -> list[Event]:
        if not text:
            return []
        if self._reasoning is None:
            return self._read([Text(text)])
        return self._read(self._reasoning.feed(text))

    def flush(self) -> list[Event]:
        """At the end of the text, once."""
        events = [] if self._reasoning is None else self._read(self._reasoning.flush())
        if self._tools is not None:
            events += self._keep(self._tools.flush())
        return joined(events)

    def finish_reason(self, finish: FinishReason) -> str:
        """As OpenAI has it: a named call ends like a text, any other by `tool_calls`."""
        if finish is FinishReason.STOP and self.call_count and self.shape.tool_parser != NAMED:
            return "tool_calls"
        return finish.value

    def call_id(self, call: int) -> str:
        digest = hashlib.blake2b(f"{self.source}/{call}".encode(), digest_size=12)
        if not self.short_ids:
            return f"call_{digest.hexdigest()}"
        number = int.from_bytes(digest.digest())
        return "".join(LETTERS[number // 62**place % 62] for place in range(9))

    def _read(self, events: list[Reasoning | Text]) -> list[Event]:
        read: list[Event] = []
        for event in events:
            if isinstance(event, Reasoning):
                if self.shape.shows_reasoning:
                    read.append(event)
            elif self._tools is None:
                read.append(event)
            else:
                read += self._keep(self._tools.feed(event.text))
        return joined(read)

    def _keep(self, events: list[Text | Start | Arguments]) -> list[Event]:
        kept: list[Event] = []
        for event in events:
            if not isinstance(event, Text) and self.shape.single and event.call:
                continue
            if isinstance(event, Start):
                self.call_count += 1
            kept.append(event)
        return kept


def joined(events: list[Event]) -> list[Event]:
    """Neighbours of one kind as one, so that a step brings few chunks."""
    result: list[Event] = []
    for event in events:
        last = result[-1] if result else None
        if isinstance(event, Text) and isinstance(last, Text):
            result[-1] = Text(last.text + event.text)
        elif isinstance(event, Reasoning) and isinstance(last, Reasoning):
            result[-1] = Reasoning(last.text + event.text)
        elif (
            isinstance(event, Arguments) and isinstance(last, Arguments) and last.call == event.call
        ):
            result[-1] = Arguments(last.call, last.text + event.text)
        else:
            result.append(event)
    return result
