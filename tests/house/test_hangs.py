"""A process that lives and does nothing is found, and its streams go on; see `bench/chaos.py`."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

from bench.chaos import Struck, break_all
from bench.chaos_load import KINDS, plans
from bench.chaos_server import Server

FAULTS = [
    ("worker", "stop"),
    ("worker", "deadlock"),
    ("engine", "spin"),
    ("worker", "memory"),
    ("front", "memory"),
]


async def test_streams_survive_processes_that_are_stopped_stuck_spinning_or_without_memory(
    tiny: Path, tmp_path: Path
) -> None:
    found: list[Struck] = []
    # Longer than a busy machine may starve somebody.
    words = ("--no-spares", "--hang", "5", "--forward-hang", "5", "--recover", "240")
    with Server(str(tiny), tmp_path, 1, *words) as server:
        await asyncio.to_thread(server.wait_ready)
        wrong = await break_all(
            server, plans(8, 60, tuple(KINDS)), FAULTS, random.Random(1), found.append, waits=False
        )
    assert wrong == 0
    assert [(one.role, one.way) for one in found] == FAULTS
    for one in found:
        assert not one.errors
        assert one.equal == one.count > 0
        assert one.seen_s is not None
        assert one.next_s is not None
