"""This package is the rooms that `bench/chaos.py` breaks: the real ones with fuses. A fuse is a
signal that makes a process go wrong in a way that no signal of the system does by itself.

Each room is a module of its own, so that no process imports what only another one needs.
"""

from __future__ import annotations

import asyncio
import os
import resource
import signal
import threading
from pathlib import Path

GO_WRONG = {
    "spin": signal.SIGUSR1,
    "deadlock": signal.SIGUSR2,
    "memory": signal.SIGRTMIN + 1,
    "assert": signal.SIGRTMIN + 2,
}
KEPT: list[bytearray] = []  # what has used up a process' memory


def spin() -> None:
    """A busy loop that never gives the interpreter up for long, on the process's event loop."""
    while True:
        pass


def listen() -> None:
    """Only where the actor is alone with its loop in a process."""
    if threading.current_thread() is threading.main_thread():
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(GO_WRONG["spin"], spin)
        loop.add_signal_handler(GO_WRONG["memory"], use_up_memory)


def use_up_memory() -> None:
    """No further memory for this process from now on: whatever it asks for is not to be had."""
    used = int(Path("/proc/self/statm").read_text("ascii").split()[0]) * os.sysconf("SC_PAGE_SIZE")
    resource.setrlimit(resource.RLIMIT_AS, (used, used))
    size = 1 << 20
    while size > 16:
        try:
            KEPT.append(bytearray(size))
        except MemoryError:
            size >>= 1
