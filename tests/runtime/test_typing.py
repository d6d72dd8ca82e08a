"""Goal: the type checker refuses a message that the target does not accept. Method: mypy itself, on
a small room."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOM = """
from actors.runtime import Actor, Ref
from messages.base import Message

class Ping(Message, frozen=True):
    n: int

class Pong(Message, frozen=True):
    n: int

class Other(Message, frozen=True):
    n: int

class Player(Actor):
    accepts = Ping

    async def on_start(self) -> bytes:
        self.peer: Ref[Ping | Pong] = self.context.peer("peer")
        self.narrow: Ref[Ping] = self.peer
        return b""

    def on_ping(self, message: Ping) -> None:
        self.peer.tell(Ping(1))
        self.peer.tell(Pong(1))
        self.narrow.tell(Ping(1))
        self.peer.tell(Other(1))   # refused
        self.narrow.tell(Pong(1))  # refused

    async def asks(self) -> None:
        await self.context.ask(self.peer, Ping(1), timeout_s=1.0)
        await self.context.ask(self.peer, Other(1), timeout_s=1.0)  # refused

def narrows(ref: Ref[Ping]) -> Ref[Ping | Pong]:
    return ref  # refused: who accepts less can't stand for who accepts more
"""


def test_mypy_refuses_a_message_that_the_target_does_not_accept(tmp_path: Path) -> None:
    room = tmp_path / "room.py"
    room.write_text(ROOM)
    root = Path(__file__).parents[2]
    result = subprocess.run(
        [
            sys.executable,
            "-m",
            "mypy",
            "--strict",
            "--config-file=",
            "--explicit-package-bases",
            "--namespace-packages",
            f"--cache-dir={root / '.mypy_cache'}",
            str(room),
        ],
        cwd=root,
        env={"MYPYPATH": str(root), "PATH": ""},
        capture_output=True,
        text=True,
        timeout=500,
    )
    errors = [line for line in result.stdout.splitlines() if "error:" in line]
    refused = [i + 1 for i, line in enumerate(ROOM.splitlines()) if "# refused" in line]
    assert [int(line.split(":")[1]) for line in errors] == refused, result.stdout
