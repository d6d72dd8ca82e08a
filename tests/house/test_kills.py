"""Processes of a running server are killed with SIGKILL: it comes back, and streams go on.

Each answer is compared with the one that the same prompt had before anything was killed.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from tests.house.server import WAIT_S, Server, eventually

# A room of each process below the root.
ROOMS = {"front": "tokenizer", "engine": "replica/scheduler", "worker": "replica/worker"}


def ask(server: Server, prompt: str, **keywords: Any) -> str:
    found = server.client().completions.create(
        model="tiny-llama",
        prompt=prompt,
        max_tokens=160,
        temperature=0,
        extra_body={"ignore_eos": True},
        **keywords,
    )
    return str(found.choices[0].text)


# The real tree, but for how many deaths are too many, however far apart.
ENDURING = """
import msgspec, sys
import app
from actors import tree
from actors.runtime.spec import Supervisor

def enduring(branch):
    children = tuple(enduring(x) if isinstance(x, Supervisor) else x for x in branch.children)
    return msgspec.structs.replace(branch, children=children, restarts_max=COUNT, window_s=1e9)

build = tree.build
tree.build = lambda config: (enduring(build(config)[0]), build(config)[1])
sys.exit(app.main(sys.argv[1:]))
"""


def enduring(count: int) -> tuple[str, str]:
    """The program of a server that gives up at the next death after so many."""
    return "-c", ENDURING.replace("COUNT", str(count))


GATE = """
import fcntl, os
with open(os.environ["HISTRIO_TEST_GATE"]) as gate:
    fcntl.flock(gate, fcntl.LOCK_SH)
"""


@contextlib.contextmanager
def shut(gate: Path) -> Iterator[None]:
    """No Python process with that gate gets through its start meanwhile."""
    with gate.open() as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


@pytest.fixture(scope="module")
def gate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("gate") / "sitecustomize.py"  # what Python runs first
    found.write_text(GATE)
    return found


@pytest.fixture(scope="module")
def house(tiny: Path, gate: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """One server for all that it survives."""
    environment = {"PYTHONPATH": str(gate.parent), "HISTRIO_TEST_GATE": str(gate)}
    found = Server(
        tiny,
        tmp_path_factory.mktemp("logs"),
        "--placement",
        "processes",
        program=enduring(1000),
        environment=environment,
    )
    try:
        yield found.wait_ready()
    finally:
        found.close()


@pytest.mark.parametrize("node", ROOMS)
def test_a_killed_process_is_restarted_and_health_says_so(
    node: str, house: Server, gate: Path
) -> None:
    expected = ask(house, "The house")
    room = ROOMS[node]
    before = house.rows()[room]
    pid = before["pid"]
    assert pid != house.process.pid
    with shut(gate):
        os.kill(pid, signal.SIGKILL)
        # For `front` there is nobody to ask meanwhile.
        eventually(lambda: house.status("/health") != 200, "health fails")
    house.wait_back(room, pid)
    assert ask(house, "The house") == expected
    row = house.rows()[room]
    assert row["incarnation"] == before["incarnation"] + 1
    assert row["restarts"] == before["restarts"] + 1
    assert row["last_exit"]["signal"] == signal.SIGKILL


@pytest.mark.parametrize("node", ["engine", "worker"])
def test_streams_go_on_when_a_process_is_killed_under_them(node: str, house: Server) -> None:
    prompts = [f"Once upon a time {i}" for i in range(6)]
    with ThreadPoolExecutor(len(prompts)) as pool:
        expected = list(pool.map(lambda prompt: ask(house, prompt), prompts))
    pid = house.pid_of(ROOMS[node])
    killed = False

    def stream(prompt: str) -> str:
        nonlocal killed
        text, chunks = "", 0
        for chunk in house.client().completions.create(
            model="tiny-llama",
            prompt=prompt,
            max_tokens=160,
            temperature=0,
            stream=True,
            extra_body={"ignore_eos": True},
        ):
            chunks += 1
            text += "".join(choice.text for choice in chunk.choices)
            if chunks == 5 and not killed:
                killed = True
                os.kill(pid, signal.SIGKILL)
        return text

    with ThreadPoolExecutor(len(prompts)) as pool:
        found = list(pool.map(stream, prompts))
    assert killed
    assert found == expected
    house.wait_back(ROOMS[node], pid)


def test_a_worker_in_reserve_takes_over_with_its_model_and_the_next_one_is_made(
    serve: Callable[..., Server],
) -> None:
    server = serve("--placement", "processes", "--hot-spare", "--spare-after", "0").wait_ready()
    expected = ask(server, "The house")
    room = ROOMS["worker"]
    for count in (1, 2):
        eventually(lambda count=count: len(in_reserve(server)) >= count, "one is in reserve")
        pid = server.pid_of(room)
        os.kill(pid, signal.SIGKILL)
        server.wait_back(room, pid)
        assert server.pid_of(room) == in_reserve(server)[count - 1]
        assert ask(server, "The house") == expected


def in_reserve(server: Server) -> list[int]:
    """The processes that have been in reserve for the worker."""
    lines = server.said().splitlines()
    mine = [line for line in lines if "in reserve" in line and "peer=worker" in line]
    return [int(line.rpartition("pid=")[2]) for line in mine]


def test_children_end_with_a_killed_server_and_the_next_one_serves(
    serve: Callable[..., Server],
) -> None:
    server = serve("--placement", "processes").wait_ready()
    children = server.children()
    assert len(children) >= 3
    server.signal(signal.SIGKILL)
    server.wait()
    _, alive = psutil.wait_procs(children, timeout=WAIT_S)
    assert not alive
    again = serve("--placement", "processes").wait_ready()
    assert ask(again, "The house")


def test_a_server_whose_worker_never_comes_back_exits_with_the_reason(
    serve: Callable[..., Server],
) -> None:
    server = serve("--placement", "processes", program=enduring(1)).wait_ready()

    def kill_again() -> bool:
        if server.process.poll() is not None:
            return True
        with contextlib.suppress(ProcessLookupError, KeyError, httpx.HTTPError):
            pid = server.rows()["replica/worker"]["pid"]
            if pid in {child.pid for child in server.children()}:
                os.kill(pid, signal.SIGKILL)
        return server.process.poll() is not None

    eventually(kill_again, "the root gives up")
    assert server.wait() == 1
    assert "gave up" in server.said()
