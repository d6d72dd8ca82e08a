"""This file is what runs in the children of the process tests. Each function is an entry."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time

from actors.runtime.child import Ready
from actors.runtime.process import ChildBoot


def say(line: str) -> None:
    sys.stderr.write(line + "\n")


def spin() -> None:
    time.sleep(0.01)


def start_helper() -> subprocess.Popen[bytes]:
    return subprocess.Popen(["sleep", "1000"])


async def until_told(boot: ChildBoot, ready: Ready) -> int:
    """Serves until SIGTERM; then exits with 0."""
    told = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, told.set)
    ready.tell(f"test://{boot.node.name}/{boot.node.incarnation}")
    await told.wait()
    return 0


async def crashing(boot: ChildBoot, ready: Ready) -> int:
    ready.tell("test://")
    for number in range(30):
        say(f"line {number}")
    raise RuntimeError("the model is bad")


async def dying_early(boot: ChildBoot, ready: Ready) -> int:
    say("no such model")
    return 3


async def never_ready(boot: ChildBoot, ready: Ready) -> int:
    say("loading")
    await asyncio.Event().wait()
    return 0


async def crashing_hard(boot: ChildBoot, ready: Ready) -> int:
    ready.tell("test://")
    os.kill(os.getpid(), signal.SIGSEGV)
    return 0


async def spinning(boot: ChildBoot, ready: Ready) -> int:
    """Its loop never runs again, and it ignores what it can."""
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    ready.tell("test://")
    while True:
        spin()


async def with_a_child(boot: ChildBoot, ready: Ready) -> int:
    """Has started a process of its own, which writes on to the same pipe."""
    helper = start_helper()
    ready.tell(f"test://{helper.pid}")
    await asyncio.Event().wait()
    return 0


async def flooding(boot: ChildBoot, ready: Ready) -> int:
    ready.tell("test://")
    for number in range(20_000):
        say(f"line {number} " + "x" * 100)
    return 0


async def stuck_thread(boot: ChildBoot, ready: Ready) -> int:
    """Ends while a thread of its own does not."""
    threading.Thread(target=threading.Event().wait).start()
    ready.tell("test://")
    return 0


async def telling_what_it_has(boot: ChildBoot, ready: Ready) -> int:
    heavy = [name for name in ("torch", "zmq", "starlette", "numpy") if name in sys.modules]
    say(f"modules {heavy}")
    say(f"threads {os.environ.get('OMP_NUM_THREADS')}")
    say(f"seed {boot.node.seed}")
    ready.tell("test://")
    return 0
