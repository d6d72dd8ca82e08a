"""This file writes answers of the Responses API: rows of text to events, and to one reply.

It does not know HTTP or the store; time is an argument. One code path makes both: a plain answer is
the reply that its stream would have ended with.
Laws, for every stream: events are numbered from 0 without a gap; every item is added before, and
done after, all that is of it; items follow one another; the last event holds the whole reply.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from actors.gateway.call import Row
from actors.gateway.dialect import Head
from actors.gateway.logprobs import chat_logprobs
from actors.gateway.openai import Ask
from actors.gateway.reading import Event, Reader
from actors.gateway.reasoning.base import Reasoning
from actors.gateway.sse import encode
from actors.gateway.thoughts import Thoughts
from actors.gateway.tools.base import Arguments, Start, Text
from messages.gateway import Delta, TokenLogprob
from messages.responses import (
    Incomplete,
    InputDetails,
    ItemStatus,
    OutputCall,
    OutputDetails,
    OutputItem,
    OutputMessage,
    OutputReasoning,
    OutputText,
    ReasoningText,
    ResponsesBody,
    ResponsesError,
    ResponsesReply,
    ResponsesUsage,
)
from messages.types import FinishReason, Problem, Usage

# What is written one after another: a message, reasoning, or (by its number) a call.
MESSAGE, REASONING, CALL = "msg", "rs", "fc"  # also how their ids begin


def first_reply(body: ResponsesBody, ask: Ask, head: Head) -> ResponsesReply:
    """The reply before anything of it is made."""
    sampling = ask.call.sampling
    form: dict[str, Any] = {"type": "text"}
    if body.text is not None and body.text.format is not None:
        given = msgspec.structs.asdict(body.text.format)
        form = {name: value for name, value in given.items() if value is not None}
    reasoning = body.reasoning
    return ResponsesReply(
        id=head.id,
        created_at=head.created,
        status="queued" if body.background else "in_progress",
        background=bool(body.background),
        instructions=body.instructions,
        max_output_tokens=body.max_output_tokens,
        metadata=body.metadata or {},
        model=head.model,
        output=[],
        parallel_tool_calls=body.parallel_tool_calls is not False,
        previous_response_id=body.previous_response_id,
        reasoning={"effort": None if reasoning is None else reasoning.effort, "summary": None},
        store=body.store is not False,
        temperature=sampling.temperature,
        text={"format": form},
        tool_choice="auto" if body.tool_choice is None else body.tool_choice,
        tools=body.tools or [],
        top_logprobs=body.top_logprobs or 0,
        top_p=1.0 if body.top_p is None else body.top_p,
        user=body.user,
    )


class Opened:
    """The item that is being written."""

    def __init__(self, kind: str | int, item_id: str) -> None:
        self.kind = kind  # of a call: its number
        self.id = item_id
        self.texts: list[str] = []
        self.logprobs: list[TokenLogprob] = []
        self.name = ""
        self.call_id = ""

    def item(self, status: ItemStatus) -> OutputItem:
        text = "".join(self.texts)
        if self.kind == MESSAGE:
            content = [self.part()] if self.texts or status != "in_progress" else []
            return OutputMessage(id=self.id, status=status, content=content)
        if self.kind == REASONING:
            reasoning = [ReasoningText(text=text)] if self.texts else []
            return OutputReasoning(id=self.id, status=status, content=reasoning)
        return OutputCall(
            id=self.id, status=status, call_id=self.call_id, name=self.name, arguments=text
        )

    def part(self) -> OutputText:
        content = chat_logprobs(self.logprobs).content
        return OutputText(text="".join(self.texts), logprobs=content)


class ResponseWriter:
    def __init__(self, body: ResponsesBody, ask: Ask, head: Head) -> None:
        self.reply = first_reply(body, ask, head)
        self.reader = Reader(ask.shape, head.id, 0)
        self.wants_logprobs = ask.logprobs is not None
        self.pending: list[TokenLogprob] = []  # of text that the reader still holds
        self.number = 0
        self.items: list[OutputItem] = []
        self.opened: Opened | None = None
        parser = ask.shape.thoughts_parser
        self.thoughts = Thoughts(parser) if parser else None
        self.finish: FinishReason | None = None
        self.usage = Usage()

    def begin(self) -> bytes:
        """What is made in the background waits at first; `start` follows then."""
        if self.reply.background:
            names = ["created", "queued"]
        else:
            names = ["created", "in_progress"]
            self.reply = msgspec.structs.replace(self.reply, status="in_progress")
        return b"".join(self._event(f"response.{name}", response=self.reply) for name in names)

    def start(self) -> bytes:
        """In the background: something has come of it."""
        self.reply = msgspec.structs.replace(self.reply, status="in_progress")
        return self._event("response.in_progress", response=self.reply)

    def write(self, rows: Iterable[Row]) -> bytes:
        return b"".join(
            frame for _, delta in rows for frame in (*self._write(delta), *self._finish(delta))
        )

    def end(self, now_s: int) -> bytes:
        """After the last row."""
        is_whole = self.finish is not FinishReason.LENGTH
        usage = self.usage
        self.reply = msgspec.structs.replace(
            self.reply,
            status="completed" if is_whole else "incomplete",
            completed_at=now_s if is_whole else None,
            incomplete_details=None if is_whole else Incomplete(),
            output=self.items,
            usage=ResponsesUsage(
                input_tokens=usage.prompt_tokens,
                input_tokens_details=InputDetails(cached_tokens=usage.cached_tokens),
                output_tokens=usage.completion_tokens,
                output_tokens_details=OutputDetails(
                    reasoning_tokens=0 if self.thoughts is None else self.thoughts.count
                ),
                total_tokens=usage.prompt_tokens + usage.completion_tokens,
            ),
        )
        return self._event(f"response.{self.reply.status}", response=self.reply)

    def fail(self, problem: Problem) -> bytes:
        """Instead of the end."""
        error = ResponsesError(code="server_error", message=problem.message)
        self.reply = msgspec.structs.replace(
            self.reply, status="failed", error=error, output=self.items
        )
        return self._event("response.failed", response=self.reply)

    def cancel(self) -> None:
        """What is there of it is kept."""
        if self.opened is not None:
            self.items.append(self.opened.item("incomplete"))
        self.reply = msgspec.structs.replace(self.reply, status="cancelled", output=self.items)

    def _write(self, delta: Delta) -> list[bytes]:
        frames: list[bytes] = []
        if self.wants_logprobs:
            self.pending += delta.logprobs
        events = self.reader.feed(delta.text)
        if delta.finish is not None:
            events += self.reader.flush()
        if self.thoughts is not None:
            self.thoughts.see(delta)
        for event in events:
            self._take(event, frames)
        return frames

    def _finish(self, delta: Delta) -> list[bytes]:
        if delta.finish is None:
            return []
        frames: list[bytes] = []
        self.finish = delta.finish
        self.usage = delta.usage or Usage()
        if self.opened is None and not self.items:
            self._open(MESSAGE, frames)
        self._close("incomplete" if delta.finish is FinishReason.LENGTH else "completed", frames)
        return frames

    def _take(self, event: Event, frames: list[bytes]) -> None:
        if isinstance(event, Text):
            kind: str | int = MESSAGE
        else:
            kind = REASONING if isinstance(event, Reasoning) else event.call
        if self.opened is None or self.opened.kind != kind:
            self._close("completed", frames)
            name = event.name if isinstance(event, Start) else ""
            self._open(kind, frames, name)
        if isinstance(event, Start):
            return
        opened = self.opened
        assert opened is not None
        opened.texts.append(event.text)
        where: dict[str, Any] = {"item_id": opened.id, "output_index": len(self.items)}
        if isinstance(event, Arguments):
            kind_name = "function_call_arguments.delta"
        elif isinstance(event, Reasoning):
            kind_name, where["content_index"] = "reasoning_text.delta", 0
        else:
            kind_name, where["content_index"] = "output_text.delta", 0
            logprobs, self.pending = self.pending, []
            opened.logprobs += logprobs
            where["logprobs"] = chat_logprobs(logprobs).content
        frames.append(self._event(f"response.{kind_name}", **where, delta=event.text))

    def _open(self, kind: str | int, frames: list[bytes], name: str = "") -> None:
        prefix = CALL if isinstance(kind, int) else kind
        index = len(self.items)
        opened = Opened(kind, f"{prefix}_{self.reply.id.removeprefix('resp_')}_{index}")
        self.opened = opened
        if isinstance(kind, int):
            opened.name, opened.call_id = name, self.reader.call_id(kind)
        item = opened.item("in_progress")
        frames.append(self._event("response.output_item.added", output_index=index, item=item))
        if not isinstance(kind, int):
            part = OutputText(text="") if kind == MESSAGE else ReasoningText(text="")
            frames.append(self._part("added", opened, part))

    def _close(self, status: ItemStatus, frames: list[bytes]) -> None:
        opened, self.opened = self.opened, None
        if opened is None:
            return
        if opened.kind == MESSAGE:
            opened.logprobs += self.pending  # of what ended it: no text shows it
            self.pending = []
        item = opened.item(status)
        where: dict[str, Any] = {"item_id": opened.id, "output_index": len(self.items)}
        text = "".join(opened.texts)
        if isinstance(item, OutputCall):
            done = {"name": item.name, "arguments": text}
            frames.append(self._event("response.function_call_arguments.done", **where, **done))
        elif isinstance(item, OutputReasoning):
            frames.append(
                self._event("response.reasoning_text.done", **where, content_index=0, text=text)
            )
            frames.append(self._part("done", opened, ReasoningText(text=text)))
        else:
            part = opened.part()
            frames.append(
                self._event(
                    "response.output_text.done",
                    **where,
                    content_index=0,
                    text=text,
                    logprobs=part.logprobs,
                )
            )
            frames.append(self._part("done", opened, part))
        frames.append(
            self._event("response.output_item.done", output_index=len(self.items), item=item)
        )
        self.items.append(item)

    def _part(self, what: str, opened: Opened, part: OutputText | ReasoningText) -> bytes:
        return self._event(
            f"response.content_part.{what}",
            item_id=opened.id,
            output_index=len(self.items),
            content_index=0,
            part=part,
        )

    def _event(self, kind: str, **fields: Any) -> bytes:
        event = {"type": kind, "sequence_number": self.number, **fields}
        self.number += 1
        return b"event: " + kind.encode() + b"\ndata: " + encode(event) + b"\n\n"


def output_text(items: Sequence[OutputItem]) -> str:
    """All that was said in an answer, as the official client joins it."""
    messages = (item for item in items if isinstance(item, OutputMessage))
    return "".join(part.text for message in messages for part in message.content)
