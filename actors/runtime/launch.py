"""This file is the contract of what brings nodes to life: threads, child processes, a simulation.

It does not know how. Laws: `exited` is done exactly once and tells all that is known of the death;
`kill` never waits for the node's cooperation.
"""

from __future__ import annotations

import asyncio
from typing import Protocol, runtime_checkable

import msgspec

from messages.system import NodeBoot, Reason


class Prepare(msgspec.Struct, frozen=True):
    """An actor whose `prepare` is to be called ahead, and with what (msgpack, as in StartActor)."""

    path: str
    factory: str
    arguments: dict[str, bytes]


class Preload(msgspec.Struct, frozen=True):
    """What a process in reserve loads before it is needed."""

    modules: tuple[str, ...] = ()
    prepares: tuple[Prepare, ...] = ()


class LaunchFailed(Exception):
    """The node did not come to life. Nothing of it is left."""

    def __init__(self, reason: Reason) -> None:
        super().__init__(f"{reason.cause}: {reason.detail}")
        self.reason = reason


class Launched(Protocol):
    """One incarnation of a node, as its launcher sees it."""

    @property
    def pid(self) -> int:
        """The process it runs in."""

    @property
    def endpoint(self) -> str:
        """Where its transport listens."""

    @property
    def exited(self) -> asyncio.Future[Reason]:
        """Done when it is dead; belongs to the root's loop."""

    def kill(self) -> None:
        """Ends it now. Idempotent."""


@runtime_checkable
class Mortal(Protocol):
    """A node that is seen to die before what it holds (memory, a device, ports) is free again:
    that it is when `exited` is done."""

    @property
    def dying(self) -> asyncio.Future[Reason]:
        """Done when it does nothing any more, never later than `exited`."""

    @property
    def is_hot(self) -> bool:
        """Needs nothing that the life before it may still hold: what its actors load is there."""


def death_of(launched: Launched) -> asyncio.Future[Reason]:
    """Done as soon as it is known to be dead."""
    return launched.dying if isinstance(launched, Mortal) else launched.exited


class Launcher(Protocol):
    """Brings nodes of one kind to life."""

    async def launch(self, boot: NodeBoot) -> Launched:
        """Returns once the node's transport listens. Raises LaunchFailed."""
