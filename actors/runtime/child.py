"""This file is what runs in a child process: `python -m actors.runtime.child NODE FD FD FD FD`.

It does not know which actors the node will hold; it imports what they need only when the root asks
for them, so that a node without a worker never loads torch. A spare is told what to load ahead, and
then waits for its boot data, asleep, until it is needed. At its top this file imports hardly more
than the standard library: the ties to the parent come first.

Law: this process ends when its parent does. Three ways, since each has a gap: the kernel's signal
at the parent's death, the pipe that only the parent holds open, and the parent's id at the start.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import signal
import sys
import threading
import traceback
from typing import TYPE_CHECKING, Any

from actors.runtime.dying import hold

if TYPE_CHECKING:
    import asyncio

    from actors.runtime.launch import Preload
    from actors.runtime.process import ChildBoot

PR_SET_PDEATHSIG = 1
PRELOAD_NICE = 15
NO_MEMORY = 12  # the exit code
# How long a thread waits for one that is busy with the interpreter. By default 5 ms, which is some
# steps of a model: a prompt's ids waited so long for the loop, and a step's tokens for its thread.
SWITCH_S = 0.0005
NO_MEMORY_LINE = b"out of memory\n"


class Ready:
    """Tells the parent where this node listens. `prepared`: by path, what actors will find."""

    def __init__(self, fd: int, prepared: dict[str, Any]) -> None:
        self._fd: int | None = fd
        self.prepared = prepared

    def tell(self, endpoint: str) -> None:
        assert self._fd is not None, "told already"
        os.write(self._fd, endpoint.encode() + b"\n")
        os.close(self._fd)
        self._fd = None


def tie_to_parent(life_fd: int) -> None:
    """From here on this process dies with its parent, also while it is stuck in foreign code.

    A thread sees the end of the pipe and takes along what this process has started. Where a stuck
    call holds the interpreter's lock, that thread does not run: then the kernel's signal, a second
    later, must do without it.
    """
    # Killed at once by the parent-death signal, the process could not take anybody along. So that
    # signal is SIGHUP, and its handler the C library's own `alarm`, which gets the signal's number,
    # 1, as the seconds until SIGALRM, whose default is death. No Python code runs for it.
    libc = ctypes.CDLL(None, use_errno=True)
    libc.signal.argtypes = (ctypes.c_int, ctypes.c_void_p)
    libc.signal.restype = ctypes.c_void_p
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    libc.signal(signal.SIGHUP, ctypes.cast(libc.alarm, ctypes.c_void_p))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGHUP, signal.SIGALRM})
    libc.prctl(PR_SET_PDEATHSIG, signal.SIGHUP, 0, 0, 0)

    def watch() -> None:
        with contextlib.suppress(OSError):
            while os.read(life_fd, 1):
                pass
        end_group()

    threading.Thread(target=watch, name="parent", daemon=True).start()


def end_group() -> None:
    """Ends this process and what it has started."""
    if os.getpgid(0) == os.getpid():
        os.killpg(0, signal.SIGKILL)
    os._exit(1)


def end_for_want_of_memory() -> None:
    """A process that has no memory left does not recover by restarting actors in it."""
    with contextlib.suppress(OSError):
        os.write(2, NO_MEMORY_LINE)
    os._exit(NO_MEMORY)


def heed_memory(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """For what is raised outside of any actor: in a callback of the loop, in a transport."""
    if isinstance(context.get("exception"), MemoryError):
        end_for_want_of_memory()
    loop.default_exception_handler(context)


async def serve_node(boot: ChildBoot, ready: Ready) -> int:
    """Runs a node until the root halts it or is lost. The exit code is 0 only for the former."""
    import asyncio
    from pathlib import Path

    from actors.runtime.log import Logs
    from actors.runtime.node import Node
    from actors.runtime.recorder import Recorder
    from actors.runtime.transport.zmq import ZmqTransport
    from messages.system import Cause

    node_boot = boot.node
    logs = Logs(
        node=node_boot.name,
        directory=Path(node_boot.log_dir) if node_boot.log_dir else None,
        level=node_boot.log_level,
        colors=boot.log_colors,
        file_bytes_max=node_boot.log_file_bytes_max,
        files_max=node_boot.log_files_max,
    )
    logs.adopt_stdlib()
    transport = ZmqTransport(
        node_boot.name,
        node_boot.incarnation,
        run=node_boot.run,
        run_dir=Path(node_boot.run_dir),
        token=boot.token,
        heartbeat_s=node_boot.heartbeat_s,
        hang_s=node_boot.hang_s,
    )
    sys.setswitchinterval(SWITCH_S)
    asyncio.get_running_loop().set_exception_handler(heed_memory)
    node = Node(
        node_boot,
        transport=transport,
        log=logs.log_for(),
        prepared=ready.prepared,
        out_of_memory=end_for_want_of_memory,
        recorder=Recorder(memoryview(record_of(boot))),
    )
    try:
        await node.start()
        ready.tell(transport.endpoint)
        reason = await node.wait()
        return 0 if reason.cause is Cause.STOPPED else 1
    finally:
        await node.close()
        logs.close()


def record_of(boot: ChildBoot) -> mmap.mmap:
    """The memory that this process' last messages are written to: its parent has it as well."""
    assert boot.record_fd is not None
    record = mmap.mmap(boot.record_fd, 0)
    os.close(boot.record_fd)
    return record


def load_ahead(preload: Preload, ready_fd: int) -> dict[str, Any]:
    """Loads what the node will need, in a thread that others go before: it is not urgent. What
    can't be loaded will be said when it is needed. Gives what actors have prepared, by path."""
    import importlib

    from actors.runtime.codec import decode_arguments, load_factory

    prepared: dict[str, Any] = {}

    def load() -> None:
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), PRELOAD_NICE)
        for module in preload.modules:
            with contextlib.suppress(Exception):
                importlib.import_module(module)
        for order in preload.prepares:
            with contextlib.suppress(Exception):
                factory = load_factory(order.factory)
                arguments = decode_arguments(factory, order.arguments)
                prepared[order.path] = factory.prepare(**arguments)

    thread = threading.Thread(target=load, name="preload")
    thread.start()
    thread.join()
    is_hot = 0 < len(prepared) == len(preload.prepares)
    os.write(ready_fd, b"hot\n" if is_hot else b"warm\n")
    return prepared


def main(argv: list[str]) -> int:
    boot_fd, life_fd, ready_fd, hold_fd = map(int, argv[1:])
    tie_to_parent(life_fd)
    if hold(hold_fd):
        os.write(ready_fd, b"held\n")
    # Both are for the parent, which drains; a service manager may send them to all processes.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)

    import asyncio
    import importlib

    import msgspec

    from actors.runtime.launch import Preload
    from actors.runtime.process import LENGTH, ChildBoot

    prepared: dict[str, Any] = {}
    with open(boot_fd, "rb") as file:
        (length,) = LENGTH.unpack(file.read(LENGTH.size))
        preload = msgspec.msgpack.decode(file.read(length), type=Preload)
        if preload.modules:
            prepared = load_ahead(preload, ready_fd)
        data = file.read()
    if not data:  # a spare that is not needed any more
        return 0
    boot = msgspec.msgpack.decode(data, type=ChildBoot)
    if os.getppid() != boot.parent_pid:  # it died before the signal was asked for
        end_group()
    sys.path[:] = boot.sys_path
    module, _, name = boot.entry.partition(":")
    entry = getattr(importlib.import_module(module), name)
    code: int = asyncio.run(entry(boot, Ready(ready_fd, prepared)))
    return code


if __name__ == "__main__":
    try:
        code = main(sys.argv[1:])
    except BaseException:
        traceback.print_exc()
        code = 1
    # Not by return: a thread that is stuck in foreign code must not hold up the end.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
