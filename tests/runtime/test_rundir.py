"""This file tests the directory of a run, and what the next run makes of what is left."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from actors.runtime import rundir
from actors.runtime.rundir import RunDir


def test_a_run_dir_is_for_this_user_alone_and_short(tmp_path: Path) -> None:
    run = RunDir.create(tmp_path)
    assert stat.S_IMODE(run.path.lstat().st_mode) == 0o700
    assert len(run.path.name) <= 20
    run.close()
    run.close()
    assert not run.path.exists()


def test_two_runs_share_no_secret(tmp_path: Path) -> None:
    one, two = RunDir.create(tmp_path), RunDir.create(tmp_path)
    assert one.token != two.token and one.run != two.run and one.path != two.path
    one.close()
    two.close()


def test_sweep_removes_the_dead(tmp_path: Path) -> None:
    dead = RunDir.create(tmp_path)
    (dead.path / "a.1").touch()
    assert dead._lock_fd is not None
    os.close(dead._lock_fd)  # what the kernel does at a death
    dead._lock_fd = None
    living = RunDir.create(tmp_path)
    assert not dead.path.exists()
    assert rundir.sweep(tmp_path) == []
    assert living.path.exists()
    living.close()


def test_sweep_leaves_alone_what_is_not_a_run_or_just_begins(tmp_path: Path) -> None:
    (tmp_path / "histrio-file").touch()
    (tmp_path / "histrio-new").mkdir()  # no pid file yet
    (tmp_path / "other").mkdir()
    elsewhere = tmp_path / "other" / "kept"
    elsewhere.mkdir()
    (tmp_path / "histrio-link").symlink_to(elsewhere)
    assert rundir.sweep(tmp_path) == []
    os.utime(tmp_path / "histrio-new", (0, 0))
    assert rundir.sweep(tmp_path) == [tmp_path / "histrio-new"]
    assert elsewhere.exists()


def test_the_base_is_short_whatever_the_environment_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    long_name = tmp_path / ("x" * 60)
    long_name.mkdir()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(long_name))
    assert len(str(rundir.find_base())) <= 48
    short = Path("/tmp")
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(short / "nothing-here"))
    assert rundir.find_base().is_dir()


@pytest.mark.parametrize("node", ["worker", "worker/0", "ü" * 40, "a" * 300, "..", ""])
def test_every_node_has_a_socket_of_its_own_within_the_directory(node: str) -> None:
    directory = Path("/run/user/1000/histrio-abcdefgh")
    path = rundir.socket_path(directory, node, 12)
    assert path.parent == directory
    assert path != rundir.socket_path(directory, node, 13)
    assert path != rundir.socket_path(directory, node + "x", 12)
