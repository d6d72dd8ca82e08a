"""This file breaks the processes of a real server under load, and compares every stream with the
undisturbed run, token by token.

    python -m bench.chaos --streams 200 --times 50
    python -m bench.chaos --roles worker --ways kill,stop --times 3 --model smol.gguf

A fault comes by an event: after the k-th token of a drawn stream. Ways: `kill` (SIGKILL), `stop`
(SIGSTOP, never continued), `spin` (a busy loop on the process's event loop), `deadlock` (the
worker's forward waits for ever), `memory` (no more is to be had). Roles are processes: worker,
engine (scheduler and cache), front (tokenizer, detokenizer, router). The gateway is with the root
here, as in `Engine`: its death is its connections' death, and no stream's recovery.

Figures: streams whole and equal, client-visible errors; how long until the root has seen it, and
until the next token of a stream that was under way.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

import httpx

from bench.chaos_server import GO_WRONG, Server

ROLES = {"worker": "replica/worker", "engine": "replica/scheduler", "front": "tokenizer"}
WAYS = ("kill", "stop", "spin", "deadlock", "memory")
ONLY_WORKER = ("deadlock", "memory")
BACK_S = 60.0


class Plan(NamedTuple):
    """What one client asks."""

    prompt: str
    max_tokens: int
    seed: int


class Struck(NamedTuple):
    """One fault and what came of it."""

    role: str
    way: str
    seen_s: float | None  # until the root knew
    token_s: float | None  # until a stream that was under way went on
    equal_count: int
    count: int
    errors: tuple[str, ...]


class Stream:
    """One client's stream as it comes."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.ids: list[int] = []
        self.times: list[float] = []
        self.error: str | None = None
        self.finish: str | None = None

    async def run(self, client: httpx.AsyncClient, url: str, tell: Any) -> None:
        body = {
            "prompt": self.plan.prompt,
            "max_tokens": self.plan.max_tokens,
            "seed": self.plan.seed,
            "temperature": 0.7,
            "ignore_eos": True,
            "stream": True,
            "logprobs": 0,
            "model": await model_of(client, url),
        }
        try:
            async with client.stream("POST", url + "/v1/completions", json=body) as answer:
                if answer.status_code != 200:
                    self.error = f"{answer.status_code} {(await answer.aread())[:200]!r}"
                    return
                async for line in answer.aiter_lines():
                    self.take(line)
                    if tell is not None:
                        tell(self)
        except httpx.HTTPError as error:
            self.error = f"{type(error).__name__}"

    def take(self, line: str) -> None:
        if not line.startswith("data: ") or line == "data: [DONE]":
            return
        event = json.loads(line[6:])
        if "error" in event:
            self.error = event["error"]["message"]
            return
        for choice in event["choices"]:
            told = choice.get("logprobs")
            for token in (told or {}).get("tokens", ()):
                self.ids.append(token)
                self.times.append(time.monotonic())
            self.finish = choice["finish_reason"] or self.finish


_models: dict[str, str] = {}


async def model_of(client: httpx.AsyncClient, url: str) -> str:
    if url not in _models:
        _models[url] = (await client.get(url + "/v1/models")).json()["data"][0]["id"]
    return _models[url]


def plans(count: int, tokens: int) -> list[Plan]:
    rng = random.Random("plans")
    words = "house room letter door window stair lamp table river stone cloud".split()
    return [
        Plan(
            " ".join(rng.choice(words) for _ in range(rng.randint(3, 40))),
            rng.randint(tokens // 2, tokens),
            rng.randrange(1000),
        )
        for _ in range(count)
    ]


async def play(url: str, asked: list[Plan], tell: Any = None) -> list[Stream]:
    streams = [Stream(plan) for plan in asked]
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
    async with httpx.AsyncClient(timeout=300.0, limits=limits) as client:
        await model_of(client, url)
        await asyncio.gather(*(stream.run(client, url, tell) for stream in streams))
    return streams


async def strike(
    server: Server, role: str, way: str, asked: list[Plan], right: list[Stream], rng: random.Random
) -> Struck:
    """One run of all streams with one fault in it."""
    url = server.url
    path = ROLES[role]
    victim = rng.randrange(len(asked))
    after = rng.randint(1, max(1, asked[victim].max_tokens * 3 // 4))
    struck_s: list[float] = []
    seen: list[float] = []
    watching: list[asyncio.Task[None]] = []
    rows = await rows_of(url)
    pid = rows[path]["pid"]
    incarnation = rows[path]["incarnation"]

    async def watch() -> None:
        async with httpx.AsyncClient(timeout=10.0) as client:
            while not seen:
                for row in (await client.get(url + "/actors")).json():
                    if row["path"] == path and (
                        row["state"] != "running" or row["incarnation"] != incarnation
                    ):
                        seen.append(time.monotonic())
                        return
                await asyncio.sleep(0.01)

    def tell(stream: Stream) -> None:
        if not struck_s and stream.plan is asked[victim] and len(stream.ids) >= after:
            struck_s.append(time.monotonic())
            watching.append(asyncio.create_task(watch()))
            assert is_child(pid, server.process.pid), f"{pid} is none of the server's"
            send = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}.get(way) or GO_WRONG[way]
            os.kill(pid, send)

    streams = await play(url, asked, tell)
    for task in watching:
        with contextlib.suppress(TimeoutError):  # then it was never seen, and is shown so
            await asyncio.wait_for(task, BACK_S)
    equal = sum(
        a.ids == b.ids and a.finish == b.finish for a, b in zip(streams, right, strict=True)
    )
    at_s = struck_s[0] if struck_s else None
    first_s = None
    if at_s is not None and seen:
        later = [t for stream in streams for t in stream.times if t > max(seen[0], at_s)]
        first_s = min(later) - at_s if later else None
    until_s = time.monotonic() + BACK_S
    while (await status_of(url)) != 200:
        assert time.monotonic() < until_s, "it is not well again"
        await asyncio.sleep(0.1)
    return Struck(
        role,
        way,
        seen[0] - at_s if seen and at_s is not None else None,
        first_s,
        equal,
        len(streams),
        tuple(sorted({stream.error for stream in streams if stream.error is not None})),
    )


def is_child(pid: int, parent: int) -> bool:
    """Nobody else's process is ever harmed, also where a pid was given again."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text("ascii").rpartition(")")[2].split()
    except OSError:
        return False
    return int(fields[1]) == parent


async def rows_of(url: str) -> dict[str, Any]:
    async with httpx.AsyncClient(timeout=10.0) as client:
        return {row["path"]: row for row in (await client.get(url + "/actors")).json()}


async def status_of(url: str) -> int:
    async with httpx.AsyncClient(timeout=10.0) as client:
        return (await client.get(url + "/health")).status_code


async def main_async(arguments: argparse.Namespace) -> int:
    rng = random.Random(arguments.seed)
    asked = plans(arguments.streams, arguments.tokens)
    failed = 0
    with (
        tempfile.TemporaryDirectory(prefix="chaos-") as folder,
        Server(arguments.model, Path(folder), arguments.threads) as server,
    ):
        await asyncio.to_thread(server.wait_ready)
        begin_s = time.monotonic()
        right = await play(server.url, asked)
        again = await play(server.url, asked)
        assert not [s.error for s in right if s.error], right[0].error
        same = sum(a.ids == b.ids for a, b in zip(right, again, strict=True))
        took_s = (time.monotonic() - begin_s) / 2
        print(f"undisturbed: {len(right)} streams in {took_s:.1f} s, {same} equal in a second run")
        for role in arguments.roles.split(","):
            for way in arguments.ways.split(","):
                if way in ONLY_WORKER and role != "worker":
                    continue
                results = []
                for _ in range(arguments.times):
                    one = await strike(server, role, way, asked, right, rng)
                    results.append(one)
                    # More than five deaths within 30 s are not an accident any more: it gives up.
                    await asyncio.sleep(arguments.rest)
                failed += show(role, way, results)
    return 1 if failed else 0


def show(role: str, way: str, results: list[Struck]) -> int:
    def at(values: list[float], share: float) -> str:
        if not values:
            return "    -"
        return f"{sorted(values)[min(len(values) - 1, int(share * len(values)))] * 1000:5.0f}"

    seen = [r.seen_s for r in results if r.seen_s is not None]
    token = [r.token_s for r in results if r.token_s is not None]
    equal = sum(r.equal_count for r in results)
    count = sum(r.count for r in results)
    errors = sorted({error for r in results for error in r.errors})
    print(
        f"{role:7} {way:9} {len(results):3} times  streams {equal}/{count} equal  "
        f"seen p50 {at(seen, 0.5)} p99 {at(seen, 0.99)} ms  "
        f"next token p50 {at(token, 0.5)} p99 {at(token, 0.99)} ms  {'; '.join(errors)[:200]}",
        flush=True,
    )
    return int(equal != count)


def main(words: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="bench.chaos",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--model", default="", help="folder or .gguf; default: a tiny random Llama")
    parser.add_argument("--streams", type=int, default=200)
    parser.add_argument("--tokens", type=int, default=60, help="at most, of one stream")
    parser.add_argument("--times", type=int, default=50, help="faults for each role and way")
    parser.add_argument("--roles", default=",".join(ROLES))
    parser.add_argument("--ways", default="kill,stop,spin,deadlock")
    parser.add_argument("--rest", type=float, default=6.0, help="seconds between faults")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    return asyncio.run(main_async(parser.parse_args(words)))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
