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


class ChatStream:
    """Chunks of /v1/chat/completions."""

    def __init__(
        self, ask: Ask, head: Head, echoes: Sequence[str], checked: Sequence[Checked] = ()
    ) -> None:
        self.ask = ask
        self.head = head
        self.echoes = echoes
        self.tally = Tally(ask)
        self.extras = Extras(ask, self.tally, checked)
        self.templates: dict[int, Template] = {}
        self.readers: dict[int, Reader] = {}  # where the text is more than text

    def write(self, rows: Iterable[Row]) -> bytes:
        frames: list[bytes] = []
        for index, delta in rows:
            template = self.templates.get(index)
            if template is None:
                template = self._begin(index, frames)
            self.extras.see(index, delta)
            self.tally.think(index, delta)
            reader = self.readers.get(index)
            if reader is not None:
                self._write_read(index, delta, reader, frames)
            elif self.ask.logprobs is not None and delta.logprobs:
                frames.append(
                    self._chunk(index, ChunkDelta(content=delta.text), logprobs=delta.logprobs)
                )
            elif self.extras.is_on and (delta.text or delta.token_ids):
                frames.append(self._chunk(index, ChunkDelta(content=delta.text)))
            elif delta.text:
                frames.append(template.fill(delta.text))
            if delta.finish is not None:
                self.tally.finish(index, delta.usage)
                finish = delta.finish.value
                if reader is not None:
                    finish = reader.finish_reason(delta.finish)
                frames.append(
                    self._chunk(index, ChunkDelta(), finish=finish, matched=delta.matched)
                )
        return b"".join(frames)

    def _write_read(self, index: int, delta: Delta, reader: Reader, frames: list[bytes]) -> None:
        """Chunks of what the reader makes of the text; log probabilities go with the first."""
        events = reader.feed(delta.text)
        if delta.finish is not None:
            events += reader.flush()
        logprobs = delta.logprobs if self.ask.logprobs is not None else ()
        if not events and (logprobs or (self.extras.is_on and delta.token_ids)):
            frames.append(self._chunk(index, ChunkDelta(), logprobs=logprobs))
        for event in events:
            if isinstance(event, Text) and not logprobs and not self.extras.is_on:
                frames.append(self.templates[index].fill(event.text))
            else:
                frames.append(self._chunk(index, delta_of(event, reader), logprobs=logprobs))
            logprobs = ()

    def end(self, checked: Sequence[Checked]) -> bytes:
        if not self.ask.include_usage:
            return DONE
        chunk = ChatChunk(
            id=self.head.id,
            created=self.head.created,
            model=self.head.model,
            choices=[],
            usage=self.tally.usage(),
        )
        return frame(encode(chunk)) + DONE

    def fail(self, problem: Problem) -> bytes:
        return failure(problem)

    def _begin(self, index: int, frames: list[bytes]) -> Template:
        if not self.templates:  # a chat has one prompt
            self.extras.begin(index)
        frames.append(self._chunk(index, ChunkDelta(role="assistant", content="")))
        template = Template(self._struct(index, ChunkDelta(content=MARK)))
        self.templates[index] = template
        if not self.ask.shape.is_plain:
            self.readers[index] = Reader(self.ask.shape, self.head.id, index)
        echo = self.echoes[index // self.ask.call.choice_count]
        if echo:
            frames.append(template.fill(echo))
        return template

    def _chunk(
        self,
        index: int,
        delta: ChunkDelta,
        *,
        logprobs: Sequence[TokenLogprob] = (),
        finish: str | None = None,
        matched: str | int | None = None,
    ) -> bytes:
        chunk = self._struct(index, delta, logprobs=logprobs, finish=finish, matched=matched)
        return frame(encode(chunk))

    def _struct(
        self,
        index: int,
        delta: ChunkDelta,
        *,
        logprobs: Sequence[TokenLogprob] = (),
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
        return ChatChunk(
            id=self.head.id,
            created=self.head.created,
            model=self.head.model,
            choices=[choice],
            usage=self.extras.usage(),
            prompt_token_ids=self.extras.prompt_ids(index),
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


class CompletionStream:
    """Chunks of /v1/completions."""

    def __init__(
        self, ask: Ask, head: Head, echoes: Sequence[str], checked: Sequence[Checked] = ()
    ) -> None:
        self.ask = ask
        self.head = head
        self.echoes = echoes
        self.tally = Tally(ask)
        self.extras = Extras(ask, self.tally, checked)
        self.templates: dict[int, Template] = {}
        self.scribes: dict[int, CompletionScribe] = {}

    def write(self, rows: Iterable[Row]) -> bytes:
        frames: list[bytes] = []
        for index, delta in rows:
            template = self.templates.get(index)
            if template is None:
                template = self._begin(index, frames)
            self.extras.see(index, delta)
            if self.ask.logprobs is not None and delta.logprobs:
                logprobs = self.scribes[index].write(delta.logprobs)
                frames.append(frame(encode(self._struct(index, delta.text, logprobs=logprobs))))
            elif self.extras.is_on and (delta.text or delta.token_ids):
                frames.append(frame(encode(self._struct(index, delta.text))))
            elif delta.text:
                frames.append(template.fill(delta.text))
            if delta.finish is not None:
                self.tally.finish(index, delta.usage)
                chunk = self._struct(index, "", finish=delta.finish, matched=delta.matched)
                frames.append(frame(encode(chunk)))
        return b"".join(frames)

    def end(self, checked: Sequence[Checked]) -> bytes:
        frames: list[bytes] = []
        if self.ask.prompt_only:
            self.tally.check_only(checked)
            for index in range(self.ask.call.request_count):
                self._begin(index, frames)
                chunk = self._struct(index, "", finish=FinishReason.LENGTH)
                frames.append(frame(encode(chunk)))
        if self.ask.include_usage:
            reply = CompletionReply(
                id=self.head.id,
                created=self.head.created,
                model=self.head.model,
                choices=[],
                usage=self.tally.usage(),
            )
            frames.append(frame(encode(reply)))
        frames.append(DONE)
        return b"".join(frames)

    def fail(self, problem: Problem) -> bytes:
        return failure(problem)

    def _begin(self, index: int, frames: list[bytes]) -> Template:
        template = Template(self._struct(index, MARK))
        self.templates[index] = template
        echo = self.echoes[index // self.ask.call.choice_count]
        self.scribes[index] = CompletionScribe(self.ask.logprobs or 0, len(echo))
        self.extras.begin(index)
        if echo and self.extras.is_on:
            frames.append(frame(encode(self._struct(index, echo))))
        elif echo:
            frames.append(template.fill(echo))
        return template

    def _struct(
        self,
        index: int,
        text: str,
        *,
        logprobs: CompletionLogprobs | None = None,
        finish: FinishReason | None = None,
        matched: str | int | None = None,
    ) -> CompletionReply:
        choice = CompletionChoice(
            index=index,
            text=text,
            logprobs=logprobs,
            finish_reason=None if finish is None else finish.value,
            matched_stop=msgspec.UNSET if finish is None else matched,
            token_ids=self.extras.ids(),
            prompt_token_ids=self.extras.prompt_ids(index),
        )
        return CompletionReply(
            id=self.head.id,
            created=self.head.created,
            model=self.head.model,
            choices=[choice],
            usage=self.extras.usage(),
        )
