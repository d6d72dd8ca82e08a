"""Processes of a running server are killed with SIGKILL: it comes back, and streams go on.

Each answer is compared with the one that the same prompt had before anything was killed.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import psutil
import pytest

from tests.house.server import Server, eventually

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


def pid_of(server: Server, room: str) -> int:
    pid: int = server.rows()[room]["pid"]
    return pid


def back(server: Server, room: str, pid: int) -> Callable[[], bool]:
    """Whether `room` lives in another process than `pid`, and all is well."""

    def look() -> bool:
        if server.status("/health") != 200:
            return False
        return pid_of(server, room) != pid

    return look


@pytest.mark.parametrize("node", ROOMS)
def test_a_killed_process_is_restarted_and_health_says_so(
    node: str, serve: Callable[..., Server]
) -> None:
    server = serve("--placement", "processes").wait_ready()
    expected = ask(server, "The house")
    room = ROOMS[node]
    pid = pid_of(server, room)
    assert pid != server.process.pid
    os.kill(pid, signal.SIGKILL)
    # The kill is seen at once; for `front` there is nobody to ask meanwhile.
    eventually(lambda: server.status("/health") != 200, "health fails")
    eventually(back(server, room, pid), "the room is back")
    assert ask(server, "The house") == expected
    row = server.rows()[room]
    assert row["incarnation"] == 2
    assert row["restarts"] == 1
    assert row["last_exit"]["signal"] == signal.SIGKILL


@pytest.mark.parametrize("node", ["engine", "worker"])
def test_streams_go_on_when_a_process_is_killed_under_them(
    node: str, serve: Callable[..., Server]
) -> None:
    server = serve("--placement", "processes").wait_ready()
    prompts = [f"Once upon a time {i}" for i in range(6)]
    expected = [ask(server, prompt) for prompt in prompts]
    pid = pid_of(server, ROOMS[node])
    killed = False

    def stream(prompt: str) -> str:
        nonlocal killed
        text, chunks = "", 0
        for chunk in server.client().completions.create(
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
    eventually(back(server, ROOMS[node], pid), "the room is back")


def test_a_worker_in_reserve_takes_over_with_its_model_and_the_next_one_is_made(
    serve: Callable[..., Server],
) -> None:
    server = serve("--placement", "processes", "--hot-spare", "--spare-after", "0").wait_ready()
    expected = ask(server, "The house")
    room = ROOMS["worker"]
    for count in (1, 2):
        eventually(lambda count=count: len(in_reserve(server)) == count, "one is in reserve")
        pid = pid_of(server, room)
        os.kill(pid, signal.SIGKILL)
        eventually(back(server, room, pid), "the worker is back")
        assert pid_of(server, room) == in_reserve(server)[-1]
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
    _, alive = psutil.wait_procs(children, timeout=10)
    assert not alive
    again = serve("--placement", "processes").wait_ready()
    assert ask(again, "The house")


def test_a_server_whose_worker_never_comes_back_exits_with_the_reason(
    serve: Callable[..., Server],
) -> None:
    server = serve("--placement", "processes").wait_ready()

    def kill_again() -> bool:
        if server.process.poll() is not None:
            return True
        with contextlib.suppress(ProcessLookupError, KeyError, httpx.HTTPError):
            pid = pid_of(server, "replica/worker")
            if pid in {child.pid for child in server.children()}:
                os.kill(pid, signal.SIGKILL)
        return server.process.poll() is not None

    eventually(kill_again, "the root gives up")
    assert server.wait() == 1
    assert "gave up" in server.said()
