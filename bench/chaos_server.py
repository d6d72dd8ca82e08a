"""This file is the server that `bench/chaos.py` breaks: the real one, with fuses in its rooms.

It is run as `python -m bench.chaos_server serve ...`.
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
# Faults that follow each other within seconds are each judged by itself, as rare ones would be; how
# many deaths are too many is tested elsewhere.
WINDOW_S = 1.0


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
    """That server in a process, or the one of another `module`, from outside."""

    def __init__(
        self,
        model: str,
        folder: Path,
        threads: int,
        *words: str,
        module: str = "bench.chaos_server",
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
        command = [sys.executable, "-m", module, "serve", "--model", model]
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
