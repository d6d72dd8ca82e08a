"""This file defines the messages that the runtime itself sends: life, death, refusal, control.

It does not know any room.
"""

from __future__ import annotations

import enum

from messages.base import Address, Message, Part


class State(enum.StrEnum):
    """Where an actor is in its life, as the directory and `GET /actors` show it."""

    STARTING = "starting"
    RUNNING = "running"
    DRAINING = "draining"
    STOPPING = "stopping"
    STOPPED = "stopped"
    RESTARTING = "restarting"
    FAILED = "failed"


class Cause(enum.StrEnum):
    """Why an actor or a node is gone, or why a message was not delivered."""

    STOPPED = "stopped"  # asked to stop
    CRASHED = "crashed"  # a handler raised: our bug
    EXITED = "exited"  # its process ended (exit code or signal)
    HUNG = "hung"  # it made no progress and was killed
    UNREACHABLE = "unreachable"  # the link to its node is lost
    NOBODY = "nobody"  # no such actor, or an earlier incarnation of it
    FULL = "full"  # the mailbox was full
    EXPIRED = "expired"  # the deadline had passed
    UNREADABLE = "unreadable"  # not decodable into the receiver's union
    ABANDONED = "abandoned"  # was in the hands of an actor that died


class Reason(Part, frozen=True):
    """A death, with all that is known about it."""

    cause: Cause
    detail: str = ""
    exit_code: int | None = None
    signal: int | None = None
    last_lines: tuple[str, ...] = ()


class Ready(Message, frozen=True):
    """From a child to its supervisor: it is in service. `note` is what others may learn from it
    (msgpack of a struct that the room defines), handed to every actor that starts later."""

    address: Address
    note: bytes = b""


class Stop(Message, frozen=True):
    """Finish what runs until `grace_s` is over, then end."""

    grace_s: float = 5.0


class Drain(Message, frozen=True):
    """Take no new work, finish what runs. A room that needs to know declares `on_drain`."""

    grace_s: float = 30.0


class Down(Message, frozen=True):
    """To a watcher, once for each incarnation watched: it is dead."""

    address: Address
    reason: Reason


class Up(Message, frozen=True):
    """To a watcher: an incarnation of the watched path is in service."""

    address: Address


class Undelivered(Message, frozen=True):
    """To the sender of a user message that did not arrive."""

    target: Address
    kind: str  # the message's tag
    cause: Cause
    request: str | None = None


class ActorRow(Part, frozen=True):
    """One row of `GET /actors`."""

    path: str
    node: str
    pid: int
    state: State
    incarnation: int
    restarts: int
    mailbox_depth: int = 0
    mailbox_age_s: float = 0.0
    handled_count: int = 0
    busy_with: str | None = None
    busy_s: float = 0.0
    last_exit: Reason | None = None


# Metrics: actors count locally, each node sends what changed to the actor `metrics`


Labels = tuple[tuple[str, str], ...]


class Counter(Part, frozen=True):
    name: str
    labels: Labels
    increase: float


class Gauge(Part, frozen=True):
    name: str
    labels: Labels
    value: float


class Histogram(Part, frozen=True):
    """Observations since the last flush, by the bucket bounds that the observer named."""

    name: str
    labels: Labels
    bounds: tuple[float, ...]
    counts: tuple[int, ...]  # len(bounds) + 1
    total: float


class Flush(Message, frozen=True):
    """What changed on one node since its last flush."""

    node: str
    counters: tuple[Counter, ...] = ()
    gauges: tuple[Gauge, ...] = ()
    histograms: tuple[Histogram, ...] = ()
