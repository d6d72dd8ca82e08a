"""This file is what clients of a simulated world have got so far, held against what they must get.

It does not know connections, gateways or faults. Laws that each asserts of what it is given: tokens
and text are a prefix of the reference, index after index, none twice; each token has one log
probability, where that is asked for; an end has the whole of it, with usage and reason as they
would be without any trouble.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from actors.gateway.call import Row
from actors.gateway.errors import Refused
from bench.sim.bodies import sampling_of
from bench.sim.scenario import Ask
from bench.sim.site import Exchange, problem_of
from bench.sim.vectors import vector_of
from messages.types import FinishReason, unpack

# What a response that failed says, and the code that the other dialects have for it.
CODES = {
    "gain later": "overloaded",
    "could not be queued": "overloaded",
    "was not back in time": "interrupted",
    "it is not tried again": "repeatedly_interrupted",
    "was not compiled within": "grammar_timeout",
}


def vector_for(ask: Ask) -> bytes:
    """What the model makes of its prompt, where that is asked for."""
    cells = [(token, at, ask.namespace) for at, token in enumerate(ask.prompt)]
    return vector_of(cells, sampling_of(ask))


class Got:
    """What one choice of a call has got."""

    def __init__(self, client: Any, choice: int) -> None:
        self.ask = client.ask
        self.right = client.rights[choice]
        self.prompt_len = len(client.ask.prompt)
        self.vector = b""
        self.wanted = vector_for(client.ask)
        self.tokens: list[int] = []
        self.text = ""
        self.finish: FinishReason | None = None

    def take(self, row: Row) -> None:
        delta, right = row.delta, self.right
        assert self.finish is None, "a delta after the last"
        assert delta.index == len(self.tokens), f"{delta.index} after {len(self.tokens)} tokens"
        new = list(unpack(delta.token_ids))
        self.tokens += new
        self.text += delta.text
        self.vector += delta.vector
        assert self.tokens == right.tokens[: len(self.tokens)], "other tokens than alone"
        assert right.text.startswith(self.text), f"{self.text!r} is not {right.text!r}"
        if self.ask.logprobs and new:
            rows = zip(new, delta.logprobs, strict=True)
            for nth, (token, entry) in enumerate(rows, delta.index + 1):
                assert entry.token_id == token, f"{entry.token_id}, not {token}"
                assert_logprob(self.ask, nth, entry.logprob)
        self.finish = delta.finish
        if delta.finish is not None:
            assert delta.finish is right.finish, f"{delta.finish}, not {right.finish}"
            assert delta.matched == right.matched, f"{delta.matched!r}, not {right.matched!r}"
            usage = delta.usage
            assert usage is not None, "an end without usage"
            assert usage.prompt_tokens == self.prompt_len, usage
            assert usage.completion_tokens == len(right.tokens), (usage, len(right.tokens))
            assert usage.cached_tokens < usage.prompt_tokens, usage

    def assert_whole(self) -> None:
        assert self.finish is not None, "an end without a finish"
        assert self.tokens == self.right.tokens, f"{len(self.tokens)} tokens came"
        assert self.text == self.right.text, f"{self.text!r} is not {self.right.text!r}"
        assert self.vector == self.wanted, f"{self.vector!r} is not {self.wanted!r}"


class Answer:
    """What one HTTP client has got, over all its connections."""

    calls: Sequence[Sequence[tuple[str, str]]] = ()  # of each choice
    is_within_call = False  # one that the model has chosen to make

    def __init__(self, client: Any) -> None:
        self.ask = client.ask
        self.rights = rights = client.rights
        self.logprobs: list[list[float]] = [[] for _ in rights]
        self.texts = [""] * len(rights)
        self.finishes: list[str | None] = [None] * len(rights)
        self.usage: dict[str, Any] | None = None
        self.last_id = ""
        self.is_over = False

    def take(self, exchange: Exchange) -> None:
        """The events of one connection. Raises Refused for a failure."""
        if exchange.status != 200:
            self.raise_refusal(exchange)
            return
        for event in exchange.events():
            if event.data is None:
                self.is_over = True
                continue
            if "error" in event.data:
                # A stream that has begun has no header left for it.
                raise Refused(problem_of(503, event.data["error"], "0"))
            self.last_id = event.id or self.last_id
            self.usage = event.data.get("usage") or self.usage
            for choice in event.data["choices"]:
                index = choice["index"]
                assert self.finishes[index] is None, "text after a finish"
                self.take_choice(index, choice)
                self.finishes[index] = choice["finish_reason"]
                self.take_logprobs(index, choice)
        self.check()

    def take_whole(self, exchange: Exchange) -> None:
        """An answer that is no stream."""
        if exchange.status != 200:
            self.raise_refusal(exchange)
            return
        if not exchange.is_complete:
            return
        self.take_body(exchange.json())

    def take_body(self, body: dict[str, Any]) -> None:
        self.finishes = [choice["finish_reason"] for choice in body["choices"]]
        for index, choice in enumerate(body["choices"]):
            self.take_choice(index, choice)
            self.take_logprobs(index, choice)
        self.usage = body["usage"]
        self.is_over = True

    def take_choice(self, index: int, choice: dict[str, Any]) -> None:
        """What one event, or a whole answer, has of a choice."""
        self.texts[index] += choice["text"]

    def check(self) -> None:
        """So far it is right."""
        for text, right in zip(self.texts, self.rights, strict=True):
            assert right.text.startswith(text), f"{text!r} is not {right.text!r}"

    def assert_ends(self) -> None:
        assert self.texts == [right.text for right in self.rights], self.texts
        assert self.finishes == [right.finish.value for right in self.rights], self.finishes

    def told(self, choice: dict[str, Any]) -> list[float]:
        """The log probabilities that come with it."""
        return list(choice["logprobs"]["token_logprobs"])

    def take_logprobs(self, index: int, choice: dict[str, Any]) -> None:
        if choice.get("logprobs") is None:
            return
        assert self.ask.logprobs, "log probabilities that nobody asked for"
        for logprob in self.told(choice):
            self.logprobs[index].append(logprob)
            assert_logprob(self.ask, len(self.logprobs[index]), logprob)

    def raise_refusal(self, exchange: Exchange) -> None:
        if exchange.status is None or not exchange.is_complete:
            return  # it is lost
        raise Refused(exchange.problem())

    def assert_whole(self) -> None:
        self.assert_ends()
        assert self.usage is not None, "no usage"
        counts = [len(right.tokens) for right in self.rights]
        assert self.usage["completion_tokens"] == sum(counts), (self.usage, counts)
        if self.ask.logprobs:
            assert [len(each) for each in self.logprobs] == counts, (self.logprobs, counts)


class Story:
    """The events of a response that is made in the background, over all visits."""

    def __init__(self, client: Any) -> None:
        self.right = client.rights[0]
        self.response_id = ""
        self.kinds: list[str] = []
        self.text = ""
        self.last: dict[str, Any] = {}

    @property
    def is_over(self) -> bool:
        return bool(self.last)

    def take(self, exchange: Exchange) -> None:
        """The events of one visit. Raises Refused for a failure."""
        for event in exchange.events():
            data = event.data
            assert data["sequence_number"] == len(self.kinds), (data, self.kinds)
            kind = data["type"]
            self.kinds.append(kind)
            if "response" in data:
                self.response_id = data["response"]["id"]
            if kind == "response.output_text.delta":
                self.text += data["delta"]
                assert self.right.text.startswith(self.text), (self.text, self.right.text)
            if kind in ("response.completed", "response.incomplete"):
                self.last = data["response"]
            if kind == "response.failed":
                # The dialect has one code for all of them.
                error = data["response"]["error"]
                known = (code for words, code in CODES.items() if words in error["message"])
                code = next(known, error["code"])
                raise Refused(problem_of(503, {**error, "code": code}, "0"))

    def assert_whole(self) -> None:
        right, last = self.right, self.last
        assert self.text == right.text, f"{self.text!r} is not {right.text!r}"
        is_cut = right.finish is FinishReason.LENGTH
        assert last["status"] == ("incomplete" if is_cut else "completed"), last
        assert last["usage"]["output_tokens"] == len(right.tokens), (last["usage"], right)


def assert_native(client: Any, found: dict[str, Any]) -> None:
    """The whole answer of /generate."""
    ask, right = client.ask, client.rights[0]
    meta = found["meta_info"]
    assert found["output_ids"] == right.tokens, f"{found['output_ids']}, not {right.tokens}"
    assert found["text"] == right.text, f"{found['text']!r} is not {right.text!r}"
    reason = meta["finish_reason"]
    assert reason["type"] == right.finish.value, (reason, right.finish)
    assert reason.get("matched") == right.matched, (reason, right.matched)
    assert meta["prompt_tokens"] == len(ask.prompt), meta
    assert meta["completion_tokens"] == len(right.tokens), meta
    if ask.logprobs:
        told = meta["output_token_logprobs"]
        assert [token for _, token, _ in told] == right.tokens, told
        for index, (logprob, _, _) in enumerate(told, 1):
            assert_logprob(ask, index, logprob)


def assert_logprob(ask: Ask, nth: int, logprob: float | None) -> None:
    """Of the nth token of an answer, from 1 on. The probability of what is forced is 1."""
    expected = -(len(ask.prompt) + nth)
    is_forced = bool(ask.grammar) and logprob == 0.0
    assert is_forced or logprob == expected, f"{logprob}, not {expected}"
