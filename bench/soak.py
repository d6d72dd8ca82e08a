"""This file runs a server for minutes under mixed load, breaks a process every few seconds, and
sees whether anything grows.

It knows the server from outside: HTTP, signals, its processes. The load: streams that are compared
token by token with the undisturbed run, clients that leave in the middle of a stream, requests that
are refused. What lives through it all is the root's process, which here holds the gateway as well;
the others are made anew by the faults, so what they grow by shows with `--every 0` alone.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import re
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import psutil

from bench.chaos import ROLES, Chaos, Struck
from bench.chaos_load import KINDS, Load, plans
from bench.chaos_server import Server
from bench.client import Client, Connection
from bench.command import parser_of
from bench.report import Report
from bench.serve import first_model

ABOUT = """\
Streams with a fault now and then, for as long as is asked: whether all are equal to the undisturbed
run, what is left behind, and what each process grows by.

  python -m app bench soak --minutes 30
  python -m app bench soak --minutes 2 --every 5 --streams 50
  python -m app bench soak --minutes 30 --every 0      no faults: what each process grows by

The slope is that of the second half: in the first, arenas and tables fill, up to their bounds.
Exit status 1 where a stream was not equal, or something was left behind.
"""

WARM_SHARE = 0.5  # of the time, before growth is looked at
SAMPLE_S = 1.0
WAYS = ("kill", "stop")
SHM = Path("/dev/shm")
QUIET_S = 30.0
SETTLED_COUNT = 5  # looks that found the same
CHILD = re.compile(r"runtime[./]child(\.py)?$")


class Sample(NamedTuple):
    """What the root's process holds, and the memory of each of its children."""

    at_s: float
    rss_mib: float
    fds: int
    threads: int
    children: dict[tuple[str, int], float]  # MiB, by role and pid


class Watcher:
    """Looks at the server once a second."""

    def __init__(self, server: Server) -> None:
        self.root = psutil.Process(server.process.pid)
        self.samples: list[Sample] = []
        self.first_fault_s = float("inf")

    def look(self) -> Sample:
        children = {}
        for child in self.root.children(recursive=True):
            with contextlib.suppress(psutil.Error):
                words = child.cmdline()
                at = next((i for i, word in enumerate(words) if CHILD.search(word)), -2)
                role = words[at + 1] if 0 <= at < len(words) - 1 else "other"
                children[role, child.pid] = child.memory_info().rss / 2**20
        return Sample(
            time.monotonic(),
            self.root.memory_info().rss / 2**20,
            self.root.num_fds(),
            self.root.num_threads(),
            children,
        )

    async def run(self) -> None:
        while True:
            self.samples.append(self.look())
            await asyncio.sleep(SAMPLE_S)


def slopes(samples: Sequence[Sample]) -> dict[str, float]:
    """MiB/min of the root's process and of the children that lived all the time."""
    begin_s = samples[0].at_s
    found = {"root": slope([((s.at_s - begin_s) / 60, s.rss_mib) for s in samples])}
    for role, pid in samples[0].children:
        held = [
            ((s.at_s - begin_s) / 60, s.children[role, pid])
            for s in samples
            if (role, pid) in s.children
        ]
        if len(held) == len(samples):
            found[role] = max(found.get(role, float("-inf")), slope(held))
    return found


def slope(points: Sequence[tuple[float, float]]) -> float:
    """Of the line that fits best: y by x. nan of fewer than two."""
    count = len(points)
    if count < 2:
        return float("nan")
    mean_x = sum(x for x, _ in points) / count
    mean_y = sum(y for _, y in points) / count
    spread = sum((x - mean_x) ** 2 for x, _ in points)
    return sum((x - mean_x) * (y - mean_y) for x, y in points) / spread


async def rude(url: str, model: str, rng: random.Random) -> None:
    """A client that leaves: in a stream, or with a request that is refused."""
    client = Client(url)
    (plan,) = plans(1, 200)
    while True:
        body = plan._replace(seed=rng.randrange(1000)).body(model)
        if rng.random() < 0.3:
            body["temperature"] = -1
        leave_after = rng.randrange(1, 40)

        def heard(connection: Connection, leave_after: int = leave_after) -> None:
            if connection.ids_len >= leave_after and connection.transport is not None:
                connection.transport.abort()

        await client.stream("/v1/completions", body, heard)
        await asyncio.sleep(rng.uniform(0.0, 0.2))


async def quiet(watcher: Watcher, client: Client, processes: int | None = None) -> Sample:
    """Once nothing is under way, with so many processes again, or for the first time as many as
    there will be."""
    until_s = time.monotonic() + QUIET_S
    sample = watcher.look()
    same_count = 0
    while time.monotonic() < until_s and same_count < SETTLED_COUNT:
        await asyncio.sleep(SAMPLE_S)
        _, text = await client.get("/metrics")
        sample, before = watcher.look(), sample
        is_same = (sample.fds, len(sample.children)) == (before.fds, len(before.children))
        is_same &= processes in (None, len(sample.children))
        is_idle = metric(text, "histrio_requests_running") == 0
        same_count = same_count + 1 if is_same and is_idle else 0
    return sample


def metric(text: bytes, name: str) -> float:
    """The sum of all lines of this name (and labels, if it has some)."""
    lines = [line for line in text.decode().splitlines() if line.startswith(name)]
    return sum(float(line.rpartition(" ")[2]) for line in lines if line[len(name)] in " {}")


def deaths(log: Path) -> list[tuple[str, str]]:
    """Of children while the server served: role and detail, as its root said."""
    lines = [line for line in log.read_text("utf-8").splitlines() if '"node died"' in line]
    return [(line["peer"], line["detail"]) for line in map(json.loads, lines)]


def shared_memory() -> set[str]:
    return set(os.listdir(SHM)) if SHM.is_dir() else set()


def mapped() -> str:
    """What all processes have mapped. With the server ended, it is what others use."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(OSError):
            found.append(Path(f"/proc/{process.pid}/maps").read_text("utf-8"))
    return "".join(found)


async def soak(found: argparse.Namespace, report: Report) -> int:
    rng = random.Random(found.seed)
    asked = plans(found.streams, 100, tuple(KINDS))
    shm = shared_memory()
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="soak-")))
        server = stack.enter_context(
            Server(found.model, folder, found.threads, "--spare-after", "1", "--log-level", "info")
        )
        await asyncio.to_thread(server.wait_ready)
        client = Client(server.url, timeout_s=30.0)
        model = await first_model(client)
        load = Load(server.url, model, asked)
        await load.learn()
        watcher = Watcher(server)
        before = await quiet(watcher, client)
        struck, streams, wrong, told = await break_for(found, server, load, watcher, rng)
        after = await quiet(watcher, client, len(before.children))
        _, text = await client.get("/metrics")
        leased = metric(text, 'histrio_pages{state="leased"}')
        opened = metric(text, "histrio_streams_open")
        died = deaths(server.log_dir / "latest" / "main.jsonl")
    others = mapped()
    grown = {name for name in shared_memory() - shm if f"{SHM / name}\n" not in others}
    warm_s = watcher.samples[0].at_s + WARM_SHARE * 60 * found.minutes
    # The first fault makes threads that stay: those that write down what went before it.
    threads = max(s.threads for s in (before, *watcher.samples) if s.at_s < warm_s)
    late = [sample for sample in watcher.samples if sample.at_s >= warm_s]
    rows = [
        ("faults", len(struck), ""),
        ("deaths beside the faults", more_than(died, struck), ""),
        ("streams ended", streams, ""),
        ("of these not equal", wrong, "0"),
        ("what their clients were told", "; ".join(sorted(told))[:120], ""),
        *(
            (f"{role}: memory MiB/min", round(value, 3), "< 1")
            for role, value in slopes(late).items()
        ),
        ("root: memory MiB, before / after", f"{before.rss_mib:.0f} / {after.rss_mib:.0f}", ""),
        ("root: descriptors", f"{before.fds} / {after.fds}", "equal"),
        ("root: threads, warm / after", f"{threads} / {after.threads}", "no more"),
        ("processes", f"{len(before.children)} / {len(after.children)}", "equal"),
        ("shared memory left", len(grown), "0"),
        ("pages leased at the end", int(leased), "0"),
        ("streams open at the end", int(opened), "0"),
    ]
    for what, value, aim in rows:
        report.add(what=what, found=str(value), aim=aim)
    report.close()
    more = before.fds != after.fds
    more |= after.threads > threads and watcher.first_fault_s < warm_s
    return int(bool(wrong or grown or leased or opened or more))


def more_than(died: list[tuple[str, str]], struck: list[Struck]) -> str:
    """By role; and how the last of these is said to have died."""
    more = Counter(role for role, _ in died)
    more.subtract(one.role for one in struck)
    return "; ".join(f"{role} {count}: {dict(died)[role]}" for role, count in (+more).items())[:300]


async def break_for(
    found: argparse.Namespace, server: Server, load: Load, watcher: Watcher, rng: random.Random
) -> tuple[list[Struck], int, int, set[str]]:
    """The faults, the streams that ended, those that were not equal, and their errors."""
    chaos = Chaos(server, load, rng, waits=True)
    tasks = [asyncio.create_task(watcher.run())]
    tasks += [asyncio.create_task(rude(server.url, load.model, rng)) for _ in range(found.rude)]
    load.start()
    struck: list[Struck] = []
    told: set[str] = set()
    streams = wrong = strikes = 0
    begin_s = time.monotonic()
    try:
        until_s = begin_s + 60 * found.minutes
        while time.monotonic() < until_s:
            due_s = begin_s + found.every * (strikes + 1) if found.every else until_s
            await asyncio.sleep(min(SAMPLE_S, due_s - time.monotonic()))
            if due_s <= time.monotonic() < until_s:
                strikes += 1
                with contextlib.suppress(TimeoutError):  # its moment did not come
                    met = await chaos.strike(rng.choice(list(ROLES)), rng.choice(WAYS))
                    struck.append(met.struck)
                    watcher.first_fault_s = min(watcher.first_fault_s, time.monotonic())
            ended = load.take_ended()
            streams += len(ended)
            wrong += sum(not stream.is_equal for stream in ended)
            told |= {stream.error for stream in ended if stream.error}
    finally:
        await load.stop()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        chaos.log.close()
    return struck, streams, wrong, told


def main(words: list[str]) -> int:
    parser = parser_of("soak", ABOUT)
    parser.add_argument("--minutes", type=float, default=30.0, help="of load")
    parser.add_argument("--every", type=float, default=10.0, help="seconds between faults; 0: none")
    parser.add_argument("--streams", type=int, default=50, help="open at once")
    parser.add_argument("--rude", type=int, default=8, help="clients that leave")
    parser.add_argument("--model", default="", help="folder or .gguf; default: a tiny random Llama")
    parser.add_argument("--threads", type=int, default=1, help="of the forward")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true", help="one JSON object a line")
    found = parser.parse_args(words)
    report = Report("soak", as_json=found.json, minutes=found.minutes, streams=found.streams)
    return asyncio.run(soak(found, report))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
