"""This file writes answers of SGLang's native /generate: rows of text to events, or to one body.

It does not know HTTP or connections; the time is the head's.
Laws: an event says all of its answer so far, so that its last event is the plain answer; every
answer has one event with a reason to end; `[DONE]` is last, once.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import msgspec

from actors.gateway.call import Call, Checked, Row
from actors.gateway.dialect import Head
from actors.gateway.errors import body as error_body
from actors.gateway.logprobs import finite
from actors.gateway.sse import DONE, encode, frame
from messages.gateway import Delta, TokenLogprob
from messages.native import Finish, Generated, MetaInfo, Spelled
from messages.types import FinishReason, Problem, Usage, unpack


class Asked(NamedTuple):
    """A body, read."""

    call: Call
    stream: bool
    is_list: bool  # the answer is one
    rids: tuple[str, ...]  # by prompt; empty: ours
    logprobs: tuple[int | None, ...]  # by prompt; None: none
    start_lens: tuple[int | None, ...]  # by prompt: from which of its tokens on; None: none
    drops_output: bool  # the one token that had to be made for the prompt's log probabilities
    with_text: bool  # of the tokens among the log probabilities
    with_prompt: bool  # the ids of the prompt are part of the answer


class Answer:
    """One choice, as far as it has come."""

    def __init__(self) -> None:
        self.text = ""
        self.ids: array[int] = array("i")
        self.logprobs: list[Spelled] = []
        self.top: list[list[Spelled]] = []
        self.usage = Usage()
        self.finish: Finish | None = None

    def take(self, delta: Delta, *, with_text: bool) -> None:
        self.text += delta.text
        self.ids.extend(unpack(delta.token_ids))
        for row in delta.logprobs:
            self.logprobs.append(spelled(row.logprob, row.token_id, row.token, with_text))
            self.top.append([spelled(lp, i, token, with_text) for token, i, lp in row.best])
        if delta.usage is not None:
            prompt = delta.usage if delta.usage.prompt_tokens else self.usage
            self.usage = msgspec.structs.replace(
                prompt, completion_tokens=delta.usage.completion_tokens
            )
        if delta.finish is not None:
            self.finish = finish_of(delta, self.usage.completion_tokens)


def spelled(logprob: float, token_id: int, token: bytes, with_text: bool) -> Spelled:
    return (finite(logprob), token_id, token.decode("utf-8", "replace") if with_text else None)


def finish_of(delta: Delta, length: int) -> Finish:
    if delta.finish is FinishReason.LENGTH:
        return Finish(type="length", length=length)
    if delta.finish is FinishReason.ABORT:
        return Finish(type="abort", message="The request was aborted.")
    return Finish(type="stop", matched=delta.matched)


class Answers:
    """What both ways of an answer have in common."""

    def __init__(self, ask: Asked, head: Head, checked: Sequence[Checked]) -> None:
        self.ask = ask
        self.head = head
        self.checked = checked
        self.answers = [Answer() for _ in range(ask.call.request_count)]
        self.prompts: dict[int, dict[int, TokenLogprob]] = {}  # by prompt, then by position

    def take(self, row: Row) -> bool:
        """False: nothing of the answer has changed."""
        delta = row.delta
        if delta.prompt_logprobs:
            told = self.prompts.setdefault(row.choice // self.ask.call.choice_count, {})
            told.update(enumerate(delta.prompt_logprobs, delta.prompt_index))
            return False
        if self.ask.drops_output:
            if delta.finish is None:
                return False
            is_aborted = delta.finish is FinishReason.ABORT
            usage = None
            if delta.usage is not None:
                usage = msgspec.structs.replace(delta.usage, completion_tokens=0)
            delta = msgspec.structs.replace(
                delta,
                text="",
                token_ids=b"",
                logprobs=(),
                usage=usage,
                finish=delta.finish if is_aborted else FinishReason.LENGTH,
            )
        self.answers[row.choice].take(delta, with_text=self.ask.with_text)
        return True

    def input_of(self, prompt: int) -> tuple[list[Spelled], list[list[Spelled]]]:
        """Of the prompt's tokens that are wanted: their own, and the alternatives."""
        start_len = self.ask.start_lens[prompt]
        if start_len is None:
            return [], []
        own: list[Spelled] = []
        top: list[list[Spelled]] = []
        with_text = self.ask.with_text
        for position, row in sorted(self.prompts.get(prompt, {}).items()):
            if position < start_len:
                continue
            told = spelled(row.logprob, row.token_id, row.token, with_text)
            own.append(told if position else (None, *told[1:]))
            best = row.best if position else ()
            top.append([spelled(lp, i, token, with_text) for token, i, lp in best])
        return own, top

    def check_only(self, checked: Sequence[Checked]) -> None:
        """Nothing was generated."""
        self.checked = checked
        for index, answer in enumerate(self.answers):
            prompt = checked[index // self.ask.call.choice_count]
            answer.usage = Usage(prompt_tokens=prompt.token_count)
            answer.finish = Finish(type="length", length=0)

    def id_of(self, index: int) -> str:
        prompt, choice = divmod(index, self.ask.call.choice_count)
        if self.ask.rids:
            name = self.ask.rids[prompt]
        elif len(self.ask.call.prompts) == 1:
            name = self.head.id
        else:
            name = f"{self.head.id}_{prompt}"
        return name if self.ask.call.choice_count == 1 else f"{name}_{choice}"

    def value_of(self, index: int) -> Generated:
        answer = self.answers[index]
        prompt = index // self.ask.call.choice_count
        unset = msgspec.UNSET
        wants = self.ask.logprobs[prompt]
        own, top = self.input_of(prompt)
        # A stream may bring a first token before its own count of it.
        completion_tokens = answer.usage.completion_tokens
        if answer.finish is None:
            completion_tokens = len(answer.ids)
        meta = MetaInfo(
            id=self.id_of(index),
            finish_reason=answer.finish,
            prompt_tokens=answer.usage.prompt_tokens,
            completion_tokens=completion_tokens,
            cached_tokens=answer.usage.cached_tokens,
            e2e_latency=unset if answer.finish is None else self.head.now_s() - self.head.begun_s,
            input_token_logprobs=unset if wants is None else own,
            input_top_logprobs=top if wants else unset,
            output_token_logprobs=unset if wants is None else answer.logprobs,
            output_top_logprobs=answer.top if wants else unset,
            prompt_token_ids=list(unpack(self.checked[prompt].ids))
            if self.ask.with_prompt
            else unset,
        )
        return Generated(
            text=answer.text,
            output_ids=answer.ids.tolist(),
            meta_info=meta,
            index=index if self.ask.stream and self.ask.is_list else unset,
        )


class GenerateWriter(Answers):
    """The one body of an answer that is not streamed."""

    def add(self, rows: Iterable[Row]) -> None:
        for row in rows:
            self.take(row)

    def body(self, checked: Sequence[Checked]) -> bytes:
        if self.ask.call.prompt_only:
            self.check_only(checked)
        values = [self.value_of(index) for index in range(len(self.answers))]
        return encode(values if self.ask.is_list else values[0])


class GenerateStream(Answers):
    """Events of /generate."""

    def write(self, rows: Iterable[Row]) -> bytes:
        touched: dict[int, None] = {}
        for row in rows:
            if self.take(row):
                touched[row.choice] = None
        return b"".join(frame(encode(self.value_of(index))) for index in touched)

    def end(self, checked: Sequence[Checked]) -> bytes:
        frames = b""
        if self.ask.call.prompt_only:
            self.check_only(checked)
            values = [self.value_of(index) for index in range(len(self.answers))]
            frames = b"".join(frame(encode(value)) for value in values)
        return frames + DONE

    def fail(self, problem: Problem) -> bytes:
        return frame(error_body(problem)) + DONE
