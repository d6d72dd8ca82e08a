"""This file measures what a server costs while nobody asks it anything, and how soon it is up.

It knows the server from outside only: its address and its processes.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

import psutil

from bench.client import Client
from bench.command import parser_of
from bench.report import Report
from bench.serve import first_model, spawned, split_words

ABOUT = """\
Starts a server, asks it for one token, leaves it alone, and reports the processor time of each
of its processes as a share of one core.

  python -m app bench idle
  python -m app bench idle --seconds 60 -- --placement threads
"""


def main(words: Sequence[str]) -> int:
    parser = parser_of("idle", ABOUT)
    parser.add_argument("--seconds", type=float, default=20.0, help="how long to leave it alone")
    parser.add_argument("--json", action="store_true", help="one JSON object a line")
    words, rest = split_words(words)
    found = parser.parse_args(words)
    began_s = time.monotonic()
    with spawned(rest) as url:
        ready_s = time.monotonic() - began_s
        asyncio.run(one_token(url))
        token_s = time.monotonic() - began_s
        report = Report(
            "idle",
            as_json=found.json,
            start=f"{ready_s:.1f} s until ready, {token_s:.1f} s until the first token",
            seconds=found.seconds,
        )
        port = int(url.rsplit(":", 1)[1])
        measure(report, server_of(port), found.seconds)
    report.close()
    return 0


async def one_token(url: str) -> None:
    client = Client(url)
    model = await first_model(client)
    body: dict[str, object] = {"model": model, "prompt": "x", "max_tokens": 1, "stream": True}
    outcome = await client.stream("/v1/completions", body)
    if outcome.error:
        raise RuntimeError(outcome.error)


def server_of(port: int) -> psutil.Process:
    """The child of ours that serves on `port`."""
    for process in psutil.Process().children():
        if str(port) in process.cmdline():
            return process
    raise RuntimeError("the server is gone")


def measure(report: Report, root: psutil.Process, seconds: float) -> None:
    processes = [root, *root.children(recursive=True)]
    time.sleep(1.0)  # what the one request left to do
    before = [cpu_s(process) for process in processes]
    began_s = time.monotonic()
    time.sleep(seconds)
    elapsed_s = time.monotonic() - began_s
    for process, at_first in zip(processes, before, strict=True):
        report.add(
            process=name_of(process),
            pid=process.pid,
            threads=process.num_threads(),
            **{
                "MiB resident": process.memory_info().rss / 2**20,
                "% of a core": 100 * (cpu_s(process) - at_first) / elapsed_s,
            },
        )


def cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


def name_of(process: psutil.Process) -> str:
    """The node's name, or the server itself."""
    words = process.cmdline()
    if "actors.runtime.child" in words:
        return words[words.index("actors.runtime.child") + 1]
    return "main"
