"""This file defines the messages that the runtime itself sends: life, death, refusal, control.

It does not know any room.
"""

from __future__ import annotations

import enum

from messages.base import Address, Message, Part


class State(enum.StrEnum):
    """Where an actor is in its life, as the directory and `GET /actors` show it."""

    PENDING = "pending"  # not started yet: others come first
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
    BROKEN = "broken"  # what its process has of it is beyond use, also for a next life


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
    peers: tuple[str, ...] = ()  # the paths that it sends to
    makes_wait: bool = False  # its mailbox makes senders wait when full
    credits: int = 0  # and so many messages of each on another node may be under way


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


class Credits(Message, frozen=True):
    """From the node of an actor that makes senders wait to one of those: it may have sent all up
    to this number."""

    granted: int


class CreditsAsked(Message, frozen=True):
    """From the node of a sender that is paused: it has sent all up to this number, and they have
    come or are lost."""

    spent: int


Notice = Undelivered | Credits | CreditsAsked  # between nodes, in the supervision lane


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
    handle_p50_s: float | None = None  # of its last few thousand messages; None before the first
    handle_p99_s: float | None = None
    age_s: float | None = None  # since it was seen to do this; None: what it does is not known


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


# Between the root node and the others. The root alone starts, stops and judges.


class NodeBoot(Part, frozen=True):
    """All that a new node needs to know. Given to a thread, or to a child process at its start."""

    name: str
    incarnation: int
    run: str  # the run's id: part of every hello, so that two runs never mix
    run_dir: str  # for sockets and logs; mode 0700
    root: str
    root_incarnation: int
    root_endpoint: str
    seed: int = 0
    heartbeat_s: float = 0.25
    hang_s: float = 2.0
    encode_always: bool = False
    check: bool = False
    log_dir: str = ""
    log_level: str = "info"
    log_terminal: bool = True  # what a child says is passed on to the root's terminal
    log_file_bytes_max: int = 16 << 20
    log_files_max: int = 4


class Known(Part, frozen=True):
    """What every node knows of one actor."""

    path: str
    node: str
    incarnation: int
    state: State
    restarts: int = 0
    pid: int = 0
    note: bytes = b""
    last_exit: Reason | None = None
    credits: int = 0  # of each sender on another node; 0: its mailbox makes nobody wait


class Entries(Message, frozen=True):
    """Changes of the directory; the whole of it for a new node."""

    rows: tuple[Known, ...]


class StartActor(Message, frozen=True):
    """Start one incarnation. `arguments` are msgpack, decoded by the factory's annotations."""

    path: str
    incarnation: int
    factory: str
    arguments: dict[str, bytes] = {}
    keeps_mailbox: bool = False  # restart in place after a crash
    restarts: int = 0


class StopActor(Message, frozen=True):
    path: str
    incarnation: int
    grace_s: float


class DrainActor(Message, frozen=True):
    path: str
    incarnation: int
    grace_s: float


class KillActor(Message, frozen=True):
    path: str
    incarnation: int
    reason: Reason


class NodeUp(Message, frozen=True):
    """Connect to this node."""

    name: str
    incarnation: int
    endpoint: str


class NodeDown(Message, frozen=True):
    """This incarnation is dead: nothing from it counts any more."""

    name: str
    incarnation: int


class Halt(Message, frozen=True):
    """Kill what is left, flush, and end."""


class Seen(Message, frozen=True):
    """The answer to `Look`: what the root has last heard of actors on other nodes than the one that
    asked. `age_s` of each is set."""

    rows: tuple[ActorRow, ...]


NodeIn = StartActor | StopActor | DrainActor | KillActor | Entries | NodeUp | NodeDown | Halt | Seen


class Exited(Message, frozen=True):
    """From a node to the root: this incarnation is dead."""

    address: Address
    reason: Reason


class Drained(Message, frozen=True):
    """From a node to the root: the actor has finished all that it had taken."""

    address: Address


class Beat(Message, frozen=True):
    """A node's heartbeat: its loop runs, this late, and these actors' rows have changed."""

    lag_s: float
    rows: tuple[ActorRow, ...] = ()


class LinkLost(Message, frozen=True):
    """From a node to the root: its link to another node is lost."""

    name: str
    incarnation: int
    reason: Reason


class RestartAsked(Message, frozen=True):
    """From a node to the root: an operator wants this actor to have a new life."""

    path: str


class Look(Message, frozen=True):
    """From a node to the root: somebody there looks at the tree. Answered by `Seen`."""


RootIn = Ready | Exited | Drained | Beat | LinkLost | RestartAsked | Look
