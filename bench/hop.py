"""This file measures a hop between two processes: a decode Step of many sequences there, its result
back, over ZMQ ipc with the link layer, as the scheduler and the worker do it.

It knows the transport and the step's messages, no actor: what is measured is codec, sockets and the
waking of two loops. The peer is a child made by `actors/runtime/process.py`, as in a real run.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from actors.runtime.child import Ready
from actors.runtime.process import ChildBoot, ChildProcess, spawn_node
from actors.runtime.rundir import RunDir
from actors.runtime.transport.zmq import ZmqTransport
from bench.command import parser_of
from bench.report import Report, percentile
from messages.base import Address, Header, Message
from messages.system import NodeBoot, Reason
from messages.types import pack
from messages.worker import Step, StepDone

ABOUT = """\
A Step of N sequences to another process and its StepDone back, over ZMQ ipc.

  python -m app bench hop
  python -m app bench hop --sequences 1,256,1024 --rounds 5000
"""

TARGET = Address("echo", "replica/worker", 1)
SENDER = Address("main", "replica/scheduler", 1)


class Echo:
    """The worker's end: answers each step at once, with a token for each sequence."""

    def __init__(self, transport: ZmqTransport) -> None:
        self.gone = asyncio.Event()
        self._transport = transport
        self._decoder = msgspec.msgpack.Decoder(Step)

    def arrive(self, node: str, header: Header, body: Message | bytes | memoryview) -> None:
        assert not isinstance(body, Message)
        step = self._decoder.decode(body)
        done = StepDone(step.epoch, step.step, step.slots, step.slots)
        assert self._transport.send(node, Header(SENDER, TARGET), done)

    def link_up(self, node: str, incarnation: int) -> None: ...

    def link_down(self, node: str, reason: Reason) -> None:
        self.gone.set()


async def echo(boot: ChildBoot, ready: Ready) -> int:
    """What runs in the child."""
    node = boot.node
    transport = transport_of(node.name, node.incarnation, node.run, Path(node.run_dir), boot.token)
    end = Echo(transport)
    await transport.start(end)
    transport.connect(node.root, node.root_incarnation, node.root_endpoint)
    ready.tell(transport.endpoint)
    await end.gone.wait()
    await transport.close()
    return 0


def transport_of(
    name: str, incarnation: int, run: str, run_dir: Path, token: bytes
) -> ZmqTransport:
    return ZmqTransport(name, incarnation, run=run, run_dir=run_dir, token=token)


class Caller:
    """The scheduler's end."""

    def __init__(self, transport: ZmqTransport) -> None:
        self._transport = transport
        self._decoder = msgspec.msgpack.Decoder(StepDone)
        self._loop = asyncio.get_running_loop()
        self.up: asyncio.Future[None] = self._loop.create_future()
        self._answered: asyncio.Future[None] | None = None
        self._steps_left = 0
        self._step: Step | None = None

    def arrive(self, node: str, header: Header, body: Message | bytes | memoryview) -> None:
        assert not isinstance(body, Message)
        self._decoder.decode(body)
        self._steps_left -= 1
        if self._steps_left >= 0 and self._step is not None:
            self._send(self._step)
        elif self._answered is not None and not self._answered.done():
            self._answered.set_result(None)

    def link_up(self, node: str, incarnation: int) -> None:
        self.up.set_result(None)

    def link_down(self, node: str, reason: Reason) -> None:
        error = ConnectionError(f"the peer is gone: {reason.detail}")
        for future in (self.up, self._answered):
            if future is not None and not future.done():
                future.set_exception(error)

    def _send(self, step: Step) -> None:
        assert self._transport.send("echo", Header(TARGET, SENDER), step)

    async def call(self, step: Step) -> float:
        """Seconds from the sending of a step to its decoded answer."""
        self._answered = self._loop.create_future()
        self._steps_left = 0
        began_s = time.perf_counter()
        self._send(step)
        await self._answered
        return time.perf_counter() - began_s

    async def stream(self, step: Step, count: int, in_flight: int) -> float:
        """Steps per second with `in_flight` of them under way at all times."""
        self._answered = self._loop.create_future()
        self._step = step
        self._steps_left = count - in_flight
        began_s = time.perf_counter()
        for _ in range(in_flight):
            self._send(step)
        await self._answered
        elapsed_s = time.perf_counter() - began_s
        self._step = None
        return count / elapsed_s


def decode_step(sequences: int) -> Step:
    """One token for each sequence, and a new page for one in sixteen: pages hold 16 tokens."""
    slots = range(sequences)
    grown = range(0, sequences, 16)
    return Step(
        epoch=1,
        step=1,
        slots=pack(slots),
        counts=pack([1] * sequences),
        grown_slots=pack(grown),
        grown_pages=pack(grown),
    )


async def rows(sizes: Sequence[int], rounds: int) -> AsyncIterator[dict[str, Any]]:
    """One for each number of sequences."""
    run = RunDir.create()
    transport = transport_of("main", 1, run.run, run.path, run.token)
    caller = Caller(transport)
    child: ChildProcess | None = None
    try:
        await transport.start(caller)
        boot = NodeBoot("echo", 1, run.run, str(run.path), "main", 1, transport.endpoint)
        child = await spawn_node(boot, token=run.token, entry="bench.hop:echo")
        transport.connect("echo", 1, child.endpoint)
        await asyncio.wait_for(caller.up, 10.0)
        for sequences in sizes:
            step = decode_step(sequences)
            for _ in range(200):
                await caller.call(step)
            times_us = [await caller.call(step) * 1e6 for _ in range(rounds)]
            yield {
                "sequences": sequences,
                "step_bytes": len(msgspec.msgpack.encode(step)),
                "round_trip_us_p50": percentile(times_us, 0.5),
                "p90": percentile(times_us, 0.9),
                "p99": percentile(times_us, 0.99),
                "steps_per_s_2_in_flight": await caller.stream(step, rounds, 2),
            }
    finally:
        await transport.close()
        if child is not None:
            await asyncio.wait([child.exited], timeout=5.0)
            child.kill()
            await child.exited
        run.close()


async def measure(found: argparse.Namespace) -> int:
    report = Report("hop", as_json=found.json)
    async for row in rows(found.sequences, found.rounds):
        report.add(**row)
    report.close()
    return 0


def numbers(text: str) -> list[int]:
    return [int(word) for word in text.split(",")]


def main(words: Sequence[str]) -> int:
    parser = parser_of("hop", ABOUT)
    parser.add_argument(
        "--sequences", type=numbers, default=[1, 256, 1024], help="of a step: one or more, by comma"
    )
    parser.add_argument("--rounds", type=int, default=3000, help="of each")
    parser.add_argument("--json", action="store_true", help="one JSON object a line")
    return asyncio.run(measure(parser.parse_args(list(words))))
