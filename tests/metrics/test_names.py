"""Every series that a room counts is explained, and named as its kind is."""

from __future__ import annotations

import re
from pathlib import Path

from actors.metrics.prometheus import HELP

ACTORS = Path(__file__).resolve().parents[2] / "actors"
CALL = re.compile(r'\.(count|gauge|observe|add)\(\s*"(histrio_[a-z0-9_]+)"')


def names() -> dict[str, str]:
    found: dict[str, str] = {}
    for path in ACTORS.rglob("*.py"):
        for kind, name in CALL.findall(path.read_text("utf-8")):
            assert found.setdefault(name, kind) == kind, f"{name} has two kinds"
    return found


def test_every_series_has_a_help_text() -> None:
    assert names() and not set(names()) - set(HELP)


def test_counters_and_only_they_end_in_total() -> None:
    for name, kind in names().items():
        assert name.endswith("_total") == (kind == "count"), name
