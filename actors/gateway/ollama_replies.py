"""This file writes answers of the Ollama dialect: rows of text to lines of JSON, or to one body.

It does not know HTTP or connections; the time is the head's.
Laws, for every stream: each line is one JSON object; exactly one, the last, is `done`, and has the
reason, the counts and the durations; or the last is an `error`. A tool call comes whole. The joined
lines are the plain answer.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from typing import Any

import msgspec

from actors.gateway.call import Checked, Row
from actors.gateway.dialect import Head
from actors.gateway.errors import ollama_body
from actors.gateway.logprobs import finite
from actors.gateway.openai import Ask
from actors.gateway.reading import Event, Reader
from actors.gateway.reasoning.base import Reasoning
from actors.gateway.sse import encode
from actors.gateway.tools.base import Arguments, Start, Text
from messages.gateway import Delta
from messages.gateway import TokenLogprob as Spelled
from messages.ollama import CalledFunction, Line, MadeCall, Message, TokenLogprob
from messages.types import Problem, Usage


def moment(time_s: float) -> str:
    return datetime.fromtimestamp(time_s, UTC).isoformat().replace("+00:00", "Z")


def load_line(model: str, now_s: float, *, is_chat: bool) -> bytes:
    """The answer to a body without a prompt: the model is there."""
    return encode(
        Line(
            model=model,
            created_at=moment(now_s),
            done=True,
            done_reason="load",
            message=Message(role="assistant", content="") if is_chat else None,
            response=None if is_chat else "",
        )
    )


def read_logprobs(rows: Iterable[Spelled]) -> list[TokenLogprob]:
    return [
        TokenLogprob(
            token=row.token.decode("utf-8", "replace"),
            logprob=finite(row.logprob),
            bytes=list(row.token),
            top_logprobs=[
                TokenLogprob(
                    token=token.decode("utf-8", "replace"),
                    logprob=finite(logprob),
                    bytes=list(token),
                )
                for token, _, logprob in row.best
            ],
        )
        for row in rows
    ]


class Piece:
    """What one line says."""

    def __init__(self) -> None:
        self.text = ""
        self.thinking = ""
        self.calls: list[MadeCall] = []
        self.logprobs: list[TokenLogprob] = []

    @property
    def is_empty(self) -> bool:
        return not (self.text or self.thinking or self.calls or self.logprobs)


class Lines:
    """Both ways of an answer: a line for each row, or all of it in one."""

    def __init__(self, ask: Ask, head: Head, checked: Sequence[Checked]) -> None:
        self.head = head
        self.wants_logprobs = ask.logprobs is not None
        self.reader = Reader(ask.shape, head.id, 0)
        self.first_s: float | None = None
        self.started = Start(0, "")  # the call that is being read
        self.arguments: list[str] | None = None
        self.whole = Piece()
        self.last: Delta | None = None

    def line_of(self, piece: Piece) -> dict[str, Any]:
        """The fields that only this route has."""
        raise NotImplementedError

    # A plain answer

    def add(self, rows: Iterable[Row]) -> None:
        for _, delta in rows:
            self._read(delta, self.whole)

    def body(self, checked: Sequence[Checked]) -> bytes:
        assert self.last is not None, "an answer without an end"
        return self._done(self.whole, self.last)

    # A stream

    def write(self, rows: Iterable[Row]) -> bytes:
        lines: list[bytes] = []
        for _, delta in rows:
            piece = Piece()
            self._read(delta, piece)
            if not piece.is_empty:
                line = Line(
                    model=self.head.model,
                    created_at=moment(self.head.now_s()),
                    done=False,
                    logprobs=piece.logprobs or None,
                    **self.line_of(piece),
                )
                lines.append(encode(line) + b"\n")
            if delta.finish is not None:
                lines.append(self._done(Piece(), delta) + b"\n")
        return b"".join(lines)

    def end(self, checked: Sequence[Checked]) -> bytes:
        return b""

    def fail(self, problem: Problem) -> bytes:
        return ollama_body(problem.message) + b"\n"

    def _read(self, delta: Delta, piece: Piece) -> None:
        if self.first_s is None:
            self.first_s = self.head.now_s()
        events = self.reader.feed(delta.text)
        if delta.finish is not None:
            self.last = delta
            events += self.reader.flush()
        for event in events:
            self._take(event, piece)
        if delta.finish is not None:
            self._close_call(piece)
        if self.wants_logprobs:
            piece.logprobs += read_logprobs(delta.logprobs)

    def _take(self, event: Event, piece: Piece) -> None:
        if isinstance(event, Arguments):
            assert self.arguments is not None, "arguments without a call"
            self.arguments.append(event.text)
            return
        self._close_call(piece)
        if isinstance(event, Start):
            self.started, self.arguments = event, []
        elif isinstance(event, Reasoning):
            piece.thinking += event.text
        elif isinstance(event, Text):
            piece.text += event.text

    def _close_call(self, piece: Piece) -> None:
        if self.arguments is None:
            return
        try:
            value = msgspec.json.decode("".join(self.arguments))
        except (msgspec.DecodeError, RecursionError):
            value = {}  # it was cut off by the limit
        arguments = value if isinstance(value, dict) else {}
        function = CalledFunction(name=self.started.name, arguments=arguments)
        call_id = self.reader.call_id(self.started.call)
        piece.calls.append(MadeCall(id=call_id, function=function))
        self.arguments = None

    def _done(self, piece: Piece, delta: Delta) -> bytes:
        usage = delta.usage or Usage()
        now_s, begun_s = self.head.now_s(), self.head.begun_s
        first_s = now_s if self.first_s is None else self.first_s
        assert delta.finish is not None
        line = Line(
            model=self.head.model,
            created_at=moment(now_s),
            done=True,
            done_reason=delta.finish.value,
            logprobs=piece.logprobs or None,
            total_duration=nanoseconds(now_s - begun_s),
            load_duration=0,
            prompt_eval_count=usage.prompt_tokens,
            prompt_eval_duration=nanoseconds(first_s - begun_s),
            eval_count=usage.completion_tokens,
            eval_duration=nanoseconds(now_s - first_s),
            **self.line_of(piece),
        )
        return encode(line)


def nanoseconds(elapsed_s: float) -> int:
    return max(0, round(elapsed_s * 1e9))


class ChatLines(Lines):
    """Of /api/chat."""

    def line_of(self, piece: Piece) -> dict[str, Any]:
        message = Message(
            role="assistant",
            content=piece.text,
            thinking=piece.thinking or None,
            tool_calls=piece.calls or None,
        )
        return {"message": message}


class GenerateLines(Lines):
    """Of /api/generate."""

    def line_of(self, piece: Piece) -> dict[str, Any]:
        return {"response": piece.text, "thinking": piece.thinking or None}
