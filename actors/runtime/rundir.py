"""This file is the directory of one run: where its sockets live, and what it must not leave behind.

It does not know what is sent over the sockets. The directory has a short random name and mode 0700;
a locked pid file says that the run is alive. The kernel drops the lock when the process dies, in
whatever way, so that the next run can tell the dead ones and remove their sockets (`sweep`). Memory
that processes of a run share has no name (`process.py`): nothing of it can be left behind.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import re
import secrets
import shutil
import stat
import tempfile
import time
from pathlib import Path

PREFIX = "histrio-"
PID_FILE = "pid"
SOCKET_PATH_BYTES_MAX = 107  # sockaddr_un, less the final zero
NODE_BYTES_MAX = 24  # of a node's name in a socket's; longer ones are shortened
UNLOCKED_AGE_S = 60.0  # a directory without pid file may be one that is just being made


class RunDir:
    """A run's directory, held by the process that made it until `close` or its death."""

    def __init__(self, path: Path, lock_fd: int, *, run: str, token: bytes) -> None:
        self.path = path
        self.run = run
        self.token = token  # known to the nodes of this run alone; handed over by descriptor
        self._lock_fd: int | None = lock_fd

    @classmethod
    def create(cls, base: Path | None = None) -> RunDir:
        """Cleans up after dead runs under `base`, and makes a directory for this one."""
        base = base or find_base()
        sweep(base)
        path = Path(tempfile.mkdtemp(prefix=PREFIX, dir=base))  # mode 0700
        lock_fd = lock_pid_file(path / PID_FILE)
        assert lock_fd is not None, f"{path} is new and already locked"
        run = path.name.removeprefix(PREFIX)
        return cls(path, lock_fd, run=run, token=secrets.token_bytes(32))

    def close(self) -> None:
        """Removes the directory. Idempotent."""
        if self._lock_fd is not None:
            shutil.rmtree(self.path, ignore_errors=True)
            os.close(self._lock_fd)
            self._lock_fd = None


def find_base() -> Path:
    """The user's runtime directory, or else the one for temporary files."""
    for name in (os.environ.get("XDG_RUNTIME_DIR"), f"/run/user/{os.getuid()}"):
        if name and len(name) <= 48:
            path = Path(name)
            with contextlib.suppress(OSError):
                status = path.stat()
                if status.st_uid == os.getuid() and os.access(path, os.W_OK | os.X_OK):
                    return path
    temporary = tempfile.gettempdir()
    return Path(temporary if len(temporary) <= 48 else "/tmp")


def socket_path(directory: Path, node: str, incarnation: int) -> Path:
    """Where a node's inbox is bound; its heartbeats are beside it, see `beat_path`.

    Raises ValueError when the directory's name leaves no room (the caller chose a long one).
    """
    encoded = node.encode()
    if len(encoded) > NODE_BYTES_MAX or not re.fullmatch(r"[A-Za-z0-9_.-]+", node):
        node = "n" + hashlib.blake2s(encoded, digest_size=8).hexdigest()
    path = directory / f"{node}.{incarnation}"
    if len(os.fsencode(beat_path(path))) > SOCKET_PATH_BYTES_MAX:
        raise ValueError(f"{path} is too long for a socket: {SOCKET_PATH_BYTES_MAX} bytes at most")
    return path


def beat_path(path: Path) -> Path:
    return path.with_name(path.name + "b")


def lock_pid_file(path: Path) -> int | None:
    """Writes this process' pid and holds the file's lock; None if another process holds it.

    The descriptor is not inherited by children, so the lock ends with this process.
    """
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(fd)
        return None
    os.truncate(fd, 0)
    os.write(fd, f"{os.getpid()}\n".encode())
    return fd


def check_owner(path: Path) -> None:
    """Raises PermissionError unless `path`'s directory belongs to this user and to no one else."""
    directory = path.parent.lstat()
    if not stat.S_ISDIR(directory.st_mode) or directory.st_uid != os.geteuid():
        raise PermissionError(f"{path.parent} does not belong to this user")
    if directory.st_mode & 0o077:
        raise PermissionError(f"{path.parent} is open to other users")
    with contextlib.suppress(FileNotFoundError):  # not bound yet: whoever binds it is this user
        status = path.lstat()
        if not stat.S_ISSOCK(status.st_mode) or status.st_uid != os.geteuid():
            raise PermissionError(f"{path} is not a socket of this user")


def sweep(base: Path) -> list[Path]:
    """Removes what dead runs of this user left under `base`. Gives the directories removed."""
    removed: list[Path] = []
    for path in sorted(base.glob(PREFIX + "*")):
        try:
            status = path.lstat()
            if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid():
                continue
            if not (path / PID_FILE).exists():
                if time.time() - status.st_mtime < UNLOCKED_AGE_S:
                    continue
                lock_fd = None
            else:
                lock_fd = lock_pid_file(path / PID_FILE)
                if lock_fd is None:
                    continue  # alive
            shutil.rmtree(path, ignore_errors=True)
            removed.append(path)
            if lock_fd is not None:
                os.close(lock_fd)
        except OSError:
            continue  # another run is sweeping as well
    return removed
