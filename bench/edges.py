"""This file measures what a server does at its edges: readers that don't read, ten times the load
that it can take, its end under load, a front end or a worker that is killed.

It knows the server from outside only: HTTP, signals, processes. The model is a tiny random one
unless `--model` names another.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Collection, Iterator
from pathlib import Path
from typing import Any

import httpx
import msgspec
import psutil

from bench.chaos import is_child
from bench.chaos_load import Plan, plans
from bench.chaos_server import Server
from bench.client import Client, Outcome
from bench.command import parser_of
from bench.flood import Flooder, Found, Wave, post
from bench.report import Report, percentile
from bench.serve import first_model

ABOUT = """\
What a server does with slow readers, too many requests, its end under load, and processes that are
killed. Each line says what was found and what it should be.

  python -m app bench edges                   all of them
  python -m app bench edges slow overload     some

slow      100 clients that read 1 byte/s, beside 20 whose gaps between tokens are measured; against
          the same 100 reading as fast as they can
overload  requests arrive ten times as often as they were served to 32 clients that ask again at
          once; at random times, whatever becomes of them, on connections that are kept (--fresh: a
          new one each). Times are from before connecting or writing until the whole answer is
          here. The client's time on the cores is told beside that of the server's processes
drain     SIGTERM under load, with time enough and without
fronts    one of two front ends is killed; its clients come back with Last-Event-ID
storm     each worker is killed, as soon as it is there, or is ready, until the house gives up
"""

STORM_MAX = 40
STORM_AIM = "11: five restarts by the replica, then five by the root"
SLOW, READERS = 100, 20
WAIT_S = 60.0
PLACES = 32  # of overload: half of them run, half wait
Show = Callable[..., None]


@contextlib.contextmanager
def server_of(found: argparse.Namespace, *words: str) -> Iterator[Server]:
    with tempfile.TemporaryDirectory(prefix="edges-") as folder:
        options = ["--no-spares", "--log-level", "warning", *words]
        with Server(found.model, Path(folder), found.threads, *options, module="app") as server:
            server.wait_ready()
            yield server


def rss_mib(server: Server) -> float:
    """Of all its processes together."""
    root = psutil.Process(server.process.pid)
    return sum(p.memory_info().rss for p in [root, *root.children(recursive=True)]) / 2**20


async def ask_all(
    client: Client, model: str, asked: list[Plan], heard: Any = None
) -> list[Outcome]:
    path = "/v1/completions"
    return await asyncio.gather(*(client.stream(path, p.body(model), heard) for p in asked))


# Readers that don't read


async def trickle(url: str, body: dict[str, object]) -> int:
    """Reads one byte a second until it is cancelled, or the server ends it. Gives the bytes."""
    loop = asyncio.get_running_loop()
    content = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: here\r\nContent-Length: {len(content)}\r\n"
    with socket.socket() as wire:
        wire.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        wire.setblocking(False)
        await loop.sock_connect(wire, ("127.0.0.1", int(url.rsplit(":", 1)[1])))
        await loop.sock_sendall(wire, head.encode() + b"\r\n" + content)
        count = 0
        while await loop.sock_recv(wire, 1):
            count += 1
            await asyncio.sleep(1.0)
        return count


async def slow(found: argparse.Namespace, show: Show) -> None:
    gaps: dict[str, float] = {}
    grown: dict[str, float] = {}
    with server_of(found) as server:
        client = Client(server.url)
        model = await first_model(client)
        measured = [plan._replace(max_tokens=300) for plan in plans(READERS, 300)]
        others = [plan._replace(max_tokens=400) for plan in plans(SLOW, 400)]
        bodies = [{**plan.body(model), "logprobs": 5} for plan in others]
        await ask_all(client, model, measured)  # warm
        for way in ("fast", "slow"):
            before = rss_mib(server)
            if way == "fast":
                tasks = [
                    asyncio.create_task(client.stream("/v1/completions", body)) for body in bodies
                ]
            else:
                tasks = [asyncio.create_task(trickle(server.url, body)) for body in bodies]
            outcomes = await ask_all(client, model, measured)
            between = [
                1000 * (later - earlier)
                for outcome in outcomes
                for earlier, later in zip(outcome.arrivals_s, outcome.arrivals_s[1:], strict=False)
            ]
            gaps[way] = percentile(between, 0.99)
            grown[way] = rss_mib(server) - before
            if way == "slow":
                for task in tasks:
                    task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        failed = [outcome.error for outcome in outcomes if outcome.error]
    show("R14", "others' gap p99 ms, 100 fast beside them", gaps["fast"], "")
    ratio = f"{100 * (gaps['slow'] / gaps['fast'] - 1):+.0f} %"
    show("R14", "the same, 100 at 1 byte/s", gaps["slow"], "< +10 %", ratio)
    show("R14", "memory grown MiB, fast", grown["fast"], "")
    show("R14", "memory grown MiB, slow", grown["slow"], "bounded")
    show("R14", "others failed", len(failed), "0", "; ".join(sorted(set(failed)))[:200])


# More than it can take


async def overload(found: argparse.Namespace, show: Show) -> None:
    """Requests arrive at seeded random times, ten times as many as were served to clients that ask
    again at once. The client is `bench/flood.py`; times are from before it connects or writes."""
    words = ("--max-running", str(PLACES // 2), "--max-queued", str(PLACES // 2))
    with server_of(found, *words) as server, Flooder() as flooder:
        model = await first_model(Client(server.url))
        roles = await roles_of(server)
        requests = [
            post("/v1/completions", plan._replace(max_tokens=64).body(model), keeps=not found.fresh)
            for plan in plans(PLACES, 64)
        ]
        wave = Wave(
            port=int(server.url.rsplit(":", 1)[1]),
            requests=requests,
            seconds=found.seconds,
            clients=PLACES,
            keeps=not found.fresh,
        )
        flooder.flood(msgspec.structs.replace(wave, seconds=2.0))  # warm
        before, most, between = cpu_of(roles), flooder.flood(wave), cpu_of(roles)
        most_rate = served(most, found.seconds) / found.seconds
        rate = 10 * most_rate
        flood = flooder.flood(msgspec.structs.replace(wave, clients=0, rate=rate))
        after = cpu_of(roles)
    turned = [a for a in flood.answers if a.status in (429, 503) and a.done_s is not None]
    good = sum(a.status == 200 and a.is_whole for a in flood.answers)
    other = len(flood.answers) - good - len(turned)
    refused_ms = [1000 * (a.done_s - a.sent_s) for a in turned if a.done_s is not None]
    kept_rate = served(flood, found.seconds) / found.seconds
    show("R15", f"most requests/s, {PLACES} clients", most_rate, "")
    show("R15", "arrived/s", len(flood.answers) / found.seconds, "10 times that")
    note = f"{100 * kept_rate / most_rate:.0f} %"
    show("R15", "served/s of ten times that", kept_rate, ">= 90 %", note)
    told = sum(answer.retries for answer in turned)
    show("R15", "refused, with Retry-After", told, f"of {len(turned)}")
    for share in (0.5, 0.99):
        name = f"time to a refusal p{100 * share:.0f} ms"
        show("R15", name, percentile(refused_ms, share), "< 50")
    show("R15", "neither served nor refused", other, "0")
    show(
        "R15",
        "request sent late p99 ms",
        1000 * percentile(flood.late_s, 0.99),
        "",
        "by the client",
    )
    for name, first, second in (("most", before, between), ("ten times", between, after)):
        used = {role: second[role] - first[role] for role in roles}
        used["client"] = (most if name == "most" else flood).cpu_s
        told_by = ", ".join(f"{role} {cpu_s:.1f}" for role, cpu_s in used.items())
        show("R15", f"CPU seconds, {name}", sum(used.values()), "", told_by)


def served(found: Found, seconds: float) -> int:
    """Whole answers within the wave's time; what it left to be done then does not count."""
    return sum(
        answer.status == 200 and answer.is_whole and (answer.done_s or seconds) < seconds
        for answer in found.answers
    )


async def roles_of(server: Server) -> dict[str, psutil.Process]:
    """The server's processes by what lives in them."""
    async with httpx.AsyncClient(timeout=10.0) as client:
        rows = {
            row["path"]: row["pid"] for row in (await client.get(server.url + "/actors")).json()
        }
    paths = {"front": "gateway", "engine": "replica/scheduler", "worker": "replica/worker"}
    roles = {role: psutil.Process(rows[path]) for role, path in paths.items()}
    return {"main": psutil.Process(server.process.pid), **roles}


def cpu_of(roles: dict[str, psutil.Process]) -> dict[str, float]:
    """Seconds on a processor, in user and system mode."""
    times = {role: process.cpu_times() for role, process in roles.items()}
    return {role: found.user + found.system for role, found in times.items()}


# The end


async def drain(found: argparse.Namespace, show: Show) -> None:
    for grace_s, tokens in ((20.0, 300), (0.5, 480)):
        with server_of(found, "--drain", str(grace_s)) as server:
            client = Client(server.url)
            model = await first_model(client)
            children = psutil.Process(server.process.pid).children(recursive=True)
            asked = [plan._replace(max_tokens=tokens) for plan in plans(found.streams, tokens)]
            begun: asyncio.Future[None] = asyncio.get_running_loop().create_future()

            def heard(_: object, begun: asyncio.Future[None] = begun) -> None:
                if not begun.done():
                    begun.set_result(None)

            task = asyncio.ensure_future(ask_all(client, model, asked, heard))
            await begun
            begin_s = time.monotonic()
            server.process.send_signal(signal.SIGTERM)
            code = await asyncio.to_thread(server.process.wait, WAIT_S)
            took_s = time.monotonic() - begin_s
            outcomes = await task
            _, alive = psutil.wait_procs(children, timeout=2)
        # A stream that was told why it ends has an error event; one that was cut has none.
        whole = sum(o.error is None for o in outcomes)
        cut = sum(o.error is not None and not o.error.startswith(("{", "status")) for o in outcomes)
        name = f"drain {grace_s:g} s, {found.streams} streams: "
        show("R16", name + "whole", whole, f"{found.streams}" if grace_s > 1 else "")
        show("R16", name + "cut without a word", cut, "0")
        show("R16", name + "exit code", code, "0")
        show("R16", name + "seconds to the exit", took_s, f"<= {grace_s + 1:g}")
        show("R16", name + "processes left", len(alive), "0")


# A front end


class Resuming:
    """A stream whose client comes back with the last event that it has seen."""

    def __init__(self, url: str, body: dict[str, object]) -> None:
        self.url = url
        self.body = body
        self.ids: list[int] = []
        self.last_id = ""
        self.is_whole = False
        self.breaks = 0
        self.told = ""  # why it ended, where that is an error

    async def read(self, client: httpx.AsyncClient) -> None:
        headers = {"last-event-id": self.last_id} if self.last_id else {"x-stream-resume": "1"}
        with contextlib.suppress(httpx.HTTPError):
            async with client.stream("POST", self.url, json=self.body, headers=headers) as got:
                if got.status_code != 200:
                    self.told = f"{got.status_code} {(await got.aread()).decode()[:200]}"
                    return
                next_id = self.last_id
                async for line in got.aiter_lines():
                    if line == "data: [DONE]":
                        self.is_whole = True
                    elif line.startswith("id: "):
                        next_id = line.removeprefix("id: ")
                    elif line.startswith("data: "):
                        event = json.loads(line[6:])
                        self.told = str(event.get("error", ""))
                        for choice in event.get("choices", ()):
                            self.ids += choice.get("token_ids") or ()
                        self.last_id = next_id

    async def read_all(self, client: httpx.AsyncClient) -> None:
        until_s = time.monotonic() + WAIT_S
        while not self.is_whole and time.monotonic() < until_s:
            await self.read(client)
            if not self.is_whole:
                self.breaks += 1
                await asyncio.sleep(0.05)


async def fronts(found: argparse.Namespace, show: Show) -> None:
    equal = count = met = 0
    told: set[str] = set()
    with server_of(found, "--front-ends", "2") as server:
        model = await first_model(Client(server.url))
        asked = [plan._replace(max_tokens=200) for plan in plans(found.streams, 200)]
        right = [o.ids for o in await ask_all(Client(server.url), model, asked)]
        path = server.url + "/v1/completions"
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
        async with httpx.AsyncClient(timeout=WAIT_S, limits=limits) as client:
            for kill in range(found.kills):
                streams = [Resuming(path, plan.body(model)) for plan in asked]
                tasks = [asyncio.create_task(stream.read_all(client)) for stream in streams]
                while not any(stream.ids for stream in streams):
                    await asyncio.sleep(0.005)
                    assert not all(task.done() for task in tasks)
                await kill_actor(server, f"fronts/{kill % 2}/gateway")
                await asyncio.gather(*tasks)
                count += len(streams)
                met += sum(stream.breaks > 0 for stream in streams)
                equal += sum(tuple(s.ids) == ids for s, ids in zip(streams, right, strict=True))
                for stream, ids in zip(streams, right, strict=True):
                    if tuple(stream.ids) != ids:
                        how = f"{len(stream.ids)} of {len(ids)} tokens, {stream.breaks} breaks"
                        told.add(f"{how}, {'whole' if stream.is_whole else 'cut'} {stream.told}")
                await asyncio.sleep(2.0)
    name = f"front end killed {found.kills} times under {found.streams} streams: "
    show("R2", name + "broken and resumed", met, "")
    show("R2", name + "equal to the undisturbed run", equal, str(count), "; ".join(sorted(told)))


async def kill_actor(
    server: Server, path: str, but: Collection[int] = (), states: Collection[str] = ()
) -> int | None:
    """Kills the process that an actor lives in, if it is none of `but`, and the actor in one of
    `states` where there are some. Gives its pid."""
    async with httpx.AsyncClient(timeout=10.0) as client:
        rows = {row["path"]: row for row in (await client.get(server.url + "/actors")).json()}
    pid: int = rows[path]["pid"]
    if (
        (states and rows[path]["state"] not in states)
        or pid in but
        or not is_child(pid, server.process.pid)
    ):
        return None
    os.kill(pid, signal.SIGKILL)
    return pid


# Too many deaths


async def storm(found: argparse.Namespace, show: Show) -> None:
    for when, states in (("at once", ()), ("once ready", ("running",))):
        killed: list[int] = []
        seen_ms: list[float] = []
        with server_of(found) as server:
            root = psutil.Process(server.process.pid)
            children: set[psutil.Process] = set()
            async with httpx.AsyncClient(timeout=5.0) as client:
                while server.process.poll() is None and len(killed) < STORM_MAX:
                    with contextlib.suppress(httpx.HTTPError, KeyError, psutil.NoSuchProcess):
                        children |= set(root.children(recursive=True))
                        pid = await kill_actor(server, "replica/worker", killed, states)
                        begin_s = time.monotonic()
                        if pid is None:
                            await asyncio.sleep(0.005)
                            continue
                        killed.append(pid)
                        while (await client.get(server.url + "/health")).status_code == 200:  # noqa: ASYNC110
                            await asyncio.sleep(0.005)
                        seen_ms.append(1000 * (time.monotonic() - begin_s))
            if len(killed) < STORM_MAX:
                await asyncio.to_thread(server.process.wait, WAIT_S)
            code = server.process.poll()
            _, alive = psutil.wait_procs(children, timeout=2)
        name = f"worker killed {when}: "
        show("R6", name + "kills until it gave up", len(killed), STORM_AIM)
        show("R6", name + "exit code", -1 if code is None else code, "not 0, nor -1: lives on")
        show("R6", name + "/health not 200, max ms", max(seen_ms, default=0.0), "< 1000")
        show("R6", name + "processes left", len(alive), "0")


EDGES: dict[str, Callable[[argparse.Namespace, Show], Awaitable[None]]] = {
    "slow": slow,
    "overload": overload,
    "drain": drain,
    "fronts": fronts,
    "storm": storm,
}


def main(words: list[str]) -> int:
    parser = parser_of("edges", ABOUT, "[option ...] [EDGE ...]")
    parser.add_argument("edges", nargs="*", metavar="EDGE", help=", ".join(EDGES))
    parser.add_argument("--model", default="", help="folder or .gguf; default: a tiny random Llama")
    parser.add_argument("--streams", type=int, default=40, help="of drain and fronts")
    parser.add_argument("--kills", type=int, default=4, help="of fronts")
    parser.add_argument("--seconds", type=float, default=10.0, help="of each load of overload")
    parser.add_argument("--fresh", action="store_true", help="overload: a connection a request")
    parser.add_argument("--threads", type=int, default=1, help="of the forward")
    parser.add_argument("--json", action="store_true", help="one JSON object a line")
    found = parser.parse_args(words)
    if unknown := set(found.edges) - set(EDGES):
        parser.error(f"no such edge: {', '.join(sorted(unknown))}")
    report = Report("edges", as_json=found.json)

    def show(figure: str, what: str, value: float, aim: str, note: str = "") -> None:
        value = round(value, 2)
        report.add(figure=figure, what=what, found=value, note=note, aim=aim)

    for name in found.edges or EDGES:
        asyncio.run(EDGES[name](found, show))
    report.close()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
