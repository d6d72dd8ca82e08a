"""The gateway in bad weather: messages lost, parts dying, clients leaving, in any order.

The dull model: the output of each request is a fixed text of its own. Whatever happens, a stream
that ends well has exactly that text, one that does not has a prefix of it and one clear error, and
in the end nothing is left.
"""

from __future__ import annotations

import random
from typing import Any

import pytest

from actors.gateway.call import Call, Prompt
from actors.gateway.errors import Refused
from actors.gateway.stream import Stream
from actors.runtime.testkit import Cell
from messages.gateway import Delta, Deltas, Encoded, Unknown
from messages.scheduler import Poll
from messages.tokenizer import Cancel, Encode
from messages.types import FinishReason, Usage, pack, unpack
from tests.gateway.test_actor import gateway_of, run, started

PARTS = ("tokenizer", "router", "replica/scheduler", "replica/cache", "replica/worker")
CALL = Call(prompts=(Prompt(text="a"), Prompt(text="b")), choice_count=2)
SINGLE = Call(prompts=(Prompt(text="a"),))


def output_of(request: str) -> list[int]:
    """The tokens of a request, whoever makes them, in whichever attempt."""
    rng = random.Random(request)
    return [rng.randrange(26) for _ in range(rng.randrange(1, 12))]


def text_of(ids: list[int]) -> str:
    return "".join(chr(97 + token) for token in ids)


class Weather:
    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.cell: Cell = started(recover_s=1000.0)
        self.queue: list[Any] = []  # on the way to the back end
        self.running: dict[str, tuple[int, int]] = {}  # request: attempt, next token
        self.late: list[Delta] = []  # on the way to the gateway, from attempts that may be over
        self.streams: list[tuple[Stream, list[str]]] = []
        self.down: set[str] = set()

    def collect(self) -> None:
        self.queue += [message for _, message in self.cell.take()]

    def open(self) -> None:
        stream = gateway_of(self.cell).open(self.rng.choice((CALL, SINGLE)))
        self.streams.append((stream, [""] * stream.call.request_count))

    def work(self) -> None:
        """The back end takes one message, or makes one token."""
        self.collect()
        if self.queue and self.rng.random() < 0.6:
            self.take(self.queue.pop(0))
        elif self.running:
            request = self.rng.choice(sorted(self.running))
            attempt, index = self.running[request]
            self.deliver(self.token(request, attempt, index))

    def take(self, message: Any) -> None:
        if isinstance(message, Cancel):
            running = self.running.get(message.request)
            if running is not None and running[0] == message.attempt:
                del self.running[message.request]
            end = Delta(message.request, message.attempt, 0, 0, finish=FinishReason.ABORT)
            self.cell.tell(Deltas((end,)))
            return
        if isinstance(message, Poll):
            running = {(request, attempt) for request, (attempt, _) in self.running.items()}
            unknown = tuple(row for row in message.rows if row not in running)
            if unknown:
                self.cell.tell(Unknown(unknown))
            return
        assert isinstance(message, Encode)
        emitted = list(unpack(message.emitted))
        assert emitted == output_of(message.request)[: len(emitted)]
        self.cell.tell(Encoded(message.request, message.attempt, 3, pack([1, 2, 3])))
        if message.forward:
            self.running[message.request] = (message.attempt, len(emitted))

    def token(self, request: str, attempt: int, index: int) -> Delta:
        ids = output_of(request)
        is_end = index + 1 >= len(ids)
        if is_end:
            del self.running[request]
        else:
            self.running[request] = (attempt, index + 1)
        made = ids[index : index + 1]
        return Delta(
            request=request,
            attempt=attempt,
            index=index,
            token_count=len(made),
            text=text_of(made),
            token_ids=pack(made),
            finish=FinishReason.STOP if is_end else None,
            usage=Usage(3, len(ids)) if is_end else None,
        )

    def deliver(self, delta: Delta) -> None:
        """On time, twice, late or, where something after it will show the gap, never."""
        luck = self.rng.random()
        if luck < 0.05 and delta.finish is None:
            return
        if luck < 0.15:
            self.late.append(delta)
        self.cell.tell(Deltas((delta,)))

    def haunt(self) -> None:
        """Something old arrives."""
        if self.late:
            self.cell.tell(Deltas((self.late.pop(self.rng.randrange(len(self.late))),)))

    def lose(self) -> None:
        path = self.rng.choice((*PARTS, "detokenizer"))
        self.down.add(path)
        self.cell.down(path)
        if path == "tokenizer":  # what it had not taken is gone
            self.collect()
            self.queue.clear()
        elif path != "router":  # what runs is gone
            self.running.clear()

    def heal(self) -> None:
        for path in sorted(self.down):
            self.cell.up(path)
        self.down.clear()

    def leave(self) -> None:
        if self.streams:
            stream, _ = self.streams.pop(self.rng.randrange(len(self.streams)))
            stream.close()

    def read(self) -> None:
        for stream, texts in list(self.streams):
            while stream.outbox.rows or stream.outbox.is_over:
                try:
                    rows = run(stream.read())
                except Refused as refused:
                    assert refused.problem.code in ("interrupted", "repeatedly_interrupted")
                    self.streams.remove((stream, texts))
                    self.judge(stream, texts, is_whole=False)
                    break
                if not rows:
                    self.streams.remove((stream, texts))
                    self.judge(stream, texts, is_whole=True)
                    break
                for row in rows:
                    texts[row.choice] += row.delta.text

    def judge(self, stream: Stream, texts: list[str], *, is_whole: bool) -> None:
        for choice, text in enumerate(texts):
            right = text_of(output_of(f"{stream.call_id}.{choice}"))
            assert text == right if is_whole else right.startswith(text)

    def step(self) -> None:
        kinds = (self.open, self.work, self.haunt, self.lose, self.heal, self.leave, self.read)
        weights = (4, 60, 3, 1.5, 6, 1, 10)
        self.rng.choices(kinds, weights)[0]()
        self.cell.advance(self.rng.random() * 0.2)

    def calm(self) -> None:
        """No more faults: all that is open comes to its end."""
        self.heal()
        for _ in range(3000):
            if not self.streams and not len(gateway_of(self.cell).recovery.ledger):
                break
            self.collect()
            if self.queue:
                self.take(self.queue.pop(0))
            elif self.running:
                request = sorted(self.running)[0]
                self.cell.tell(Deltas((self.token(request, *self.running[request]),)))
            self.read()
            self.cell.advance(0.2)


@pytest.mark.parametrize("seed", range(40))
def test_every_stream_ends_once_and_with_its_own_text(seed: int) -> None:
    weather = Weather(seed)
    for _ in range(300):
        weather.step()
    weather.calm()
    gateway = gateway_of(weather.cell)
    assert not weather.streams and not gateway.calls.open and not gateway.calls.streams
    assert len(gateway.recovery.ledger) == 0 and weather.cell.timer_count == 0
