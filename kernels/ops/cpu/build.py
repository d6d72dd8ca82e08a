"""This file compiles the C sources of the fast CPU path and keeps the result in the user's cache.

It does not know what the sources do. The result's name is a hash of all that it depends on (the
sources, the flags, the compiler's version, the CPU), so a cached file is never stale; a checksum at
its end tells a damaged one, which would kill the process that loads it. Processes that start
together wait for the first to compile. Nothing is run from a directory that another user may write
to.
"""

from __future__ import annotations

import fcntl
import hashlib
import logging
import os
import platform
import shutil
import stat
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from kernels.ops.base import OpsUnavailable

SOURCES = Path(__file__).parent / "csrc"
FLAGS = ("-O3", "-march=native", "-std=gnu11", "-fPIC", "-shared", "-fvisibility=hidden")
LIBRARIES = ("-pthread", "-lm")
NEEDED = frozenset("avx512f avx512bw avx512dq avx512vl avx512_vnni fma f16c".split())
OFF_VARIABLE = "HISTRIO_NO_COMPILE"
COMPILE_S_MAX = 300.0


def library() -> Path:
    """The compiled library's path; compiles it if no cache has it.

    Raises OpsUnavailable with the reason: switched off, another CPU, no compiler, or it failed.
    """
    if os.environ.get(OFF_VARIABLE, "") not in ("", "0"):
        raise OpsUnavailable(f"switched off by {OFF_VARIABLE}")
    cpu = cpu_identity()
    compiler, version = find_compiler()
    sources = sorted(SOURCES.glob("*.[ch]"))
    digest = hashlib.sha256("\0".join((cpu, version, *FLAGS, *LIBRARIES)).encode())
    for source in sources:
        digest.update(b"\0" + source.name.encode() + b"\0" + source.read_bytes())
    directory = cache_directory()
    path = directory / f"cpu-{digest.hexdigest()[:32]}.so"
    if intact(path):
        return path
    try:
        with locked(directory / "lock"):
            if not intact(path):  # else another process compiled it while this one waited
                compile_to(path, compiler, [str(each) for each in sources if each.suffix == ".c"])
    except OSError as error:  # a full disk
        raise OpsUnavailable(f"the compiled library can't be kept: {error.strerror}") from error
    return path


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """One process at a time. Where files can't be locked (some network homes) all go on at once:
    each compiles to a file of its own, and the last one stays."""
    with open(path, "w") as lock:
        with suppress(OSError):
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def intact(path: Path) -> bool:
    """Whether a file is there that ends with the checksum of the rest (see `compile_to`)."""
    try:
        content = path.read_bytes()
    except OSError:
        return False
    return len(content) > 32 and hashlib.sha256(content[:-32]).digest() == content[-32:]


def cpu_identity() -> str:
    """Model and features, of which the code depends. Raises OpsUnavailable for another CPU."""
    if platform.system() != "Linux" or platform.machine() != "x86_64":
        raise OpsUnavailable(f"needs Linux on x86-64, this is {platform.system()}")
    fields: dict[str, str] = {}
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if not line.strip():
            break  # the first core stands for all
        name, _, value = line.partition(":")
        fields[name.strip()] = value.strip()
    missing = sorted(NEEDED - set(fields.get("flags", "").split()))
    if missing:
        raise OpsUnavailable(f"this CPU lacks {', '.join(missing)}")
    return "\n".join(fields.get(name, "") for name in ("vendor_id", "model name", "flags"))


def find_compiler() -> tuple[str, str]:
    """(path, version text) of $CC, cc, gcc or clang. Raises OpsUnavailable if there is none."""
    for name in (os.environ.get("CC", ""), "cc", "gcc", "clang"):
        path = shutil.which(name) if name else None
        if path is None:
            continue
        try:
            found = subprocess.run(
                [path, "--version"], capture_output=True, text=True, timeout=30, check=True
            )
        except (OSError, subprocess.SubprocessError):
            continue
        return path, found.stdout
    raise OpsUnavailable("no C compiler (cc, gcc or clang) is installed")


def cache_directory() -> Path:
    """A directory of this user alone; under the user's cache, or else a fresh temporary one."""
    root = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    path = Path(root) / "histrio" / "compiled"
    try:
        path.mkdir(parents=True, exist_ok=True, mode=0o700)
        status = path.stat()
        mine = status.st_uid == os.getuid() and not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
        if mine and os.access(path, os.W_OK):
            return path
    except OSError:
        pass  # a read-only or missing home: the library lives as long as this boot's /tmp
    return Path(tempfile.mkdtemp(prefix="histrio-"))


def compile_to(path: Path, compiler: str, sources: list[str]) -> None:
    """Writes `path` in one step. Raises OpsUnavailable with the compiler's first error."""
    handle, partial = tempfile.mkstemp(suffix=".so", dir=path.parent)
    os.close(handle)
    logging.getLogger(__name__).info("compiling the CPU operators, once: %d files", len(sources))
    command = [compiler, *FLAGS, "-o", partial, *sources, *LIBRARIES]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=COMPILE_S_MAX)
        if done.returncode != 0:
            lines = [line for line in done.stderr.splitlines() if "error" in line]
            raise OpsUnavailable(f"the compiler failed: {(lines or ['no message'])[0].strip()}")
        with open(partial, "r+b") as file:
            digest = hashlib.sha256(file.read()).digest()
            file.write(digest)  # what follows an ELF file's sections is nobody else's business
        os.replace(partial, path)
    except subprocess.SubprocessError as error:
        raise OpsUnavailable(f"the compiler could not be run: {error}") from error
    finally:
        Path(partial).unlink(missing_ok=True)
