"""This file reads the log files of a run as one, and follows them. For the command line.

It does not know what the lines mean; `merge.py` orders and chooses them. Each node has one file,
which its process puts aside as `.1`, `.2`… when it is full: a source reads through all of them in
order, and finds its place again by the file's inode, whatever was renamed in the meantime.

It looks for news on a timer, which only this command does: no process of the server polls.
"""

from __future__ import annotations

import datetime
import heapq
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from actors.runtime.log import LATEST, rotated, state_dir
from actors.runtime.merge import Choice, Line, Merge, Splitter

POLL_S = 0.2
READ_BYTES = 256 << 10
RACES_MAX = 5  # lost so often against a writer that rotates, a file counts as gone
SUFFIX = ".jsonl"


class Source:
    """The files of one node."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._splitter = Splitter(path.name.removesuffix(SUFFIX))
        self._fd: int | None = None

    def lines(self) -> Iterator[list[Line]]:
        """All that was written since the last call, across rotation, piece by piece."""
        if self._fd is None:
            names = self._names()
            self._fd = open_file(names[-1]) if names else None
        while self._fd is not None:
            yield from self._read()
            following_fd = self._open_following()
            if following_fd is None:
                return
            yield from self._read()  # what was written between the end and the rotation
            yield self._splitter.flush()
            os.close(self._fd)
            self._fd = following_fd

    def _read(self) -> Iterator[list[Line]]:
        assert self._fd is not None
        if os.fstat(self._fd).st_size < os.lseek(self._fd, 0, os.SEEK_CUR):
            os.lseek(self._fd, 0, os.SEEK_SET)  # somebody has emptied the file
        while data := os.read(self._fd, READ_BYTES):
            yield self._splitter.feed(data)

    def _names(self) -> list[Path]:
        """The files there are, newest first."""
        names = [self._path]
        while rotated(self._path, len(names)).exists():
            names.append(rotated(self._path, len(names)))
        return [name for name in names if name.exists()]

    def _open_following(self) -> int | None:
        """The file after the one that is open; None when that is the newest."""
        assert self._fd is not None
        mine = os.fstat(self._fd).st_ino
        for _ in range(RACES_MAX):
            found: list[tuple[Path, int | None]] = [(name, inode(name)) for name in self._names()]
            inodes = [number for _, number in found]
            if mine in inodes:
                index = inodes.index(mine)
                if index == 0:
                    return None
                path, expected = found[index - 1]
                fd = open_file(path)
                if fd is not None and os.fstat(fd).st_ino == expected:
                    return fd
                if fd is not None:
                    os.close(fd)  # renamed between look and grasp
        # Put aside so often that it is gone: on with the oldest there is.
        names = self._names()
        return open_file(names[-1]) if names else None

    def close(self) -> None:
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None


def open_file(path: Path) -> int | None:
    try:
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return None


def inode(path: Path) -> int | None:
    try:
        return path.stat().st_ino
    except FileNotFoundError:
        return None


def wait() -> bool:
    """Between two rounds. False would end the following."""
    time.sleep(POLL_S)
    return True


def utc_now() -> str:
    now = datetime.datetime.now(datetime.UTC)
    return now.isoformat(timespec="microseconds").replace("+00:00", "Z")


def tail(
    directory: Path,
    choice: Choice | None = None,
    *,
    follow: bool = False,
    wait: Callable[[], bool] = wait,
    now: Callable[[], str] = utc_now,
) -> Iterator[Line]:
    """The chosen lines of a run, by time: those that are there, and with `follow` those to come,
    also of nodes that are started later. Half-written lines are not shown until they are whole.
    """
    choice = choice or Choice()
    sources: dict[Path, Source] = {}
    merge = Merge()
    try:
        before = now() if follow else None
        for line in read_all(directory, sources):
            if before is not None and line.timestamp > before:
                merge.add([line])
            elif choice.takes(line):
                yield line
        while follow and wait():
            before = now()
            for source in find_sources(directory, sources):
                for lines in source.lines():
                    merge.add(lines)
            yield from filter(choice.takes, merge.take(before))
        yield from filter(choice.takes, merge.take())
    finally:
        for source in sources.values():
            source.close()


def read_all(directory: Path, sources: dict[Path, Source]) -> Iterator[Line]:
    """What is there now, merged as it is read: the files may be larger than the memory."""

    def lines_of(source: Source) -> Iterator[Line]:
        for lines in source.lines():
            yield from lines

    streams = [lines_of(source) for source in find_sources(directory, sources)]
    return heapq.merge(*streams, key=lambda line: line.timestamp)


def find_sources(directory: Path, sources: dict[Path, Source]) -> list[Source]:
    """Those known and those that are new."""
    for path in sorted(directory.glob("*" + SUFFIX)):
        if path not in sources:
            sources[path] = Source(path)
    return list(sources.values())


def find_run(base: Path | None = None, name: str | None = None) -> Path:
    """The directory of a run by its name; without one, the newest.

    Raises FileNotFoundError with words for the user.
    """
    base = base or state_dir()
    path = base / (name or LATEST)
    if path.is_dir():
        return path.resolve()
    if name is None and any(base.glob("*" + SUFFIX)):
        return base  # the directory is that of a run itself
    if name is not None:
        raise FileNotFoundError(f"there is no run {name} in {base}")
    raise FileNotFoundError(f"there is no log of a run in {base}")
