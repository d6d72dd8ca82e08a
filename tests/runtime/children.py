"""This file is what runs in the children of the process tests. Each function is an entry."""

from __future__ import annotations

import asyncio
import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import msgspec

from actors.runtime.child import Ready, end_for_want_of_memory
from actors.runtime.process import ChildBoot
from actors.runtime.transport.base import Transport
from messages.base import Header, Message
from messages.system import Reason, Stop


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


async def until_asked(boot: ChildBoot, ready: Ready) -> int:
    """Serves until SIGTERM; then ends in the way that the environment names."""
    asked = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, asked.set)
    ready.tell("test://")
    await asked.wait()
    say("the last word")
    match os.environ["HOW"]:
        case "out of memory":
            end_for_want_of_memory()
        case "an exception":
            raise RuntimeError("the model is bad")
        case "in a thread":
            threading.Thread(target=os._exit, args=(3,)).start()
            await asyncio.Event().wait()
        case "a fault":
            os.kill(os.getpid(), signal.SIGSEGV)
    return 0


async def becoming_another(boot: ChildBoot, ready: Ready) -> int:
    """Goes on as another program in the same process."""
    ready.tell("test://")
    os.execvp("sleep", ["sleep", "1000"])


class Preparing:
    """Stands for an actor that loads something ahead."""

    def __init__(self, count: int) -> None:
        raise AssertionError("it is not built, only prepared")

    @staticmethod
    def prepare(count: int) -> str:
        return f"{count} rooms"


async def saying_what_is_prepared(boot: ChildBoot, ready: Ready) -> int:
    say(f"prepared: {ready.prepared}")
    ready.tell("test://")
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
    for number in (signal.SIGTERM, signal.SIGQUIT, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    ready.tell("test://")
    while True:
        spin()


async def holding_the_gil(boot: ChildBoot, ready: Ready) -> int:
    """Stuck in foreign code, so that not even its threads run."""
    ready.tell("test://")
    mutex = ctypes.create_string_buffer(256)
    for _ in range(2):  # the second time for ever, whatever signals come
        ctypes.PyDLL(None).pthread_mutex_lock(mutex)
    return 0


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


class Chatty:
    """A node that repeats what it gets."""

    def __init__(self, transport: Transport) -> None:
        self.gone = asyncio.Event()
        self._transport = transport

    def arrive(self, node: str, header: Header, body: Message | bytes | memoryview) -> None:
        assert not isinstance(body, Message)
        message = msgspec.msgpack.decode(body, type=Stop)
        if message.grace_s < 0:
            while True:  # the loop spins; the threads of ZMQ go on
                pass
        self._transport.send(node, header, message)

    def link_up(self, node: str, incarnation: int) -> None: ...

    def link_down(self, node: str, reason: Reason) -> None:
        self.gone.set()


async def chatty(boot: ChildBoot, ready: Ready) -> int:
    """Linked to its parent; ends when that link does."""
    from actors.runtime.transport.zmq import ZmqTransport  # not in the other children

    node = boot.node
    transport = ZmqTransport(
        node.name,
        node.incarnation,
        run=node.run,
        run_dir=Path(node.run_dir),
        token=boot.token,
        heartbeat_s=node.heartbeat_s,
        hang_s=node.hang_s,
    )
    end = Chatty(transport)
    await transport.start(end)
    transport.connect(node.root, node.root_incarnation, node.root_endpoint)
    ready.tell(transport.endpoint)
    await end.gone.wait()
    await transport.close()
    return 0
