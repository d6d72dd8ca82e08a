"""This file makes the rows of `GET /actors` from what a node knows. It does not know who looks."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from messages.system import ActorRow

if TYPE_CHECKING:
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
        row = life.row(now_s) if life is not None else node.remote_rows.get(path)
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
