"""This file is the clients of a simulated world: they ask, read in their ways, and judge.

They do not know faults. Some speak to the gateway as the Engine does, some by ASGI as HTTP clients
do. Laws that each asserts of what it gets: tokens are a prefix of the reference, index after index,
none twice; an end has the whole of it, with text, usage, log probabilities and reason as they would
be without any trouble; a failure is a typed problem that explains itself.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, NamedTuple

import msgspec

from actors.gateway.actor import Gateway
from actors.gateway.call import Call, Prompt, Row
from actors.gateway.errors import Refused
from actors.gateway.pattern import read_pattern
from actors.gateway.stream import Stream
from actors.runtime.life import Life
from bench.sim.scenario import Ask
from bench.sim.site import Exchange, Lost, problem_of
from bench.sim.vectors import LABEL_IDS, vector_of
from messages.types import (
    FinishReason,
    Grammar,
    Problem,
    Sampling,
    StopRules,
    pack,
    unpack,
    unpack_floats,
)

PATH = "/v1/completions"
EMBEDDINGS = "/v1/embeddings"
RESPONSES = "/v1/responses"
# What a response that failed says, and the code that the other dialects have for it.
CODES = {
    "gain later": "overloaded",
    "could not be queued": "overloaded",
    "was not back in time": "interrupted",
    "it is not tried again": "repeatedly_interrupted",
    "was not compiled within": "grammar_timeout",
}


class Outcome(NamedTuple):
    ask: Ask
    is_whole: bool
    problem: Problem | None  # of the last try, where it is not whole
    tries: int
    asked: int  # sequences, in all tries and visits
    begin_s: float  # of the last try
    end_s: float
    came_s: float  # the first try

    @property
    def is_unserved(self) -> bool:
        """There was nobody any more to ask."""
        return not self.is_whole and self.problem is None


class Client:
    """One ask, tried again where the connection itself was lost."""

    def __init__(self, ask: Ask, world: Any) -> None:
        self.ask = ask
        self.world = world
        impossible = ask._replace(grammar=()) if ask.is_impossible else ask
        self.rights = [world.oracle.right(impossible, i) for i in range(ask.choice_count)]
        self.tries = 0
        self.begin_s = self.came_s = 0.0
        # Of one that comes back:
        self.visits = 0
        self.answer = Answer(self)
        self.was_at: Life | None = None
        self.life: Life  # whose connection it last had

    async def run(self) -> Outcome:
        loop = asyncio.get_running_loop()
        await asyncio.sleep(self.ask.at_s)
        self.came_s = loop.time()
        while True:
            self.tries += 1
            try_s = loop.time()
            if not self.answer.last_id:  # else the stream that it comes back to is older
                self.begin_s = try_s
            problem: Problem | None = None
            is_whole = False
            life = await self.world.gateway(self.ask.front + self.tries - 1)
            if life is None:
                return self.outcome(False, None)
            self.life = life
            try:
                is_whole = await self.way()(life)
            except Refused as refused:
                problem = refused.problem
                if await self.world.gateway_died_since(self.life, try_s, problem):
                    continue
            except Lost:
                died = await self.world.gateway_died_since(self.life, try_s, None)
                assert died, "a connection was dropped"
                self.was_at = None
                continue
            return self.outcome(is_whole, problem)

    def outcome(self, is_whole: bool, problem: Problem | None) -> Outcome:
        asked = self.ask.choice_count * (self.tries + self.visits)
        now_s = asyncio.get_running_loop().time()
        return Outcome(
            self.ask, is_whole, problem, self.tries, asked, self.begin_s, now_s, self.came_s
        )

    def way(self) -> Callable[[Life], Awaitable[bool]]:
        if not self.ask.reader.startswith("http"):
            return self.by_call
        match self.ask.reader:
            case "http returns":
                return self.by_returning
            case "http background":
                return self.by_background
        return self.by_embedding if self.ask.wants else self.by_http

    # As the Engine

    async def by_call(self, life: Life) -> bool:
        ask, gateway = self.ask, gateway_of(life)
        call = Call(
            prompts=(Prompt(text=ask.text) if ask.text else Prompt(ids=pack(ask.prompt)),),
            choice_count=ask.choice_count,
            sampling=sampling_of(ask),
            stop=StopRules(
                strings=(ask.stop,) if ask.stop else (),
                patterns=(read_pattern(ask.stop_pattern),) if ask.stop_pattern else (),
            ),
            namespace=ask.namespace,
            grammar=Grammar(*ask.grammar) if ask.grammar else None,
        )
        suffix = f"~{ask.namespace}" if ask.namespace else ""
        stream = gateway.open(call, f"{ask.name}-{self.tries}{suffix}")
        got = [Got(self, i) for i in range(ask.choice_count)]
        if ask.reader == "hasty":
            await asyncio.sleep(ask.pause_s)
            stream.close()
            self.world.left(life, stream.call_id)
            return False
        try:
            while rows := await stream.read():
                for row in rows:
                    got[row.choice].take(row)
                count = sum(len(one.tokens) for one in got)
                if ask.reader == "leaves" and count >= ask.after:
                    stream.close()
                    self.world.left(life, stream.call_id)
                    return False
                if ask.reader == "slow":
                    await asyncio.sleep(ask.pause_s)
                if ask.reader == "stuck" and count >= ask.after:
                    await self.leave_unread(life, stream)
        finally:
            stream.close()
        for one in got:
            one.assert_whole()
        return True

    async def leave_unread(self, life: Life, stream: Stream) -> None:
        """Longer than a gateway allows; it must have been cut then, if there was something."""
        world, loop = self.world, asyncio.get_running_loop()
        begin_s = loop.time()
        stall_s = gateway_of(life).config.stream_stall_s
        await asyncio.sleep(stall_s + 3.0)
        unread_s = stream.outbox.unread_since_s
        is_calm = not life.is_dead and world.judge.trouble_before(loop.time()) < begin_s
        if unread_s is not None and is_calm:
            waited_s = loop.time() - unread_s
            assert waited_s < stall_s + 2.0, f"unread for {waited_s:g} s, and not cut"

    # As HTTP

    def body(self) -> bytes:
        ask = self.ask
        body: dict[str, Any] = {
            "model": "tiny",
            "prompt": ask.text or list(ask.prompt),
            "max_tokens": ask.max_tokens,
            "seed": ask.seed,
            "n": ask.choice_count,
            "ignore_eos": ask.ignore_eos,
            "stream": ask.reader != "http whole",
        }
        if ask.reader != "http whole":
            body["stream_options"] = {"include_usage": True}
        if ask.stop:
            body["stop"] = [ask.stop]
        if ask.stop_pattern:
            body["stop_regex"] = ask.stop_pattern
        if ask.logprobs:
            body["logprobs"] = 0
        if ask.stop_ids:
            body["stop_token_ids"] = list(ask.stop_ids)
        if ask.penalised:
            body["frequency_penalty"] = 0.5
        if ask.grammar:
            kind, text = ask.grammar
            is_text = kind in ("regex", "ebnf")
            names = {"choice": "guided_choice", "json_schema": "guided_json"}
            body[names.get(kind, kind)] = text if is_text else msgspec.Raw(text.encode())
        return msgspec.json.encode(body)

    async def by_http(self, life: Life) -> bool:
        ask, site = self.ask, self.world.site(life)
        name = f"{ask.name}-{self.tries}"
        exchange = Exchange(
            "POST",
            PATH,
            self.body(),
            {"x-request-id": name},
            pause_s=ask.pause_s if ask.reader == "http slow" else 0.0,
            leaves_after=ask.after if ask.reader == "http leaves" else None,
        )

        def leave() -> None:
            for call_id in calls_named(gateway_of(life), name):
                self.world.left(life, call_id)

        exchange.on_leave = leave
        if ask.reader == "http hasty":
            asyncio.get_running_loop().call_later(ask.pause_s, exchange.leave)
        await site.serve(exchange)
        if exchange.has_left:
            return False
        answer = Answer(self)
        if ask.reader == "http whole":
            answer.take_whole(exchange)
        else:
            answer.take(exchange)
        if exchange.is_cut or not answer.is_over:
            raise Lost
        answer.assert_whole()
        return True

    async def by_returning(self, life: Life) -> bool:
        """Cut again and again, by itself or by a dying gateway, it comes back for the rest, here or
        elsewhere, and never gets a word twice."""
        ask, world = self.ask, self.world
        while True:
            visit = self.visits
            self.visits += 1
            answer = self.answer
            is_back = bool(answer.last_id)
            leaves = visit <= ask.after % 3
            headers = {"last-event-id": answer.last_id} if is_back else {"x-stream-resume": "1"}
            by_get = is_back and visit % 3 == 1
            exchange = Exchange(
                "GET" if by_get else "POST",
                f"/v1/streams/{answer.last_id.partition('.')[0]}" if by_get else PATH,
                b"" if by_get else self.body(),
                headers,
                leaves_after=1 + ask.after % 5 if leaves else None,
            )
            await world.site(life).serve(exchange)
            if by_get and exchange.status == 404:
                continue  # nobody keeps it here; the next visit asks for it again
            if is_back and exchange.status == 200:
                self.count_return(life)
            try:
                answer.take(exchange)
            finally:
                if not answer.last_id and not answer.is_over:  # nothing can be come back for
                    self.answer = Answer(self)
            if answer.is_over:
                answer.assert_whole()
                return True
            if not exchange.has_left:
                raise Lost
            await asyncio.sleep(ask.pause_s)
            found = await world.gateway(ask.front + visit)
            if found is None:
                return False
            self.was_at, self.life, life = life, found, found

    async def by_embedding(self, life: Life) -> bool:
        ask = self.ask
        body = msgspec.json.encode({"model": "tiny", "input": list(ask.prompt)})
        exchange = Exchange("POST", EMBEDDINGS, body)
        await self.world.site(life).serve(exchange)
        if exchange.is_cut or not exchange.is_complete:
            raise Lost
        if exchange.status != 200:
            raise Refused(exchange.problem())
        found = exchange.json()
        assert found["data"][0]["embedding"] == unpack_floats(vector_for(ask)).tolist(), found
        assert found["usage"]["prompt_tokens"] == len(ask.prompt), found
        return True

    async def by_background(self, life: Life) -> bool:
        """The answer is made whether or not somebody reads; a reader that comes back gets the
        events behind the last one it has, from whichever gateway it asks."""
        ask, world = self.ask, self.world
        story = Story(self)
        visit = 0
        while True:
            after = len(story.kinds)
            is_first = not after
            path = f"{RESPONSES}/{story.response_id}?stream=true&starting_after={after - 1}"
            exchange = Exchange(
                "POST" if is_first else "GET",
                RESPONSES if is_first else path,
                self.background_body() if is_first else b"",
                leaves_after=1 + ask.after % 5 if visit < ask.after % 4 else None,
            )
            await world.site(life).serve(exchange)
            if exchange.status == 404:
                raise Lost  # with the gateway that kept it
            if exchange.status == 200:
                story.take(exchange)
            elif exchange.is_complete and is_first:
                raise Refused(exchange.problem())
            if story.is_over:
                story.assert_whole()
                world.seen["a response was made in the background"] += 1
                if visit:
                    world.seen["a response in the background was come back to"] += 1
                return True
            if not story.kinds:
                raise Lost
            # It has left, was cut, or whoever keeps it does not answer.
            visit += 1
            await asyncio.sleep(ask.pause_s)
            found = await world.gateway(ask.front + visit)
            if found is None:
                return False
            life = found

    def background_body(self) -> bytes:
        ask = self.ask
        body: dict[str, Any] = {
            "model": "tiny",
            "input": ask.text,
            "max_output_tokens": ask.max_tokens,
            "seed": ask.seed,
            "ignore_eos": ask.ignore_eos,
            "background": True,
            "stream": True,
        }
        if ask.stop:
            body["stop"] = [ask.stop]
        if ask.penalised:
            body["frequency_penalty"] = 0.5
        if ask.grammar:
            schema = msgspec.json.decode(ask.grammar[1])
            body["text"] = {"format": {"type": "json_schema", "name": "a", "schema": schema}}
        return msgspec.json.encode(body)

    def count_return(self, life: Life) -> None:
        world, before = self.world, self.was_at
        if before is None:
            world.seen["came back after its gateway died"] += 1
        elif before.address.path == life.address.path:
            world.seen["came back to its gateway"] += 1
        else:
            world.seen["came back to another gateway"] += 1


def sampling_of(ask: Ask) -> Sampling:
    return Sampling(
        seed=ask.seed,
        ignore_eos=ask.ignore_eos,
        max_tokens=ask.max_tokens,
        stop_ids=ask.stop_ids,
        logprobs=0 if ask.logprobs else None,
        frequency_penalty=0.5 if ask.penalised else 0.0,
        want_vector=ask.wants == "vector",
        label_ids=LABEL_IDS if ask.wants == "scores" else (),
    )


def vector_for(ask: Ask) -> bytes:
    """What the model makes of its prompt, where that is asked for."""
    cells = [(token, at, ask.namespace) for at, token in enumerate(ask.prompt)]
    return vector_of(cells, sampling_of(ask))


def gateway_of(life: Life) -> Gateway:
    assert isinstance(life.actor, Gateway)
    return life.actor


def calls_named(gateway: Gateway, name: str) -> list[str]:
    calls = gateway.calls.open.items()
    return [call_id for call_id, open_call in calls if name in open_call.stream.names]


class Got:
    """What one choice of a call has got."""

    def __init__(self, client: Client, choice: int) -> None:
        self.right = client.rights[choice]
        self.prompt_len = len(client.ask.prompt)
        self.wants_logprobs = client.ask.logprobs
        self.is_constrained = bool(client.ask.grammar)
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
        if self.wants_logprobs and new:
            first = self.prompt_len + delta.index + 1
            for i, (token, entry) in enumerate(zip(new, delta.logprobs, strict=True)):
                assert entry.token_id == token, f"{entry.token_id}, not {token}"
                # The probability of what is forced is 1.
                is_forced = self.is_constrained and entry.logprob == 0.0
                assert is_forced or entry.logprob == -(first + i), entry
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

    def __init__(self, client: Client) -> None:
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
                self.texts[index] += choice["text"]
                self.finishes[index] = choice["finish_reason"]
                self.take_logprobs(index, choice)
        for text, right in zip(self.texts, self.rights, strict=True):
            assert right.text.startswith(text), f"{text!r} is not {right.text!r}"

    def take_whole(self, exchange: Exchange) -> None:
        """An answer that is no stream."""
        if exchange.status != 200:
            self.raise_refusal(exchange)
            return
        if not exchange.is_complete:
            return
        body = exchange.json()
        self.texts = [choice["text"] for choice in body["choices"]]
        self.finishes = [choice["finish_reason"] for choice in body["choices"]]
        for index, choice in enumerate(body["choices"]):
            self.take_logprobs(index, choice)
        self.usage = body["usage"]
        self.is_over = True

    def take_logprobs(self, index: int, choice: dict[str, Any]) -> None:
        if choice.get("logprobs") is None:
            return
        assert self.ask.logprobs, "log probabilities that nobody asked for"
        for logprob in choice["logprobs"]["token_logprobs"]:
            self.logprobs[index].append(logprob)
            expected = -(len(self.ask.prompt) + len(self.logprobs[index]))
            is_forced = bool(self.ask.grammar) and logprob == 0.0
            assert is_forced or logprob == expected, f"{logprob}, not {expected}"

    def raise_refusal(self, exchange: Exchange) -> None:
        if exchange.status is None or not exchange.is_complete:
            return  # it is lost
        raise Refused(exchange.problem())

    def assert_whole(self) -> None:
        rights = self.rights
        assert self.texts == [right.text for right in rights], self.texts
        assert self.finishes == [right.finish.value for right in rights], self.finishes
        assert self.usage is not None, "no usage"
        counts = [len(right.tokens) for right in rights]
        assert self.usage["completion_tokens"] == sum(counts), (self.usage, counts)
        if self.ask.logprobs:
            assert [len(each) for each in self.logprobs] == counts, (self.logprobs, counts)


class Story:
    """The events of a response that is made in the background, over all visits."""

    def __init__(self, client: Client) -> None:
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
