"""This file brings nodes to life in threads of this process, each with an event loop of its own.

It does not know transports: one is made for each node by a given function. A thread cannot be
killed: `kill` fences it off and forgets it; a daemon, it dies with the process.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable
from typing import Any

import structlog

from actors.runtime.launch import Launched, LaunchFailed
from actors.runtime.node import Node
from actors.runtime.transport.base import Transport
from messages.system import Cause, NodeBoot, Reason


class ThreadNode:
    """One life of a node in a thread, seen from the root's loop."""

    def __init__(self, boot: NodeBoot, transport: Transport, log: Any) -> None:
        self.pid = os.getpid()
        self.endpoint = ""
        self._boot = boot
        self._transport = transport
        self._log = log
        self._root_loop = asyncio.get_running_loop()
        self.exited: asyncio.Future[Reason] = self._root_loop.create_future()
        self.ready: asyncio.Future[None] = self._root_loop.create_future()
        self._node: Node | None = None
        self._thread = threading.Thread(target=self._run, name=f"node {boot.name}", daemon=True)
        self._thread.start()

    def kill(self) -> None:
        """Fences it off: if its loop still turns it ends there, else it is abandoned."""
        node = self._node
        if node is not None and not self.exited.done():
            try:
                node.loop.call_soon_threadsafe(node.halt, Reason(Cause.STOPPED, "killed"))
            except RuntimeError:  # its loop is closed already
                pass
        self._exited(Reason(Cause.EXITED, "its thread was abandoned"))

    def _run(self) -> None:
        try:
            reason = asyncio.run(self._live())
        except BaseException as error:
            reason = Reason(Cause.CRASHED, f"{type(error).__name__}: {error}")
        self._hand_over(self._exited, reason)

    async def _live(self) -> Reason:
        node = Node(self._boot, transport=self._transport, log=self._log)
        self._node = node
        await node.start()
        self._hand_over(self._listens, self._transport.endpoint)
        try:
            return await node.wait()
        finally:
            await node.close()

    def _hand_over(self, call: Callable[..., None], *arguments: Any) -> None:
        try:
            self._root_loop.call_soon_threadsafe(call, *arguments)
        except RuntimeError:  # the root's loop is closed: nobody is left to be told
            pass

    def _listens(self, endpoint: str) -> None:
        self.endpoint = endpoint
        if not self.ready.done():
            self.ready.set_result(None)

    def _exited(self, reason: Reason) -> None:
        if not self.exited.done():
            self.exited.set_result(reason)
        if not self.ready.done():
            self.ready.set_exception(LaunchFailed(reason))


class ThreadLauncher:
    """Makes thread nodes."""

    def __init__(self, transport: Callable[[NodeBoot], Transport], log: Any = None) -> None:
        self._transport = transport
        self._log = log or structlog.get_logger()

    async def launch(self, boot: NodeBoot) -> Launched:
        node = ThreadNode(boot, self._transport(boot), self._log)
        await node.ready
        return node
