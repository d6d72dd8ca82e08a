"""This file holds the simulated processes of one world: launched, stopped for a while, killed.

It does not know what they run. A node's callbacks are told apart by a context variable, so that a
stopped one (SIGSTOP) stands still while time and the others go on, and finds all that has waited
when it goes on.

Laws: a killed node says nothing more to anyone; only its launcher tells that it is dead; at most
one life of a node runs at a time.
"""

from __future__ import annotations

import asyncio
import contextvars
from asyncio import events
from collections import Counter, deque
from collections.abc import Callable
from typing import Any

from actors.runtime.clock import rng_for
from actors.runtime.launch import Launched, Launcher, LaunchFailed
from actors.runtime.node import Node
from actors.runtime.simloop import SimLoop
from actors.runtime.spec import NodeKind
from bench.sim.wire import SimTransport, Wire
from messages.system import Cause, NodeBoot, Reason

SIGKILL = 9
SPARE_AFTER_S = 1.0
SPARE_LAUNCH_S = 0.01
FIRST_PID = 1000
MAIN = "main"

_life: contextvars.ContextVar[str | None] = contextvars.ContextVar("life", default=None)


class Probe:
    """Between a transport and its node: shows each message to the world, before and after."""

    def __init__(self, node: Node, before: Callable[..., None], after: Callable[..., None]) -> None:
        self.node = node
        self.before = before
        self.after = after

    def arrive(self, node: str, header: Any, body: Any) -> None:
        self.before(self.node, header, body)
        self.node.arrive(node, header, body)
        self.after(self.node, header, body)

    def link_up(self, node: str, incarnation: int) -> None:
        self.node.link_up(node, incarnation)

    def link_down(self, node: str, reason: Reason) -> None:
        self.node.link_down(node, reason)


class SimProcess:
    """One life of a simulated process."""

    def __init__(
        self, boot: NodeBoot, transport: SimTransport, pid: int, house: House, life: str
    ) -> None:
        self.pid = pid
        self.context = transport.context
        self.life = life
        self.boot = boot
        self.endpoint = transport.endpoint
        self.transport = transport
        self.house = house
        loop = asyncio.get_running_loop()
        self.exited: asyncio.Future[Reason] = loop.create_future()
        self.node = Node(boot, transport=transport, log=house.log)
        self.node.pid = pid
        house.born(self.node)

    async def run(self, started: asyncio.Future[None]) -> None:
        await self.node.start()
        self.transport._inbound = Probe(self.node, self.house.before, self.house.after)
        started.set_result(None)
        reason = await self.node.wait()
        await self.node.close()
        self._exited(Reason(Cause.EXITED, reason.detail, exit_code=0))

    def kill(self) -> None:
        """A power cut: nothing is sent any more, its actors are gone at once."""
        if self.exited.done():
            return
        self.house._killed.add(self.life)
        self.transport.vanish()
        self.node.halt(Reason(Cause.EXITED, "power cut"))
        self.house.go_on(self.boot.name)
        self._exited(Reason(Cause.EXITED, "killed by SIGKILL", signal=SIGKILL))

    def _exited(self, reason: Reason) -> None:
        if not self.exited.done():
            self.exited.set_result(reason)


class House:
    """The fabric of a simulated system; `System(fabric=...)`."""

    def __init__(
        self,
        loop: SimLoop,
        wire: Wire,
        *,
        seed: int,
        heartbeat_s: float,
        hang_s: float,
        launch_s: float,
        log: Any,
        before: Callable[..., None],
        after: Callable[..., None],
        born: Callable[[Node], None],
        spares: bool = False,
    ) -> None:
        self.run = "simulation"
        self.run_dir = ""
        self.log = log
        self.loop = loop
        self.wire = wire
        self.heartbeat_s = heartbeat_s
        self.hang_s = hang_s
        self.launch_s = launch_s
        self.before = before
        self.after = after
        self.born = born  # told of each new node, before it starts
        self.spares = spares
        self.processes: dict[str, SimProcess] = {}  # the last life of each
        self.fired: Counter[str] = Counter()
        self.launch_count = 0
        self.launches_to_fail = 0
        self.launches_to_break = 0  # die while their actors start
        self.main: SimTransport | None = None
        self._rng = rng_for(seed, "processes")
        self._spare_s: dict[str, float] = {}  # since when a node has a process in reserve
        self._stopped: dict[str, deque[events.Handle]] = {}  # by life
        self._tasks: dict[asyncio.Task[Any], str | None] = {}  # that go on, by whose they are
        self._killed: set[str | None] = set()  # lives that ended without a chance to tidy up
        loop.holds = self._holds
        loop.set_task_factory(self._make_task)

    # As a fabric

    def transport(self, name: str, incarnation: int) -> SimTransport:
        """The root's own."""
        self.main = self._transport(name, incarnation, contextvars.copy_context())
        return self.main

    def _transport(self, name: str, incarnation: int, context: contextvars.Context) -> SimTransport:
        return SimTransport(
            self.wire,
            name,
            incarnation,
            heartbeat_s=self.heartbeat_s,
            hang_s=self.hang_s,
            context=context,
        )

    def begin_anew(self) -> None:
        """For another run of the same server: the last one's processes have ended, the ones in
        reserve too."""
        assert not self.alive(), f"{self.alive()} of the last run are there"
        self._spare_s.clear()

    def launcher(self, kind: NodeKind) -> Launcher:
        return self

    async def launch(self, boot: NodeBoot) -> Launched:
        """A new process: it takes a while to be there, and may never be."""
        self.launch_count += 1
        await asyncio.sleep(self._launch_time(boot.name) * (0.5 + self._rng.random()))
        if self.launches_to_fail > 0:
            self.launches_to_fail -= 1
            self.fired["launch failed"] += 1
            raise LaunchFailed(Reason(Cause.EXITED, "died at once", exit_code=1))
        before = self.processes.get(boot.name)
        assert before is None or before.exited.done(), f"two lives of node {boot.name}"
        life = f"{boot.name}#{boot.incarnation} ({self.launch_count})"  # also over several runs
        context = contextvars.copy_context()
        context.run(_life.set, life)
        transport = self._transport(boot.name, boot.incarnation, context)
        pid = FIRST_PID + self.launch_count
        process = context.run(SimProcess, boot, transport, pid, self, life)
        started: asyncio.Future[None] = self.loop.create_future()
        self.loop.create_task(process.run(started), name=f"node {life}", context=context)
        self.processes[boot.name] = process
        try:
            await started
        except asyncio.CancelledError:
            process.kill()
            raise
        if self.launches_to_break > 0:
            self.launches_to_break -= 1
            self.loop.call_later(self._rng.uniform(0, 0.2), self._break, process)
        return process

    def _launch_time(self, name: str) -> float:
        """A process in reserve is there at once. The next one is made a while after."""
        now_s = self.loop.time()
        ready_s = self._spare_s.get(name)
        if self.spares:
            self._spare_s[name] = now_s + 2 * self.launch_s + SPARE_AFTER_S
        if ready_s is None or ready_s > now_s:
            return self.launch_s
        self.fired["a spare was used"] += 1
        return SPARE_LAUNCH_S

    def _break(self, process: SimProcess) -> None:
        if not process.exited.done():
            self.fired["killed in start"] += 1
            process.kill()

    def close(self) -> None:
        self.wire.transports.clear()

    # What they run

    def _make_task(self, loop: Any, coroutine: Any, **given: Any) -> asyncio.Task[Any]:
        task: asyncio.Task[Any] = asyncio.Task(coroutine, loop=loop, **given)
        context = given.get("context")
        self._tasks[task] = _life.get() if context is None else context.get(_life)
        task.add_done_callback(self._tasks.pop)
        return task

    def running(self) -> list[str]:
        """The tasks and timers of the root's process and of those that have ended by themselves: of
        a process that was killed, nothing is left to run."""
        tasks = [
            task.get_name() for task, life in self._tasks.items() if life not in self._killed
        ]  # fmt: skip
        timers = [
            repr(handle._callback)  # type: ignore[attr-defined]
            for handle in self.loop.timers()
            if handle._context.get(_life) not in self._killed  # type: ignore[attr-defined]
            and handle._callback != self.wire._arrive  # a frame on the wire is nobody's
        ]
        return tasks + timers

    def is_killed(self) -> bool:
        """Whether what runs just now is of a process that was killed."""
        return _life.get() in self._killed

    # What befalls processes

    def alive(self) -> list[str]:
        return [name for name, process in self.processes.items() if not process.exited.done()]

    def kill(self, name: str) -> bool:
        """As `kill -9`. False: it is dead already."""
        process = self.processes.get(name)
        if process is None or process.exited.done():
            return False
        process.kill()
        return True

    def stop(self, name: str) -> bool:
        """As SIGSTOP, until `go_on`."""
        process = self.processes.get(name)
        if process is None or process.exited.done() or process.life in self._stopped:
            return False
        self._stopped[process.life] = deque()
        return True

    def is_stopped(self, name: str) -> bool:
        process = self.processes.get(name)
        return process is not None and process.life in self._stopped

    def go_on(self, name: str) -> None:
        process = self.processes.get(name)
        held = self._stopped.pop(process.life, None) if process is not None else None
        for handle in held or ():
            self.loop.release(handle)

    def _holds(self, handle: events.Handle) -> bool:
        if not self._stopped:
            return False
        life = handle._context.get(_life)  # type: ignore[attr-defined]
        held = self._stopped.get(life) if life is not None else None
        if held is None:
            return False
        held.append(handle)
        return True

    def context(self, name: str) -> contextvars.Context:
        """Where what belongs to a node runs: so that it stands still when that does."""
        process = self.processes.get(name)
        return contextvars.copy_context() if process is None else process.context

    def node(self, name: str) -> Node | None:
        """The node of a living process other than the root's."""
        process = self.processes.get(name)
        return None if process is None or process.exited.done() else process.node
