"""This file writes answers of the OpenAI dialect that are one body, for both routes.

It does not know streams (`replies.py`), HTTP or time. Law: its texts, calls and usage are those
that the stream of the same rows has.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

from actors.gateway.call import Checked, Row
from actors.gateway.dialect import Head
from actors.gateway.logprobs import CompletionScribe, chat_logprobs, finite, prompt_logprobs
from actors.gateway.openai import Ask
from actors.gateway.reading import Reader
from actors.gateway.reasoning.base import Reasoning
from actors.gateway.sse import encode
from actors.gateway.tally import Tally
from actors.gateway.tools.base import Arguments, Start, Text
from messages.gateway import TokenLogprob
from messages.openai import (
    ChatChoice,
    ChatReply,
    CompletionChoice,
    CompletionLogprobs,
    CompletionReply,
    FunctionCall,
    PromptLogprobs,
    ReplyCall,
    ReplyMessage,
)
from messages.types import FinishReason, unpack
from messages.types import Usage as RequestUsage


class Gathered:
    """One choice of a plain answer, as far as it has come."""

    __slots__ = ("finish", "logprobs", "matched", "texts", "token_ids")

    def __init__(self, echo: str) -> None:
        self.texts = [echo]
        self.logprobs: list[TokenLogprob] = []
        self.finish = FinishReason.LENGTH
        self.matched: str | int | None = None
        self.token_ids = bytearray()  # Int32s

    @property
    def likelihood(self) -> float:
        """Mean log probability of a token; to compare choices by."""
        found = [finite(row.logprob) for row in self.logprobs]
        return sum(found) / len(found) if found else float("-inf")


class PlainWriter:
    """The one body of an answer that is not streamed, for both routes."""

    def __init__(self, ask: Ask, head: Head, echoes: Sequence[str]) -> None:
        self.ask = ask
        self.head = head
        self.echoes = echoes
        self.tally = Tally(ask)
        self.choices = [
            Gathered(echoes[index // ask.call.choice_count])
            for index in range(ask.call.request_count)
        ]

        self.prompts: dict[int, dict[int, TokenLogprob]] = {}  # by prompt, then by position

    def add(self, rows: Iterable[Row]) -> None:
        for index, delta in rows:
            choice = self.choices[index]
            if delta.prompt_logprobs:
                told = self.prompts.setdefault(index // self.ask.call.choice_count, {})
                told.update(enumerate(delta.prompt_logprobs, delta.prompt_index))
                continue
            if self.ask.drops_output:
                if delta.finish is not None:
                    usage = delta.usage or RequestUsage()
                    usage = msgspec.structs.replace(usage, completion_tokens=0)
                    self.tally.finish(index, usage)
                continue
            self.tally.think(index, delta)
            choice.texts.append(delta.text)
            choice.token_ids += delta.token_ids
            choice.logprobs.extend(delta.logprobs)
            if delta.finish is not None:
                choice.finish = delta.finish
                choice.matched = delta.matched
                self.tally.finish(index, delta.usage)

    def body(self, checked: Sequence[Checked]) -> bytes:
        if self.ask.prompt_only:
            self.tally.check_only(checked)
        reply = self._chat(checked) if self.ask.is_chat else self._completion(checked)
        return encode(reply)

    def _ids(self, choice: Gathered) -> list[int] | msgspec.UnsetType:
        return list(unpack(bytes(choice.token_ids))) if self.ask.token_ids else msgspec.UNSET

    def _prompt_ids(self, checked: Sequence[Checked], index: int) -> list[int] | msgspec.UnsetType:
        return list(unpack(checked[index].ids)) if self.ask.token_ids else msgspec.UNSET

    def _told(self, prompt: int) -> list[TokenLogprob]:
        """Of the prompt's tokens, in order."""
        return [row for _, row in sorted(self.prompts.get(prompt, {}).items())]

    def _prompt_logprobs(self, prompt: int) -> PromptLogprobs | msgspec.UnsetType:
        return prompt_logprobs(self._told(prompt)) if self.ask.prompt_logprobs else msgspec.UNSET

    def _logprobs(self, prompt: int, choice: Gathered) -> CompletionLogprobs | None:
        """Those of the output, and of an echoed prompt before them."""
        wanted = self.ask.logprobs
        if wanted is None:
            return None
        if self.ask.echoes is None:
            return CompletionScribe(wanted).write(choice.logprobs)
        scribe = CompletionScribe(wanted)
        told = [cut(row, wanted) for row in self._told(prompt)]
        return joined(scribe.write(told, is_prompt=True), scribe.write(choice.logprobs))

    def _kept(self) -> list[tuple[int, Gathered]]:
        """The choices that are shown, with the number of their prompt."""
        each = self.ask.call.choice_count
        groups = [self.choices[at : at + each] for at in range(0, len(self.choices), each)]
        if self.ask.kept_count is not None:
            groups = [
                sorted(group, key=lambda choice: -choice.likelihood)[: self.ask.kept_count]
                for group in groups
            ]
        return [(prompt, choice) for prompt, group in enumerate(groups) for choice in group]

    def _chat(self, checked: Sequence[Checked]) -> ChatReply:
        wanted = self.ask.logprobs is not None
        return ChatReply(
            id=self.head.id,
            created=self.head.created,
            model=self.head.model,
            choices=[
                ChatChoice(
                    index=index,
                    message=message,
                    logprobs=chat_logprobs(choice.logprobs) if wanted else None,
                    finish_reason=finish,
                    matched_stop=choice.matched,
                    token_ids=self._ids(choice),
                )
                for index, choice in enumerate(self.choices)
                for message, finish in (self._message(index, choice),)
            ],
            usage=self.tally.usage(),
            prompt_token_ids=self._prompt_ids(checked, 0),
            prompt_logprobs=self._prompt_logprobs(0),
        )

    def _message(self, index: int, choice: Gathered) -> tuple[ReplyMessage, str]:
        """The message of one choice, and why it ended."""
        if self.ask.shape.is_plain:
            return ReplyMessage(content="".join(choice.texts)), choice.finish.value
        reader = Reader(self.ask.shape, self.head.id, index)
        echo, *texts = choice.texts
        content, reasoning = [echo], []
        calls: list[ReplyCall] = []
        for event in reader.feed("".join(texts)) + reader.flush():
            if isinstance(event, Text):
                content.append(event.text)
            elif isinstance(event, Reasoning):
                reasoning.append(event.text)
            elif isinstance(event, Start):
                function = FunctionCall(name=event.name)
                calls.append(ReplyCall(id=reader.call_id(event.call), function=function))
            elif isinstance(event, Arguments):
                function = calls[-1].function
                arguments = function.arguments + event.text
                whole = FunctionCall(name=function.name, arguments=arguments)
                calls[-1] = msgspec.structs.replace(calls[-1], function=whole)
        text = "".join(content)
        message = ReplyMessage(
            content=None if calls and not text else text,
            reasoning_content="".join(reasoning) if reasoning else msgspec.UNSET,
            tool_calls=calls or msgspec.UNSET,
        )
        return message, reader.finish_reason(choice.finish)

    def _completion(self, checked: Sequence[Checked]) -> CompletionReply:
        return CompletionReply(
            id=self.head.id,
            created=self.head.created,
            model=self.head.model,
            choices=[
                CompletionChoice(
                    index=index,
                    text="".join(choice.texts),
                    logprobs=self._logprobs(prompt, choice),
                    finish_reason=choice.finish.value,
                    matched_stop=choice.matched,
                    token_ids=self._ids(choice),
                    prompt_token_ids=self._prompt_ids(checked, prompt),
                    prompt_logprobs=self._prompt_logprobs(prompt),
                )
                for index, (prompt, choice) in enumerate(self._kept())
            ],
            usage=self.tally.usage(),
        )


def cut(row: TokenLogprob, alternatives: int) -> TokenLogprob:
    """The row with as many alternatives as this list has."""
    return msgspec.structs.replace(row, best=row.best[:alternatives])


def joined(first: CompletionLogprobs, second: CompletionLogprobs) -> CompletionLogprobs:
    best = None
    if first.top_logprobs is not None and second.top_logprobs is not None:
        best = first.top_logprobs + second.top_logprobs
    return CompletionLogprobs(
        tokens=first.tokens + second.tokens,
        token_logprobs=first.token_logprobs + second.token_logprobs,
        top_logprobs=best,
        text_offset=first.text_offset + second.text_offset,
    )
