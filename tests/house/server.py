"""This file starts real servers for the tests, and looks at them from outside."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import psutil

ROOT = Path(__file__).resolve().parents[2]
WAIT_S = 240.0  # for anything, on however busy a machine; nothing is expected to take as long

ONE_EACH = httpx.Limits(max_keepalive_connections=0)  # a connection for each request
# Without certificates to read, which would cost more than the request. Threads may share it.
ANY = httpx.Client(verify=False, timeout=WAIT_S, limits=ONE_EACH, trust_env=False)


def eventually(what: Callable[[], Any], why: str) -> Any:
    """Waits for other processes: the first true value of `what`. A bound, never a measurement."""
    until_s = time.monotonic() + WAIT_S
    while not (found := what()):
        assert time.monotonic() < until_s, f"never: {why}"
        time.sleep(0.05)
    return found


def reserved_port() -> socket.socket:
    """A port of this machine that nobody else is given while the socket is open. Who binds it with
    SO_REUSEADDR, as servers do, may listen there."""
    found = socket.socket()
    found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    found.bind(("127.0.0.1", 0))
    return found


def metric_of(page: str, name: str) -> float:
    """The sum over all lines that begin so (a name, and perhaps labels); 0 without any."""
    lines = [line for line in page.splitlines() if line.startswith(name)]
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line[len(name)] in " {},")


@contextlib.contextmanager
def stopped(pid: int) -> Iterator[None]:
    """The process does nothing meanwhile. It may be killed."""
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)


class Server:
    """`python -m app serve` in a process of its own. It calls nobody hung and waits for parts that
    were lost, since on a busy machine anybody may take long: who tests that says `--hang`."""

    def __init__(
        self,
        model: Path,
        log_dir: Path,
        *words: str,
        program: tuple[str, ...] = ("-m", "app"),
        environment: dict[str, str] | None = None,
    ) -> None:
        self.reserved = reserved_port()
        self.port: int = self.reserved.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.log_dir = log_dir
        self.clients: dict[str, openai.OpenAI] = {}  # by key
        self.output = log_dir / "output.txt"
        log_dir.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, *program, "serve", "--model", str(model)]
        command += ["--port", str(self.port), "--log-dir", str(log_dir), "--dtype", "float32"]
        command += ["--threads", "1", "--kv-tokens", "4096", "--no-spares"]
        for name in ("--hang", "--forward-hang", "--recover", "--drain"):
            command += [name, str(WAIT_S)]
        with open(self.output, "wb") as output:
            self.process = subprocess.Popen(
                [*command, *words],
                cwd=ROOT,
                env={**os.environ, **(environment or {})},
                stdout=output,
                stderr=output,
                start_new_session=True,
            )

    def said(self) -> str:
        return self.output.read_text("utf-8", "replace")

    def get(self, path: str) -> httpx.Response:
        """On a connection of its own."""
        return ANY.get(self.url + path)

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
        """One for each key, that threads may share. Closed with the server: a socket left to the
        collector warns in whatever test runs by then."""
        found = self.clients.get(key)
        if found is None:
            found = self.clients[key] = openai.OpenAI(
                base_url=self.url + "/v1",
                api_key=key,
                max_retries=0,
                timeout=WAIT_S,
                http_client=openai.DefaultHttpxClient(verify=False, limits=ONE_EACH),
            )
        return found

    def model(self) -> str:
        found: str = self.get("/v1/models").json()["data"][0]["id"]
        return found

    def rows(self) -> dict[str, dict[str, Any]]:
        """`GET /actors`, by path."""
        return {row["path"]: row for row in self.get("/actors").json()}

    def pid_of(self, path: str) -> int:
        """Of the process in which a part serves. Waits while it is being restarted: no process has
        the pid 0, and a signal to that would be for ourselves."""

        def look() -> int:
            row = self.rows()[path]
            return int(row["pid"]) if row["state"] == "running" else 0

        found: int = eventually(look, f"{path} runs")
        return found

    def wait_back(self, path: str, pid: int) -> None:
        """Until the part serves in another process than `pid`, and all is well."""

        def look() -> bool:
            with contextlib.suppress(httpx.HTTPError):  # of a front end that has not come back
                row = self.rows()[path]
                is_new = row["state"] == "running" and row["pid"] != pid
                return is_new and self.get("/health").json() == {"status": "ok"}
            return False

        eventually(look, f"{path} is back")

    def metric(self, name: str) -> float:
        return metric_of(self.get("/metrics").text, name)

    def children(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children(recursive=True)

    def signal(self, number: int) -> None:
        self.process.send_signal(number)

    def wait(self) -> int:
        return self.process.wait(WAIT_S)

    def close(self) -> None:
        """Ends it, whatever its state; nothing of it is left."""
        for client in self.clients.values():
            client.close()
        left: list[psutil.Process] = []
        with contextlib.suppress(psutil.NoSuchProcess):
            left = self.children()
        for _ in range(20):  # the second signal does not wait for what runs
            self.process.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(2.0)
                break
        else:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
        for process in left:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        self.reserved.close()
