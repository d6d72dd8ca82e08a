"""This file is the contract of every transport: how envelopes get from one node to another.

It does not know actors: a node hands it a header and a body, and gets headers and bodies from it.

Guarantees, kept by each implementation and by one test suite over all of them:
at most once; in order for each pair of nodes; nothing delivered to a later incarnation of a node
than the one it was sent to; `send` never blocks; every queue bounded, and a refusal is visible at
once.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from messages.base import Header, Message
from messages.system import Reason


class Inbound(Protocol):
    """What a node offers to its transport. Called on the node's loop only."""

    def arrive(self, node: str, header: Header, body: Message | bytes | memoryview) -> None:
        """Takes one message from `node`. Bytes are msgpack, for the receiver's union; decode them
        during the call (a memoryview, used for large ones, keeps a whole frame alive)."""

    def link_up(self, node: str, incarnation: int) -> None:
        """The peer answered the hello: messages flow both ways."""

    def link_down(self, node: str, reason: Reason) -> None:
        """The peer is gone or was fenced. What was in the window is lost."""


class Transport(Protocol):
    """Carries messages between nodes."""

    async def start(self, inbound: Inbound) -> None:
        """Binds. Afterwards `endpoint` is set."""

    @property
    def endpoint(self) -> str:
        """Where peers reach this node; its scheme names the transport."""

    def connect(self, node: str, incarnation: int, endpoint: str) -> None:
        """Starts (or replaces) the link to one incarnation of a peer. Idempotent."""

    def disconnect(self, node: str) -> None:
        """Ends the link; nothing more arrives from that incarnation."""

    def be_patient(self, node: str, factor: float) -> None:
        """Until told otherwise the peer may be silent for `factor` times the usual: it loads, and
        a library's import or a model's set-up can hold its interpreter for seconds."""

    def send(self, node: str, header: Header, body: Message) -> bool:
        """Queues one message. False: no link, or its window is full (nothing was queued)."""

    def troubles(self) -> Mapping[str, int]:
        """How often what went wrong or was refused since the start, by kind; for metrics."""

    async def close(self) -> None:
        """Ends all links and frees sockets and paths."""
