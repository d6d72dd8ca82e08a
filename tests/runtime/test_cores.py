"""Goal: what hangs is told from what gets no core. Method: the rule by itself, then processes that
spin, wait and are stopped; the test of nodes that are spared for it is in `test_nodes.py`."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from actors.runtime.cores import Use, is_starved, use_of
from tests.runtime.nodes import until

BEFORE = Use(all_s=5.0, loop_s=2.0)


@pytest.mark.parametrize(
    ("now", "expected"),
    [
        (Use(5.1, 2.1, wants=True, loop_wants=True), True),  # wants a core, has had 0.1 s
        (Use(6.0, 3.0, wants=True, loop_wants=True), False),  # spins
        (Use(5.0, 2.0), False),  # waits, or is stopped
        (Use(5.1, 2.0, wants=True), True),  # another thread, for which the loop may wait
        (Use(6.0, 2.0, wants=True), False),  # another thread spins
        (Use(9.0, 2.1, wants=True, loop_wants=True), True),  # others had it, the loop had not
    ],
)
def test_starved_is_who_wants_a_core_and_has_hardly_had_one(now: Use, expected: bool) -> None:
    assert is_starved(BEFORE, now, enough_s=0.5) is expected


@contextmanager
def process(code: str) -> Iterator[int]:
    child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    try:
        assert child.stdout is not None
        child.stdout.readline()
        yield child.pid
    finally:
        child.kill()
        child.communicate()


async def test_a_process_that_spins_uses_a_core_and_wants_more_until_it_is_stopped() -> None:
    with process("print(flush=True)\nwhile True: pass") as pid:
        first = use_of(pid)
        await until(lambda: use_of(pid).loop_s > first.loop_s)
        await until(lambda: use_of(pid).loop_wants and use_of(pid).wants)
        os.kill(pid, signal.SIGSTOP)
        await until(lambda: not use_of(pid).wants)
        assert use_of(pid).all_s >= use_of(pid).loop_s > first.loop_s


async def test_a_process_that_waits_wants_nothing_and_neither_does_one_that_has_ended() -> None:
    with process("import time\nprint(flush=True)\ntime.sleep(1000)") as pid:
        await until(lambda: not use_of(pid).wants)
    assert use_of(pid) == Use()
