"""This file tests whole systems over real processes; `test_nodes.py` has the same in simulation."""

from __future__ import annotations

import os
import signal
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from actors.runtime.log import Logs
from actors.runtime.merge import Choice
from actors.runtime.spec import Node, NodeKind, Strategy, Supervisor
from actors.runtime.supervisor import StartFailed
from actors.runtime.system import System
from actors.runtime.tail import tail
from messages.system import ActorRow, Cause, State
from tests.runtime.nodes import DEADLINE_S, until
from tests.runtime.players import Add, Crash, Relay, Settings, Sleep
from tests.runtime.stage import child, tree
from tests.runtime.test_process import children_of, is_alive, read


@asynccontextmanager
async def running(root: Supervisor, *nodes: str, **options: Any) -> AsyncIterator[System]:
    """A started system with a process for each of the nodes; afterwards nothing of it is left."""
    before = children_of(os.getpid())
    with tempfile.TemporaryDirectory(prefix="hz") as directory:
        places = tuple(Node(name=name, kind=NodeKind.PROCESS) for name in nodes)
        options = {"hang_s": DEADLINE_S, **options}
        system = System(root, nodes=places, run_dir=Path(directory), **options)
        try:
            await system.start()
            yield system
        finally:
            await system.stop()
        assert os.listdir(directory) == []
    assert children_of(os.getpid()) <= before


def row(system: System, path: str) -> ActorRow:
    return next(row for row in system.actors() if row.path == path)


def is_running(system: System, path: str, incarnation: int) -> bool:
    found = row(system, path)
    return (found.incarnation, found.state) == (incarnation, State.RUNNING)


async def test_actors_in_two_processes_speak_to_each_other() -> None:
    root = tree(child("c", node="n"), child("a", "Caller", node="m"), child("b"))
    async with running(root, "n", "m") as system:
        pids = {row(system, path).pid for path in "cab"}
        assert len(pids) == 3 and row(system, "b").pid == os.getpid()
        for pid in pids - {os.getpid()}:
            loaded = read(f"/proc/{pid}/maps")
            assert b"libtorch" not in loaded and b"libzmq" in loaded
        system.tell("a", Relay("b", 3, times=4))  # m to main
        local: Any = system.local("b")
        await until(lambda: local.n == 12)
        system.tell("a", Relay("c", 1, times=100))  # m to n
        await until(lambda: row(system, "c").handled_count >= 100)


async def test_a_killed_node_comes_back_and_the_reason_is_told() -> None:
    root = tree(child("c", node="n"), child("a", "Caller"), strategy=Strategy.ONE_FOR_ONE)
    async with running(root, "n") as system:
        old_pid = row(system, "c").pid
        os.kill(old_pid, signal.SIGKILL)
        await until(lambda: is_running(system, "c", 2))
        found = row(system, "c")
        assert found.pid != old_pid and not is_alive(old_pid)
        assert found.last_exit is not None and found.last_exit.signal == signal.SIGKILL
        assert row(system, "a").incarnation == 1
        system.tell("c", Add(5))
        await until(lambda: row(system, "c").handled_count >= 1)


async def test_a_stopped_node_is_killed_and_comes_back() -> None:
    async with running(tree(child("c", node="n")), "n", hang_s=0.8, heartbeat_s=0.1) as system:
        old_pid = row(system, "c").pid
        os.kill(old_pid, signal.SIGSTOP)
        await until(lambda: is_running(system, "c", 2))
        assert not is_alive(old_pid)
        last_exit = row(system, "c").last_exit
        assert last_exit is not None and last_exit.cause is Cause.HUNG


async def test_an_actor_that_cannot_start_in_its_process_fails_the_start() -> None:
    root = tree(child("c", node="n", arguments={"settings": Settings(fails=True)}), restarts_max=0)
    with pytest.raises(StartFailed) as caught:
        async with running(root, "n"):
            pass
    assert "does not start" in str(caught.value.reason.detail)


async def test_the_files_of_all_nodes_read_as_one_log(tmp_path: Path) -> None:
    logs = Logs(node="main", directory=tmp_path, terminal=None)
    options = {"log": logs.log_for(), "log_dir": tmp_path, "log_terminal": False}
    async with running(tree(child("c", node="n")), "n", **options) as system:
        system.tell("c", Crash("the pages are gone"))
        await until(lambda: is_running(system, "c", 2))
    logs.close()
    lines = list(tail(tmp_path, Choice(level="warning")))
    said = [(line.fields["node"], line.fields["event"]) for line in lines]
    assert ("n", "not delivered") in said and ("main", "actor died") in said
    assert [line.timestamp for line in lines] == sorted(line.timestamp for line in lines)


def said(directory: Path, event: str) -> list[dict[str, Any]]:
    return [line.fields for line in tail(directory, Choice()) if line.fields["event"] == event]


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV])
async def test_what_a_killed_node_did_last_is_in_the_log_and_in_a_file(
    number: signal.Signals, tmp_path: Path
) -> None:
    logs = Logs(node="main", directory=tmp_path, terminal=None)
    options = {"log": logs.log_for(), "log_dir": tmp_path, "log_terminal": False}
    root = tree(child("c", node="n"), child("a", "Caller"), strategy=Strategy.ONE_FOR_ONE)
    async with running(root, "n", **options) as system:
        pid = row(system, "c").pid
        assert b"/memfd:n-flight" in read(f"/proc/{pid}/maps")
        system.tell("a", Relay("c", 1, times=3))
        await until(lambda: row(system, "c").handled_count == 3)
        system.tell("c", Sleep(1000))
        await until(lambda: row(system, "c").busy_with == "Sleep")
        os.kill(pid, number)
        await until(lambda: is_running(system, "c", 2))
        await until(lambda: bool(said(tmp_path, "last messages")))
    logs.close()
    (told,) = said(tmp_path, "last messages")  # the second life has ended in order
    assert (told["peer"], told["incarnation"], told["pid"]) == ("n", 1, pid)
    assert told["last"][-1].endswith("handled (not ended)  c  Sleep")
    title, _, *lines = read(told["file"]).decode().splitlines()
    assert f"pid {pid}: killed by {number.name}" in title
    assert lines[-1] == told["last"][-1]
    assert "c <- a  Add  r1" in "\n".join(lines)
    (came,) = (line for line in lines if "  came  c  Sleep" in line)
    assert lines.index(came) == len(lines) - 2
    starts = [line for line in lines if line.endswith("c  on_start [control]")]
    assert len(starts) == 1 and "not ended" not in starts[0]
    assert not any(name.startswith("histrio") for name in os.listdir("/dev/shm"))


async def test_a_node_that_ends_in_order_leaves_no_account(tmp_path: Path) -> None:
    logs = Logs(node="main", directory=tmp_path, terminal=None)
    options = {"log": logs.log_for(), "log_dir": tmp_path, "log_terminal": False}
    async with running(tree(child("c", node="n")), "n", **options) as system:
        system.tell("c", Add(1))
    logs.close()
    assert said(tmp_path, "last messages") == []
    assert not any(name.endswith(".txt") for name in os.listdir(tmp_path))
