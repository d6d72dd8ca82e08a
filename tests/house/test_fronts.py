"""Several gateways on one port, in processes of their own: one dies, the others don't notice."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from typing import Any

import httpx
import psutil
import pytest

from tests.house.server import WAIT_S, Server, eventually

TOKENS = 400
STREAMS = 8
FRONTS = ("fronts/0/gateway", "fronts/1/gateway")


@pytest.fixture(scope="module")
def two(tiny: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """One server with two front ends, for the whole module."""
    server = Server(tiny, tmp_path_factory.mktemp("fronts"), "--front-ends", "2")
    try:
        # One that is ready says nothing of the other, which starts beside it.
        eventually(is_whole(server.wait_ready()), "both front ends serve")
        yield server
    finally:
        server.close()


def is_whole(server: Server) -> Callable[[], bool]:
    """Whether all parts run, also those that the answering front end can do without."""
    return lambda: server.get("/health").json() == {"status": "ok"}


def peer_ports(pid: int) -> set[int]:
    """The clients' ports of all connections that a process has."""
    return {c.raddr.port for c in psutil.Process(pid).net_connections("tcp") if c.raddr}


def body(prompt: str, *, stream: bool = True, tokens: int = TOKENS) -> dict[str, object]:
    return {
        "model": "tiny-llama",
        "prompt": prompt,
        "max_tokens": tokens,
        "temperature": 0,
        "stream": stream,
        "ignore_eos": True,
    }


def ask(server: Server, prompt: str, tokens: int = TOKENS) -> str:
    url = server.url + "/v1/completions"
    found = httpx.post(url, json=body(prompt, stream=False, tokens=tokens), timeout=WAIT_S)
    return str(found.json()["choices"][0]["text"])


class Reader:
    """One stream, on a connection of its own. `started` is called when it has begun. It can come
    back for the rest."""

    def __init__(self, server: Server, prompt: str) -> None:
        self.url = server.url + "/v1/completions"
        self.prompt = prompt
        self.port = 0  # ours
        self.text = ""
        self.last_id = ""
        self.is_whole = False

    def read(self, started: Callable[[], object] = bool) -> None:
        headers = {"last-event-id": self.last_id} if self.last_id else {"x-stream-resume": "1"}
        try:
            with httpx.stream(
                "POST", self.url, json=body(self.prompt), headers=headers, timeout=WAIT_S
            ) as got:
                assert got.status_code == 200
                address = got.extensions["network_stream"].get_extra_info("client_addr")
                self.port = address[1]
                started()
                next_id = self.last_id
                for line in got.iter_lines():
                    if line == "data: [DONE]":
                        self.is_whole = True
                    elif line.startswith("id: "):
                        next_id = line.removeprefix("id: ")
                    elif line:
                        chunk = json.loads(line.removeprefix("data: "))
                        self.text += "".join(choice["text"] for choice in chunk["choices"])
                        self.last_id = next_id
        except httpx.HTTPError:
            pass  # its gateway died


def test_both_front_ends_answer_and_say_the_same_of_the_house(two: Server) -> None:
    pids = {two.pid_of(path) for path in FRONTS}
    assert len(pids) == 2
    seen: set[int] = set()

    def look() -> bool:
        with httpx.Client(timeout=WAIT_S) as client:
            rows = client.get(two.url + "/actors")
            port = rows.extensions["network_stream"].get_extra_info("client_addr")[1]
            seen.update(pid for pid in pids if port in peer_ports(pid))
            assert {row["path"] for row in rows.json() if row["state"] == "running"} >= set(FRONTS)
            assert client.get(two.url + "/health").json() == {"status": "ok"}
            # Flushed by each node in its own time, so waited for.
            told = "histrio_loop_lag_seconds" in client.get(two.url + "/metrics").text
        return told and seen == pids

    eventually(look, "both gateways are reached")
    before = two.metric("histrio_requests_total")
    for index in range(6):
        ask(two, f"Count {index}", 4)
    eventually(lambda: two.metric("histrio_requests_total") >= before + 6, "all are counted")


def test_a_killed_front_end_breaks_only_its_own_streams(two: Server) -> None:
    prompts = [f"Once upon a time {index}" for index in range(STREAMS)]
    with ThreadPoolExecutor(STREAMS) as pool:
        expected = dict(
            zip(prompts, pool.map(lambda prompt: ask(two, prompt), prompts), strict=True)
        )
    victim = "fronts/0/gateway"
    pid = two.pid_of(victim)
    readers = [Reader(two, prompt) for prompt in prompts]
    ports: set[int] = set()

    def kill() -> None:
        ports.update(peer_ports(pid))
        os.kill(pid, signal.SIGKILL)

    barrier = Barrier(STREAMS, action=kill)
    with ThreadPoolExecutor(STREAMS) as pool:
        list(pool.map(lambda reader: reader.read(lambda: barrier.wait(WAIT_S)), readers))
    for reader in readers:
        if reader.port not in ports:
            assert reader.is_whole
            assert reader.text == expected[reader.prompt]
        else:
            assert expected[reader.prompt].startswith(reader.text)
            reader.read()  # from the other gateway, or the new one
            assert reader.is_whole
            assert reader.text == expected[reader.prompt]

    two.wait_back(victim, pid)
    assert two.rows()[victim]["restarts"] == 1
    eventually(lambda: two.metric("histrio_requests_running") == 0, "its requests are ended")
    eventually(lambda: two.metric('histrio_pages{state="leased"}') == 0, "its pages are free")
    eventually(lambda: two.metric("histrio_streams_open") == 0, "no stream is open")
    again = two.pid_of(victim)

    def serves() -> bool:
        with httpx.Client(timeout=WAIT_S) as client:
            again_body = body("Again", stream=False, tokens=4)
            found = client.post(two.url + "/v1/completions", json=again_body)
            assert found.status_code == 200
            port = found.extensions["network_stream"].get_extra_info("client_addr")[1]
            return port in peer_ports(again)

    eventually(serves, "it serves on the same port")


def test_a_second_server_does_not_join_the_port(two: Server, serve: Callable[..., Server]) -> None:
    other = serve("--front-ends", "2", "--port", str(two.port))
    assert other.wait() != 0
    assert "cannot listen" in other.said()
