"""This file writes streams of the OpenAI dialect: rows of text to chunks.

It does not know HTTP, connections or time; `openai.py` reads what is asked, this file writes what
is answered.
Laws, for every stream: the role comes once for each index, in its first chunk; each index has
exactly one finish chunk; usage comes only where asked for, once, after all finish chunks and with
no choices (and so far, in every chunk, where that was asked for); `[DONE]` is last, once. The
joined texts, calls and the usage are those of the plain answer (`bodies.py`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from actors.gateway.bodies import PlainWriter
from actors.gateway.call import Checked, Row
from actors.gateway.dialect import Head, StreamWriter
from actors.gateway.errors import body as error_body
from actors.gateway.logprobs import CompletionScribe, chat_logprobs
from actors.gateway.openai import Ask
from actors.gateway.reading import Event, Reader
from actors.gateway.reasoning.base import Reasoning
from actors.gateway.sse import DONE, MARK, Template, encode, frame
from actors.gateway.tally import Extras, Tally
from actors.gateway.tools.base import Start, Text
from messages.gateway import Delta, TokenLogprob
from messages.openai import (
    ChatChunk,
    ChunkCall,
    ChunkChoice,
    ChunkDelta,
    ChunkFunction,
    CompletionChoice,
    CompletionLogprobs,
    CompletionReply,
    Usage,
)
from messages.types import FinishReason, Problem


def stream_writer(ask: Ask, head: Head, checked: Sequence[Checked]) -> StreamWriter:
    """`checked` are the prompts as the tokenizer saw them, where the call was checked first."""
    make = ChatStream if ask.is_chat else CompletionStream
    return make(ask, head, echo_texts(ask, checked), checked)


def plain_writer(ask: Ask, head: Head, checked: Sequence[Checked]) -> PlainWriter:
    return PlainWriter(ask, head, echo_texts(ask, checked))


def echo_texts(ask: Ask, checked: Sequence[Checked]) -> tuple[str, ...]:
    if ask.echoes is None:
        return ("",) * len(ask.call.prompts)
    return tuple(checked[i].text if text is None else text for i, text in enumerate(ask.echoes))


def failure(problem: Problem) -> bytes:
    """How a stream that has begun ends when its call fails: the error as an event, then the end."""
    return frame(error_body(problem)) + DONE


class Chunks:
    """What streams of chats and of completions share: when a row becomes which chunks. A subclass
    says what these look like."""

    def __init__(
        self, ask: Ask, head: Head, echoes: Sequence[str], checked: Sequence[Checked] = ()
    ) -> None:
        self.ask = ask
        self.head = head
        self.echoes = echoes
        self.tally = Tally(ask)
        self.extras = Extras(ask, self.tally, checked)
        self.templates: dict[int, Template] = {}

    def write(self, rows: Iterable[Row]) -> bytes:
        frames: list[bytes] = []
        for index, delta in rows:
            if index not in self.templates:
                self.extras.open(index, delta)
                self._begin(index, frames)
            self.extras.see(index, delta)
            self._say(index, delta, frames)
            if delta.finish is not None:
                self.tally.finish(index, delta.usage)
                frames.append(self._finish(index, delta.finish, delta.matched))
        return b"".join(frames)

    def end(self, checked: Sequence[Checked]) -> bytes:
        if not self.ask.include_usage:
            return DONE
        return frame(encode(self._reply([], self.tally.usage()))) + DONE

    def fail(self, problem: Problem) -> bytes:
        return failure(problem)

    def echo(self, index: int) -> str:
        return self.echoes[index // self.ask.call.choice_count]

    def _say(self, index: int, delta: Delta, frames: list[bytes]) -> None:
        if self.ask.logprobs is not None and delta.logprobs:
            frames.append(self._text(index, delta.text, delta.logprobs))
        elif self.extras.is_on and (delta.text or delta.token_ids):
            frames.append(self._text(index, delta.text))
        elif delta.text:
            frames.append(self.templates[index].fill(delta.text))

    def _begin(self, index: int, frames: list[bytes]) -> None:
        """A choice's first chunks, and its template."""
        raise NotImplementedError

    def _text(self, index: int, text: str, logprobs: Sequence[TokenLogprob] = ()) -> bytes:
        raise NotImplementedError

    def _finish(self, index: int, finish: FinishReason, matched: str | int | None) -> bytes:
        raise NotImplementedError

    def _reply(self, choices: list[Any], usage: Usage | None | msgspec.UnsetType) -> Any:
        """A chunk, for `encode`."""
        raise NotImplementedError


class ChatStream(Chunks):
    """Chunks of /v1/chat/completions."""

    def __init__(
        self, ask: Ask, head: Head, echoes: Sequence[str], checked: Sequence[Checked] = ()
    ) -> None:
        super().__init__(ask, head, echoes, checked)
        self.readers: dict[int, Reader] = {}  # where the text is more than text

    def _say(self, index: int, delta: Delta, frames: list[bytes]) -> None:
        self.tally.think(index, delta)
        reader = self.readers.get(index)
        if reader is None:
            super()._say(index, delta, frames)
        else:
            self._write_read(index, delta, reader, frames)

    def _write_read(self, index: int, delta: Delta, reader: Reader, frames: list[bytes]) -> None:
        """Chunks of what the reader makes of the text; log probabilities go with the first."""
        events = reader.feed(delta.text)
        if delta.finish is not None:
            events += reader.flush()
        logprobs = delta.logprobs if self.ask.logprobs is not None else ()
        if not events and (logprobs or (self.extras.is_on and delta.token_ids)):
            frames.append(self._chunk(index, ChunkDelta(), logprobs))
        for event in events:
            if isinstance(event, Text) and not logprobs and not self.extras.is_on:
                frames.append(self.templates[index].fill(event.text))
            else:
                frames.append(self._chunk(index, delta_of(event, reader), logprobs))
            logprobs = ()

    def _begin(self, index: int, frames: list[bytes]) -> None:
        if not self.templates:  # a chat has one prompt
            self.extras.begin(index)
        frames.append(self._chunk(index, ChunkDelta(role="assistant", content="")))
        template = Template(self._struct(index, ChunkDelta(content=MARK)))
        self.templates[index] = template
        if not self.ask.shape.is_plain:
            self.readers[index] = Reader(self.ask.shape, self.head.id, index)
        if echo := self.echo(index):
            frames.append(template.fill(echo))

    def _text(self, index: int, text: str, logprobs: Sequence[TokenLogprob] = ()) -> bytes:
        return self._chunk(index, ChunkDelta(content=text), logprobs)

    def _finish(self, index: int, finish: FinishReason, matched: str | int | None) -> bytes:
        reader = self.readers.get(index)
        reason = finish.value if reader is None else reader.finish_reason(finish)
        return frame(encode(self._struct(index, ChunkDelta(), finish=reason, matched=matched)))

    def _chunk(self, index: int, delta: ChunkDelta, logprobs: Sequence[TokenLogprob] = ()) -> bytes:
        return frame(encode(self._struct(index, delta, logprobs)))

    def _struct(
        self,
        index: int,
        delta: ChunkDelta,
        logprobs: Sequence[TokenLogprob] = (),
        *,
        finish: str | None = None,
        matched: str | int | None = None,
    ) -> ChatChunk:
        choice = ChunkChoice(
            index=index,
            delta=delta,
            logprobs=chat_logprobs(logprobs) if logprobs else None,
            finish_reason=finish,
            matched_stop=msgspec.UNSET if finish is None else matched,
            token_ids=self.extras.ids(),
        )
        return self._reply([choice], self.extras.usage(index), self.extras.prompt_ids(index))

    def _reply(
        self,
        choices: list[ChunkChoice],
        usage: Usage | None | msgspec.UnsetType,
        prompt_ids: list[int] | msgspec.UnsetType = msgspec.UNSET,
    ) -> ChatChunk:
        return ChatChunk(
            id=self.head.id,
            created=self.head.created,
            model=self.head.model,
            choices=choices,
            usage=usage,
            prompt_token_ids=prompt_ids,
        )


def delta_of(event: Event, reader: Reader) -> ChunkDelta:
    """What one chunk adds to the answer."""
    if isinstance(event, Text):
        return ChunkDelta(content=event.text)
    if isinstance(event, Reasoning):
        return ChunkDelta(reasoning_content=event.text)
    if isinstance(event, Start):
        call = ChunkCall(
            index=event.call,
            id=reader.call_id(event.call),
            type="function",
            function=ChunkFunction(name=event.name, arguments=""),
        )
    else:
        call = ChunkCall(index=event.call, function=ChunkFunction(arguments=event.text))
    return ChunkDelta(tool_calls=[call])


class CompletionStream(Chunks):
    """Chunks of /v1/completions."""

    def __init__(
        self, ask: Ask, head: Head, echoes: Sequence[str], checked: Sequence[Checked] = ()
    ) -> None:
        super().__init__(ask, head, echoes, checked)
        self.scribes: dict[int, CompletionScribe] = {}

    def end(self, checked: Sequence[Checked]) -> bytes:
        frames: list[bytes] = []
        if self.ask.prompt_only:
            self.tally.check_only(checked)
            for index in range(self.ask.call.request_count):
                self._begin(index, frames)
                frames.append(self._finish(index, FinishReason.LENGTH, None))
        frames.append(super().end(checked))
        return b"".join(frames)

    def _begin(self, index: int, frames: list[bytes]) -> None:
        template = Template(self._struct(index, MARK))
        self.templates[index] = template
        echo = self.echo(index)
        self.scribes[index] = CompletionScribe(self.ask.logprobs or 0, len(echo))
        self.extras.begin(index)
        if echo and self.extras.is_on:
            frames.append(self._text(index, echo))
        elif echo:
            frames.append(template.fill(echo))

    def _text(self, index: int, text: str, logprobs: Sequence[TokenLogprob] = ()) -> bytes:
        written = self.scribes[index].write(logprobs) if logprobs else None
        return frame(encode(self._struct(index, text, written)))

    def _finish(self, index: int, finish: FinishReason, matched: str | int | None) -> bytes:
        return frame(encode(self._struct(index, "", finish=finish.value, matched=matched)))

    def _struct(
        self,
        index: int,
        text: str,
        logprobs: CompletionLogprobs | None = None,
        *,
        finish: str | None = None,
        matched: str | int | None = None,
    ) -> CompletionReply:
        choice = CompletionChoice(
            index=index,
            text=text,
            logprobs=logprobs,
            finish_reason=finish,
            matched_stop=msgspec.UNSET if finish is None else matched,
            token_ids=self.extras.ids(),
            prompt_token_ids=self.extras.prompt_ids(index),
        )
        return self._reply([choice], self.extras.usage(index))

    def _reply(
        self, choices: list[CompletionChoice], usage: Usage | None | msgspec.UnsetType
    ) -> CompletionReply:
        return CompletionReply(
            id=self.head.id,
            created=self.head.created,
            model=self.head.model,
            choices=choices,
            usage=usage,
        )
