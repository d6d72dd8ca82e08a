"""This file is the server that `bench/chaos.py` breaks: the real one, in which each process can be
told by a signal to go wrong in a way that no signal of the system does by itself.

It is run as `python -m bench.chaos_server serve ...`; the rooms are the real ones with a fuse.
"""

from __future__ import annotations

import asyncio
import os
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import httpx
import msgspec
import torch

from actors import tree
from actors.runtime import spec
from actors.scheduler.actor import Scheduler
from actors.tokenizer.actor import Tokenizer
from actors.worker.actor import Worker

ROOT = Path(__file__).resolve().parents[1]
GO_WRONG = {
    "spin": signal.SIGUSR1,
    "deadlock": signal.SIGUSR2,
    "memory": signal.SIGRTMIN + 1,
    "assert": signal.SIGRTMIN + 2,
}
FUSED = {
    "worker": "bench.chaos_server:FusedWorker",
    "scheduler": "bench.chaos_server:FusedScheduler",
    "tokenizer": "bench.chaos_server:FusedTokenizer",
}


# Faults that follow each other within seconds are each judged by itself, as rare ones would be; how
# many deaths are too many is tested elsewhere.
WINDOW_S = 1.0
KEPT: list[bytearray] = []  # what has used up a process' memory


def spin() -> None:
    """A busy loop that never gives the interpreter up for long, on the process's event loop."""
    while True:
        pass


def listen() -> None:
    """Only where the actor is alone with its loop in a process."""
    if threading.current_thread() is threading.main_thread():
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(GO_WRONG["spin"], spin)
        loop.add_signal_handler(GO_WRONG["memory"], use_up_memory)


class FusedScheduler(Scheduler):
    async def on_start(self) -> bytes:
        listen()
        return await super().on_start()


class FusedTokenizer(Tokenizer):
    async def on_start(self) -> bytes:
        listen()
        return await super().on_start()


class FusedWorker(Worker):
    is_stuck = loses_device = False

    async def on_start(self) -> bytes:
        listen()
        loop = asyncio.get_running_loop()
        if threading.current_thread() is threading.main_thread():
            loop.add_signal_handler(GO_WRONG["deadlock"], self.get_stuck)
            loop.add_signal_handler(GO_WRONG["assert"], self.lose_device)
        return await super().on_start()

    def get_stuck(self) -> None:
        self.is_stuck = True

    def lose_device(self) -> None:
        self.loses_device = True

    def launch(self, *arguments: Any) -> Any:
        if self.is_stuck:
            threading.Event().wait()
        if self.loses_device:
            # Fails on the device, some time later, and with it all that this process asks of it.
            torch._assert_async(torch.zeros(1, device=self.runner.device))
        return super().launch(*arguments)


def use_up_memory() -> None:
    """No further memory for this process from now on: whatever it asks for is not to be had."""
    used = int(Path("/proc/self/statm").read_text("ascii").split()[0]) * os.sysconf("SC_PAGE_SIZE")
    resource.setrlimit(resource.RLIMIT_AS, (used, used))
    size = 1 << 20
    while size > 16:
        try:
            KEPT.append(bytearray(size))
        except MemoryError:
            size >>= 1


def fused(branch: spec.Supervisor) -> spec.Supervisor:
    children = tuple(
        fused(child)
        if isinstance(child, spec.Supervisor)
        else msgspec.structs.replace(
            child,
            factory=FUSED.get(child.name, child.factory),
            # The gateway beside the root: what is broken are the parts behind it.
            node="main" if child.name in ("gateway", "metrics") else child.node,
        )
        for child in branch.children
    )
    return msgspec.structs.replace(branch, children=children, window_s=WINDOW_S)


def main() -> int:
    import app

    build = tree.build

    def build_fused(config: Any) -> Any:
        root, nodes = build(config)
        return fused(root), nodes

    tree.build = build_fused  # what `actors.run` calls
    return app.main(sys.argv[1:])


class Server:
    """That server in a process, from outside."""

    def __init__(self, model: str, folder: Path, threads: int, *words: str) -> None:
        if not model:
            from tests.house.tiny import make_model

            model = str(make_model(folder / "tiny-llama"))
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        self.output = folder / "server.txt"
        self.log_dir = folder / "logs"
        command = [sys.executable, "-m", "bench.chaos_server", "serve", "--model", model]
        command += ["--port", str(port), "--log-dir", str(folder / "logs"), "--dtype", "float32"]
        command += ["--threads", str(threads), "--kv-tokens", "131072", "--max-running", "256"]
        command += ["--front-ends", "1", "--log-file-bytes", str(1 << 30), *words]
        folder.mkdir(parents=True, exist_ok=True)
        with open(self.output, "wb") as output:
            self.process = subprocess.Popen(command, cwd=ROOT, stdout=output, stderr=output)

    def __enter__(self) -> Server:
        return self

    def wait_ready(self) -> None:
        for _ in range(1200):
            assert self.process.poll() is None, self.output.read_text("utf-8", "replace")
            try:
                if httpx.get(self.url + "/ready", timeout=5.0).status_code == 200:
                    return
            except httpx.HTTPError:
                pass
            time.sleep(0.1)
        raise AssertionError("never ready")

    def __exit__(self, *_: object) -> None:
        self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()


if __name__ == "__main__":
    sys.exit(main())
