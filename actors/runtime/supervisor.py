"""This file runs the supervision tree: it starts children in order, restarts them as `restart.py`
decides, and gives up when that says so.

It does not know nodes or messages: a leaf starts and ends through its `Stage` (the system). Laws: a
child starts only after the one before it is ready, but for a supervisor whose children start
together; stops go in reverse; a death of a life that has been replaced already changes nothing;
when a supervisor gives up, all its children are stopped before its own supervisor hears of it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable
from typing import Any, Protocol

from actors.runtime import spec
from actors.runtime.restart import Again, GiveUp, Leave, Restarts
from actors.runtime.spec import Restart, Strategy
from messages.system import Cause, Reason


class StartFailed(Exception):
    """A child did not become ready. What was started for it has been stopped."""

    def __init__(self, path: str, reason: Reason) -> None:
        super().__init__(f"{path}: {reason.detail or reason.cause}")
        self.path = path
        self.reason = reason


class Stage(Protocol):
    """Where leaves perform: the system, which knows nodes."""

    loop: asyncio.AbstractEventLoop
    log: Any

    async def start_leaf(self, leaf: Leaf) -> None:
        """Returns when the leaf is ready. Raises StartFailed."""

    async def stop_leaf(self, leaf: Leaf, reason: Reason) -> None:
        """Returns when it is dead, by its own end or by force."""

    def settle(self, leaf: Leaf, reason: Reason) -> None:
        """The leaf is dead and is not restarted (by this supervisor)."""

    def restarts_for(self, branch: Branch) -> Restarts: ...


class Leaf:
    """One actor's place in the tree, over all its lives."""

    def __init__(self, child: spec.Child, path: str, parent: Branch) -> None:
        self.child = child
        self.path = path
        self.name = child.name
        self.parent = parent
        self.incarnation = 0
        self.restarts_count = 0
        self.is_alive = False
        self.last_exit: Reason | None = None

    async def start(self, stage: Stage) -> None:
        if self.incarnation > 0:
            self.restarts_count += 1
        self.incarnation += 1
        await stage.start_leaf(self)

    async def stop(self, stage: Stage, reason: Reason) -> None:
        if self.is_alive:
            await stage.stop_leaf(self, reason)

    @property
    def restart(self) -> Restart:
        return self.child.restart


class Branch:
    """One supervisor at work."""

    def __init__(
        self, supervisor: spec.Supervisor, path: str, parent: Branch | None, stage: Stage
    ) -> None:
        self.spec = supervisor
        self.path = path
        self.name = supervisor.name
        self.parent = parent
        self.stage = stage
        self.restart = Restart.PERMANENT
        self.is_alive = False
        self.children: dict[str, Leaf | Branch] = {}
        for child in supervisor.children:
            child_path = f"{path}/{child.name}" if path else child.name
            self.children[child.name] = (
                Leaf(child, child_path, self)
                if isinstance(child, spec.Child)
                else Branch(child, child_path, self, stage)
            )
        assert len(self.children) == len(supervisor.children), f"{path}: two with one name"
        self.restarts = stage.restarts_for(self)
        self.gave_up: Callable[[Reason], None] | None = None  # set at the root
        self._dead: dict[str, Reason] = {}
        self._is_gathering = False
        self._tasks: dict[asyncio.Task[None], None] = {}  # ordered, unlike a set of objects
        self._busy: set[str] = set()  # children of a restart that is under way
        self._busy_since_s = 0.0
        self._busy_s = 0.0  # in all, before that

    # Start and stop

    async def start(self, stage: Stage) -> None:
        """Starts all children in order. Raises StartFailed, with those started stopped again."""
        self.restarts.begin_again()
        self.is_alive = True
        self._dead.clear()
        self._begin(self.children)  # who dies meanwhile is judged when all are through
        try:
            if self.spec.starts_together:
                await self._start_together(stage)
            else:
                for child in self.children.values():
                    await child.start(stage)
        except BaseException:
            await self.stop(stage, Reason(Cause.STOPPED, "a sibling did not start"))
            raise
        finally:
            self._through(self.children)
        self._judge_soon()

    async def _start_together(self, stage: Stage) -> None:
        """Raises the first failure, when all the others are through."""
        starts = [child.start(stage) for child in self.children.values()]
        outcomes = await asyncio.gather(*starts, return_exceptions=True)
        for outcome in outcomes:
            if isinstance(outcome, BaseException):
                raise outcome

    async def stop(self, stage: Stage, reason: Reason) -> None:
        """Ends what it is doing, then its children in reverse order."""
        self.is_alive = False
        current = asyncio.current_task()
        tasks = [t for t in self._tasks if t is not current]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._begin(self.children)  # until it is started again
        for child in reversed(self.children.values()):
            await child.stop(stage, reason)

    # Deaths

    def died(self, name: str, reason: Reason) -> None:
        """A child is dead that nobody asked to stop. Deaths of one moment are judged together."""
        if not self.is_alive:
            return
        self._dead[name] = reason
        self._judge_soon()

    def spoil(self, reason: Reason) -> None:
        """Nothing below can be mended by a restart: gives up at once."""
        if self.is_alive:
            name = self.path or "root"
            self.stage.log.error("supervisor gives up", supervisor=name, detail=reason.detail)
            self._spawn(self._end(reason))

    def restart_child(self, name: str) -> None:
        """An operator's wish: no death, so it counts as no restart. Void while they restart."""
        names = self.restarts.affected({name})
        if not self.is_alive or self._busy or not self.children[name].is_alive:
            return
        self._begin(names)
        self._spawn(self._again(Again(tuple(reversed(names)), names, 0.0)))

    def _begin(self, names: Iterable[str]) -> None:
        if not self._busy:
            self._busy_since_s = self.stage.loop.time()
        self._busy |= set(names)

    def _through(self, names: Iterable[str]) -> None:
        if self._busy:
            self._busy -= set(names)
            if not self._busy:
                self._busy_s += self.stage.loop.time() - self._busy_since_s

    def _up_s(self) -> float:
        """A clock that stands while somebody is stopped and started. What takes a minute to start
        and dies at once would not be a storm by any other: none would have many deaths in a
        window."""
        now_s = self._busy_since_s if self._busy else self.stage.loop.time()
        return now_s - self._busy_s

    def _judge_soon(self) -> None:
        if self._dead and self.is_alive and not self._is_gathering:
            self._is_gathering = True
            self.stage.loop.call_soon(self._judge)

    def _judge(self) -> None:
        self._is_gathering = False
        if not self.is_alive or not self._dead:
            return
        if self._busy and self.spec.strategy is not Strategy.ONE_FOR_ONE:
            return  # judged when the restart under way is through
        ready = {n: r for n, r in self._dead.items() if n not in self._busy}
        for name in ready:
            del self._dead[name]
        ready = {n: r for n, r in ready.items() if not self.children[n].is_alive}
        if not ready:
            return
        abnormal = {n for n, r in ready.items() if r.cause is not Cause.STOPPED}
        decision = self.restarts.died(ready, abnormal, self._up_s())
        self.stage.log.warning(
            "died", supervisor=self.path or "root", dead=sorted(ready), decision=repr(decision)
        )
        match decision:
            case Leave():
                self._settle(ready)
            case Again():
                self._begin((*decision.stops, *decision.starts))
                self._spawn(self._again(decision))
            case GiveUp():
                last = next(iter(ready.values()))
                self._settle(ready)
                self._spawn(self._give_up(decision, last))

    def _settle(self, dead: dict[str, Reason]) -> None:
        for name, reason in dead.items():
            child = self.children[name]
            if isinstance(child, Leaf):
                self.stage.settle(child, reason)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = self.stage.loop.create_task(work, name=f"supervisor {self.path or 'root'}")
        self._tasks[task] = None
        task.add_done_callback(self._worked)

    def _worked(self, task: asyncio.Task[None]) -> None:
        """Work that fails in a way nobody foresaw must not leave the dead lying: gives up."""
        self._tasks.pop(task, None)
        error = None if task.cancelled() else task.exception()
        if error is not None:
            name = self.path or "root"
            self.stage.log.error("supervision failed", supervisor=name, exc_info=error)
            self.spoil(Reason(Cause.CRASHED, f"supervision of {name} failed: {error!r}"[:500]))

    async def _again(self, decision: Again) -> None:
        stage = self.stage
        try:
            for name in decision.stops:
                await self.children[name].stop(stage, Reason(Cause.STOPPED, "sibling died"))
            if decision.delay_s > 0:
                await asyncio.sleep(decision.delay_s)
            for name in decision.starts:
                child = self.children[name]
                self._dead.pop(name, None)
                try:
                    await child.start(stage)
                except StartFailed as failed:
                    self._dead[name] = failed.reason
                    if self.spec.strategy is not Strategy.ONE_FOR_ONE:
                        break  # those after it depend on it: the next judgement covers them
        finally:
            self._through((*decision.stops, *decision.starts))
        self._judge_soon()

    async def _give_up(self, decision: GiveUp, last: Reason) -> None:
        count, window_s = decision
        detail = f"{count + 1} deaths within {window_s:g} s in {self.path or 'root'}: {last.detail}"
        reason = Reason(Cause.CRASHED, detail[:500], last.exit_code, last.signal, last.last_lines)
        self.stage.log.error("supervisor gives up", supervisor=self.path or "root", detail=detail)
        await self._end(reason)

    async def _end(self, reason: Reason) -> None:
        await self.stop(self.stage, Reason(Cause.STOPPED, "the supervisor gave up"))
        if self.parent is not None:
            self.parent.died(self.name, reason)
        elif self.gave_up is not None:
            self.gave_up(reason)

    def leaves(self) -> list[Leaf]:
        """All actors below, in start order."""
        found: list[Leaf] = []
        for child in self.children.values():
            found += child.leaves() if isinstance(child, Branch) else [child]
        return found
