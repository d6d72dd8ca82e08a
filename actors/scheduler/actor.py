"""This file is the scheduler: the core in `schedule.py`, reached by messages.

It does not know tensors, text or clients. One `Step` goes to the worker and one `Tokens` to the
detokenizer of each front end for each step; the cache is spoken to at admission, after prefill
chunks, and at the end of a request. When the worker or the cache dies, this actor is restarted with
them and starts from nothing: the gateway submits again what was open.
"""

from __future__ import annotations

from typing import NamedTuple

import msgspec

from actors.runtime.actor import Actor, MailboxSpec
from actors.runtime.context import Ref
from actors.scheduler.finish import overloaded
from actors.scheduler.grammars import Grammars
from actors.scheduler.schedule import Schedule
from messages import cache, detokenizer, gateway, worker
from messages import scheduler as inbox
from messages.config import CacheConfig, Paths, SchedulerConfig
from messages.scheduler import (
    Acquired,
    Cancel,
    Compiled,
    Continue,
    Deferred,
    Freed,
    Granted,
    Inspect,
    Load,
    Pause,
    Poll,
    Probed,
    StopMet,
    Submit,
)
from messages.system import Cause, Down, Undelivered, Up
from messages.types import FinishReason, Problem
from messages.worker import Facts, StepDone, StepFailed

STEP_BOUNDS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0)
ROW_BOUNDS = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0, 1024.0)
QUEUE_BOUNDS_S = (0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)


GRAMMAR_SWEEP_S = 0.5  # how often waits for grammars are looked at, while there are any


class Sweep(NamedTuple):
    """Look for requests that have waited too long for their grammar's turn."""


class Scheduler(Actor):
    """Decides which requests run, and what each step computes."""

    accepts = inbox.In
    private = Sweep
    # Results and the cache's answers share this mailbox with requests, and must never be refused;
    # the number of requests is bounded by the core, which answers those that are too many.
    mailbox = MailboxSpec(count_max=1 << 17, bytes_max=1 << 30)

    def __init__(self, scheduler: SchedulerConfig, cache: CacheConfig, paths: Paths) -> None:
        self.config = scheduler
        self.paths = paths
        self.prompt_tokens = self.cached_tokens = 0  # of all that were let in
        self.shown = (-1, -1)  # running and waiting, as last published
        self.dead: dict[str, int] = {}  # gateways: the last incarnation that is known to be dead

    async def on_start(self) -> bytes:
        facts = msgspec.msgpack.decode(self.context.notes[self.paths.worker], type=Facts)
        self.schedule = Schedule(self.config, facts, epoch=self.context.address.incarnation)
        self.grammars = Grammars(self.config.grammar_timeout_s)
        self.cache: Ref[cache.In] = self.context.peer(self.paths.cache)
        self.worker: Ref[worker.In] = self.context.peer(self.paths.worker)
        self.detokenizers: dict[str, Ref[detokenizer.In]] = {}  # by the gateway's path
        pairs = zip(self.paths.gateways, self.paths.detokenizers, strict=True)
        for gateway_path, detokenizer_path in pairs:
            self.detokenizers[gateway_path] = self.context.peer(detokenizer_path)
            self.context.watch(gateway_path)
        self._show()
        return b""

    def on_submit(self, message: Submit) -> None:
        if message.reply_to.incarnation <= self.dead.get(message.reply_to.path, 0):
            # It was on its way when its gateway died; nobody is left to read what it makes.
            self.context.count("histrio_submits_lost_total")
            return
        waiting = self.grammars.attempt_of(message.request)
        if waiting is not None:
            if waiting >= message.attempt:
                return  # a repetition, or older than what waits
            self._abort_waiting(message.request)
        if message.grammar is None:
            self.schedule.submit(message, self.context.now_s())
        else:
            self._submit_constrained(message)
        self._go_on()

    def _submit_constrained(self, message: Submit) -> None:
        assert message.grammar is not None
        verdict = self.grammars.judge(message.grammar)
        now_s = self.context.now_s()
        if verdict is True:
            self.schedule.submit(message, now_s)
        elif not self.schedule.supersede(message):
            return  # a repetition, or older than what runs
        elif isinstance(verdict, Problem):
            self.schedule.output.refuse(message, verdict)
        elif len(self.grammars) >= self.config.queued_max and message.attempt == 1:
            self.schedule.output.refuse(message, overloaded(len(self.grammars), 1.0))
        else:
            if not len(self.grammars):
                self.context.start_timer("grammars", Sweep(), every_s=GRAMMAR_SWEEP_S)
            self.grammars.hold(message, now_s)

    def on_compiled(self, message: Compiled) -> None:
        now_s = self.context.now_s()
        found = self.grammars.compiled(message, now_s)
        self.context.count("histrio_grammars_total", outcome=message.outcome.value)
        for submit, problem in found:
            if problem is None:
                self.schedule.submit(submit, now_s)
            else:
                self.schedule.output.refuse(submit, problem)
        self._go_on()

    def on_sweep(self, message: Sweep) -> None:
        for submit, problem in self.grammars.expire(self.context.now_s()):
            self.schedule.output.refuse(submit, problem)
        self._go_on()

    def _abort_waiting(self, request: str) -> None:
        """A request leaves that has not run: its terminal tail says so."""
        output = self.schedule.output
        output.refuse(self.grammars.take(request), None, FinishReason.ABORT)

    def on_cancel(self, message: Cancel) -> None:
        if self.grammars.attempt_of(message.request) == message.attempt:
            self._abort_waiting(message.request)
        else:
            self.schedule.cancel(message)
        self._go_on()

    def on_poll(self, message: Poll) -> None:
        waits = self.grammars.attempt_of
        rows = tuple(row for row in message.rows if waits(row[0]) != row[1])
        unknown = self.schedule.unknown(rows)
        if unknown:
            reply: Ref[gateway.In] = self.context.ref(message.reply_to)
            reply.tell(gateway.Unknown(unknown))

    def on_stop_met(self, message: StopMet) -> None:
        self.schedule.stop_met(message)
        self._go_on()

    def on_acquired(self, message: Acquired) -> None:
        self.schedule.acquired(message, self.context.now_s())
        self._go_on()

    def on_deferred(self, message: Deferred) -> None:
        self.schedule.deferred(message)
        self._go_on()

    def on_granted(self, message: Granted) -> None:
        self.schedule.granted(message)
        self._go_on()

    def on_freed(self, message: Freed) -> None:
        self.schedule.freed()
        self._go_on()

    def on_probed(self, message: Probed) -> None:
        self.schedule.probed(message)
        self._go_on()

    def on_step_done(self, message: StepDone) -> None:
        if message.failed:
            self.context.log.error("rows failed", step=message.step, detail=message.detail)
        self.schedule.step_done(message, self.context.now_s())
        self._go_on()

    def on_step_failed(self, message: StepFailed) -> None:
        self.context.log.error("step failed", step=message.step, detail=message.detail)
        self.schedule.step_failed(message)
        self._go_on()

    def on_inspect(self, message: Inspect) -> None:
        self.context.reply(self._load())

    def on_pause(self, message: Pause) -> None:
        self.context.log.warning("paused", retract=message.retract)
        self.schedule.pause(retract=message.retract)
        self._go_on()
        self.context.reply(self._load())

    def on_continue(self, message: Continue) -> None:
        self.context.log.info("continued")
        self.schedule.resume()
        self._go_on()
        self.context.reply(self._load())

    def _load(self) -> Load:
        schedule, grammars = self.schedule, self.grammars
        return Load(
            running_count=schedule.running_count,
            waiting_count=len(schedule.live) - schedule.running_count + len(grammars),
            used_len=schedule.used_len,
            capacity_len=schedule.capacity_len,
            waiting_len=schedule.waiting_len,
            running_max=self.config.running_max,
            is_paused=schedule.is_paused,
            prompt_tokens=self.prompt_tokens,
            cached_tokens=self.cached_tokens,
        )

    def on_up(self, up: Up) -> None:
        # Earlier lives of a gateway may have ended before this life of ours began.
        path, incarnation = up.address.path, up.address.incarnation
        self.dead[path] = max(self.dead.get(path, 0), incarnation - 1)

    def on_down(self, down: Down) -> None:
        self.dead[down.address.path] = down.address.incarnation
        self.grammars.take_of(down.address)
        self.schedule.lose(down.address)
        self._go_on()

    def on_undelivered(self, notice: Undelivered) -> None:
        # A peer that died takes us with it, or the gateway tries again. But a lost message to one
        # that lives (also the end of some request, to the detokenizer) would leave requests waiting
        # for ever: better to start afresh.
        is_alive = notice.cause in (Cause.FULL, Cause.EXPIRED, Cause.UNREADABLE)
        peers = (self.paths.worker, self.paths.cache, *self.paths.detokenizers)
        if is_alive and notice.target.path in peers:
            raise RuntimeError(f"{notice.kind} to {notice.target.path} was lost: {notice.cause}")

    def check(self) -> None:
        self.schedule.check()
        self.grammars.check()
        both = [name for name in self.schedule.live if self.grammars.attempt_of(name) is not None]
        assert not both, f"{both} wait for a grammar and run"

    def _go_on(self) -> None:
        """After any event: sends what can be sent now."""
        self.schedule.pump(self.context.now_s())
        output = self.schedule.output
        for message in output.to_cache:
            self.cache.tell(message)
        output.to_cache.clear()
        for ask in self.grammars.asks:
            self.worker.tell(ask)
        self.grammars.asks.clear()
        if not len(self.grammars):
            self.context.cancel_timer("grammars")
        for step in output.steps:
            self.worker.tell(step)
        output.steps.clear()
        for gateway_path, mail in output.mails.items():
            if mail.rows:
                self.detokenizers[gateway_path].tell(mail.take())
        self._count()
        self._show()

    def _count(self) -> None:
        output, context = self.schedule.output, self.context
        for news in output.news:
            context.log.debug(news.event, request=news.request, **news.facts)
        output.news.clear()
        for elapsed_s, row_count in output.landed:
            context.observe("histrio_step_seconds", elapsed_s, bounds=STEP_BOUNDS_S)
            context.observe("histrio_step_rows", row_count, bounds=ROW_BOUNDS)
        output.landed.clear()
        for waited_s in output.queue_s:
            context.observe("histrio_queue_seconds", waited_s, bounds=QUEUE_BOUNDS_S)
        output.queue_s.clear()
        if output.prompt_tokens:
            context.count("histrio_prompt_tokens_total", output.prompt_tokens)
            self.prompt_tokens += output.prompt_tokens
            output.prompt_tokens = 0
        if output.cached_tokens:
            context.count("histrio_cached_tokens_total", output.cached_tokens)
            self.cached_tokens += output.cached_tokens
            output.cached_tokens = 0
        if output.generated_tokens:
            context.count("histrio_generated_tokens_total", output.generated_tokens)
            output.generated_tokens = 0
        if output.retraction_count:
            context.count("histrio_retractions_total", output.retraction_count)
            output.retraction_count = 0

    def _show(self) -> None:
        running = self.schedule.running_count
        shown = (running, len(self.schedule.live) - running + len(self.grammars))
        if shown != self.shown:
            self.context.gauge("histrio_requests_running", shown[0])
            self.context.gauge("histrio_requests_waiting", shown[1])
            self.shown = shown
