"""This file is where log lines go: readable to the terminal, as JSON lines to the node's own file.

It does not know who logs. Nothing is kept in module state: a node makes one `Logs` and hands out
loggers bound to an actor's path. Every line says when, how grave, what happened, on which node, in
which actor, and for which request.

Laws: a line is written whole or not at all, by one write; a file is never larger than its limit,
and there are never more of them than theirs; a full disk loses lines, never the process.
"""

from __future__ import annotations

import contextlib
import datetime
import logging
import os
import shutil
import sys
import threading
from collections.abc import Callable, Mapping, MutableMapping
from pathlib import Path
from typing import Any, TextIO

import msgspec
import structlog

LEVELS = {"debug": 10, "info": 20, "warning": 30, "error": 40, "critical": 50}
FIRST_KEYS = ("timestamp", "level", "event", "node", "actor", "request")
LINE_BYTES_MAX = 256 << 10
RUNS_KEPT_MAX = 20
LATEST = "latest"

Event = MutableMapping[str, Any]
Log = structlog.typing.FilteringBoundLogger


class LogFile:
    """A file of lines that is put aside as `.1`, `.2`… when it is full."""

    def __init__(self, path: Path, *, bytes_max: int, files_max: int) -> None:
        self.path = path
        self.lost_count = 0  # lines that could not be written
        self._bytes_max = bytes_max
        self._files_max = files_max
        self._fd: int | None = None
        self._bytes = 0
        self._open()

    def _open(self) -> None:
        flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
        self._fd = os.open(self.path, flags, 0o600)
        self._bytes = os.fstat(self._fd).st_size
        if self._bytes and os.pread(self._fd, 1, self._bytes - 1) != b"\n":
            # An earlier life of this node died while it wrote.
            self._bytes += os.write(self._fd, b"\n")

    def write(self, line: bytes) -> None:
        """Appends one line, which ends in a newline. Never raises for the disk's state."""
        try:
            if self._fd is None:
                self._open()
            if self._bytes and self._bytes + len(line) > self._bytes_max:
                self._rotate()
            assert self._fd is not None
            self._bytes += os.write(self._fd, line)
        except OSError:
            self.lost_count += 1

    def _rotate(self) -> None:
        self.close()
        names = [self.path, *(rotated(self.path, i) for i in range(1, self._files_max))]
        names[-1].unlink(missing_ok=True)
        for older, newer in zip(reversed(names[1:]), reversed(names[:-1]), strict=True):
            with contextlib.suppress(FileNotFoundError):
                newer.rename(older)
        self._open()

    def close(self) -> None:
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None


def rotated(path: Path, index: int) -> Path:
    """The name of the file that was put aside `index` times."""
    return path.with_name(f"{path.name}.{index}")


class Logs:
    """The log of one node. Usable from any thread."""

    def __init__(
        self,
        *,
        node: str,
        directory: Path | None = None,
        level: str = "info",
        terminal: TextIO | None = sys.stderr,
        colors: bool | None = None,
        file_bytes_max: int = 16 << 20,
        files_max: int = 4,
        now: Callable[[], datetime.datetime] | None = None,
    ) -> None:
        """Without `directory` there is no file; without `terminal` nothing is shown.

        Raises OSError when the directory can't be written to.
        """
        self.node = node
        self.level = LEVELS[level]
        self._terminal = terminal
        if colors is None:
            colors = terminal is not None and terminal.isatty()
        self._colors = colors
        self._now = now or (lambda: datetime.datetime.now(datetime.UTC))
        self._lock = threading.Lock()
        self._file: LogFile | None = None
        self._adopter: Adopter | None = None
        if directory is not None:
            directory.mkdir(parents=True, exist_ok=True, mode=0o700)
            self._file = LogFile(
                directory / f"{node.replace('/', '-')}.jsonl",
                bytes_max=file_bytes_max,
                files_max=files_max,
            )

    def log_for(self, actor: str = "") -> Log:
        """A logger for the actor at this path, or for the node itself.

        `.bind(request=...)` adds the request to every line of the logger that it gives.
        """
        log: Log = structlog.wrap_logger(
            None,
            processors=[structlog.processors.format_exc_info, self._emit],
            wrapper_class=structlog.make_filtering_bound_logger(self.level),
            context_class=dict,
            cache_logger_on_first_use=True,
        )
        return log.bind(actor=actor) if actor else log

    def _emit(self, _logger: object, level: str, event: Event) -> Event:
        self.write("error" if level == "exception" else level, event)
        raise structlog.DropEvent

    def write(self, level: str, event: Event) -> None:
        """Writes one line, whatever the level."""
        now = self._now().astimezone(datetime.UTC)
        line: dict[str, Any] = {
            "timestamp": now.isoformat(timespec="microseconds").replace("+00:00", "Z"),
            "level": level,
            "event": str(event.pop("event", "")),
            "node": event.get("node", self.node),
            "actor": event.pop("actor", ""),
            "request": event.pop("request", None) or "",
        }
        line.update((key, event[key]) for key in event if key not in FIRST_KEYS)
        encoded = encode_line(line)
        with self._lock:
            if self._file is not None:
                self._file.write(encoded)
            if self._terminal is not None:
                with contextlib.suppress(OSError, ValueError):  # closed, or nobody reads it
                    self._terminal.write(render_line(line, colors=self._colors) + "\n")
                    self._terminal.flush()

    @property
    def lost_count(self) -> int:
        return self._file.lost_count if self._file is not None else 0

    def adopt_stdlib(self) -> None:
        """What libraries say through `logging` becomes lines of this log, until `close`."""
        root = logging.getLogger()
        for handler in list(root.handlers):
            root.removeHandler(handler)
        self._adopter = Adopter(self)
        root.addHandler(self._adopter)
        root.setLevel(max(self.level, logging.INFO))

    def close(self) -> None:
        """Idempotent. Later lines open the file again."""
        with self._lock:
            if self._file is not None:
                self._file.close()
        if self._adopter is not None:
            logging.getLogger().removeHandler(self._adopter)
            self._adopter = None


class Adopter(logging.Handler):
    """Turns records of the standard library's logging into lines."""

    def __init__(self, logs: Logs) -> None:
        super().__init__(logs.level)
        self._logs = logs

    def emit(self, record: logging.LogRecord) -> None:
        try:
            event: Event = {"event": record.getMessage(), "logger": record.name}
            if record.exc_info:
                event["exception"] = logging.Formatter().formatException(record.exc_info)
            level = record.levelname.lower()
            self._logs.write(level if level in LEVELS else "info", event)
        except Exception:
            self.handleError(record)


def encode_line(line: dict[str, Any]) -> bytes:
    """One JSON line. What JSON does not have is written as its `repr`; a huge line is cut down to
    its first keys."""
    try:
        encoded = msgspec.json.encode(line, enc_hook=repr) + b"\n"
    except (msgspec.MsgspecError, RecursionError, TypeError, ValueError):
        encoded = msgspec.json.encode({key: _plain(line[key]) for key in line}) + b"\n"
    if len(encoded) <= LINE_BYTES_MAX:
        return encoded
    short = {key: _plain(line[key])[:1000] for key in FIRST_KEYS}
    return msgspec.json.encode({**short, "cut_bytes": len(encoded)}) + b"\n"


COLORS = {"debug": "2", "warning": "33", "error": "31", "critical": "1;31"}


def render_line(line: Mapping[str, Any], *, colors: bool = False) -> str:
    """One line for people: time, level, where, what, and the other keys. Tracebacks follow below.

    Values may come from clients: what a terminal would obey is escaped.
    """
    level = str(line.get("level", ""))
    where = "/".join(str(line[key]) for key in ("node", "actor") if line.get(key))
    head = f"{str(line.get('timestamp', ''))[11:23]} {level:<8}{where or '-'}"
    what = _printable(str(line.get("event", "")))
    if colors:
        head = f"\x1b[{COLORS.get(level, '2')}m{head}\x1b[0m"
        what = f"\x1b[1m{what}\x1b[0m"
    pairs = [
        f"{key}={_quoted(_printable(_plain(value)))}"
        for key, value in line.items()
        if key not in ("timestamp", "level", "event", "node", "actor", "exception")
        and value not in ("", None)
    ]
    text = " ".join([head, what, *pairs])
    exception = line.get("exception")
    if exception:
        text += "\n" + "\n".join(map(_printable, str(exception).splitlines()))
    return text


def _quoted(text: str) -> str:
    return f'"{text}"' if " " in text else text


def _printable(text: str) -> str:
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def _plain(value: object) -> str:
    try:
        text = value if isinstance(value, str) else repr(value)
    except Exception:  # a repr of theirs, or nested too deep for one
        text = f"<{type(value).__name__}>"
    return text.encode(errors="replace").decode()


def state_dir() -> Path:
    """Where the logs of runs are kept when the settings name no directory."""
    base = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(base) / "histrio" / "runs"


def make_run_log_dir(base: Path | None = None, now: datetime.datetime | None = None) -> Path:
    """A new directory for one run, pointed to by `latest`; removes those of the oldest runs."""
    base = base or state_dir()
    now = now or datetime.datetime.now(datetime.UTC)
    path = base / f"{now:%Y-%m-%dT%H-%M-%S}-{os.getpid()}"
    path.mkdir(parents=True, exist_ok=True, mode=0o700)
    pointer = base / f".{LATEST}-{os.getpid()}"
    pointer.unlink(missing_ok=True)
    pointer.symlink_to(path.name)
    pointer.rename(base / LATEST)
    runs = sorted(entry for entry in base.iterdir() if entry.name[:1].isdigit())
    for old in runs[:-RUNS_KEPT_MAX]:
        shutil.rmtree(old, ignore_errors=True)
    return path
