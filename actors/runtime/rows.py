"""This file makes the rows of `GET /actors`: from the lives of this node, from what is heard of
those elsewhere, and from the directory.

The root hears what has changed with each heartbeat. Another node knows of others only where they
are: when somebody looks there it asks the root, at most once in a heartbeat, since nothing newer is
to be had. It does not know who looks. Laws: nobody is asked anything while nobody looks; what
is heard of an incarnation is shown of none but that, and only while the directory says it lives;
`age_s` says how long ago it was true.
"""

from __future__ import annotations

import asyncio
import math
from typing import TYPE_CHECKING

import msgspec

from messages.system import ActorRow, Known, Look, Seen, State

if TYPE_CHECKING:
    from actors.runtime.life import Life
    from actors.runtime.node import Node

LIVING = frozenset({State.STARTING, State.RUNNING, State.DRAINING, State.STOPPING})


class Rows:
    """Of one node."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self._said: dict[str, ActorRow] = {}  # of our own actors, to the root
        self._heard: dict[str, ActorRow] = {}  # of actors elsewhere
        self._heard_s: dict[str, float] = {}  # when, by node
        self._told_s = -math.inf  # when the root has answered
        self._asked: asyncio.Future[None] | None = None  # the root, and it has not

    def all(self) -> list[ActorRow]:
        """One for each path, as far as it is known here."""
        now_s = self._node.time()
        known = (entry.known for entry in self._node.entries.values())
        return [self._row(each, now_s) for each in known if each is not None]

    def _row(self, known: Known, now_s: float) -> ActorRow:
        life = self._node.lives.get(known.path)
        if life is not None and life.address.incarnation == known.incarnation:
            row = msgspec.structs.replace(row_of(life, now_s), age_s=0.0)
        elif (heard := self._heard_of(known)) is not None:
            age_s = now_s - self._heard_s[heard.node]
            row = msgspec.structs.replace(heard, state=known.state, age_s=age_s)
        else:
            row = ActorRow(known.path, known.node, known.pid, known.state, known.incarnation, 0)
        return msgspec.structs.replace(
            row,
            pid=known.pid or row.pid,
            restarts=known.restarts,
            last_exit=known.last_exit,
        )

    def _heard_of(self, known: Known) -> ActorRow | None:
        row = self._heard.get(known.path)
        is_it = row is not None and row.incarnation == known.incarnation
        return row if is_it and known.state in LIVING else None

    # To the root, with each heartbeat

    def changed(self) -> tuple[ActorRow, ...]:
        """Of our own actors, those of which the root has heard something else."""
        now_s = self._node.time()
        rows = (row_of(life, now_s) for life in self._node.lives.values())
        return tuple(row for row in rows if self._said.get(row.path) != row)

    def said(self, rows: tuple[ActorRow, ...]) -> None:
        self._said |= {row.path: row for row in rows}

    # At the root

    def heard(self, node: str, rows: tuple[ActorRow, ...]) -> None:
        """By its heartbeat. What that leaves out is as it was."""
        self._heard |= {row.path: row for row in rows if row.node == node}
        self._heard_s[node] = self._node.time()

    def seen_from(self, node: str) -> Seen:
        """What it is told of others: it knows itself, and has the directory."""
        told = (row for row in self.all() if row.node != node and row.age_s is not None)
        return Seen(tuple(msgspec.structs.replace(row, last_exit=None) for row in told))

    # On the other nodes, when somebody looks

    async def look(self, timeout_s: float) -> list[ActorRow]:
        """As `all`, with what the root has heard; as last told where it does not answer in time."""
        node = self._node
        if node.office is None and node.time() - self._told_s >= node.boot.heartbeat_s:
            if self._asked is None:
                self._asked = node.loop.create_future()
                node.report(Look())
            await asyncio.wait([self._asked], timeout=timeout_s)
        return self.all()

    def told(self, rows: tuple[ActorRow, ...]) -> None:
        now_s = self._told_s = self._node.time()
        self._heard = {row.path: row for row in rows}
        self._heard_s = {row.node: now_s - (row.age_s or 0.0) for row in rows}
        if self._asked is not None:
            self._asked.set_result(None)
            self._asked = None


def row_of(life: Life, now_s: float) -> ActorRow:
    """What a life says of itself. Its restarts and its last exit are in the directory."""
    oldest_s = life.mailbox.oldest_s()
    busy_with, since_s = _busy(life)
    p50_s, p99_s = life.durations.quantiles(0.5, 0.99)
    return ActorRow(
        path=life.address.path,
        node=life.address.node,
        pid=life.node.pid,
        state=life.state,
        incarnation=life.address.incarnation,
        restarts=0,
        mailbox_depth=len(life.mailbox),
        mailbox_age_s=now_s - oldest_s if oldest_s is not None else 0.0,
        handled_count=life.handled_count,
        busy_with=busy_with,
        busy_s=now_s - since_s if busy_with is not None else 0.0,
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
