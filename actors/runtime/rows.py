"""This file makes the rows of `GET /actors` from what a node knows. It does not know who looks."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from messages.system import ActorRow

if TYPE_CHECKING:
    from actors.runtime.life import Life
    from actors.runtime.node import Node


def rows_of(node: Node) -> list[ActorRow]:
    """One row for each path: from the life itself, from its node's last beat, or, where there is
    neither, what the directory says."""
    now_s = node.time()
    rows = []
    for path, entry in node.entries.items():
        known = entry.known
        if known is None:
            continue
        life = node.lives.get(path)
        row = row_of(life, now_s) if life is not None else node.remote_rows.get(path)
        if row is None or row.incarnation != known.incarnation:
            row = ActorRow(path, known.node, known.pid, known.state, known.incarnation, 0)
        rows.append(
            msgspec.structs.replace(
                row,
                state=row.state if life is not None else known.state,
                pid=known.pid or row.pid,
                restarts=known.restarts,
                last_exit=known.last_exit,
            )
        )
    return rows


def row_of(life: Life, now_s: float) -> ActorRow:
    """What a life says of itself."""
    oldest_s = life.mailbox.oldest_s()
    busy_with, since_s = _busy(life)
    known = life.entry.known
    p50_s, p99_s = life.durations.quantiles(0.5, 0.99)
    return ActorRow(
        path=life.address.path,
        node=life.address.node,
        pid=life.node.pid,
        state=life.state,
        incarnation=life.address.incarnation,
        restarts=known.restarts if known is not None else 0,
        mailbox_depth=len(life.mailbox),
        mailbox_age_s=now_s - oldest_s if oldest_s is not None else 0.0,
        handled_count=life.handled_count,
        busy_with=busy_with,
        busy_s=now_s - since_s if busy_with is not None else 0.0,
        last_exit=known.last_exit if known is not None else None,
        handle_p50_s=p50_s,
        handle_p99_s=p99_s,
    )


def _busy(life: Life) -> tuple[str | None, float]:
    """With what, and since when."""
    if life.current is not None:
        return type(life.current.body).__name__, life.busy_since_s
    if life.current_kind is not None:
        return life.current_kind, life.busy_since_s
    if life.jobs:
        lane, since_s = next(iter(life.jobs.values()))
        return f"thread {lane}", since_s
    return None, 0.0
