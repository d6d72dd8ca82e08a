"""This file shows a running server in the terminal: its actors and its load, again and again.

It does not know how the server is built: it reads `/actors` and `/metrics` of one gateway, like any
client. Rates are differences of two readings. `--once` prints one screen and no rates.
"""

from __future__ import annotations

import json
import shutil
import time
import urllib.error
import urllib.request
from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

TIMEOUT_S = 5.0
OLD_S = 1.0  # several heartbeats
RATES = (
    ("generated tok/s", "histrio_generated_tokens_total"),
    ("prompt tok/s", "histrio_prompt_tokens_total"),
    ("cached tok/s", "histrio_cached_tokens_total"),
    ("requests/s", "histrio_requests_total"),
)
LEVELS = (
    ("running", "histrio_requests_running"),
    ("waiting", "histrio_requests_waiting"),
    ("open calls", "histrio_streams_open"),
)
COLUMNS = (
    "ACTOR",
    "STATE",
    "NODE",
    "PID",
    "LIFE",
    "RESTARTS",
    "WAITING",
    "HANDLED",
    "P50",
    "P99",
    "DOING",
)
CLEAR = "\x1b[H\x1b[J"


class NotReached(Exception):
    """The server did not answer as one of ours; the text says what to do."""


class Reading(NamedTuple):
    """What a server said of itself at one moment."""

    at_s: float
    ready: bool
    actors: list[dict[str, Any]]
    series: Mapping[str, float]  # summed over labels
    pages: Mapping[str, float]  # KV pages by state


def read(url: str, key: str | None) -> Reading:
    """Raises: NotReached."""
    try:
        actors = json.loads(fetch(url, "/actors", key))
        series, pages = series_of(fetch(url, "/metrics", key).decode("utf-8"))
    except urllib.error.HTTPError as error:
        hint = ": give --key" if error.code in (401, 403) else ""
        raise NotReached(f"{url} answers {error.code}{hint}") from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "reason", error)
        raise NotReached(f"no server at {url} ({reason}); --url says where it is") from None
    try:
        fetch(url, "/ready", key)
        ready = True
    except OSError:  # 503, or it has just gone
        ready = False
    return Reading(time.monotonic(), ready, actors, series, pages)


def fetch(url: str, path: str, key: str | None) -> bytes:
    headers = {"authorization": f"Bearer {key}"} if key else {}
    request = urllib.request.Request(url.rstrip("/") + path, headers=headers)
    with urllib.request.urlopen(request, timeout=TIMEOUT_S) as reply:
        body: bytes = reply.read()
        return body


def series_of(text: str) -> tuple[dict[str, float], dict[str, float]]:
    """Prometheus' text format: each series summed over its labels, and the KV pages by state."""
    sums: dict[str, float] = defaultdict(float)
    pages: dict[str, float] = defaultdict(float)
    for line in text.splitlines():
        if not line or line.startswith("#"):
            continue
        name, _, value = line.rpartition(" ")
        bare, _, labels = name.partition("{")
        sums[bare] += float(value)
        if bare == "histrio_pages":
            state = labels.partition('state="')[2].partition('"')[0]
            pages[state] += float(value)
    return dict(sums), dict(pages)


def screen(now: Reading, before: Reading | None) -> Iterator[str]:
    """The lines of one screen."""
    state = "ready" if now.ready else "NOT READY"
    parts = [state, *(f"{now.series.get(name, 0):.0f} {label}" for label, name in LEVELS)]
    if before is not None and now.at_s > before.at_s:
        for label, name in RATES:
            rate = (now.series.get(name, 0) - before.series.get(name, 0)) / (now.at_s - before.at_s)
            parts.append(f"{max(rate, 0):.0f} {label}")  # a count begins anew with its actor
    yield "  ".join(parts)
    total = sum(now.pages.values())
    if total:
        shares = (f"{state} {count / total:.0%}" for state, count in sorted(now.pages.items()))
        yield f"KV pages: {total:.0f}  " + "  ".join(shares)
    yield ""
    rows = [COLUMNS, *map(cells, now.actors)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        yield "  ".join(map(str.ljust, row, widths)).rstrip()


def cells(row: Mapping[str, Any]) -> tuple[str, ...]:
    return (
        str(row["path"]),
        str(row["state"]),
        str(row["node"]),
        str(row["pid"]),
        str(row["incarnation"]),
        str(row["restarts"]),
        str(row.get("mailbox_depth", 0)),
        str(row.get("handled_count", 0)),
        milliseconds(row.get("handle_p50_s")),
        milliseconds(row.get("handle_p99_s")),
        doing_of(row),
    )


def doing_of(row: Mapping[str, Any]) -> str:
    """And when that was, where it is long ago: its node, or the root, has not been heard since."""
    doing = row.get("busy_with")
    said = "" if doing is None else f"{doing} {row.get('busy_s', 0.0):.1f} s"
    age_s = row.get("age_s") or 0.0
    return said if age_s < OLD_S else f"{said} ({age_s:.0f} s ago)".lstrip()


def milliseconds(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds * 1000:.2f} ms"


def watch(url: str, key: str | None, interval_s: float) -> Iterator[str]:
    """One screen after another, each after its interval; ends only by the caller.

    Raises: NotReached at the first reading; later ones are shown and tried again.
    """
    before: Reading | None = None
    now: Reading | None = read(url, key)
    while True:
        if now is not None:
            columns, lines = shutil.get_terminal_size()
            shown = [line[:columns] for line in screen(now, before)][: lines - 1]
            yield CLEAR + "\n".join(shown)
        time.sleep(interval_s)
        before = now or before
        try:
            now = read(url, key)
        except NotReached as error:
            now = None
            yield f"{CLEAR}{error}"
