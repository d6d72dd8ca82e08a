"""This file tells what a child process did last, from the recorder that it left: in a file of the
run's log directory, and the last of it in the log.

It does not know how children are made or who restarts them. A death in order is no news. Law: what
is found is told once, and a full disk loses the file, never the line in the log.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from actors.runtime.recorder import Event, Flight, read
from messages.base import Lane
from messages.system import NodeBoot, Reason

LAST_LEN = 6  # headers in the log
FILES_MAX = 8  # of one node: those of its last deaths
# What is recovered comes first: telling takes the interpreter from the root's loop, in slices of
# 5 ms, each time that the loop makes a system call.
TELL_AFTER_S = 1.0
VERBS = {Event.HANDLED: "handled", Event.CAME: "came", Event.WENT: "went", Event.THREAD: "thread"}


def tell(boot: NodeBoot, pid: int, record: bytes, reason: Reason, log: Any) -> None:
    """Of a child that has ended, on the loop; a while later, in a thread. The loop's end waits for
    it."""
    if reason.exit_code == 0:
        return
    loop = asyncio.get_running_loop()
    about = {"peer": boot.name, "incarnation": boot.incarnation, "pid": pid}
    now_s = loop.time()

    def work() -> None:
        time.sleep(TELL_AFTER_S)
        found = read(record)
        if not found:
            return
        file = ""
        with contextlib.suppress(OSError):
            if boot.log_dir:
                title = f"node {boot.name}, incarnation {boot.incarnation}, pid {pid}"
                file = write(boot, f"{title}: {reason.detail}", found, now_s)
        last = tuple(line_of(flight, now_s) for flight in last_of(found))
        log.error("last messages", **about, file=file, last=last)

    loop.run_in_executor(None, work)


def last_of(found: Sequence[Flight]) -> list[Flight]:
    """Those for the log: what had not ended, and the newest."""
    newest = found[-LAST_LEN:]
    return [one for one in found[:-LAST_LEN] if one.is_open][-LAST_LEN:] + list(newest)


def write(boot: NodeBoot, title: str, found: Sequence[Flight], now_s: float) -> str:
    """One line for each header, the last last. Gives the file's path. Raises OSError."""
    directory = Path(boot.log_dir)
    path = directory / name_of(boot.name, boot.incarnation)
    lines = [
        f"{title}\n",
        "seconds before the end was seen, what became of it, receiver <- sender, kind, request\n",
        *(line_of(flight, now_s) + "\n" for flight in found),
    ]
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    with open(fd, "w", encoding="utf-8") as file:
        file.writelines(lines)
    old = directory / name_of(boot.name, boot.incarnation - FILES_MAX)
    old.unlink(missing_ok=True)
    return str(path)


def name_of(node: str, incarnation: int) -> str:
    return f"{node.replace('/', '-')}.{incarnation}.last.txt"


def line_of(flight: Flight, now_s: float) -> str:
    """One header in words."""
    what = VERBS.get(flight.event, "?")  # type: ignore[call-overload]
    if flight.is_open:
        what += " (not ended)"
    elif flight.took_s is not None:
        times = f"{flight.times} times in " if flight.times > 1 else ""
        what += f" ({times}{flight.took_s:.6f} s)"
    lane = "" if flight.lane == Lane.USER else f" [{lane_of(flight.lane)}]"
    way = f"{flight.receiver} <- {flight.sender}" if flight.sender else flight.receiver
    text = f"-{max(now_s - flight.at_s, 0.0):.6f}  {what}  {way}  {flight.kind}{lane}"
    return f"{text}  {flight.request}" if flight.request else text


def lane_of(number: int) -> str:
    try:
        return Lane(number).name.lower()
    except ValueError:
        return "?"
