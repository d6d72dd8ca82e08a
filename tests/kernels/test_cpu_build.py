"""How the compiled library comes to be, and every way in which it can't be had."""

from __future__ import annotations

import errno
import multiprocessing
import os
import stat
import threading
from pathlib import Path

import pytest
import torch

from kernels.ops.base import OpsUnavailable
from kernels.ops.cpu import build, check, native
from tests.kernels.cpu_cases import block_weight, compiled_ops, generator, threads

OPS = compiled_ops()


@pytest.fixture
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "histrio" / "compiled"


def fake_compiler(directory: Path, monkeypatch: pytest.MonkeyPatch, compile_line: str) -> None:
    """A `cc` that knows its version and otherwise runs `compile_line`."""
    script = directory / "cc"
    script.write_text(f'#!/bin/sh\n[ "$1" = --version ] && echo fake && exit 0\n{compile_line}\n')
    script.chmod(0o755)
    monkeypatch.setenv("PATH", f"{directory}:/usr/bin:/bin")
    monkeypatch.delenv("CC", raising=False)


def test_it_can_be_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(build.OFF_VARIABLE, "1")
    with pytest.raises(OpsUnavailable, match=build.OFF_VARIABLE):
        build.library()


def test_no_compiler_is_a_reason(empty_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(empty_cache))
    monkeypatch.delenv("CC", raising=False)
    with pytest.raises(OpsUnavailable, match="no C compiler"):
        build.library()


def test_a_cpu_that_lacks_instructions_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "NEEDED", frozenset({"fma", "avx1024"}))
    with pytest.raises(OpsUnavailable, match="lacks avx1024"):
        build.library()


def test_a_failing_compiler_is_a_reason_and_leaves_nothing(
    empty_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_compiler(tmp_path, monkeypatch, "echo 'x.c:1: error: no such thing' >&2; exit 1")
    with pytest.raises(OpsUnavailable, match="no such thing"):
        build.library()
    assert not list(empty_cache.glob("*.so"))


def test_a_full_disk_is_a_reason(
    empty_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    fake_compiler(tmp_path, monkeypatch, "exit 0")
    monkeypatch.setattr(build, "compile_to", full)
    with pytest.raises(OpsUnavailable, match="can't be kept: No space left"):
        build.library()


def test_where_files_can_not_be_locked_it_is_compiled_all_the_same(
    empty_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    copy = 'while [ "$1" != -o ]; do shift; done; echo library > "$2"'
    fake_compiler(tmp_path, monkeypatch, copy)
    monkeypatch.setattr(build.fcntl, "flock", refuse)
    assert build.intact(build.library())


def test_the_second_time_nothing_is_compiled(
    empty_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = tmp_path / "log"
    copy = f'while [ "$1" != -o ]; do shift; done; echo library > "$2"; echo once >> {log}'
    fake_compiler(tmp_path, monkeypatch, copy)
    first = build.library()
    assert build.library() == first
    assert first.read_bytes()[:-32] == b"library\n" and log.read_text() == "once\n"
    assert stat.S_IMODE(empty_cache.stat().st_mode) == 0o700


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_processes_that_start_together_compile_once(
    empty_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = tmp_path / "log"
    copy = f'while [ "$1" != -o ]; do shift; done; echo library > "$2"; echo once >> {log}'
    fake_compiler(tmp_path, monkeypatch, copy)
    context = multiprocessing.get_context("fork")  # none of them imports torch again
    barrier, answers = context.Barrier(3), context.SimpleQueue()

    def child() -> None:
        barrier.wait(500)
        answers.put(str(build.library()))

    children = [context.Process(target=child) for _ in range(3)]
    for each in children:
        each.start()
    for each in children:
        each.join(500)
        assert each.exitcode == 0
    assert len({answers.get() for _ in children}) == 1 and log.read_text() == "once\n"


def test_another_compiler_or_cpu_has_another_file(
    empty_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy = 'while [ "$1" != -o ]; do shift; done; echo library > "$2"'
    fake_compiler(tmp_path, monkeypatch, copy)
    paths = {build.library()}
    monkeypatch.setattr(build, "cpu_identity", lambda: "another")
    paths.add(build.library())
    monkeypatch.setattr(build, "find_compiler", lambda: (str(tmp_path / "cc"), "version 2"))
    paths.add(build.library())
    assert len(paths) == 3


def test_a_cache_that_others_may_write_is_not_used(empty_cache: Path) -> None:
    empty_cache.mkdir(parents=True)
    empty_cache.chmod(0o777)
    other = build.cache_directory()
    assert other != empty_cache and stat.S_IMODE(other.stat().st_mode) == 0o700
    other.rmdir()


def test_a_damaged_library_is_compiled_again(
    empty_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy = 'while [ "$1" != -o ]; do shift; done; echo library > "$2"'
    fake_compiler(tmp_path, monkeypatch, copy)
    path = build.library()
    whole = path.read_bytes()
    for damaged in (b"", whole[:20], whole[:-1], b"x" + whole[1:]):
        path.write_bytes(damaged)
        assert build.library() == path and path.read_bytes() == whole


def test_a_library_that_can_not_be_loaded_is_a_reason(
    empty_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_compiler(
        tmp_path, monkeypatch, 'while [ "$1" != -o ]; do shift; done; echo library > "$2"'
    )
    with pytest.raises(OpsUnavailable, match="can't be loaded"):
        native.load.__wrapped__()


def test_a_library_that_computes_wrongly_is_not_used() -> None:
    want = torch.ones(3)
    check.expect("product", want * 1.001, want, 1e-2)
    for wrong in (want * 1.1, want * torch.nan):
        with pytest.raises(OpsUnavailable, match="the compiled product is off"):
            check.expect("product", wrong, want, 1e-2)


def test_callers_in_several_threads_get_their_own_results() -> None:
    prepared = OPS.prepare_linear(block_weight("q4_1", 512, 128), None, "quantized")
    inputs = [torch.randn((rows, 128), generator=generator(rows)) for rows in (1, 5, 40, 90)]
    wants = [OPS.linear(prepared, x) for x in inputs]
    wrong: list[int] = []

    def call(number: int) -> None:
        same = [
            torch.equal(OPS.linear(prepared, inputs[number]), wants[number]) for _ in range(200)
        ]
        wrong.extend([number] * same.count(False))

    callers = [threading.Thread(target=call, args=(number,)) for number in range(len(inputs))]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert not wrong


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_forked_child_computes_with_threads_of_its_own() -> None:
    prepared = OPS.prepare_linear(block_weight("q4_1", 2048, 128), None, "quantized")
    x = torch.randn((9, 128), generator=generator(0))
    with threads(OPS, 2):
        want = OPS.linear(prepared, x)
        child = os.fork()
        if child == 0:
            os._exit(0 if torch.equal(OPS.linear(prepared, x), want) else 1)
        assert os.waitpid(child, 0)[1] == 0


def test_thread_counts_below_one_are_refused() -> None:
    with pytest.raises(ValueError, match="out of range"):
        OPS.set_threads(0)


def test_more_threads_than_cores_still_compute_right() -> None:
    prepared = OPS.prepare_linear(block_weight("q8_0", 2048, 128), None, "quantized")
    x = torch.randn((70, 128), generator=generator(1))
    with threads(OPS, 1):
        want = OPS.linear(prepared, x)
    for count in (7, 3, 2, 5):
        with threads(OPS, count):
            for _ in range(20):
                assert torch.equal(OPS.linear(prepared, x), want)
