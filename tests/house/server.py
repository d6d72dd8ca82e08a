"""This file starts real servers for the tests, and looks at them from outside."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import openai
import psutil

ROOT = Path(__file__).resolve().parents[2]
WAIT_S = 240.0  # for anything, on however busy a machine; nothing is expected to take as long


def eventually(what: Callable[[], Any], why: str) -> Any:
    """Waits for other processes: the first true value of `what`. A bound, never a measurement."""
    until_s = time.monotonic() + WAIT_S
    while not (found := what()):
        assert time.monotonic() < until_s, f"never: {why}"
        time.sleep(0.02)
    return found


def reserved_port() -> socket.socket:
    """A port of this machine that nobody else is given while the socket is open. Who binds it with
    SO_REUSEADDR, as servers do, may listen there."""
    found = socket.socket()
    found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    found.bind(("127.0.0.1", 0))
    return found


class Server:
    """`python -m app serve` in a process of its own. It calls nobody hung, since a busy machine
    makes anybody look so: who tests that says `--hang`."""

    def __init__(self, model: Path, log_dir: Path, *words: str) -> None:
        self.reserved = reserved_port()
        self.port: int = self.reserved.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.log_dir = log_dir
        self.clients: list[openai.OpenAI] = []
        self.output = log_dir / "output.txt"
        log_dir.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "app", "serve", "--model", str(model)]
        command += ["--port", str(self.port), "--log-dir", str(log_dir), "--dtype", "float32"]
        command += ["--threads", "1", "--kv-tokens", "4096", "--no-spares"]
        command += ["--hang", str(WAIT_S), "--forward-hang", str(WAIT_S), *words]
        with open(self.output, "wb") as output:
            self.process = subprocess.Popen(
                command, cwd=ROOT, stdout=output, stderr=output, start_new_session=True
            )

    def said(self) -> str:
        return self.output.read_text("utf-8", "replace")

    def get(self, path: str) -> httpx.Response:
        return httpx.get(self.url + path, timeout=WAIT_S)

    def status(self, path: str) -> int | None:
        """Of a GET; None when nobody answers."""
        try:
            return self.get(path).status_code
        except httpx.HTTPError:
            return None

    def wait_ready(self) -> Server:
        def ready() -> bool:
            assert self.process.poll() is None, self.said()
            return self.status("/ready") == 200

        eventually(ready, f"ready\n{self.said()}")
        return self

    def client(self, key: str = "none") -> openai.OpenAI:
        """Closed with the server at the latest: a socket left to the collector warns in whatever
        test runs by then."""
        client = openai.OpenAI(
            base_url=self.url + "/v1", api_key=key, max_retries=0, timeout=WAIT_S
        )
        self.clients.append(client)
        return client

    def model(self) -> str:
        found: str = self.get("/v1/models").json()["data"][0]["id"]
        return found

    def rows(self) -> dict[str, dict[str, Any]]:
        """`GET /actors`, by path."""
        return {row["path"]: row for row in self.get("/actors").json()}

    def metric(self, name: str) -> float:
        """The sum over all lines that begin so (a name, and perhaps labels); 0 without any."""
        text = self.get("/metrics").text
        lines = [line for line in text.splitlines() if line.startswith(name)]
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line[len(name)] in " {},")

    def children(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children(recursive=True)

    def signal(self, number: int) -> None:
        self.process.send_signal(number)

    def wait(self) -> int:
        return self.process.wait(WAIT_S)

    def close(self) -> None:
        """Ends it, whatever its state; nothing of it is left."""
        for client in self.clients:
            client.close()
        left: list[psutil.Process] = []
        with contextlib.suppress(psutil.NoSuchProcess):
            left = self.children()
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(20)
            except subprocess.TimeoutExpired:
                os.killpg(self.process.pid, signal.SIGKILL)
                self.process.wait()
        for process in left:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        self.reserved.close()
