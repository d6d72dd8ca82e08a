"""This file asks a server in this very process for ten thousand answers, many of which nobody waits
for, and looks for what is left of them.

It knows the tree from inside: tasks, timers, pages, and every object that the garbage collector
knows. The first requests fill what is meant to fill (caches, the log's directory, pools), and are
not counted; the memories of the last requests sent, which hold thousands, are made small for it.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import gc
import os
import random
import sys
import tempfile
import threading
import time
import tracemalloc
from collections import Counter
from pathlib import Path
from typing import NamedTuple
from unittest import mock

import actors.router.actor
import actors.tokenizer.actor
from actors import run
from actors.runtime.system import System
from bench.client import Client, Connection
from bench.command import parser_of
from bench.report import ROOT, Report
from bench.serve import first_model, free_port
from messages.config import (
    CacheConfig,
    Config,
    GatewayConfig,
    LogConfig,
    ModelConfig,
    RuntimeConfig,
)

ABOUT = """\
Sends requests to the whole tree in one process, and counts what is left of them when it is idle
again: tasks, timers, actors, descriptors, threads, pages, Python objects.

  python -m app bench leak
  python -m app bench leak --requests 1000 --together 8

A tenth leave in their stream, a tenth at any time before or in the answer, a tenth are refused, a
tenth are not streamed. Exit status 1 where something is left.
"""

GROWTH_MAX = 0.01
PROMPT_LEN = 24
TYPES_SHOWN = 5
IDLE_S = 240.0
SENT_MAX = 256  # must be full before anything is counted
# Of this file's own memory, and of what looks into it.
NOT_OURS = ("*/bench/*", tracemalloc.__file__, collections.__file__)
HASTY_S = 0.03  # how long a client waits that leaves before it is through, on average


class Left(NamedTuple):
    """What there is while nothing is asked."""

    tasks: int
    timers: int
    lives: int
    fds: int
    threads: int
    leased: float
    running: float
    python_bytes: int  # 0 without tracemalloc
    objects: Counter[str]
    traces: tracemalloc.Snapshot | None


async def left_of(system: System, client: Client) -> Left:
    """Once the house is idle."""
    until_s = time.monotonic() + IDLE_S
    leased = running = 1.0
    while (leased or running) and time.monotonic() < until_s:
        await asyncio.sleep(0.2)
        _, text = await client.get("/metrics")
        leased = metric(text, 'histrio_pages{state="leased"}')
        running = metric(text, "histrio_requests_running")
    await asyncio.sleep(0.2)  # connections of those that left
    for _ in range(3):
        gc.collect()
    lives = system.node.lives.values()
    traces = None
    if tracemalloc.is_tracing():
        unseen = [tracemalloc.Filter(False, name) for name in NOT_OURS]
        traces = tracemalloc.take_snapshot().filter_traces(unseen)
    return Left(
        len(asyncio.all_tasks()),
        sum(len(life.timers) for life in lives),
        len(lives),
        len(os.listdir("/proc/self/fd")),
        threading.active_count(),
        leased,
        running,
        sum(row.size for row in traces.statistics("filename")) if traces else 0,
        Counter(type(one).__qualname__ for one in gc.get_objects()),
        traces,
    )


def metric(text: bytes, name: str) -> float:
    lines = [line for line in text.decode().splitlines() if line.startswith(name)]
    return sum(float(line.rpartition(" ")[2]) for line in lines if line[len(name)] in " {")


async def ask(client: Client, model: str, rng: random.Random) -> None:
    """One request of one kind; what becomes of it is not looked at here."""
    kind = rng.randrange(10)
    body: dict[str, object] = {
        "model": model,
        "prompt": [rng.randrange(3, 500) for _ in range(PROMPT_LEN)],
        "max_tokens": rng.randrange(1, 12),
        "seed": rng.randrange(1000),
        "ignore_eos": True,
        "stream": kind != 0,
    }
    if kind == 3:  # leaves while it connects, before the answer, or in it
        body["max_tokens"], body["stream"] = 60, rng.random() < 0.5
        client = Client(client.url.geturl(), timeout_s=rng.expovariate(1 / HASTY_S))
    heard = None
    if kind == 1:
        body["temperature"] = -1
    elif kind == 2:
        body["max_tokens"] = 200

        def heard(connection: Connection) -> None:
            if connection.transport is not None:
                connection.transport.abort()

    await client.stream("/v1/completions", body, heard)


async def ask_many(
    client: Client, model: str, count: int, together: int, rng: random.Random
) -> None:
    left = iter(range(count))

    async def place() -> None:
        for _ in left:
            await ask(client, model, rng)

    await asyncio.gather(*(place() for _ in range(together)))


def config_of(folder: Path) -> Config:
    from tests.house.tiny import make_model

    return Config(
        model=ModelConfig(path=str(make_model(folder / "tiny-llama")), dtype="float32"),
        gateway=GatewayConfig(port=free_port()),
        cache=CacheConfig(kv_tokens=4096),
        log=LogConfig(dir=str(folder / "logs"), level="warning"),
        runtime=RuntimeConfig(placement="inline", seed=1, front_ends=1),
    )


async def look(
    requests: int, warm: int, together: int, seed: int, *, traces: bool
) -> tuple[Left, Left]:
    """What there is before and after so many requests."""
    rng = random.Random(seed)
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="leak-"))
        for room in (actors.router.actor, actors.tokenizer.actor):
            stack.enter_context(mock.patch.object(room, "SENT_MAX", SENT_MAX))
        if traces:
            tracemalloc.start()
            stack.callback(tracemalloc.stop)
        config = run.settle(config_of(Path(folder)), lambda _: None).config
        with run.build(config) as system:
            await system.start()
            try:
                client = Client(f"http://127.0.0.1:{config.gateway.port}", timeout_s=60.0)
                model = await first_model(client)
                await ask_many(client, model, warm, together, rng)
                before = await left_of(system, client)
                await ask_many(client, model, requests, together, rng)
                until_s = time.monotonic() + IDLE_S
                after = await left_of(system, client)
                while has_more(before, after) and time.monotonic() < until_s:
                    after = await left_of(system, client)  # a busy machine takes longer to end them
                system.check()
            finally:
                await system.stop()
    return before, after


def main(words: list[str]) -> int:
    parser = parser_of("leak", ABOUT)
    parser.add_argument("--requests", type=int, default=10_000, help="in all")
    parser.add_argument("--warm", type=int, default=1500, help="requests before, not counted")
    parser.add_argument("--together", type=int, default=16, help="requests open at once")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true", help="one JSON object a line")
    found = parser.parse_args(words)
    report = Report("leak", as_json=found.json, requests=found.requests)
    before, after = asyncio.run(
        look(found.requests, found.warm, found.together, found.seed, traces=True)
    )
    objects = sum(before.objects.values()), sum(after.objects.values())
    for what, old, new, aim in (
        ("tasks", before.tasks, after.tasks, "no more"),
        ("timers", before.timers, after.timers, "no more"),
        ("actors", before.lives, after.lives, "no more"),
        ("descriptors", before.fds, after.fds, "no more"),
        ("threads", before.threads, after.threads, "no more"),
        ("pages leased", before.leased, after.leased, "0"),
        ("requests running", before.running, after.running, "0"),
        ("bytes of Python objects", before.python_bytes, after.python_bytes, "< +1 %"),
        ("objects", *objects, "< +1 %"),
    ):
        grown = f"{100 * (new / old - 1):+.2f} %" if old else ""
        report.add(what=what, before=old, after=new, grown=grown, aim=aim)
    most = (after.objects - before.objects).most_common(TYPES_SHOWN)
    for name, count in most:
        report.add(what=f"more {name}", before=None, after=count, grown="", aim="")
    if before.traces is not None and after.traces is not None:
        for line in after.traces.compare_to(before.traces, "lineno")[:TYPES_SHOWN]:
            frame = line.traceback[0]
            where = f"bytes of {frame.filename.removeprefix(f'{ROOT}/')}:{frame.lineno}"
            old = line.size - line.size_diff
            report.add(what=where, before=old, after=line.size, grown="", aim="")
    report.close()
    return int(has_leak(before, after))


def has_more(before: Left, after: Left) -> bool:
    """Of what is counted exactly."""
    return any(new > old for old, new in zip(before[:5], after[:5], strict=True))


def has_leak(before: Left, after: Left) -> bool:
    return bool(
        has_more(before, after)
        or after.leased
        or after.running
        or after.python_bytes > before.python_bytes * (1 + GROWTH_MAX)
        or sum(after.objects.values()) > sum(before.objects.values()) * (1 + GROWTH_MAX)
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
