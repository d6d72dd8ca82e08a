"""This file measures `tell` to handler in other Python actor libraries, those that are installed.

It does not know ours; `bench/mailbox.py` puts both into one table. A library that is not there is
left out, and named. Each is used as its own documentation says, its receiver counting messages.
"""

from __future__ import annotations

import asyncio
import importlib
import time
from collections.abc import Callable
from typing import Any

Peer = Callable[[int], float]


def asyncio_queue(count: int) -> float:
    """No library: a queue and a task, unbounded, untyped, unsupervised."""

    async def main() -> float:
        queue: asyncio.Queue[int] = asyncio.Queue()
        seen = 0

        async def receive() -> None:
            nonlocal seen
            while seen < count:
                await queue.get()
                seen += 1

        task = asyncio.ensure_future(receive())
        began_s = time.perf_counter()
        for n in range(count):
            queue.put_nowait(n)
            if n % 1000 == 0:
                await asyncio.sleep(0)
        await task
        return count / (time.perf_counter() - began_s)

    return asyncio.run(main())


def pykka(count: int) -> float:
    """A thread for each actor."""
    library: Any = importlib.import_module("pykka")

    class Sink(library.ThreadingActor):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.seen = 0

        def on_receive(self, message: Any) -> int:
            self.seen += 1
            return self.seen

    sink = Sink.start()
    began_s = time.perf_counter()
    for n in range(count - 1):
        sink.tell(n)
    assert sink.ask(count) == count
    took_s = time.perf_counter() - began_s
    sink.stop()
    return count / took_s


def thespian(count: int) -> float:
    """In its in-process base."""
    library: Any = importlib.import_module("thespian.actors")
    seen = [0]

    class Sink(library.Actor):  # type: ignore[misc]
        def receiveMessage(self, message: Any, sender: Any) -> None:
            seen[0] += 1

    system = library.ActorSystem("simpleSystemBase")
    sink = system.createActor(Sink)
    began_s = time.perf_counter()
    for n in range(count):
        system.tell(sink, n)
    while seen[0] < count:
        system.listen(0)
    took_s = time.perf_counter() - began_s
    system.shutdown()
    return count / took_s


def xoscar(count: int) -> float:
    """In one pool, so in one process; `tell` is a call without a result."""
    library: Any = importlib.import_module("xoscar")

    class Sink(library.Actor):  # type: ignore[misc]
        def __init__(self) -> None:
            self.seen = 0

        def add(self, n: int) -> int:
            self.seen += 1
            return self.seen

    async def main() -> float:
        pool = await library.create_actor_pool("127.0.0.1", n_process=0)
        async with pool:
            sink = await library.create_actor(Sink, address=pool.external_address, uid="sink")
            began_s = time.perf_counter()
            for n in range(count - 1):
                await sink.add.tell(n)
            seen = 0
            while seen < count:
                seen = await sink.add(count)
            return count / (time.perf_counter() - began_s)

    return asyncio.run(main())


PEERS: dict[str, tuple[str, Peer]] = {
    "asyncio.Queue and a task": ("asyncio", asyncio_queue),
    "pykka": ("pykka", pykka),
    "thespian, simple base": ("thespian", thespian),
    "xoscar, one pool": ("xoscar", xoscar),
}
