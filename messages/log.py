"""This file defines one line of a log file, as `logs` reads it. It does not know who wrote it."""

from __future__ import annotations

import msgspec


class LogLine(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A JSON line. Further keys of the event are kept by the file and shown as they are."""

    timestamp: str  # ISO 8601, UTC, microseconds
    level: str
    event: str
    node: str = ""
    actor: str = ""
    request: str = ""
