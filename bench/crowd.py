"""This file is a crowd of clients in processes of their own: one process alone is late to connect
hundreds of streams, and that would count as the server's time.

It does not know what is asked. A wave is a line of JSON to each process (`python -m bench.crowd`)
and one from it; all begin at the same moment of the machine's clock.
"""

from __future__ import annotations

import asyncio
import random
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any

import msgspec

from bench.client import Client, Outcome
from bench.report import ROOT

HEAD_START_S = 0.05  # until all processes have read their part


class Part(msgspec.Struct):
    """What one process sends: all at once, but `room` of them at most, each after its delay."""

    url: str
    key: str
    timeout_s: float
    begin_s: float
    room: int
    asks: list[tuple[float, str, dict[str, Any]]]  # delay, path, body


class Crowd:
    """So many processes, as long as the block lasts."""

    def __init__(self, count: int) -> None:
        command = [sys.executable, "-m", "bench.crowd"]
        pipe = subprocess.PIPE
        self.processes = [
            subprocess.Popen(command, cwd=ROOT, stdin=pipe, stdout=pipe) for _ in range(count)
        ]

    def __enter__(self) -> Crowd:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.processes:
            assert process.stdin is not None and process.stdout is not None
            process.stdin.close()
            process.wait()
            process.stdout.close()

    def send(
        self, client: Client, asks: Sequence[tuple[float, str, dict[str, Any]]], room: int
    ) -> list[Outcome]:
        """Outcomes in the order of the asks, which the processes take in turn."""
        count = len(self.processes)
        begin_s = time.monotonic() + HEAD_START_S
        for nth, process in enumerate(self.processes):
            part = Part(
                client.url.geturl(),
                client.key,
                client.timeout_s,
                begin_s,
                max(1, (room + count - 1 - nth) // count),
                list(asks[nth::count]),
            )
            assert process.stdin is not None
            process.stdin.write(msgspec.json.encode(part) + b"\n")
            process.stdin.flush()
        outcomes: dict[int, Outcome] = {}
        for nth, process in enumerate(self.processes):
            assert process.stdout is not None
            found = msgspec.json.decode(process.stdout.readline(), type=list[Outcome])
            outcomes.update(zip(range(nth, len(asks), count), found, strict=True))
        return [outcomes[index] for index in range(len(asks))]


async def send_part(part: Part) -> list[Outcome]:
    client = Client(part.url, key=part.key, timeout_s=part.timeout_s)
    room = asyncio.Semaphore(part.room)

    async def send(delay_s: float, path: str, body: dict[str, Any]) -> Outcome:
        if delay_s:
            await asyncio.sleep(delay_s)
        async with room:
            return await client.stream(path, body)

    await asyncio.sleep(max(0.0, part.begin_s - time.monotonic()))
    return list(await asyncio.gather(*(send(*ask) for ask in part.asks)))


def delays(count: int, rate: float | None, name: str) -> list[float]:
    """When requests arrive: all at once, or at seeded random times at `rate` a second."""
    rng = random.Random(name)
    due_s = 0.0
    found = []
    for _ in range(count):
        due_s += 0.0 if rate is None else rng.expovariate(rate)
        found.append(due_s)
    return found


def main() -> None:
    for line in sys.stdin.buffer:
        outcomes = asyncio.run(send_part(msgspec.json.decode(line, type=Part)))
        sys.stdout.buffer.write(msgspec.json.encode(outcomes) + b"\n")
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
