"""This file is the server that `bench/chaos.py` breaks: the real one, with fuses in its rooms.

It is run as `python -m bench.chaos_server serve ...`; with `--apart` before that, the gateway has a
process of its own, else it is with the root, as in `Engine`.
"""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import httpx
import msgspec

from actors import tree
from actors.runtime import spec

ROOT = Path(__file__).resolve().parents[1]
FUSED = {
    "worker": "bench.fused.worker:FusedWorker",
    "scheduler": "bench.fused.scheduler:FusedScheduler",
    "tokenizer": "bench.fused.tokenizer:FusedTokenizer",
}
FUSED_GATEWAY = "bench.fused.gateway:FusedGateway"
APART = "--apart"
# Faults that follow each other within seconds are each judged by itself, as rare ones would be; how
# many deaths are too many is tested elsewhere.
WINDOW_S = 1.0


def fused(branch: spec.Supervisor, *, apart: bool) -> spec.Supervisor:
    children = tuple(
        fused(child, apart=apart) if isinstance(child, spec.Supervisor) else placed(child, apart)
        for child in branch.children
    )
    return msgspec.structs.replace(branch, children=children, window_s=WINDOW_S)


def placed(child: spec.Child, apart: bool) -> spec.Child:
    """With its fuse. What holds the connections is not in one process with what is broken."""
    node, factory = child.node, FUSED.get(child.name, child.factory)
    if child.name == "metrics":
        node = "main"
    elif child.name == "gateway":
        node, factory = ("gateway", FUSED_GATEWAY) if apart else ("main", child.factory)
    return msgspec.structs.replace(child, factory=factory, node=node)


def main(words: list[str]) -> int:
    import app

    apart = APART in words
    build = tree.build

    def build_fused(config: Any) -> Any:
        root, nodes = build(config)
        own = (spec.Node(name="gateway", kind=spec.NodeKind.PROCESS),) if apart else ()
        return fused(root, apart=apart), (*nodes, *own)

    tree.build = build_fused  # what `actors.run` calls
    return app.main([word for word in words if word != APART])


class Server:
    """That server in a process, or the one of another `module`, from outside."""

    def __init__(
        self,
        model: str,
        folder: Path,
        threads: int,
        *words: str,
        module: str = "bench.chaos_server",
        apart: bool = False,
    ) -> None:
        if not model:
            from tests.house.tiny import make_model

            model = str(make_model(folder / "tiny-llama"))
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        self.output = folder / "server.txt"
        self.log_dir = folder / "logs"
        command = [sys.executable, "-m", module, *([APART] if apart else [])]
        command += ["serve", "--model", model]
        command += ["--port", str(port), "--log-dir", str(folder / "logs"), "--dtype", "float32"]
        command += ["--threads", str(threads), "--kv-tokens", "131072", "--max-running", "256"]
        # On a GPU a near tie may fall otherwise beside other rows: who asks for one says how.
        command += [
            "--device",
            "cpu",
            "--front-ends",
            "1",
            "--log-file-bytes",
            str(1 << 30),
            *words,
        ]
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
    sys.exit(main(sys.argv[1:]))
