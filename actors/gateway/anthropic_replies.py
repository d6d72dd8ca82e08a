"""This file writes answers of the Anthropic dialect: rows of text to events, or to one message.

It does not know HTTP, connections or time.
Laws, for every stream: `message_start`, blocks one after the other, each begun, filled and ended,
`message_delta` with the reason and the usage, `message_stop`; or, at any place, one `error`, and
nothing after it. The joined blocks are those of the plain answer.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from actors.gateway.call import Checked, Row
from actors.gateway.dialect import Head
from actors.gateway.errors import Refused, anthropic_problem, unavailable
from actors.gateway.openai import Ask
from actors.gateway.reading import Event, Reader
from actors.gateway.reasoning.base import Reasoning
from actors.gateway.sse import encode
from actors.gateway.tools.base import Arguments, Start, Text
from messages.anthropic import (
    CountReply,
    Reply,
    TextBlock,
    ThinkingBlock,
    ToolUseBlock,
    Usage,
)
from messages.gateway import Delta
from messages.types import FinishReason, Problem
from messages.types import Usage as RequestUsage

Block = TextBlock | ThinkingBlock | ToolUseBlock
ABORTED = unavailable("The request was aborted by the operator of the server.", code="aborted")


def usage_of(usage: RequestUsage | None) -> Usage:
    usage = usage or RequestUsage()
    return Usage(
        input_tokens=usage.prompt_tokens - usage.cached_tokens,
        output_tokens=usage.completion_tokens,
        cache_read_input_tokens=usage.cached_tokens,
    )


def stop_of(delta: Delta, reader: Reader) -> tuple[str, str | None]:
    """Why the answer ended, and the stop sequence that ended it."""
    if delta.finish is FinishReason.LENGTH:
        return "max_tokens", None
    if isinstance(delta.matched, str):
        return "stop_sequence", delta.matched
    return ("tool_use" if reader.call_count else "end_turn"), None


class MessageWriter:
    """The one body of an answer that is not streamed."""

    def __init__(self, ask: Ask, head: Head, checked: Sequence[Checked]) -> None:
        self.head = head
        self.reader = Reader(ask.shape, head.id, 0)
        self.texts: list[str] = []
        self.last: Delta | None = None

    def add(self, rows: Iterable[Row]) -> None:
        for _, delta in rows:
            self.texts.append(delta.text)
            if delta.finish is not None:
                self.last = delta

    def body(self, checked: Sequence[Checked]) -> bytes:
        last = self.last
        assert last is not None, "an answer without an end"
        if last.finish is FinishReason.ABORT:
            raise Refused(ABORTED)
        events = self.reader.feed("".join(self.texts)) + self.reader.flush()
        reason, sequence = stop_of(last, self.reader)
        reply = Reply(
            id=self.head.id,
            model=self.head.model,
            content=blocks_of(events, self.reader),
            stop_reason=reason,
            stop_sequence=sequence,
            usage=usage_of(last.usage),
        )
        return encode(reply)


def blocks_of(
    events: list[Event], reader: Reader
) -> list[TextBlock | ThinkingBlock | ToolUseBlock]:
    blocks: list[TextBlock | ThinkingBlock | ToolUseBlock] = []
    arguments: dict[int, str] = {}
    places: dict[int, int] = {}
    for event in events:
        if isinstance(event, Text):
            last = blocks[-1] if blocks else None
            if isinstance(last, TextBlock):
                blocks[-1] = TextBlock(text=last.text + event.text)
            else:
                blocks.append(TextBlock(text=event.text))
        elif isinstance(event, Reasoning):
            last = blocks[-1] if blocks else None
            if isinstance(last, ThinkingBlock):
                blocks[-1] = ThinkingBlock(thinking=last.thinking + event.text)
            else:
                blocks.append(ThinkingBlock(thinking=event.text))
        elif isinstance(event, Start):
            places[event.call] = len(blocks)
            blocks.append(ToolUseBlock(id=reader.call_id(event.call), name=event.name, input={}))
        else:
            arguments[event.call] = arguments.get(event.call, "") + event.text
    for call, text in arguments.items():
        block = blocks[places[call]]
        assert isinstance(block, ToolUseBlock)
        blocks[places[call]] = msgspec.structs.replace(block, input=input_of(text))
    return blocks


def input_of(arguments: str) -> Any:
    """What a call's arguments say; those that were cut off, or are no object, say nothing."""
    try:
        value = msgspec.json.decode(arguments)
    except (msgspec.DecodeError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def event_frame(kind: str, fields: dict[str, Any]) -> bytes:
    return b"event: " + kind.encode() + b"\ndata: " + encode({"type": kind, **fields}) + b"\n\n"


class MessageStream:
    """Events of /v1/messages."""

    def __init__(self, ask: Ask, head: Head, checked: Sequence[Checked]) -> None:
        self.head = head
        self.reader = Reader(ask.shape, head.id, 0)
        self.is_begun = False
        self.is_broken = False
        self.block_count = 0
        self.open_kind: str | int | None = None  # of the open block: text, thinking, or its call

    def write(self, rows: Iterable[Row]) -> bytes:
        frames: list[bytes] = []
        for _, delta in rows:
            if not self.is_begun:
                self._begin(delta, frames)
            events = self.reader.feed(delta.text)
            if delta.finish is not None:
                events += self.reader.flush()
            for event in events:
                self._write_event(event, frames)
            if delta.finish is FinishReason.ABORT:
                self.is_broken = True
                frames.append(self.fail(ABORTED))
            elif delta.finish is not None:
                self._finish(delta, frames)
        return b"".join(frames)

    def end(self, checked: Sequence[Checked]) -> bytes:
        return b"" if self.is_broken else event_frame("message_stop", {})

    def fail(self, problem: Problem) -> bytes:
        return b"event: error\ndata: " + anthropic_problem(problem) + b"\n\n"

    def _begin(self, delta: Delta, frames: list[bytes]) -> None:
        self.is_begun = True
        usage = usage_of(delta.usage)
        message = Reply(
            id=self.head.id,
            model=self.head.model,
            content=[],
            stop_reason=None,
            stop_sequence=None,
            usage=msgspec.structs.replace(usage, output_tokens=0),
        )
        frames.append(event_frame("message_start", {"message": message}))

    def _write_event(self, event: Event, frames: list[bytes]) -> None:
        if isinstance(event, Start):
            block = ToolUseBlock(id=self.reader.call_id(event.call), name=event.name, input={})
            self._open(event.call, block, frames)
        elif isinstance(event, Arguments):
            self._fill({"type": "input_json_delta", "partial_json": event.text}, frames)
        elif isinstance(event, Reasoning):
            self._open("thinking", ThinkingBlock(thinking=""), frames)
            self._fill({"type": "thinking_delta", "thinking": event.text}, frames)
        else:
            self._open("text", TextBlock(text=""), frames)
            self._fill({"type": "text_delta", "text": event.text}, frames)

    def _open(
        self,
        kind: str | int,
        block: Block,
        frames: list[bytes],
    ) -> None:
        """Begins a block, unless the open one is it."""
        if self.open_kind == kind:
            return
        self._close(frames)
        self.open_kind = kind
        fields = {"index": self.block_count, "content_block": block}
        frames.append(event_frame("content_block_start", fields))
        if not self.block_count:  # there the public API sends one
            frames.append(event_frame("ping", {}))
        self.block_count += 1

    def _fill(self, delta: dict[str, Any], frames: list[bytes]) -> None:
        fields = {"index": self.block_count - 1, "delta": delta}
        frames.append(event_frame("content_block_delta", fields))

    def _close(self, frames: list[bytes]) -> None:
        if self.open_kind is None:
            return
        self.open_kind = None
        frames.append(event_frame("content_block_stop", {"index": self.block_count - 1}))

    def _finish(self, delta: Delta, frames: list[bytes]) -> None:
        self._close(frames)
        reason, sequence = stop_of(delta, self.reader)
        fields = {
            "delta": {"stop_reason": reason, "stop_sequence": sequence},
            "usage": usage_of(delta.usage),
        }
        frames.append(event_frame("message_delta", fields))


class CountWriter:
    """How many tokens a prompt has."""

    def __init__(self, ask: Ask, head: Head, checked: Sequence[Checked]) -> None:
        pass

    def add(self, rows: Iterable[Row]) -> None:
        raise AssertionError("a count has no rows")

    def body(self, checked: Sequence[Checked]) -> bytes:
        return encode(CountReply(input_tokens=checked[0].token_count))
