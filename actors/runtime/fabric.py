"""This file chooses how the nodes of a system are brought to life and linked, from what the tree
asks for: nothing for one node, memory for threads, ZMQ as soon as there is a process.

It does not know actors. Only here and in `child.py` is the ZMQ transport named, and it is imported
only where a process is asked for.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import structlog

from actors.runtime import spec
from actors.runtime.launch import Launched, Launcher, Preload
from actors.runtime.spec import NodeKind
from actors.runtime.threads import ThreadLauncher
from actors.runtime.transport.base import Transport
from actors.runtime.transport.memory import MemoryHub, MemoryTransport
from messages.system import NodeBoot

if TYPE_CHECKING:
    from actors.runtime.process import ChildProcess

# Beside its actors' modules a node needs these.
NODE_MODULES = (
    "asyncio",
    "actors.runtime.log",
    "actors.runtime.node",
    "actors.runtime.transport.zmq",
)


class Fabric(Protocol):
    """What holds the nodes of one system together."""

    @property
    def run(self) -> str: ...

    @property
    def run_dir(self) -> str: ...

    def transport(self, name: str, incarnation: int) -> Transport | None:
        """A transport for one node; None where there is but one node."""

    def launcher(self, kind: NodeKind) -> Launcher: ...

    def close(self) -> None:
        """Removes what the run has left in the file system."""


class MemoryFabric:
    """Threads of this process, or only the root."""

    def __init__(
        self, nodes: tuple[spec.Node, ...], log: Any = None, hub: MemoryHub | None = None
    ) -> None:
        self.run = "memory"
        self.run_dir = ""
        self.hub = hub or MemoryHub()
        self._has_nodes = bool(nodes)
        self._threads = ThreadLauncher(self._transport, log)

    def _transport(self, boot: NodeBoot) -> Transport:
        return MemoryTransport(self.hub, boot.name, boot.incarnation)

    def transport(self, name: str, incarnation: int) -> Transport | None:
        return MemoryTransport(self.hub, name, incarnation) if self._has_nodes else None

    def launcher(self, kind: NodeKind) -> Launcher:
        assert kind is NodeKind.THREAD, kind
        return self._threads

    def close(self) -> None:
        self.hub.transports.clear()


class ProcessFabric:
    """Child processes, and threads beside them, over ZMQ in a directory of the run's own."""

    def __init__(
        self,
        run_dir: Path | None,
        heartbeat_s: float,
        hang_s: float,
        log: Any = None,
        preloads: Mapping[str, Preload] | None = None,
        spare_after_s: float = 10.0,
    ) -> None:
        """`preloads`: the nodes that get a spare process, and what that loads ahead. It is made so
        long after a launch: what is in service, and its first requests, come first."""
        from actors.runtime.rundir import RunDir

        self._rundir = RunDir.create(run_dir)
        self.run = self._rundir.run
        self.run_dir = str(self._rundir.path)
        self._heartbeat_s = heartbeat_s
        self._hang_s = hang_s
        self._preloads = {
            name: Preload((*NODE_MODULES, *preload.modules), preload.prepares)
            for name, preload in (preloads or {}).items()
        }
        self._spare_after_s = spare_after_s
        self._spares: dict[str, ChildProcess] = {}
        self._alarms: dict[str, asyncio.TimerHandle] = {}
        self._log = log or structlog.get_logger()
        self._threads = ThreadLauncher(
            lambda boot: self.transport(boot.name, boot.incarnation), log
        )

    def transport(self, name: str, incarnation: int) -> Transport:
        from actors.runtime.transport.zmq import ZmqTransport

        return ZmqTransport(
            name,
            incarnation,
            run=self.run,
            run_dir=Path(self.run_dir),
            token=self._rundir.token,
            heartbeat_s=self._heartbeat_s,
            hang_s=self._hang_s,
        )

    def launcher(self, kind: NodeKind) -> Launcher:
        return self._threads if kind is NodeKind.THREAD else self

    async def launch(self, boot: NodeBoot) -> Launched:
        from actors.runtime.process import spawn_node

        spare = self._spares.pop(boot.name, None)
        self._plan_spare(boot)
        return await spawn_node(
            boot,
            token=self._rundir.token,
            environment=child_environment(),
            spare=spare,
            log=self._log,
        )

    def _plan_spare(self, boot: NodeBoot) -> None:
        """One more process, a while after this one was started, which comes first."""
        if boot.name in self._preloads:
            if boot.name in self._alarms:
                self._alarms[boot.name].cancel()
            loop = asyncio.get_running_loop()
            self._alarms[boot.name] = loop.call_later(self._spare_after_s, self._make_spare, boot)

    def _make_spare(self, boot: NodeBoot) -> None:
        from actors.runtime.process import drop, spawn_child, write_to_stderr

        if boot.name not in self._spares:
            forward = write_to_stderr if boot.log_terminal else drop
            preload = self._preloads[boot.name]
            try:
                spare = spawn_child(boot.name, child_environment(), forward, preload)
            except OSError as error:
                self._log.warning("no process in reserve", peer=boot.name, detail=str(error))
                return
            spare.warm.add_done_callback(
                lambda _: self._log.info("in reserve", peer=boot.name, pid=spare.pid)
            )
            self._spares[boot.name] = spare

    def close(self) -> None:
        for alarm in self._alarms.values():
            alarm.cancel()
        for spare in self._spares.values():
            spare.kill()
        self._rundir.close()


def child_environment() -> dict[str, str]:
    """Libraries that count threads as they load: one each, unless the user has said otherwise;
    the worker asks torch itself for what it needs."""
    return {} if "OMP_NUM_THREADS" in os.environ else {"OMP_WAIT_POLICY": "PASSIVE"}


def fabric_for(
    nodes: tuple[spec.Node, ...],
    run_dir: Path | None,
    heartbeat_s: float,
    hang_s: float,
    log: Any = None,
    preloads: Mapping[str, Preload] | None = None,
    spare_after_s: float = 10.0,
) -> Fabric:
    """The least that holds these nodes."""
    if any(node.kind is NodeKind.PROCESS for node in nodes):
        return ProcessFabric(run_dir, heartbeat_s, hang_s, log, preloads, spare_after_s)
    return MemoryFabric(nodes, log)
