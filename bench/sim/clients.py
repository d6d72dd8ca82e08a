"""This file is the clients of a simulated world: they ask, read in their ways, and judge.

They do not know faults. Some speak to the gateway as the Engine does, some by ASGI as HTTP clients
do. Laws that each asserts of what it gets: tokens are a prefix of the reference, index after index,
none twice; an end has the whole of it, with text, usage, log probabilities and reason as they would
be without any trouble; a failure is a typed problem that explains itself.
"""

from __future__ import annotations

import asyncio
from typing import Any, NamedTuple

import msgspec

from actors.gateway.actor import Gateway
from actors.gateway.call import Call, Prompt, Row
from actors.gateway.errors import Refused
from actors.gateway.http import App
from actors.vocab.vocab import Vocab
from bench.sim.rooms import END
from bench.sim.scenario import Ask
from messages.types import FinishReason, Problem, Sampling, StopRules, pack, unpack


class Right(NamedTuple):
    """What one choice must come to."""

    tokens: list[int]
    text: str
    finish: FinishReason
    matched: str | int | None


def right_of(ask: Ask, choice: int, vocab: Vocab) -> Right:
    """A plain function of what was asked: no batch, page or crash in sight."""
    tokens = ask.tokens(choice)
    last = tokens[-1]
    ends = set(ask.stop_ids) | (set() if ask.ignore_eos else {END})
    spoken = tokens[:-1] if last in ends else tokens  # a stop id is no text
    if ask.stop:
        for count in range(1, len(spoken) + 1):
            text = vocab.decode(spoken[:count])
            if ask.stop in text:
                return Right(
                    tokens[:count], text[: text.index(ask.stop)], FinishReason.STOP, ask.stop
                )
    if last in ends:
        return Right(tokens, vocab.decode(spoken), FinishReason.STOP, last)
    return Right(tokens, vocab.decode(tokens), FinishReason.LENGTH, None)


def with_stop(ask: Ask, vocab: Vocab, pick: float) -> Ask:
    """Gives it a stop string that its own text meets, perhaps across two tokens."""
    text = vocab.decode(ask.tokens(0)[: 1 + int(pick * ask.max_tokens)])
    end = len(text)
    stop = text[max(0, end - 1 - int(pick * 7) % 3) :]
    return ask._replace(stop=stop) if stop and "\ufffd" not in stop else ask


class Outcome(NamedTuple):
    ask: Ask
    is_whole: bool
    problem: Problem | None  # of the last try, where it is not whole
    tries: int
    begin_s: float  # of the last try
    end_s: float


class Lost(Exception):
    """The connection is gone: with its gateway."""


class Client:
    """One ask, tried again where the connection itself was lost."""

    def __init__(self, ask: Ask, world: Any) -> None:
        self.ask = ask
        self.world = world
        self.rights = [right_of(ask, i, world.vocab) for i in range(ask.choice_count)]
        self.tries = 0
        self.begin_s = 0.0

    async def run(self) -> Outcome:
        loop = asyncio.get_running_loop()
        await asyncio.sleep(self.ask.at_s)
        while True:
            self.tries += 1
            self.begin_s = loop.time()
            problem: Problem | None = None
            is_whole = False
            try:
                gateway = await self.world.gateway()
                if gateway is None:
                    return Outcome(self.ask, False, None, self.tries, self.begin_s, loop.time())
                by_http = self.ask.reader.startswith("http")
                is_whole = await (self.by_http if by_http else self.by_call)(gateway)
            except Refused as refused:
                problem = refused.problem
                if await self.world.gateway_died_since(self.begin_s, problem):
                    continue
            except Lost:
                died = await self.world.gateway_died_since(self.begin_s, None)
                assert died, "a connection was dropped"
                continue
            return Outcome(self.ask, is_whole, problem, self.tries, self.begin_s, loop.time())

    # As the Engine

    async def by_call(self, gateway: Gateway) -> bool:
        ask = self.ask
        call = Call(
            prompts=(Prompt(ids=pack(ask.prompt)),),
            choice_count=ask.choice_count,
            sampling=Sampling(
                seed=ask.seed,
                ignore_eos=ask.ignore_eos,
                max_tokens=ask.max_tokens,
                stop_ids=ask.stop_ids,
                logprobs=0 if ask.logprobs else None,
            ),
            stop=StopRules(strings=(ask.stop,) if ask.stop else ()),
            namespace=ask.namespace,
        )
        suffix = f"~{ask.namespace}" if ask.namespace else ""
        stream = gateway.open(call, f"{ask.name}-{self.tries}{suffix}")
        got = [Got(self, i) for i in range(ask.choice_count)]
        try:
            while rows := await stream.read():
                for row in rows:
                    got[row.choice].take(row)
                count = sum(len(one.tokens) for one in got)
                if ask.reader == "leaves" and count >= ask.after:
                    return False
                if ask.reader == "slow":
                    await asyncio.sleep(ask.pause_s)
                if ask.reader == "stuck" and count >= ask.after:
                    await asyncio.sleep(gateway.config.stream_stall_s + 3.0)
        finally:
            stream.close()
        for one in got:
            one.assert_whole()
        return True

    # As HTTP

    async def by_http(self, gateway: Gateway) -> bool:
        ask = self.ask
        body: dict[str, Any] = {
            "model": gateway.limits.model,
            "prompt": list(ask.prompt),
            "max_tokens": ask.max_tokens,
            "seed": ask.seed,
            "n": ask.choice_count,
            "ignore_eos": ask.ignore_eos,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if ask.stop:
            body["stop"] = [ask.stop]
        if ask.stop_ids:
            body["stop_token_ids"] = list(ask.stop_ids)
        exchange = Exchange(self, msgspec.json.encode(body))
        try:
            await App(gateway)(exchange.scope, exchange.receive, exchange.send)
        finally:
            exchange.is_over = True
        if exchange.has_left:
            return False
        return exchange.judge()


class Got:
    """What one choice of a call has got."""

    def __init__(self, client: Client, choice: int) -> None:
        self.right = client.rights[choice]
        self.prompt_len = len(client.ask.prompt)
        self.wants_logprobs = client.ask.logprobs
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
        assert self.tokens == right.tokens[: len(self.tokens)], "other tokens than alone"
        assert right.text.startswith(self.text), f"{self.text!r} is not {right.text!r}"
        if self.wants_logprobs and new:
            told = [(entry.token_id, entry.logprob) for entry in delta.logprobs]
            first = self.prompt_len + delta.index + 1
            assert told == [(token, -(first + i)) for i, token in enumerate(new)], told
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


class Exchange:
    """One HTTP request, at the level of ASGI."""

    def __init__(self, client: Client, body: bytes) -> None:
        self.client = client
        self.status: int | None = None
        self.body = b""
        self.is_complete = False
        self.is_cut = False
        self.has_left = False
        self.is_over = False
        self.inbox: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self.inbox.put_nowait({"type": "http.request", "body": body, "more_body": False})
        self.scope = {
            "type": "http",
            "method": "POST",
            "path": "/v1/completions",
            "headers": [(b"content-type", b"application/json")],
            "query_string": b"",
            "state": {"abort": self.abort},
        }

    def abort(self) -> None:
        self.is_cut = True
        self.inbox.put_nowait({"type": "http.disconnect"})

    async def receive(self) -> Any:
        return await self.inbox.get()

    async def send(self, message: Any) -> None:
        ask = self.client.ask
        if message["type"] == "http.response.start":
            assert self.status is None, "a second response"
            self.status = message["status"]
            return
        assert self.status is not None and not self.is_complete, "bytes after the end"
        self.body += message.get("body", b"")
        if not message.get("more_body", False):
            self.is_complete = True
            self.inbox.put_nowait({"type": "http.disconnect"})
            return
        if ask.reader == "http slow":
            await asyncio.sleep(ask.pause_s)
        events = self.body.count(b"data: ")
        if ask.reader == "http leaves" and events > ask.after and not self.has_left:
            self.has_left = True
            self.inbox.put_nowait({"type": "http.disconnect"})

    def judge(self) -> bool:
        """Whether the answer is whole. Raises Refused for a failure, Lost for a broken one."""
        ask, rights = self.client.ask, self.client.rights
        if self.status != 200:
            if not self.is_complete:
                raise Lost
            raise Refused(problem_of(self.status or 0, msgspec.json.decode(self.body)["error"]))
        texts = [""] * ask.choice_count
        finishes: list[str | None] = [None] * ask.choice_count
        usage = None
        blocks = [block for block in self.body.split(b"\n\n") if block]
        has_done = bool(blocks) and blocks[-1] == b"data: [DONE]"
        for block in blocks:
            data = block.removeprefix(b"data: ")
            if data == b"[DONE]":
                continue
            event = msgspec.json.decode(data)
            if "error" in event:
                raise Refused(problem_of(503, event["error"]))
            usage = event.get("usage") or usage
            for choice in event["choices"]:
                index = choice["index"]
                assert finishes[index] is None, "text after a finish"
                texts[index] += choice["text"]
                finishes[index] = choice["finish_reason"]
        for text, right in zip(texts, rights, strict=True):
            assert right.text.startswith(text), f"{text!r} is not {right.text!r}"
        if self.is_cut or not has_done:
            raise Lost
        assert texts == [right.text for right in rights]
        assert finishes == [right.finish.value for right in rights], finishes
        assert usage is not None, "no usage"
        assert usage["completion_tokens"] == sum(len(right.tokens) for right in rights), usage
        return True


def problem_of(status: int, error: dict[str, Any]) -> Problem:
    from messages.types import Fault

    fault = {503: Fault.UNAVAILABLE, 400: Fault.INVALID}.get(status, Fault.INTERNAL)
    if error["code"] in ("overloaded", "queue_full"):
        fault = Fault.OVERLOADED
    return Problem(fault=fault, message=error["message"], code=error["code"])
