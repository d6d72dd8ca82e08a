"""The gateway in a running system: its note, its door, and what is left when it crashes."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx
import msgspec
import pytest

from actors.gateway.actor import Gateway
from actors.gateway.call import Call, Prompt
from actors.gateway.doors.batches import Batches
from actors.gateway.errors import Refused
from actors.runtime.actor import Actor
from actors.runtime.context import Ref
from actors.runtime.spec import Child, Supervisor
from actors.runtime.system import System
from messages import gateway, tokenizer
from messages.config import GatewayConfig, ModelConfig, Paths
from messages.gateway import Delta, Deltas, Encoded
from messages.tokenizer import Cancel, Encode
from messages.types import FinishReason, Usage, pack
from messages.worker import Facts
from tests.gateway.street import until_true
from tests.house.server import WAIT_S, reserved_port

PATHS = Paths()
FACTS = Facts("M", 100, 64, 16, 64, (2,), "float32", "cpu")
HERE = "tests.gateway.test_system"


class Part(Actor):
    """Stands for a room that only has to be there."""

    accepts = tokenizer.In

    async def on_start(self) -> bytes:
        is_worker = self.context.address.path == PATHS.worker
        return msgspec.msgpack.encode(FACTS) if is_worker else b""

    def on_encode(self, message: Encode) -> None: ...

    def on_cancel(self, message: Cancel) -> None: ...


class Oracle(Actor):
    """Says yes to every prompt, in one token."""

    accepts = tokenizer.In
    is_mute = False

    def on_encode(self, message: Encode) -> None:
        if self.is_mute:
            return
        reply: Ref[gateway.In] = self.context.ref(message.reply_to)
        ids = pack([5])
        reply.tell(Encoded(message.request, message.attempt, 1, ids))
        if message.forward:
            row = Delta(
                message.request,
                message.attempt,
                0,
                1,
                "yes",
                ids,
                finish=FinishReason.STOP,
                usage=Usage(1, 1),
            )
            reply.tell(Deltas((row,)))

    def on_cancel(self, message: Cancel) -> None: ...


def child(name: str, factory: str, **arguments: msgspec.Struct) -> Child:
    return Child(name=name, factory=factory, arguments=arguments)


@asynccontextmanager
async def house(**settings: object) -> AsyncIterator[System]:
    config = msgspec.convert({"port": 0, **settings}, GatewayConfig)
    replica = Supervisor(
        name="replica",
        children=tuple(child(name, f"{HERE}:Part") for name in ("worker", "cache", "scheduler")),
    )
    root = Supervisor(
        name="root",
        children=(
            child("metrics", "actors.metrics.actor:Metrics", paths=PATHS),
            replica,
            child("detokenizer", f"{HERE}:Part"),
            child("router", f"{HERE}:Part"),
            child("tokenizer", f"{HERE}:Oracle"),
            child(
                "gateway",
                "actors.gateway.actor:Gateway",
                model=ModelConfig(),
                gateway=config,
                paths=PATHS,
            ),
        ),
    )
    system = System(root, check=True)
    await system.start()
    try:
        yield system
    finally:
        await system.stop()


def url_of(system: System) -> str:
    actor = system.local("gateway")
    assert isinstance(actor, Gateway) and actor.site is not None and actor.site.listener is not None
    port = actor.site.listener.bound.getsockname()[1]
    return f"http://127.0.0.1:{port}"


CHAT = {"model": "M", "messages": [{"role": "user", "content": "x"}]}


async def test_the_house_answers_over_http() -> None:
    async with house() as system, httpx.AsyncClient(base_url=url_of(system)) as client:
        assert (await client.get("/health")).json() == {"status": "ok"}
        assert (await client.get("/ready")).status_code == 200
        got = await client.post("/v1/chat/completions", json={**CHAT, "n": 3})
        assert [c["message"]["content"] for c in got.json()["choices"]] == ["yes"] * 3
        page = (await client.get("/metrics")).text
        assert "histrio_metrics_refused_total 0" in page
        rows = {row["path"]: row for row in (await client.get("/actors")).json()}
        assert rows["replica/worker"]["state"] == "running"


async def test_a_gateway_that_crashes_is_back_on_its_port() -> None:
    with reserved_port() as reserved:
        port = reserved.getsockname()[1]
        async with house(port=port) as system:
            first = system.local("gateway")
            assert isinstance(first, Gateway)
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 9\r\n\r\n{")
            async with asyncio.timeout(WAIT_S):
                await until_true(lambda: first.site is not None and first.site.state.tasks)
                first.context.crash(RuntimeError("as told"))
                with contextlib.suppress(ConnectionResetError):
                    assert await reader.read() == b""  # its connections end with it
                await until_true(lambda: is_listening(system.local("gateway"), first))
            assert url_of(system) == f"http://127.0.0.1:{port}"
            async with httpx.AsyncClient(base_url=url_of(system)) as client:
                assert (await client.post("/v1/chat/completions", json=CHAT)).status_code == 200
            writer.close()


async def test_who_calls_while_the_gateway_starts_is_answered_once_it_serves(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def slow(self: Batches) -> None:
        asked.append(asyncio.create_task(client.post("/v1/chat/completions", json=CHAT)))
        for _ in range(200):  # in which a call could be taken, and its prompt be encoded
            await asyncio.sleep(0)

    asked: list[asyncio.Task[httpx.Response]] = []
    monkeypatch.setattr(Batches, "open", slow)
    with reserved_port() as reserved:
        port = reserved.getsockname()[1]
        base = f"http://127.0.0.1:{port}"
        async with httpx.AsyncClient(base_url=base, timeout=WAIT_S) as client:
            async with house(port=port):
                assert (await asked[0]).status_code == 200


def is_listening(actor: Actor | None, former: Gateway) -> bool:
    if not isinstance(actor, Gateway) or actor is former or actor.site is None:
        return False
    return actor.site.listener is not None


async def test_a_local_reader_is_not_left_waiting_by_a_crash() -> None:
    async with house(http=False) as system:
        actor = system.local("gateway")
        assert isinstance(actor, Gateway)
        oracle = system.local("tokenizer")
        assert isinstance(oracle, Oracle)
        oracle.is_mute = True
        stream = actor.open(Call(prompts=(Prompt(text="x"),)))
        reading = asyncio.create_task(stream.read())
        await asyncio.sleep(0)
        actor.context.crash(RuntimeError("as told"))
        with pytest.raises(Refused):
            await reading


async def test_a_drained_house_takes_nothing_new_and_stops() -> None:
    async with house() as system, httpx.AsyncClient(base_url=url_of(system)) as client:
        await system.drain(5.0)
        got = await client.post("/v1/chat/completions", json=CHAT)
        assert got.status_code == 503 and got.json()["error"]["code"] == "unavailable"
        assert (await client.get("/ready")).status_code == 503
