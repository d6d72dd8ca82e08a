"""This file tells a process that hangs from one that gets no core: both are silent.

It does not know nodes; it reads what the kernel says of a process' threads. One of them, that of
the event loop, has the process' own id. What is stopped or waits does not want a core; what spins
uses one. Only what wants a core and has hardly got one is starved.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple, Protocol, runtime_checkable

TICK_S = 1 / os.sysconf("SC_CLK_TCK")
USER_TICKS, SYSTEM_TICKS = 11, 12  # fields of `stat`, counted from the state


class Use(NamedTuple):
    """What a process has had of the cores, in seconds, and whether it wants more just now."""

    all_s: float = 0.0
    loop_s: float = 0.0
    wants: bool = False  # any thread
    loop_wants: bool = False


@runtime_checkable
class OwnProcess(Protocol):
    """A node that is a process of its own, so that the kernel can be asked about it."""

    def use(self) -> Use: ...


def use_of(pid: int) -> Use:
    """Of a process that has ended: nothing, and it wants nothing."""
    found = Use()
    try:
        for task in Path(f"/proc/{pid}/task").iterdir():
            fields = (task / "stat").read_text("ascii", "replace").rpartition(")")[2].split()
            used_s = (int(fields[USER_TICKS]) + int(fields[SYSTEM_TICKS])) * TICK_S
            wants = fields[0] == "R"
            found = Use(found.all_s + used_s, found.loop_s, found.wants or wants, found.loop_wants)
            if task.name == str(pid):
                found = found._replace(loop_s=used_s, loop_wants=wants)
    except OSError:  # it, or one of its threads, is just ending
        pass
    return found


def is_starved(before: Use, now: Use, enough_s: float) -> bool:
    """Since `before` it has not had `enough_s` of a core, and it wants one."""
    return (now.loop_wants and now.loop_s - before.loop_s < enough_s) or (
        now.wants and now.all_s - before.all_s < enough_s
    )
