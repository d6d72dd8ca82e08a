"""This file is a supervision tree as data. It does not know any room: `actors/tree.py` does."""

from __future__ import annotations

import enum

import msgspec


class Strategy(enum.StrEnum):
    ONE_FOR_ONE = "one_for_one"
    ONE_FOR_ALL = "one_for_all"
    REST_FOR_ONE = "rest_for_one"


class Restart(enum.StrEnum):
    PERMANENT = "permanent"  # always restarted
    TRANSIENT = "transient"  # restarted unless it stopped by itself
    TEMPORARY = "temporary"  # never restarted


class Child(msgspec.Struct, frozen=True, kw_only=True):
    """One actor. Its path is the names from the root's children down, joined by `/`."""

    name: str
    factory: str  # "actors.scheduler.actor:Scheduler"
    # Keyword arguments of the factory: structs, encoded when the actor lives in another process and
    # decoded there by the annotations of `__init__`.
    arguments: dict[str, msgspec.Struct] = {}
    node: str = "main"
    restart: Restart = Restart.PERMANENT
    start_timeout_s: float = 300.0
    stop_grace_s: float = 5.0
    # Where its node has a process in reserve, its `prepare` is called there ahead.
    is_prepared: bool = False


class Supervisor(msgspec.Struct, frozen=True, kw_only=True):
    """Children in start order; stopped in reverse. More than `restarts_max` restarts within
    `window_s` seconds and it gives up: its children are stopped and its own supervisor decides. The
    seconds in which children are being restarted don't count."""

    name: str
    children: tuple[Child | Supervisor, ...]
    strategy: Strategy = Strategy.ONE_FOR_ONE
    restarts_max: int = 5
    window_s: float = 30.0
    backoff_first_s: float = 0.1  # the first restart is immediate
    backoff_max_s: float = 10.0
    # The children start side by side: none of them needs another. Only with ONE_FOR_ONE.
    starts_together: bool = False


class NodeKind(enum.StrEnum):
    THREAD = "thread"  # its own loop in a thread of the root's process
    PROCESS = "process"  # its own process, reached over ZMQ


class Node(msgspec.Struct, frozen=True, kw_only=True):
    """A place for actors, other than the root node `main`. A node's death is its actors' death."""

    name: str
    kind: NodeKind
