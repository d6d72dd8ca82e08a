"""This file is one request's output: its tokens become text, until the scheduler or a stop string
ends it.

It does not know actors: it is given `Tail`s and answers with the `Delta` for the gateway, and says
when a stop string was met. Laws: exactly one Delta has a `finish`, and it is the last; what is sent
after n tokens depends only on those n tokens, so that a replay of them leaves the same state; token
counts are the ones of the client's text (a stop string's last token included, later ones not).
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from actors.detokenizer.pattern import automaton_of
from actors.detokenizer.stop import StopMatcher, StopStrings
from actors.detokenizer.stream import open_stream
from actors.vocab.pieces import Pieces
from messages.base import Address
from messages.detokenizer import Open, Tail
from messages.gateway import Delta, TokenLogprob
from messages.types import FinishReason, Int32s, Logprob, Usage, unpack


class Output:
    """From `Open` to the last `Tail`."""

    __slots__ = (
        "attempt",
        "ended",
        "is_first",
        "is_plain",
        "life",
        "matcher",
        "min_tokens",
        "prompt_usage",
        "reply_to",
        "request",
        "spans",
        "stream",
        "text_len",
        "token_bytes",
        "token_count",
        "want_token_ids",
    )

    def __init__(
        self, opened: Open, pieces: Pieces, token_bytes: Sequence[bytes], life: int = 0
    ) -> None:
        """At its beginning, or behind the tokens that the client already has. `life`: that of the
        scheduler which runs it."""
        rules = opened.stop
        self.request = opened.request
        self.attempt = opened.attempt
        self.life = life
        self.reply_to: Address = opened.reply_to
        self.token_bytes = token_bytes
        self.want_token_ids = rules.want_token_ids
        self.min_tokens = rules.min_tokens
        self.prompt_usage = opened.usage
        self.stream = open_stream(
            pieces, skip_special=rules.skip_special, continues=rules.continues_prompt
        )
        self.matcher = (
            StopMatcher(
                StopStrings(rules.strings),
                keep_match=rules.keep_match,
                patterns=automaton_of(rules.patterns, rules.pattern_chars_max)
                if rules.patterns
                else None,
            )
            if rules.strings or rules.patterns
            else None
        )
        self.token_count = 0
        self.text_len = 0  # characters, with what the matcher holds back
        self.spans: array[int] | None = array("i") if rules.want_spans else None
        self.ended = False  # the client has its finish; the scheduler has not said so yet
        self.is_first = True  # nothing has been sent
        self.is_plain = False  # what is said from now on is text alone, up to the end
        self.push(unpack(opened.emitted))
        self.take_spans()

    @property
    def matched(self) -> str | None:
        return None if self.matcher is None else self.matcher.matched

    def push(self, token_ids: Sequence[int]) -> str:
        """The text that these tokens release. Stops counting at the one that completes a match."""
        push = self.stream.push if self.spans is None else self.push_measured
        matcher = self.matcher
        if matcher is None:
            self.token_count += len(token_ids)
            if len(token_ids) == 1:
                return push(token_ids[0])
            return "".join([push(token_id) for token_id in token_ids])
        released = []
        for token_id in token_ids:
            if matcher.matched is not None:
                break
            self.token_count += 1
            text = push(token_id)
            if text:
                released.append(matcher.push(text, counts=self.token_count > self.min_tokens))
        return "".join(released)

    def push_measured(self, token_id: int) -> str:
        assert self.spans is not None
        text = self.stream.push(token_id)
        self.text_len += len(text)
        self.spans.append(self.text_len)
        return text

    def take_spans(self, count: int = 0) -> Int32s:
        """Those of the last `count` tokens; of those that are no text, where the text ends."""
        if self.spans is None:
            return b""
        spans, self.spans = self.spans, array("i")
        spans.extend([self.text_len] * (count - len(spans)))
        return spans.tobytes()

    def finish(self) -> str:
        """The text that was waiting for more."""
        text = self.stream.finish()
        matcher = self.matcher
        if matcher is None:
            return text
        released = matcher.push(text, counts=self.token_count > self.min_tokens) if text else ""
        return released + matcher.finish() if matcher.matched is None else released

    def follows(self, tail: Tail) -> bool:
        """False where tokens are missing in between: no text can be right then."""
        return self.ended or tail.index == self.token_count

    def take(self, tail: Tail) -> Delta | None:
        """What the client gets for this tail; None after its finish, or where there is nothing.

        The tail must follow on what came before: see `follows`.
        """
        if self.ended:
            return None
        if tail.prompt_logprobs:
            return self.tell_prompt(tail)
        if not tail.tokens and tail.finish is None:
            return None
        assert self.follows(tail), (tail.index, self.token_count)
        token_ids = unpack(tail.tokens)
        if tail.finish is None and self.is_plain and not (tail.logprobs or tail.vector):
            return Delta(  # as are most: text, and nothing else to be said
                request=self.request,
                attempt=self.attempt,
                index=tail.index,
                token_count=len(token_ids),
                text=self.push(token_ids),
                token_ids=tail.tokens if self.want_token_ids else b"",
            )
        text, told = self.take_text(tail, token_ids)
        count = self.token_count - tail.index
        finish, matched, usage = tail.finish, tail.matched, tail.usage
        stop = self.matched
        reason: str | int | None = matched
        if stop is not None:
            finish, reason = FinishReason.STOP, stop
            usage = Usage(
                prompt_tokens=(usage or self.prompt_usage).prompt_tokens,
                completion_tokens=self.token_count,
                cached_tokens=(usage or self.prompt_usage).cached_tokens,
            )
        self.ended = finish is not None
        if self.is_first and usage is None:
            usage = self.prompt_usage
        self.is_first = False
        self.is_plain = self.matcher is None and self.spans is None
        return Delta(
            request=self.request,
            attempt=self.attempt,
            index=tail.index,
            token_count=count,
            text=text,
            token_ids=tail.tokens[: 4 * count] if self.want_token_ids else b"",
            logprobs=self.spell(tail.logprobs[:count]) if told else (),
            finish=finish,
            matched=reason,
            usage=usage,
            problem=tail.problem if stop is None else None,
            spans=self.take_spans(count),
            vector=tail.vector,
        )

    def tell_prompt(self, tail: Tail) -> Delta:
        return Delta(
            request=self.request,
            attempt=self.attempt,
            index=tail.index,
            token_count=0,
            prompt_logprobs=self.spell(tail.prompt_logprobs),
            prompt_index=tail.prompt_index,
        )

    def take_text(self, tail: Tail, token_ids: array[int]) -> tuple[str, bool]:
        """The tail's text, and whether it has log probabilities."""
        told = bool(tail.logprobs)
        if tail.finish is None:
            return (self.push(token_ids) if self.matched is None else ""), told
        silent = 0  # the stop id counts as a token, and is no text
        if tail.matched is not None and token_ids and token_ids[-1] == tail.matched:
            silent = 1
        text = ""
        if self.matched is None:
            text = self.push(token_ids[: len(token_ids) - silent])
        if self.matched is None:
            self.token_count += silent
            text += self.finish()
        return text, told

    def spell(self, logprobs: Sequence[Logprob]) -> tuple[TokenLogprob, ...]:
        return tuple(
            TokenLogprob(
                token=self.bytes_of(row.token_id),
                token_id=row.token_id,
                logprob=row.logprob,
                best=tuple((self.bytes_of(i), i, logprob) for i, logprob in row.best),
            )
            for row in logprobs
        )

    def bytes_of(self, token_id: int) -> bytes:
        # Models have more rows than their tokenizers have tokens, to fill up a multiple of 64.
        return self.token_bytes[token_id] if token_id < len(self.token_bytes) else b""

    def check(self) -> None:
        if self.matcher is not None and self.matcher.matched is None:
            self.matcher.check()
        assert self.matched is None or not self.token_count < self.min_tokens, self.token_count
