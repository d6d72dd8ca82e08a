"""This file is a parent that the process tests kill: it starts a run with children, and waits."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from actors.runtime.process import spawn_node
from actors.runtime.rundir import RunDir
from messages.system import NodeBoot


async def main(base: str, names: list[str]) -> None:
    run = RunDir.create(Path(base))
    say(str(run.path))
    for entry in names:
        boot = NodeBoot(entry, 1, run.run, str(run.path), "main", 1, "ipc://none")
        child = await spawn_node(boot, token=run.token, entry=f"tests.runtime.children:{entry}")
        say(f"{child.pid} {child.endpoint.removeprefix('test://')}")
    say("up")
    await asyncio.Event().wait()


def say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], sys.argv[2:]))
