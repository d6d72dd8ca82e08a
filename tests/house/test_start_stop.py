"""How a server starts, refuses to start, drains and ends."""

from __future__ import annotations

import json
import shutil
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from safetensors.numpy import load_file, save_file

from tests.house.server import ROOT, WAIT_S, Server, eventually, stopped

PLACEMENTS = ["inline", "threads", "processes"]


class Streaming(threading.Thread):
    """A client that reads one long stream to its end."""

    def __init__(self, server: Server, max_tokens: int) -> None:
        super().__init__()
        self.url = server.url
        self.body = {
            "model": "tiny-llama",
            "prompt": "The house",
            "max_tokens": max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
        }
        self.began = threading.Event()
        self.lines: list[str] = []
        self.error: Exception | None = None

    def run(self) -> None:
        url = self.url + "/v1/completions"
        try:
            with httpx.stream("POST", url, json=self.body, timeout=WAIT_S) as answer:
                for line in answer.iter_lines():
                    if line:
                        self.lines.append(line)
                        self.began.set()
        except httpx.HTTPError as error:
            self.error = error
        self.began.set()


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_sigterm_lets_a_stream_finish_refuses_new_requests_and_frees_the_port(
    placement: str, serve: Callable[..., Server]
) -> None:
    server = serve("--placement", placement).wait_ready()
    children = server.children()
    assert len(children) >= (3 if placement == "processes" else 0)
    stream = Streaming(server, 400)
    stream.start()
    assert stream.began.wait(WAIT_S)
    for child in children:  # as a terminal sends it to all: it means the parent alone
        child.send_signal(signal.SIGTERM)
        child.send_signal(signal.SIGINT)
    server.signal(signal.SIGTERM)
    eventually(lambda: server.status("/ready") != 200, "readiness goes false")
    if stream.is_alive():
        body = {"model": "tiny-llama", "prompt": "x", "max_tokens": 1}
        try:
            refused = httpx.post(server.url + "/v1/completions", json=body, timeout=WAIT_S)
            assert refused.status_code == 503
            assert "retry-after" in refused.headers
        except httpx.HTTPError:
            pass  # it has closed its door: refused as well
    stream.join(WAIT_S)
    assert stream.error is None
    assert stream.lines[-1] == "data: [DONE]"
    assert '"finish_reason":"length"' in "".join(stream.lines).replace(" ", "")
    assert server.wait() == 0, server.said()
    assert "node died" not in server.said()
    assert not psutil.wait_procs(children, timeout=WAIT_S)[1]
    with socket.create_server(("127.0.0.1", server.port)):
        pass


ON_THE_WAY_OUT = """
import asyncio, os, signal, sys
from actors import run
async def main():
    with run.signals() as first:
        os.kill(os.getpid(), signal.SIGTERM)
        assert await first == signal.SIGTERM
    return 0
asyncio.run(main())
signal.raise_signal(getattr(signal, sys.argv[1]))
"""


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM"])
def test_a_second_signal_means_the_same_until_the_process_has_ended(name: str) -> None:
    command = [sys.executable, "-c", ON_THE_WAY_OUT, name]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=WAIT_S)
    assert ended.returncode == 128 + getattr(signal, name), ended.stderr


def test_what_runs_longer_than_the_drain_is_ended(serve: Callable[..., Server]) -> None:
    server = serve("--drain", "0.2", "--threads", "1").wait_ready()
    streams = [Streaming(server, 480) for _ in range(12)]
    for stream in streams:
        stream.start()
    assert streams[0].began.wait(WAIT_S)
    server.signal(signal.SIGINT)
    assert server.wait() == 0, server.said()
    for stream in streams:
        stream.join(WAIT_S)
        assert not stream.is_alive()


def test_a_second_signal_ends_at_once(serve: Callable[..., Server]) -> None:
    # One after another, and none while it is told to drain: it still does when it is told again.
    server = serve("--placement", "processes", "--max-running", "1").wait_ready()
    children = server.children()
    streams = [Streaming(server, 480) for _ in range(24)]
    for stream in streams:
        stream.start()
    eventually(lambda: any(stream.began.is_set() for stream in streams), "one begins")
    with stopped(server.pid_of("replica/worker")):
        server.signal(signal.SIGTERM)
        eventually(lambda: "draining" in server.said(), "it drains")
    server.signal(signal.SIGTERM)
    assert server.wait() == 128 + signal.SIGTERM, server.said()
    assert not psutil.wait_procs(children, timeout=WAIT_S)[1]
    for stream in streams:
        stream.join(WAIT_S)


def test_a_port_in_use_is_said_before_anything_is_loaded(serve: Callable[..., Server]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        server = serve("--port", str(port), "--placement", "processes")
        assert server.wait() == 1
    (line,) = server.said().splitlines()
    assert f"127.0.0.1:{port}" in line
    assert "--port" in line


# A model that is not whole


def absent(path: Path) -> str:
    shutil.rmtree(path)
    return "no such file or folder"


def empty(path: Path) -> str:
    shutil.rmtree(path)
    path.mkdir()
    return "empty"


def config_only(path: Path) -> str:
    (path / "model.safetensors").unlink()
    (path / "tokenizer.json").unlink()
    return "weights"


def without_tokenizer(path: Path) -> str:
    (path / "tokenizer.json").unlink()
    return "tokenizer.json"


def without_a_shard(path: Path) -> str:
    tensors = load_file(path / "model.safetensors")
    names = sorted(tensors)
    save_file({n: tensors[n] for n in names[:5]}, path / "model-00001-of-00002.safetensors")
    (path / "model.safetensors").unlink()
    where = {n: f"model-0000{1 if n in names[:5] else 2}-of-00002.safetensors" for n in names}
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}), "utf-8")
    return "model-00002-of-00002.safetensors"


def truncated(path: Path) -> str:
    weights = path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])
    return "model.safetensors"


def without_a_tensor(path: Path) -> str:
    tensors = load_file(path / "model.safetensors")
    del tensors["model.norm.weight"]
    save_file(tensors, path / "model.safetensors")
    return "model.norm.weight"


def unknown_architecture(path: Path) -> str:
    return changed(path, architectures=["NonsenseForCausalLM"])


def changed(path: Path, **values: Any) -> str:
    config = json.loads((path / "config.json").read_text("utf-8"))
    (path / "config.json").write_text(json.dumps({**config, **values}), "utf-8")
    return str(next(iter(values.values()))[0])


# Some are found before the tree starts, whatever the placement; others by the worker, where it is.
EARLY = [absent, empty, config_only, without_tokenizer, without_a_shard]
LATE = [truncated, without_a_tensor, unknown_architecture]


@pytest.mark.parametrize(
    ("spoil", "placement"),
    [(spoil, "inline") for spoil in EARLY + LATE] + [(truncated, "processes")],
)
def test_a_model_that_is_not_whole_is_named_in_the_last_lines(
    spoil: Callable[[Path], str],
    placement: str,
    tiny: Path,
    tmp_path: Path,
    serve: Callable[..., Server],
) -> None:
    path = tmp_path / "spoilt-model"
    shutil.copytree(tiny, path)
    named = spoil(path)
    server = serve("--placement", placement, model=path)
    assert server.wait() == 1
    last = "\n".join(server.said().splitlines()[-12:])
    assert named in last
    assert "spoilt-model" in last
    assert "Traceback" not in last
