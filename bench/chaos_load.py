"""This file is the load that `bench/chaos.py` breaks processes under: so many streams, always open,
each compared token by token with what the undisturbed server said.

It knows HTTP only. A plan (prompt, length, seed, kind) says the same thing every time it is asked;
each place asks its own plan again and again. Where the process that holds the connections is broken
too, clients come back with the last event that they have (`docs/streams.md`).
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from bench.client import CUT, Client, Connection, Outcome, Said

WORDS = "house room letter door window stair lamp table river stone cloud".split()
CONNECT_AGAIN_S = 0.05
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 60},
        "colours": {"type": "array", "items": {"enum": ["red", "green", "blue"]}, "minItems": 4},
        "parts": {
            "type": "array",
            "items": {
                "type": "object",
                "properties": {"size": {"type": "integer"}, "is_new": {"type": "boolean"}},
                "required": ["size", "is_new"],
                "additionalProperties": False,
            },
        },
    },
    "required": ["name", "colours", "parts"],
    "additionalProperties": False,
}
VERSES = [" ".join(WORDS[n:] + WORDS[:n]) for n in range(4)]
# What a request may have, by the kind of its stream.
KINDS: dict[str, dict[str, object]] = {
    "plain": {"ignore_eos": True},
    "penalised": {"ignore_eos": True, "frequency_penalty": 0.6, "repetition_penalty": 1.2},
    "logprobs": {"ignore_eos": True, "logprobs": 3},
    "choices": {"ignore_eos": True, "n": 2},
    "stopped": {"ignore_eos": True, "stop": ["ou", "q", ". "], "min_tokens": 20},
    "regex": {"structured_outputs": {"regex": "( ?[a-z]{1,9}){120}"}},
    "schema": {"structured_outputs": {"json": SCHEMA}},
    "forced": {"structured_outputs": {"choice": VERSES}},
}


class Plan(NamedTuple):
    """What one client asks."""

    prompt: str
    max_tokens: int
    seed: int
    kind: str = "plain"

    def body(self, model: str) -> dict[str, object]:
        return {
            "model": model,
            "prompt": self.prompt,
            "max_tokens": self.max_tokens,
            "seed": self.seed,
            "temperature": 0.7,
            "stream": True,
            "return_token_ids": True,
            **KINDS[self.kind],
        }


def plans(count: int, tokens: int, kinds: Sequence[str] = ("plain",)) -> list[Plan]:
    """`kinds` in turn."""
    rng = random.Random("plans")
    return [
        Plan(
            " ".join(rng.choice(WORDS) for _ in range(rng.randint(3, 40))),
            rng.randint(tokens // 2, tokens),
            rng.randrange(1000),
            kinds[nth % len(kinds)],
        )
        for nth in range(count)
    ]


# What a stream has said, by choice.
Spoken = dict[int, Said]


class Stream:
    """One open stream. `times` are of the wall clock, as in the server's log."""

    def __init__(self, place: int) -> None:
        self.place = place
        self.ids_len = 0
        self.told_len = 0  # of these, by the connection that it has now
        self.times: list[float] = []  # of each event that carried tokens
        self.is_equal: bool | None = None  # known at its end
        self.error: str | None = None
        self.breaks: list[float] = []  # when its connection was lost


class Load:
    """All places. `heard` is called whenever a stream has got tokens."""

    def __init__(
        self, url: str, model: str, asked: list[Plan], *, comes_back: bool = False
    ) -> None:
        self.comes_back = comes_back
        self.client = Client(url)
        self.model = model
        self.asked = asked
        self.right: list[Spoken] = []
        self.open: dict[int, Stream] = {}  # by place
        self.ended: list[Stream] = []  # since they were last taken
        self.heard: Callable[[Stream], None] | None = None
        self._tasks: list[asyncio.Task[None]] = []

    async def learn(self) -> int:
        """Asks every plan twice, all at once; how many said the same both times. What they say is
        from then on right."""
        first = await self._all_once()
        self.right = await self._all_once()
        return sum(a == b for a, b in zip(first, self.right, strict=True))

    async def _all_once(self) -> list[Spoken]:
        found = await asyncio.gather(*(self._ask(plan) for plan in self.asked))
        failed = [outcome.error for outcome in found if outcome.error]
        assert not failed, failed[0]
        return [outcome.said() for outcome in found]

    def ids_len(self, place: int) -> int:
        """How many tokens the stream of a place gets, in all its choices."""
        return sum(len(said.ids) for said in self.right[place].values())

    async def _ask(
        self,
        plan: Plan,
        heard: Callable[[Connection], None] | None = None,
        event_id: str = "",
    ) -> Outcome:
        headers = {"Last-Event-ID": event_id} if event_id else {}
        if self.comes_back and not event_id:
            headers = {"X-Stream-Resume": "1"}
        body = plan.body(self.model)
        return await self.client.stream("/v1/completions", body, heard, headers)

    def start(self) -> None:
        self._tasks = [asyncio.create_task(self._keep(place)) for place in range(len(self.asked))]

    async def stop(self) -> None:
        """Cuts what is open."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _keep(self, place: int) -> None:
        while True:
            stream = self.open[place] = Stream(place)

            def heard(connection: Connection, stream: Stream = stream) -> None:
                if connection.ids_len > stream.told_len:
                    stream.ids_len += connection.ids_len - stream.told_len
                    stream.told_len = connection.ids_len
                    stream.times.append(time.time())
                    if self.heard is not None:
                        self.heard(stream)

            plan = self.asked[place]
            outcome = await self._ask(plan, heard)
            parts = [outcome.said()]
            event_id = outcome.event_id
            while self.comes_back and is_broken(outcome):
                stream.breaks.append(time.time())
                await asyncio.sleep(CONNECT_AGAIN_S)
                stream.told_len = 0
                outcome = await self._ask(plan, heard, event_id)
                event_id = outcome.event_id or event_id
                parts.append(outcome.said())
            stream.error = outcome.error
            stream.is_equal = joined(parts) == self.right[place]
            self.ended.append(stream)
            if outcome.error:
                await asyncio.sleep(CONNECT_AGAIN_S)  # it may not be listening

    def take_ended(self) -> list[Stream]:
        found, self.ended = self.ended, []
        return found


def is_broken(outcome: Outcome) -> bool:
    """The connection was lost, or nobody listens, or not yet: nothing that the request led to."""
    return outcome.status in (0, 503) or outcome.error == CUT


def joined(parts: list[Spoken]) -> Spoken:
    """What the connections of one stream have said together."""
    found: Spoken = {}
    for part in parts:
        for index, said in part.items():
            found[index] = found.get(index, Said()).then(said)
    return found
