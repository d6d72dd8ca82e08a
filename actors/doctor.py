"""This file looks at the machine and says what would keep the server from working, or slow it down.

It does not know how the server is built: it looks at versions, the compiler, the processor, memory,
folders and the port. It imports nothing that could fail on a broken machine: device libraries are
tried in a child process, which may crash without harm.
"""

from __future__ import annotations

import errno
import json
import os
import platform
import re
import resource
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any, Literal, NamedTuple

from messages.config import Config

GIB = 1 << 30


class Check(NamedTuple):
    mark: Literal["ok", "warn", "fail"]
    name: str
    found: str
    advice: str = ""


# What serving cannot do without, beside torch (whose check is its own).
NEEDED = (
    "msgspec",
    "pyzmq",
    "starlette",
    "uvicorn",
    "structlog",
    "tokenizers",
    "jinja2",
    "gguf",
    "safetensors",
    "numpy",
)

# Run in a child: a library built for another processor dies there by a signal, not here.
PROBE = """
import json, torch
found = {
    "torch": torch.__version__,
    "threads": torch.get_num_threads(),
    "cuda": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
}
print(json.dumps(found))
"""

PROBE_OPS = """
import json
from kernels.ops.base import OpsUnavailable
from kernels.ops.cpu import build, check
try:
    path = build.library()
    check.check_once()
    found = {"available": True, "detail": f"compiled and checked, {path.name}"}
except OpsUnavailable as error:
    found = {"available": False, "reason": str(error)}
print(json.dumps(found))
"""


def checks(config: Config) -> Iterator[Check]:
    """Looks at one thing after another, slow ones last; yields as it goes."""
    yield check_python()
    yield check_packages()
    yield check_name_clash()
    yield check_processor()
    yield check_cores()
    yield check_memory()
    yield check_files(config)
    yield check_compiler()
    yield check_folder("state folder", state_home())
    yield check_folder("cache folder", cache_home())
    yield check_shared_memory()
    yield check_port(config)
    yield check_torch()
    yield check_ops()


def state_home() -> Path:
    return Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state") / "histrio"


def cache_home() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "histrio"


def check_python() -> Check:
    found = f"{platform.python_version()} on {platform.system()} {platform.machine()}"
    if platform.system() != "Linux":
        return Check("warn", "python", found, "only Linux is tested; try --placement inline")
    return Check("ok", "python", found)


def check_packages() -> Check:
    found, missing = [], []
    for name in NEEDED:
        try:
            found.append(f"{name} {metadata.version(name)}")
        except metadata.PackageNotFoundError:
            missing.append(name)
    if missing:
        return Check("fail", "packages", f"missing: {', '.join(missing)}", "pip install -e .")
    return Check("ok", "packages", ", ".join(found))


def check_name_clash() -> Check:
    """Ours is a top-level package called `kernels`; another distribution has that name too."""
    try:
        found = metadata.version("kernels")
    except metadata.PackageNotFoundError:
        return Check("ok", "name `kernels`", "only ours")
    advice = "pip uninstall kernels: another package of that name hides ours or is hidden by it"
    return Check("warn", "name `kernels`", f"a distribution of that name, {found}", advice)


def check_processor() -> Check:
    text = read_text("/proc/cpuinfo")
    name = re.search(r"model name\s*:\s*(.+)", text)
    flags = re.search(r"(?:flags|Features)\s*:\s*(.+)", text)
    have = set(flags.group(1).split()) if flags else set()
    wanted = ("avx2", "fma", "avx512f", "avx512_vnni", "avx512_bf16", "amx_int8", "asimd")
    found = f"{name.group(1) if name else platform.processor() or 'unknown'}: "
    found += " ".join(flag for flag in wanted if flag in have) or "no vector unit known to us"
    if "avx512_vnni" in have:
        return Check("ok", "processor", found)
    return Check("warn", "processor", found, "without AVX512-VNNI the forward is slower")


def check_cores() -> Check:
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    quota = read_text("/sys/fs/cgroup/cpu.max").split()
    if len(quota) == 2 and quota[0] != "max":
        granted = int(quota[0]) / int(quota[1])
        if granted < (usable or 1):
            advice = (
                f"--threads {max(1, int(granted))}: more threads than the quota stall each other"
            )
            return Check("warn", "cores", f"{usable}, but a quota of {granted:.1f}", advice)
    return Check("ok", "cores", f"{usable}, load {os.getloadavg()[0]:.1f}")


def check_memory() -> Check:
    found = re.search(r"MemAvailable:\s+(\d+) kB", read_text("/proc/meminfo"))
    if not found:
        return Check("warn", "memory", "unknown", "set --kv-tokens")
    available = int(found.group(1)) << 10
    text = f"{available / GIB:.1f} GiB available"
    if available < GIB // 2:
        return Check("fail", "memory", text, "free some: the default model needs about 0.5 GiB")
    if available < 2 * GIB:
        return Check("warn", "memory", text, "a small KV pool only: set --kv-tokens")
    return Check("ok", "memory", text)


def check_files(config: Config) -> Check:
    limit, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = config.gateway.open_max + 256
    found = f"{limit} open files at most"
    if limit != resource.RLIM_INFINITY and limit < wanted:
        return Check("warn", "file limit", found, f"ulimit -n {wanted} for {wanted - 256} streams")
    return Check("ok", "file limit", found)


def check_compiler() -> Check:
    for name in filter(None, (os.environ.get("CC"), "cc", "gcc", "clang")):
        path = shutil.which(name.split()[0])
        if path:
            ran = subprocess.run(
                [path, "--version"], capture_output=True, text=True, timeout=20, check=False
            )
            return Check("ok", "compiler", (ran.stdout.splitlines() or [path])[0])
    advice = "apt install gcc (or another C compiler): without it plain torch operators serve"
    return Check("warn", "compiler", "none", advice)


def check_folder(name: str, path: Path) -> Check:
    try:
        path.mkdir(parents=True, exist_ok=True)
        probe = path / f".doctor-{os.getpid()}"
        probe.write_bytes(b"x")
        probe.unlink()
    except OSError as error:
        variable = "XDG_STATE_HOME" if "state" in name else "XDG_CACHE_HOME"
        return Check("fail", name, f"{path}: {error.strerror}", f"set {variable} to a writable one")
    free = shutil.disk_usage(path).free
    if free < GIB:
        return Check("warn", name, f"{path}: {free / GIB:.1f} GiB free", "make room")
    return Check("ok", name, f"{path}, {free / GIB:.0f} GiB free")


def check_shared_memory() -> Check:
    try:
        free = shutil.disk_usage("/dev/shm").free
    except OSError as error:
        return Check("warn", "shared memory", f"/dev/shm: {error.strerror}", "mount a tmpfs there")
    if free < 64 << 20:
        return Check("warn", "shared memory", f"{free >> 20} MiB free", "docker run --shm-size 1g")
    return Check("ok", "shared memory", f"{free / GIB:.1f} GiB free")


def check_port(config: Config) -> Check:
    host, port = config.gateway.host, config.gateway.port
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
    except OSError as error:
        advice = "another --host"
        if error.errno == errno.EADDRINUSE:
            advice = "stop what listens there, or another --port"
        elif error.errno == errno.EACCES:
            advice = "a --port above 1023"
        return Check("fail", "port", f"{host}:{port}: {error.strerror}", advice)
    return Check("ok", "port", f"{host}:{port} is free")


def check_torch() -> Check:
    found, why = probe(PROBE)
    if found is None:
        return Check("fail", "torch", why, "pip install torch==2.13.0")
    devices = ", ".join(found["cuda"]) or "no GPU"
    return Check("ok", "torch", f"{found['torch']}, {found['threads']} threads, {devices}")


def check_ops() -> Check:
    found, why = probe(PROBE_OPS)
    advice = "plain torch operators serve; it is slower"
    if found is None:
        return Check("warn", "compiled operators", why, advice)
    if not found.get("available"):
        return Check("warn", "compiled operators", str(found.get("reason", "no")), advice)
    return Check("ok", "compiled operators", str(found.get("detail", "available")))


def probe(code: str) -> tuple[dict[str, Any] | None, str]:
    """Runs `code` in a child from the checkout's root. Returns its JSON, or None and why not."""
    root = Path(__file__).resolve().parent.parent
    try:
        ran = subprocess.run(
            [sys.executable, "-c", code],
            cwd=root,
            capture_output=True,
            text=True,
            timeout=180,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return None, "no answer within 180 s"
    if ran.returncode < 0:
        return None, f"died of signal {-ran.returncode}"
    if ran.returncode > 0:
        return None, (ran.stderr.strip().splitlines() or ["failed"])[-1]
    found: dict[str, Any] = json.loads(ran.stdout.splitlines()[-1])
    return found, ""


def read_text(path: str) -> str:
    try:
        return Path(path).read_text("utf-8", "replace")
    except OSError:
        return ""
