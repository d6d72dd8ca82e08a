"""This file is the clients of a simulated world: they ask, read in their ways, and judge.

They do not know faults. Some speak to the gateway as the Engine does, some by ASGI as HTTP clients
do. What each has got is held against what it must get (`answers.py`). Law: a call ends whole, or by
a typed problem, or with the connection; a connection is lost with its gateway only.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, NamedTuple

from actors.gateway.actor import Gateway
from actors.gateway.errors import Refused
from actors.gateway.stream import Stream
from actors.runtime.life import Life
from bench.sim.answers import Answer, Got, Story, assert_native, vector_for
from bench.sim.batching import Batch
from bench.sim.bodies import (
    EMBEDDINGS,
    GENERATE,
    RESPONSES,
    background_body,
    body_of,
    call_of,
    embedding_body,
    native_body,
    path_of,
)
from bench.sim.calling import answer_of
from bench.sim.scenario import CHOICE_WAYS, Ask
from bench.sim.site import Exchange, Lost
from bench.sim.text import END
from messages.types import Problem, unpack_floats

ASKED_BY_LINE = 20  # a line of a batch that finds no place is tried again and again
CLOCK_S = 1e-5  # what a Unix time in a float may be wrong by


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
        self.answer = answer_of(self)
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
            case "http native":
                return self.by_native
            case "http batch":
                return self.by_batch
        return self.by_embedding if self.ask.wants else self.by_http

    # As the Engine

    async def by_call(self, life: Life) -> bool:
        ask, gateway = self.ask, gateway_of(life)
        suffix = f"~{ask.namespace}" if ask.namespace else ""
        # What the gateway begins at a client's word stands still with the gateway's process.
        within = self.world.house.context(life.address.node).run
        stream = within(gateway.open, call_of(ask), f"{ask.name}-{self.tries}{suffix}")
        got = [Got(self, i) for i in range(ask.choice_count)]
        if ask.reader == "hasty":
            await asyncio.sleep(ask.pause_s)
            within(stream.close)
            self.world.left(life, stream.call_id)
            return False
        try:
            while rows := await stream.read():
                for row in rows:
                    got[row.choice].take(row)
                count = sum(len(one.tokens) for one in got)
                if ask.reader == "leaves" and count >= ask.after:
                    within(stream.close)
                    self.world.left(life, stream.call_id)
                    return False
                if ask.reader == "slow":
                    await asyncio.sleep(ask.pause_s)
                if ask.reader == "stuck" and count >= ask.after:
                    await self.leave_unread(life, stream)
        finally:
            within(stream.close)
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
        # A gateway without credit is paused, and looks at nothing until its peers have room.
        is_paused = world.scenario.shape.waits and world.scenario.shape.mailbox_max
        if unread_s is not None and is_calm and not is_paused:
            waited_s = loop.time() - unread_s
            assert waited_s < stall_s + 2.0, f"unread for {waited_s:g} s, and not cut"

    # As HTTP

    async def by_http(self, life: Life) -> bool:
        ask, site = self.ask, self.world.site(life)
        name = f"{ask.name}-{self.tries}"
        exchange = Exchange(
            "POST",
            path_of(ask),
            body_of(ask),
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
        answer = answer_of(self)
        if ask.reader == "http whole":
            answer.take_whole(exchange)
        else:
            answer.take(exchange)
        if exchange.is_cut or not answer.is_over:
            raise Lost
        answer.assert_whole()
        self.count_calls(answer)
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
            events = 1 + ask.after % 5 if ask.after <= 12 else ask.after - 12
            by_get = is_back and visit % 3 == 1
            exchange = Exchange(
                "GET" if by_get else "POST",
                f"/v1/streams/{answer.last_id.partition('.')[0]}" if by_get else path_of(ask),
                b"" if by_get else body_of(ask),
                headers,
                leaves_after=events if leaves else None,
                is_torn=bool(ask.tools) or ask.after > 12,
            )
            await world.site(life).serve(exchange)
            if by_get and exchange.status == 404:
                continue  # nobody keeps it here; the next visit asks for it again
            if is_back and exchange.status == 200:
                self.count_return(life)
                world.seen["came back within a call that was chosen"] += answer.is_within_call
            try:
                answer.take(exchange)
            finally:
                if not answer.last_id and not answer.is_over:  # nothing can be come back for
                    self.answer = answer_of(self)
            if answer.is_over:
                answer.assert_whole()
                self.count_calls(answer)
                return True
            if not exchange.has_left:
                raise Lost
            await asyncio.sleep(ask.pause_s)
            found = await world.gateway(ask.front + visit)
            if found is None:
                return False
            self.was_at, self.life, life = life, found, found

    async def asked(self, life: Life, path: str, body: bytes) -> Any:
        """A whole answer. Raises Lost, Refused."""
        exchange = Exchange("POST", path, body)
        await self.world.site(life).serve(exchange)
        if exchange.is_cut or not exchange.is_complete:
            raise Lost
        if exchange.status != 200:
            raise Refused(exchange.problem())
        return exchange.json()

    async def by_embedding(self, life: Life) -> bool:
        ask = self.ask
        found = await self.asked(life, EMBEDDINGS, embedding_body(ask))
        assert found["data"][0]["embedding"] == unpack_floats(vector_for(ask)).tolist(), found
        assert found["usage"]["prompt_tokens"] == len(ask.prompt), found
        return True

    async def by_native(self, life: Life) -> bool:
        """In the dialect of /generate, which says how long it took as well."""
        loop = asyncio.get_running_loop()
        begin_s = loop.time()
        found = await self.asked(life, GENERATE, native_body(self.ask))
        assert_native(self, found)
        took_s = found["meta_info"]["e2e_latency"]
        assert 0.0 <= took_s <= loop.time() - begin_s + CLOCK_S, f"it is said to take {took_s:g} s"
        return True

    async def by_batch(self, life: Life) -> bool:
        batch = Batch(self)
        self.world.batches.append(batch)
        is_judged = await batch.run()
        self.visits += batch.visits + ASKED_BY_LINE * len(batch.lines)
        return is_judged

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
                background_body(ask) if is_first else b"",
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

    def count_calls(self, answer: Answer) -> None:
        """Of a whole answer."""
        tools, seen = self.ask.tools, self.world.seen
        if tools in CHOICE_WAYS:
            has_called = any(answer.calls)
            seen["a call was chosen"] += has_called
            seen["text was chosen where a call might have been"] += not has_called
        elif tools:
            seen["a tool was called"] += self.rights[0].matched == END

    def count_return(self, life: Life) -> None:
        world, before = self.world, self.was_at
        if before is None:
            world.seen["came back after its gateway died"] += 1
        elif before.address.path == life.address.path:
            world.seen["came back to its gateway"] += 1
        else:
            world.seen["came back to another gateway"] += 1


def gateway_of(life: Life) -> Gateway:
    assert isinstance(life.actor, Gateway)
    return life.actor


def calls_named(gateway: Gateway, name: str) -> list[str]:
    calls = gateway.calls.open.items()
    return [call_id for call_id, open_call in calls if name in open_call.stream.names]
