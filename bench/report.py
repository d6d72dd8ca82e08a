"""This file prints what a bench found: a header that says where, a table, or JSON lines.

It does not know what is measured.
"""

from __future__ import annotations

import json
import os
import platform
import re
import subprocess
import sys
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent


def percentile(values: Iterable[float], share: float) -> float:
    """The smallest value that at least `share` of them do not exceed; nan of nothing."""
    ordered = sorted(values)
    if not ordered:
        return float("nan")
    rank = -(-len(ordered) * share // 1)  # ceiling
    return ordered[min(len(ordered) - 1, max(0, int(rank) - 1))]


def median(values: Iterable[float]) -> float:
    """The middle one, or the mean of the two in the middle; nan of nothing."""
    ordered = sorted(values)
    if not ordered:
        return float("nan")
    half = len(ordered) // 2
    return ordered[half] if len(ordered) % 2 else (ordered[half - 1] + ordered[half]) / 2


def machine() -> dict[str, str]:
    """Where this runs, for the header: a figure without it says nothing."""
    cpu = ""
    try:
        found = re.search(r"model name\s*:\s*(.+)", Path("/proc/cpuinfo").read_text("utf-8"))
        cpu = found.group(1) if found else ""
    except OSError:
        pass
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return {
        "machine": f"{cpu or platform.processor() or platform.machine()}, {cores} cores",
        "load_avg": f"{os.getloadavg()[0]:.1f}",
        "python": platform.python_version(),
        "commit": commit(),
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "command": " ".join(command_words()),
    }


def command_words() -> list[str]:
    """How this bench was started: by itself, or as `app bench NAME`."""
    words = sys.argv[1:]
    if words[:1] == ["bench"]:
        return ["python -m app", *words]
    return [f"python -m bench.{Path(sys.argv[0]).stem}", *words]


def commit() -> str:
    """Short id of the checkout's commit, marked where the work tree differs from it."""

    def git(*words: str) -> str:
        ran = subprocess.run(
            ["git", *words], cwd=ROOT, capture_output=True, text=True, timeout=20, check=False
        )
        return ran.stdout.strip() if ran.returncode == 0 else ""

    found = git("rev-parse", "--short=10", "HEAD")
    if not found:
        return "unknown"
    return found + ("+changes" if git("status", "--porcelain", "--untracked-files=no") else "")


class Report:
    """Collects rows and prints them in one of two ways. `as_json`: each row at once, one a line."""

    def __init__(self, name: str, *, as_json: bool, **facts: Any) -> None:
        self.name = name
        self.as_json = as_json
        self.facts = {**machine(), **facts}
        self.rows: list[dict[str, Any]] = []
        if not as_json:
            print(f"bench {name}")
            for key, value in self.facts.items():
                print(f"  {key:<9} {value}")
            print(flush=True)

    def add(self, **row: Any) -> None:
        """One line of the table; the keys are the columns, in order."""
        self.rows.append(row)
        if self.as_json:
            print(json.dumps({"bench": self.name, **self.facts, **row}), flush=True)

    def close(self) -> None:
        """Prints the table."""
        if self.rows and not self.as_json:
            print(table(self.rows), flush=True)


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Columns aligned: text to the left, numbers to the right."""
    columns = list(dict.fromkeys(key for row in rows for key in row))
    texts = [[shown(row.get(column)) for column in columns] for row in rows]
    widths = [max(len(c), *(len(t[i]) for t in texts)) for i, c in enumerate(columns)]
    numeric = [
        all(isinstance(row.get(column, 0), int | float) for row in rows) for column in columns
    ]

    def line(cells: Sequence[str]) -> str:
        placed = (
            cell.rjust(width) if right else cell.ljust(width)
            for cell, width, right in zip(cells, widths, numeric, strict=True)
        )
        return "  ".join(placed).rstrip()

    rule = "  ".join("-" * width for width in widths)
    return "\n".join([line(columns), rule, *map(line, texts)])


def shown(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, float):
        if value != value:  # nothing was measured
            return "-"
        if 0 < abs(value) < 0.1:
            return f"{value:.2g}"
        return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.2f}"
    return f"{value:,}" if isinstance(value, int) else str(value)
