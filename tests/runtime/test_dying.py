"""Goal: that a process dies is told before it has ended, with how it ends, and never of one that
lives. Method: real processes; the parent's pidfd is not listened to until the test says so."""

from __future__ import annotations

import asyncio
import functools
import mmap
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from actors.runtime import dying
from actors.runtime.process import ChildProcess
from messages.system import Reason
from tests.runtime.nodes import DEADLINE_S, until
from tests.runtime.test_process import death_of, is_alive, spawn


@contextmanager
def deaf(child: ChildProcess) -> Iterator[None]:
    """Within it only the early sign can tell."""
    loop = asyncio.get_running_loop()
    loop.remove_reader(child._pid_fd)
    try:
        yield
    finally:
        loop.add_reader(child._pid_fd, child._died)


async def sign_of(child: ChildProcess) -> Reason:
    async with asyncio.timeout(DEADLINE_S):
        return await asyncio.shield(child.dying)


def as_numbers(reason: Reason) -> tuple[int | None, int | None]:
    return reason.exit_code, reason.signal


async def test_a_kill_is_told_before_the_process_has_ended() -> None:
    child, _ = await spawn("until_told")
    with deaf(child):
        child.kill()
        sign = await sign_of(child)
        assert not child.exited.done()
    assert as_numbers(sign) == as_numbers(await death_of(child)) == (None, signal.SIGKILL)
    assert not is_alive(child.pid)


@pytest.mark.parametrize(
    ("how", "code", "number", "last"),
    [
        ("in order", 0, None, "the last word"),
        ("out of memory", 12, None, "out of memory"),
        ("an exception", 1, None, "RuntimeError: the model is bad"),
        ("in a thread", 3, None, "the last word"),
        ("a fault", None, signal.SIGSEGV, "Extension modules: "),
    ],
)
async def test_the_sign_tells_how_it_ends_and_what_it_said_last(
    how: str, code: int | None, number: int | None, last: str
) -> None:
    child, _ = await spawn("until_asked", environment={"HOW": how})
    with deaf(child):
        child.terminate()
        sign = await sign_of(child)
    ended = await death_of(child)
    assert as_numbers(sign) == as_numbers(ended) == (code, number)
    assert sign.last_lines == ended.last_lines
    assert sign.last_lines[-1].startswith(last)


async def test_what_a_child_has_started_dies_at_the_sign() -> None:
    child, _ = await spawn("with_a_child")
    grandchild = os.pidfd_open(int(child.endpoint.removeprefix("test://")))
    with deaf(child):
        os.kill(child.pid, signal.SIGKILL)
        await sign_of(child)
        ended = asyncio.Event()
        asyncio.get_running_loop().add_reader(grandchild, ended.set)
        async with asyncio.timeout(DEADLINE_S):
            await ended.wait()
        asyncio.get_running_loop().remove_reader(grandchild)
        os.close(grandchild)
    await death_of(child)


async def test_a_process_that_becomes_another_program_has_not_died() -> None:
    """It gives up its mutexes as if it had."""
    child, _ = await spawn("becoming_another")
    watch = child._watch._thread
    assert watch is not None
    await until(lambda: not watch.is_alive())
    for _ in range(3):  # what the thread has told the loop
        await asyncio.sleep(0)
    assert is_alive(child.pid) and not child.dying.done()
    child.kill()
    assert (await death_of(child)).signal == signal.SIGKILL
    assert child.dying.result() is child.exited.result()


async def no_sign(monkeypatch: pytest.MonkeyPatch) -> None:
    child, _ = await spawn("until_told")
    assert child._watch._thread is None
    child.kill()
    ended = await death_of(child)
    assert ended.signal == signal.SIGKILL
    assert child.dying.result() is ended


async def test_on_another_kind_of_processor_only_the_end_is_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(dying, "CALLS", {})
    await no_sign(monkeypatch)


async def test_where_the_exit_status_is_hidden_only_the_end_is_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(dying, "fields_of", lambda pid: None)
    await no_sign(monkeypatch)


async def test_where_no_thread_is_to_be_had_only_the_end_is_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(dying.threading.Thread, "start", fail)
    await no_sign(monkeypatch)


# Without a process: a thread that ends gives up its mutexes as well.


def shared() -> tuple[int, mmap.mmap]:
    fd = os.memfd_create("test")
    os.ftruncate(fd, dying.SIZE)
    return fd, mmap.mmap(fd, dying.SIZE)


def test_the_end_of_the_holder_is_told_once() -> None:
    fd, memory = shared()
    held, end, told = threading.Event(), threading.Event(), threading.Semaphore(0)

    def holder() -> None:
        assert dying.hold(fd)
        held.set()
        end.wait()

    thread = threading.Thread(target=holder)
    thread.start()
    assert held.wait(DEADLINE_S)
    watch = dying.Watch(memory)
    watch.start(os.getpid(), told.release)
    assert not told.acquire(blocking=False)
    end.set()
    assert told.acquire(timeout=DEADLINE_S)
    thread.join()
    watch.close()
    watch.close()
    assert not told.acquire(blocking=False)


def test_a_holder_that_has_ended_before_is_told_as_well() -> None:
    fd, memory = shared()
    thread = threading.Thread(target=dying.hold, args=(fd,))
    thread.start()
    thread.join()
    told = threading.Semaphore(0)
    watch = dying.Watch(memory)
    watch.start(os.getpid(), told.release)
    assert told.acquire(timeout=DEADLINE_S)
    watch.close()


def test_a_watch_that_is_closed_without_a_sign_leaves_neither_thread_nor_descriptor() -> None:
    """As of a process whose own memory the kernel had to take before it could look into it."""
    before, threads = set(os.listdir("/proc/self/fd")), threading.active_count()
    told: list[int] = []
    for number in range(20):
        fd, memory = shared()
        os.close(fd)
        memory[:4] = (os.getpid() | dying.WAITERS).to_bytes(4, "little")
        watch = dying.Watch(memory)
        watch.start(os.getpid(), functools.partial(told.append, number))
        assert threading.active_count() == threads + 1
        watch.close()
        assert threading.active_count() == threads and told == []
    assert set(os.listdir("/proc/self/fd")) <= before


def test_what_is_no_shared_memory_holds_no_mutex() -> None:
    reading, writing = os.pipe()
    os.close(writing)
    assert not dying.hold(reading)  # and takes it all the same
    with pytest.raises(OSError, match="Bad file"):
        os.fstat(reading)


def test_a_living_process_has_no_exit_status() -> None:
    assert dying.tells_status(os.getpid())
    assert dying.status_of_dying(os.getpid()) is None
