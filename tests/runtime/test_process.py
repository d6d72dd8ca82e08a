"""This file tests child processes with real ones: birth, death, and that nobody is left behind."""

from __future__ import annotations

import asyncio
import contextlib
import os
import select
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from actors.runtime import rundir
from actors.runtime.launch import LaunchFailed, Preload, Prepare
from actors.runtime.process import (
    ROOT,
    ChildProcess,
    drop,
    reason_of_exit,
    spawn_child,
    spawn_node,
)
from messages.system import Cause, NodeBoot, Reason
from tests.runtime.nodes import DEADLINE_S, until

TOKEN = b"a secret of this run"


async def spawn(entry: str, **options: object) -> tuple[ChildProcess, bytearray]:
    """A child that runs the entry of `children.py`, and all that it writes."""
    output = bytearray()
    boot = NodeBoot("n", 3, "r", "/nowhere", "main", 1, "ipc://none", seed=7)
    child = await spawn_node(
        boot,
        token=TOKEN,
        entry=f"tests.runtime.children:{entry}",
        forward=output.extend,
        **options,  # type: ignore[arg-type]
    )
    return child, output


async def death_of(child: ChildProcess) -> Reason:
    async with asyncio.timeout(DEADLINE_S):
        return await child.exited


def wait_for_end(pid: int) -> None:
    """Until the process is dead, which need not be a child of ours. Fails after DEADLINE_S."""
    try:
        fd = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        readable, _, _ = select.select([fd], [], [], DEADLINE_S)
        assert readable, f"process {pid} lives on"
    finally:
        os.close(fd)


def is_alive(pid: int) -> bool:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, 0)
        return True
    return False


async def test_a_child_tells_its_endpoint_and_ends_with_a_code() -> None:
    child, _ = await spawn("until_told")
    assert child.endpoint == "test://n/3"
    assert is_alive(child.pid) and not child.exited.done()
    child.terminate()
    reason = await death_of(child)
    assert (reason.cause, reason.exit_code, reason.signal) == (Cause.EXITED, 0, None)
    assert not is_alive(child.pid)  # reaped: not even a zombie


async def test_a_crash_is_told_with_its_last_lines() -> None:
    child, output = await spawn("crashing")
    reason = await death_of(child)
    assert reason.exit_code == 1
    assert len(reason.last_lines) == 20
    assert reason.last_lines[-1] == "RuntimeError: the model is bad"
    assert b"line 0\n" in output  # all of it was passed on


async def test_kill_is_told_as_a_signal() -> None:
    child, _ = await spawn("spinning")
    child.kill()
    child.kill()
    reason = await death_of(child)
    assert reason.signal == signal.SIGKILL and reason.exit_code is None
    assert "SIGKILL" in reason.detail
    child.kill()  # of the dead: nothing


async def test_a_segmentation_fault_is_told_with_where_it_was() -> None:
    child, _ = await spawn("crashing_hard")
    reason = await death_of(child)
    assert reason.signal == signal.SIGSEGV
    assert any("crashing_hard" in line for line in reason.last_lines)


async def test_a_child_that_dies_before_it_is_ready_fails_the_launch() -> None:
    with pytest.raises(LaunchFailed) as caught:
        await spawn("dying_early")
    assert caught.value.reason.exit_code == 3
    assert caught.value.reason.last_lines == ("no such model",)


async def test_a_child_that_is_never_ready_is_killed() -> None:
    with pytest.raises(LaunchFailed) as caught:
        await spawn("never_ready", start_timeout_s=1.0)
    assert caught.value.reason.cause is Cause.HUNG


async def test_a_cancelled_launch_leaves_no_child() -> None:
    before = children_of(os.getpid())
    task = asyncio.create_task(spawn("never_ready"))
    await until(lambda: children_of(os.getpid()) != before)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await until(lambda: children_of(os.getpid()) == before)


def read(path: str) -> bytes:
    return Path(path).read_bytes()


def children_of(pid: int) -> set[str]:
    return set(Path(f"/proc/{pid}/task/{pid}/children").read_text().split())


async def test_what_a_child_has_started_dies_with_it() -> None:
    child, _ = await spawn("with_a_child")
    grandchild = int(child.endpoint.removeprefix("test://"))
    os.kill(child.pid, signal.SIGKILL)
    await death_of(child)  # also though the grandchild holds the pipe open
    wait_for_end(grandchild)


async def test_a_child_ends_when_the_pipe_of_its_parent_closes() -> None:
    child, _ = await spawn("spinning")
    assert child._life_fd is not None
    os.close(child._life_fd)
    child._life_fd = None
    await death_of(child)


async def test_a_flood_of_output_is_passed_on_and_the_last_lines_kept() -> None:
    child, output = await spawn("flooding")
    reason = await death_of(child)
    assert output.count(b"\n") == 20_000
    assert len(reason.last_lines) == 20 and reason.last_lines[-1].startswith("line 19999 ")


async def test_a_stuck_thread_does_not_keep_the_child_alive() -> None:
    child, _ = await spawn("stuck_thread")
    assert (await death_of(child)).exit_code == 0


async def test_a_child_has_only_what_it_needs() -> None:
    child, output = await spawn("telling_what_it_has", environment={"OMP_NUM_THREADS": "1"})
    await death_of(child)
    assert output.decode().splitlines() == ["modules []", "threads 1", "seed 7"]


async def test_boot_data_is_not_to_be_seen_by_others() -> None:
    child, _ = await spawn("until_told")
    for name in ("cmdline", "environ"):
        assert TOKEN not in read(f"/proc/{child.pid}/{name}")
    child.kill()
    await death_of(child)


async def test_no_descriptor_is_left_in_the_parent() -> None:
    before = len(os.listdir("/proc/self/fd"))
    for entry in ("until_told", "crashing"):
        child, _ = await spawn(entry)
        child.kill()
        await death_of(child)
    assert len(os.listdir("/proc/self/fd")) <= before  # others may have been closed


def test_every_exit_status_has_words() -> None:
    assert reason_of_exit(0, ()).detail == "exit code 0"
    assert reason_of_exit(-6, ()).detail == "killed by SIGABRT"
    assert reason_of_exit(-40, ()).signal == 40


class Parent:
    """A process with a run and children of its own, to be killed."""

    def __init__(self, base: Path, *entries: str) -> None:
        self.popen = subprocess.Popen(
            [sys.executable, "-m", "tests.runtime.parent", str(base), *entries],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self.popen.stdout is not None
        lines = list(iter(lambda: self.popen.stdout.readline().strip(), "up"))  # type: ignore[union-attr]
        self.path = Path(lines[0])
        self.children = [int(line.split()[0]) for line in lines[1:]]
        self.told = [line.split()[1:] for line in lines[1:]]

    def kill(self) -> None:
        self.popen.kill()
        self.popen.wait()
        assert self.popen.stdout is not None
        self.popen.stdout.close()


def test_no_child_outlives_a_killed_parent_and_the_next_run_cleans_up(tmp_path: Path) -> None:
    parent = Parent(tmp_path, "holding_the_gil", "spinning", "with_a_child", "until_told")
    try:
        assert parent.path.exists()
        living = rundir.RunDir.create(tmp_path)
        assert parent.path.exists()  # the other run is alive: not touched
        assert list(Path("/dev/shm").glob("histrio*")) == []  # what they share has no name
    finally:
        parent.kill()
    for pid in (*parent.children, int(parent.told[2][0])):
        wait_for_end(pid)
    following = rundir.RunDir.create(tmp_path)
    assert not parent.path.exists()
    assert living.path.exists()
    living.close()
    following.close()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "what", ["os.memfd_create", "os.pipe", "subprocess.Popen", "os.pidfd_open"]
)
async def test_where_no_process_is_to_be_had_nothing_is_left_of_it(
    what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: object, **options: object) -> object:
        raise BlockingIOError(11, "Resource temporarily unavailable")

    before = set(os.listdir("/proc/self/fd"))
    with monkeypatch.context() as patch:
        patch.setattr(f"actors.runtime.process.{what}", fail)
        with pytest.raises(LaunchFailed) as failed:
            await spawn("until_told")
    assert "node n could not be started" in failed.value.reason.detail
    assert set(os.listdir("/proc/self/fd")) <= before


# Spares


async def warm_spare(*prepares: Prepare, forward: Callable[[bytes], None] = drop) -> ChildProcess:
    spare = spawn_child("n", {}, forward, Preload(("json", "no_such_module"), prepares))
    await until(lambda: spare.is_warm)
    return spare


async def test_a_warm_spare_becomes_the_child() -> None:
    spare = await warm_spare()
    child, _ = await spawn("until_told", spare=spare)
    assert child is spare
    assert child.endpoint == "test://n/3"
    child.terminate()
    assert (await death_of(child)).exit_code == 0


async def test_what_was_prepared_in_a_spare_is_there_when_it_is_needed() -> None:
    factory = "tests.runtime.children:Preparing"
    prepares = [
        Prepare("house", factory, {"count": msgspec.msgpack.encode(3)}),
        Prepare("not/found", "tests.runtime.children:Nobody", {}),
        Prepare("not/decoded", factory, {"count": b"\xc1"}),
    ]
    output = bytearray()
    spare = await warm_spare(*prepares, forward=output.extend)
    child, _ = await spawn("saying_what_is_prepared", spare=spare)
    assert child is spare
    await death_of(child)
    assert output.decode().strip() == "prepared: {'house': '3 rooms'}"
    assert not child.is_hot  # two of the three are missing


async def test_a_spare_is_hot_when_all_that_it_was_to_prepare_is_there() -> None:
    arguments = {"count": msgspec.msgpack.encode(3)}
    hot = await warm_spare(Prepare("house", "tests.runtime.children:Preparing", arguments))
    warm = await warm_spare()
    assert (hot.is_hot, warm.is_hot) == (True, False)
    for spare in (hot, warm):
        spare.kill()
        await death_of(spare)


async def test_a_spare_that_is_dead_or_not_ready_is_done_without() -> None:
    dead = await warm_spare()
    dead.kill()
    await death_of(dead)
    instead_of_dead, _ = await spawn("until_told", spare=dead)
    # Not ready: it is asked for before its interpreter can have started.
    cold = spawn_child("n", {}, drop, Preload(("time",)))
    instead_of_cold, _ = await spawn("until_told", spare=cold)
    for child, spare in ((instead_of_dead, dead), (instead_of_cold, cold)):
        assert child is not spare
        child.terminate()
        assert (await death_of(child)).exit_code == 0
    await death_of(cold)


async def test_a_spare_that_nobody_needs_ends_with_its_parent_or_when_killed() -> None:
    spare = await warm_spare()
    spare.kill()
    assert (await death_of(spare)).signal == signal.SIGKILL
    assert not is_alive(spare.pid)
