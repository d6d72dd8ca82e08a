"""A process that lives and does nothing is found, and its streams go on; see `bench/chaos.py`."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

from bench.chaos import plans, play, strike
from bench.chaos_server import Server


async def test_streams_survive_a_stopped_worker_a_stuck_forward_and_a_spinning_engine(
    tiny: Path, tmp_path: Path
) -> None:
    asked = plans(6, 60)
    rng = random.Random(1)
    with Server(str(tiny), tmp_path, 1, "--no-spares") as server:
        await asyncio.to_thread(server.wait_ready)
        right = await play(server.url, asked)
        for role, way in (("worker", "stop"), ("worker", "deadlock"), ("engine", "spin")):
            struck = await strike(server, role, way, asked, right, rng)
            assert not struck.errors
            assert struck.equal_count == struck.count == len(asked)
            assert struck.seen_s is not None
