"""This file brings a node to life in a process of its own, and tells when and how that one died.

It does not know what the node does. The child is a fresh interpreter (`actors/runtime/child.py`),
never a fork: nothing of the parent but what is handed over. Its boot data comes by an inherited
descriptor, not by arguments or environment, which others can read.

Laws: `exited` is done exactly once, when the child is dead and reaped, with exit code, signal and
last lines of output; `dying` with the same code or signal, as soon as that is certain and never
later than `exited`; `kill` waits for nothing; what the child started in its process group dies with
it; a child outlives its parent in no case (pipe, parent-death signal, parent id).
"""

from __future__ import annotations

import asyncio
import contextlib
import mmap
import os
import signal
import struct
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from actors.runtime import dying, flight, recorder
from actors.runtime.cores import Use, use_of
from actors.runtime.launch import LaunchFailed, Preload
from messages.system import Cause, NodeBoot, Reason

LAST_LINES_MAX = 20
LINE_CHARS_MAX = 500
READ_BYTES_MAX = 65_536
AHEAD_BYTES_MAX = 30_000  # both fit into a pipe, so that writing them waits for nobody
BOOT_BYTES_MAX = 30_000
LENGTH = struct.Struct("<I")  # of what a child loads ahead, which comes before its boot data
# What a child says before its endpoint, each a line.
HELD = b"held"  # its main thread holds the mutex whose owner's death is told early
WARM = b"warm"  # a spare: it has loaded what it was told to
HOT = b"hot"  # and also prepared all that it was told to
PYTHON = (sys.executable, "-P", "-X", "faulthandler")
CHILD_MODULE = "actors.runtime.child"
NOTHING = Preload()
ROOT = Path(__file__).resolve().parents[2]  # what `actors` is imported from


class ChildBoot(msgspec.Struct, frozen=True, kw_only=True):
    """What the child reads before anything else."""

    node: NodeBoot
    token: bytes
    parent_pid: int
    sys_path: tuple[str, ...]
    entry: str  # "module:function", an async function of (ChildBoot, ready) that gives an exit code
    log_colors: bool = False
    record_fd: int | None = None  # the memory of its flight recorder


class ChildProcess:
    """One life of a child, seen from its parent. Made by `spawn_node`."""

    def __init__(
        self,
        node: str,
        popen: subprocess.Popen[bytes],
        life_fd: int,
        ready_fd: int,
        forward: Callable[[bytes], None],
        record_fd: int,
        record: mmap.mmap,
        watch: dying.Watch,
    ) -> None:
        self.node = node
        self.record_fd = record_fd  # the child's number of it
        self.record = b""  # what it did last, once it is dead
        self._record = record
        self._watch = watch
        self.pid = popen.pid
        self.endpoint = ""
        self._loop = asyncio.get_running_loop()
        self.exited: asyncio.Future[Reason] = self._loop.create_future()
        self.dying: asyncio.Future[Reason] = self._loop.create_future()
        self.ready: asyncio.Future[str | None] = self._loop.create_future()
        self._popen = popen
        self._life_fd: int | None = life_fd
        self._ready_fd: int | None = ready_fd
        self._forward = forward
        self._last_lines: deque[str] = deque(maxlen=LAST_LINES_MAX)
        self._half_line = b""
        self._ready_bytes = b""
        self.warm: asyncio.Future[None] = self._loop.create_future()  # never, of what isn't a spare
        self.is_hot = False  # a spare whose actors find all that they asked to have prepared
        self.boot_fd: int | None = None  # of a spare, which waits for its boot data
        self._output_fd: int | None = _fileno(popen)
        self._pid_fd = os.pidfd_open(popen.pid)
        for fd in (self._output_fd, ready_fd):
            os.set_blocking(fd, False)
        self._loop.add_reader(self._pid_fd, self._died)
        self._loop.add_reader(self._output_fd, self._read_output)
        self._loop.add_reader(ready_fd, self._read_ready)

    @property
    def is_warm(self) -> bool:
        """A spare that has loaded what it was told to."""
        return self.warm.done()

    def boot(self, boot: ChildBoot) -> None:
        """Tells it what it is. Where it is dead already, `exited` says so."""
        data = msgspec.msgpack.encode(boot)
        assert len(data) <= BOOT_BYTES_MAX, f"{len(data)} bytes of boot data"
        if self.boot_fd is not None:
            with contextlib.suppress(BrokenPipeError):
                os.write(self.boot_fd, data)
            os.close(self.boot_fd)
            self.boot_fd = None

    def use(self) -> Use:
        """What it has had of the cores."""
        return use_of(self.pid)

    def kill(self) -> None:
        """Ends the child and all in its process group now. Waits for nothing; idempotent."""
        if not self.exited.done():
            self._kill_group()

    def terminate(self) -> None:
        """Asks the child to end (SIGTERM); it may take its time, or refuse, as a node does."""
        if not self.exited.done():
            with contextlib.suppress(ProcessLookupError):
                self._popen.terminate()

    def _kill_group(self) -> None:
        # Until the child is reaped neither its pid nor its group's id can belong to anyone else.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)

    def _read_ready(self) -> None:
        assert self._ready_fd is not None
        data = os.read(self._ready_fd, 4096)
        *lines, self._ready_bytes = (self._ready_bytes + data).split(b"\n")
        for line in lines:
            if line == HELD:
                self._watch.start(self.pid, self._owner_died)
            elif line in (WARM, HOT):
                self.is_hot = line == HOT
                self.warm.set_result(None)
            else:
                self.endpoint = line.decode(errors="replace").strip()
        if self.endpoint or not data:
            self._close_ready()

    def _close_ready(self) -> None:
        """It listens, or never will."""
        if self._ready_fd is not None:
            self._loop.remove_reader(self._ready_fd)
            os.close(self._ready_fd)
            self._ready_fd = None
        if not self.ready.done():
            self.ready.set_result(self.endpoint or None)

    def _read_output(self) -> bool:
        """Takes one piece of what the child wrote. False: nothing more now, or ever."""
        if self._output_fd is None:
            return False
        try:
            data = os.read(self._output_fd, READ_BYTES_MAX)
        except BlockingIOError:
            return False
        if not data:
            self._close_output()
            return False
        self._forward(data)
        *lines, self._half_line = (self._half_line + data).split(b"\n")
        self._half_line = self._half_line[-READ_BYTES_MAX:]
        for line in lines[-LAST_LINES_MAX:]:
            self._keep_line(line)
        return True

    def _keep_line(self, line: bytes) -> None:
        text = line.decode(errors="replace").rstrip()
        if text:
            self._last_lines.append(text[:LINE_CHARS_MAX])

    def _close_output(self) -> None:
        if self._output_fd is not None:
            self._loop.remove_reader(self._output_fd)
            self._output_fd = None
            assert self._popen.stdout is not None
            self._popen.stdout.close()

    def _owner_died(self) -> None:
        """In the watch's thread."""
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody is left to be told
            self._loop.call_soon_threadsafe(self._begins_to_die)

    def _begins_to_die(self) -> None:
        """All of it is ending, but its memory is not free yet, nor are its descriptors closed."""
        if self.dying.done():
            return
        code = dying.status_of_dying(self.pid)
        if code is None:
            return
        self._kill_group()  # what it has left behind
        self._drain_output()
        half = self._half_line.decode(errors="replace").rstrip()[:LINE_CHARS_MAX]
        lines = (*self._last_lines, half) if half else tuple(self._last_lines)
        self.dying.set_result(reason_of_exit(code, lines[-LAST_LINES_MAX:]))

    def _drain_output(self) -> None:
        for _ in range(64):  # what is in the pipe, however much others still write into it
            if not self._read_output():
                break

    def _died(self) -> None:
        self._loop.remove_reader(self._pid_fd)
        os.close(self._pid_fd)
        self._kill_group()  # what it has left behind
        self.record = self._record[:]
        self._record.close()
        code = self._popen.wait()  # dead already: gives its status, reaps it
        self._watch.close()
        self._drain_output()
        self._keep_line(self._half_line)
        self._close_output()
        for fd in (self._life_fd, self.boot_fd):
            if fd is not None:
                os.close(fd)
        self._life_fd = self.boot_fd = None
        self._close_ready()
        reason = reason_of_exit(code, tuple(self._last_lines))
        if not self.dying.done():
            self.dying.set_result(reason)
        self.exited.set_result(reason)


def reason_of_exit(code: int, last_lines: tuple[str, ...]) -> Reason:
    """What an exit status says. `code` as in subprocess: negative for a signal."""
    if code >= 0:
        detail = f"exit code {code}"
        return Reason(cause=Cause.EXITED, detail=detail, exit_code=code, last_lines=last_lines)
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    detail = f"killed by {name}"
    if -code == signal.SIGKILL:
        detail += " (by the operator, by its supervisor, or for want of memory)"
    return Reason(cause=Cause.EXITED, detail=detail, signal=-code, last_lines=last_lines)


async def spawn_node(
    boot: NodeBoot,
    *,
    token: bytes,
    entry: str = "actors.runtime.child:serve_node",
    environment: Mapping[str, str] | None = None,
    start_timeout_s: float = 60.0,
    forward: Callable[[bytes], None] | None = None,
    spare: ChildProcess | None = None,
    log: Any = None,
) -> ChildProcess:
    """Starts a child and waits until its transport listens. A `spare` that is warm becomes it.

    `environment` is added to this process' own (numbers of threads are read by libraries as they
    load). `forward` gets the child's output as it comes; by default it goes to this stderr, or
    nowhere where the boot data says so. `log` hears what the child did last, unless it ended in
    order.
    Raises LaunchFailed when there is no process to be had, when it dies before, or is not there in
    `start_timeout_s` (it is killed).
    """
    forward = forward or (write_to_stderr if boot.log_terminal else drop)
    child = spare
    if child is None or not child.is_warm or child.dying.done():
        if child is not None:
            child.kill()
        try:
            child = spawn_child(boot.name, environment or {}, forward)
        except OSError as error:  # no process, descriptor or memory is to be had
            detail = f"node {boot.name} could not be started: {error}"
            raise LaunchFailed(Reason(Cause.EXITED, detail)) from error
    child.boot(
        ChildBoot(
            node=boot,
            token=token,
            parent_pid=os.getpid(),
            sys_path=import_path(),
            entry=entry,
            log_colors=boot.log_terminal and os.isatty(2),
            record_fd=child.record_fd,
        )
    )
    if log is not None:
        tell_last(child, boot, log)
    try:
        async with asyncio.timeout(start_timeout_s):
            endpoint = await asyncio.shield(child.ready)
    except TimeoutError:
        child.kill()
        reason = Reason(
            cause=Cause.HUNG,
            detail=f"node {boot.name} was not up in {start_timeout_s:g} s",
            last_lines=(await asyncio.shield(child.exited)).last_lines,
        )
        raise LaunchFailed(reason) from None
    except asyncio.CancelledError:
        child.kill()
        raise
    if endpoint is None:
        child.kill()  # it may have closed the descriptor and live on
        raise LaunchFailed(await asyncio.shield(child.exited))
    return child


def tell_last(child: ChildProcess, boot: NodeBoot, log: Any) -> None:
    """Says what the child did last, when it has ended."""

    def ended(exited: asyncio.Future[Reason]) -> None:
        flight.tell(boot, child.pid, child.record, exited.result(), log)

    child.exited.add_done_callback(ended)


def spawn_child(
    node: str,
    environment: Mapping[str, str],
    forward: Callable[[bytes], None],
    preload: Preload = NOTHING,
) -> ChildProcess:
    """Starts a child without waiting for it; it waits for `boot`. Its descriptors: boot data, a
    pipe whose other end is held by this process for as long as it lives, a pipe to say that it is
    ready, and memory for its recorder and for the sign of its death, without a name, which is the
    kernel's again when both processes have ended. A spare loads `preload` before it looks for its
    boot data. Raises OSError, and nothing is left.
    """
    ahead = msgspec.msgpack.encode(preload)
    assert len(ahead) <= AHEAD_BYTES_MAX, f"{len(ahead)} bytes of what is loaded ahead"
    with contextlib.ExitStack() as theirs, contextlib.ExitStack() as ours:
        # The child's ends are closed here in any case, ours where it comes to nothing.
        record_fd, record = share_memory(f"{node}-flight", recorder.SIZE, theirs, ours)
        hold_fd, held = share_memory(f"{node}-life", dying.SIZE, theirs, ours)
        watch = dying.Watch(held)
        ours.callback(watch.close)
        boot_fd, boot_write_fd = open_pipe(theirs, ours)
        life_read_fd, life_write_fd = open_pipe(theirs, ours)
        ready_read_fd, ready_write_fd = open_pipe(ours, theirs)
        numbers = (boot_fd, life_read_fd, ready_write_fd, hold_fd)
        path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        popen = subprocess.Popen(
            # -P: the current directory may hold other things called `actors`.
            [*PYTHON, "-m", CHILD_MODULE, node, *map(str, numbers)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            pass_fds=(*numbers, record_fd),
            process_group=0,  # Ctrl-C is for the parent; and `kill` reaches all of the group
            env={**os.environ, **environment, "PYTHONPATH": path, "PYTHONUNBUFFERED": "1"},
            bufsize=0,
        )
        ours.enter_context(popen)  # closes its output and waits for it
        ours.callback(popen.kill)
        child = ChildProcess(
            node, popen, life_write_fd, ready_read_fd, forward, record_fd, record, watch
        )
        ours.pop_all()
    child.boot_fd = boot_write_fd
    with contextlib.suppress(BrokenPipeError):  # dead already: `exited` says so
        os.write(boot_write_fd, LENGTH.pack(len(ahead)) + ahead)
    return child


def share_memory(
    name: str, size: int, theirs: contextlib.ExitStack, ours: contextlib.ExitStack
) -> tuple[int, mmap.mmap]:
    """Memory of `size` bytes, all zero: a descriptor for the child, and what this process sees."""
    fd = os.memfd_create(name)
    theirs.callback(os.close, fd)
    os.ftruncate(fd, size)
    return fd, ours.enter_context(mmap.mmap(fd, size))


def open_pipe(reader: contextlib.ExitStack, writer: contextlib.ExitStack) -> tuple[int, int]:
    """A pipe, each end of which is closed with its stack."""
    read_fd, write_fd = os.pipe()
    reader.callback(os.close, read_fd)
    writer.callback(os.close, write_fd)
    return read_fd, write_fd


def import_path() -> tuple[str, ...]:
    """What this process imports from, so that a child finds the same modules."""
    return tuple(os.path.abspath(entry) for entry in sys.path)


def write_to_stderr(data: bytes) -> None:
    """Passes a child's output on, where this process has a stderr of its own."""
    with contextlib.suppress(OSError):
        os.write(2, data)


def drop(data: bytes) -> None:
    """Shows nothing; the last lines are kept all the same."""


def _fileno(popen: subprocess.Popen[bytes]) -> int:
    assert popen.stdout is not None
    return popen.stdout.fileno()
