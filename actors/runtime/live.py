"""This file is the context of an actor that runs on a node.

It does not know how messages travel (`node.py`) nor when handlers run (`life.py`).
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from actors.runtime.clock import rng_for
from actors.runtime.context import (
    Context,
    Outcome,
    Ref,
    Rejected,
    TimedOut,
)
from actors.runtime.crew import Crew
from actors.runtime.directory import ExactTarget
from actors.runtime.life import Life
from actors.runtime.recorder import Event
from messages.base import Address, Lane, Message
from messages.system import ActorRow, Cause, Reason, RestartAsked, State

M = TypeVar("M", contravariant=True)
T = TypeVar("T")

OFFLOADED_MAX = 65_536  # jobs of one actor that wait or run; more is a bug in the room


class LiveContext(Context):
    """What one life may do."""

    def __init__(self, life: Life) -> None:
        node = life.node
        self._life = life
        self._node = node
        self.address = life.address
        self.log = node.log.bind(actor=life.address.path)
        self.notes = node.notes
        self.tally = node.tally
        self.timers = life.timers
        self.send = life.send  # type: ignore[method-assign]
        self._job_count = 0

    def send(
        self,
        target: Any,
        message: Any,
        deadline_s: float | None = None,
        request: str | None = None,
        question: int | None = None,
    ) -> None:
        self._life.send(target, message, deadline_s, request, question)

    def peer(self, path: str) -> Ref[Any]:
        if self._life.state is State.STARTING:
            self._life.peer_paths.add(path)
        return Ref(self._life.send, self._node.entry(path))

    def ref(self, address: Address) -> Ref[Any]:
        return Ref(self._life.send, ExactTarget(address, self._node.entry(address.path)))

    def reply(self, message: Message) -> None:
        envelope = self._life.current
        assert envelope is not None and envelope.sender is not None, "nobody to reply to"
        if envelope.question is None:
            self.ref(envelope.sender).tell(message, request=envelope.request)
        else:
            self._node.answer(self._life, envelope, message)

    async def ask(self, ref: Ref[M], message: M, *, timeout_s: float) -> Outcome:
        address = ref.address
        if self._life.is_dead:
            return Rejected(Cause.STOPPED)
        if address is None:
            return Rejected(Cause.NOBODY)
        assert address != self.address, "an actor that asks itself would wait for ever"
        number, answer = self._node.questions.open(self._life, address)
        try:
            deadline_s = self.now_s() + timeout_s
            self._life.send(ref.target, message, deadline_s, None, number)
            async with asyncio.timeout(timeout_s):
                return await answer
        except TimeoutError:
            return TimedOut(timeout_s)
        finally:
            self._node.questions.close(number)

    def watch(self, path: str) -> None:
        self._node.watch(self._life, path)

    def actors(self) -> list[ActorRow]:
        return self._node.rows.all()

    async def look(self, *, timeout_s: float) -> list[ActorRow]:
        return await self._node.rows.look(timeout_s)

    def ask_restart(self, path: str) -> None:
        self._node.report(RestartAsked(path))

    def now_s(self) -> float:
        return self._node.time()

    def rng(self, purpose: str) -> random.Random:
        address = self.address
        return rng_for(self._node.seed, address.path, address.incarnation, purpose)

    def spawn(self, coro: Coroutine[Any, Any, T], *, name: str) -> asyncio.Task[T]:
        task = self._node.loop.create_task(coro, name=f"{self.address} {name}")
        self._life.spawned[task] = None
        task.add_done_callback(self._spawned_done)
        return task

    def _spawned_done(self, task: asyncio.Task[Any]) -> None:
        self._life.spawned.pop(task, None)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._life.crash(error)

    def offload(
        self,
        work: Callable[[], T],
        then: Callable[[T | Exception], Any],
        *,
        lane: str = "default",
        keeps: bool = False,
    ) -> None:
        def deliver(result: T | Exception) -> None:
            if self._life.is_dead:
                return
            try:
                self._life.tell_itself(then(result))
            except Exception as error:
                self._life.crash(error)

        self._run_in_crew(work, deliver, lane, keeps=keeps)

    def let_go(self, *, lane: str = "default") -> None:
        crew = self._life.crews.get(lane)
        if crew is not None:  # not in a simulated loop, which keeps nothing
            crew.let_go()

    async def in_thread(self, work: Callable[[], T], *, lane: str = "default") -> T:
        life = self._life
        done: asyncio.Future[T] = self._node.loop.create_future()
        if life.is_dead:
            done.cancel()
        life.waits[done] = None
        done.add_done_callback(life.waits.pop)

        def deliver(result: T | Exception) -> None:
            if done.done():
                return
            if isinstance(result, Exception):
                done.set_exception(result)
            else:
                done.set_result(result)

        self._run_in_crew(work, deliver, lane)
        return await done

    def _run_in_crew(
        self,
        work: Callable[[], Any],
        deliver: Callable[[Any], None],
        lane: str,
        *,
        keeps: bool = False,
    ) -> None:
        life = self._life
        threads = life.actor.offload_threads
        assert lane in threads, f"{type(life.actor).__name__} has no threads {lane!r}"
        assert len(life.jobs) < OFFLOADED_MAX, "too much offloaded work"
        if life.is_dead:
            return
        self._job_count += 1
        job = self._job_count
        since_s = self.now_s()
        life.jobs[job] = (lane, since_s)
        number = life.note(Lane.USER, since_s, lane, Event.THREAD)

        def done(result: Any) -> None:
            life.jobs.pop(job, None)
            life.ended(number, since_s)
            deliver(result)

        if self._node.runs_inline:  # a simulated loop has no threads: same order, no overlap
            line = (self.address, lane) if threads[lane] == 1 else None
            self._node.loop.call_soon(_run_inline, work, done, line)
            return
        if lane not in life.crews:
            name = f"{self.address.path}.{lane}"
            life.crews[lane] = Crew(name, threads[lane], self._node.loop.call_soon_threadsafe)
        life.crews[lane].run(work, done, keeps=keeps)

    def drained(self) -> None:
        self._life.drained()

    def hung(self, detail: str) -> None:
        self._life.end(Reason(Cause.HUNG, detail))

    def broken(self, detail: str) -> None:
        self._life.end(Reason(Cause.BROKEN, detail))

    def crash(self, error: BaseException) -> None:
        self._life.crash(error)


def _run_inline(work: Callable[[], Any], done: Callable[[Any], None], line: object) -> None:
    """`line`: what has the same is done in order; None: by threads that overtake each other."""
    try:
        result = work()
    except Exception as error:
        result = error
    done(result)
