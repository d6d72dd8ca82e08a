"""This file is the worker: the only door from actors to `kernels`.

It does not know requests, pages' owners or policies: it executes the steps that it is sent, in
order, in one thread of its own, so that its loop answers while a forward runs. Where the device
computes by itself, a second thread waits for it, so that the next step is launched meanwhile. It
holds no queue of its own beyond the credits that it grants (`Facts.credits`). A forward that makes
no progress (`watch.py`) is the end of this life, and of its process: a stuck thread can't be ended
otherwise. So is a device that answers this process no more.

Laws: each `Step` is answered by exactly one `StepDone` or `StepFailed`; a step of a new epoch first
empties every slot, and keeps the KV, since the cache may have outlived the scheduler.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TypeVar

import msgspec

from actors.runtime import Actor, Context, MailboxSpec
from actors.worker import compiles, translate
from actors.worker.beside import CompilesBeside, LookAtGrammars
from actors.worker.compiles import Job
from actors.worker.effort import Effort
from actors.worker.grammar import Grammars
from actors.worker.watch import Watch
from kernels.health import DeviceLost
from kernels.memory import forget_freed
from kernels.runner import Flight, Runner, RunnerOptions
from messages import worker
from messages.base import Address
from messages.config import CacheConfig, ModelConfig, Paths, SchedulerConfig, WorkerConfig
from messages.system import Reason

CREDITS = 2  # one step computes, the next one is there
CREDITS_AHEAD = 3  # where the device computes by itself: see `Schedule` for when the third is used
HANG_STEPS = 4  # of the largest: while a device computes them, this process does nothing
MORE_MEMORY = (
    "ask for less (--context-len, --max-running, --prefill-budget, --kv-tokens), give the pool more"
    " of it (--memory-fraction, --graph-bytes), or end what else uses the device"
)
LOST: list[Runner] = []  # what a lost device still holds: to free it would only fail as well
T = TypeVar("T")
FORWARD_BOUNDS_S = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)


@dataclass(frozen=True, slots=True)
class Executed:
    """A step that the forward thread is through with, and who asked for it."""

    step: worker.Step
    asker: Address
    answer: worker.StepDone | worker.StepFailed | Exception


@dataclass(frozen=True, slots=True)
class Launched:
    """A step that the device is computing, or that failed behind one that it is."""

    step: worker.Step
    asker: Address
    begin_s: float
    flight: Flight | worker.StepFailed


@dataclass(frozen=True, slots=True)
class Look:
    """Look whether the forward goes on."""


@dataclass(frozen=True, slots=True)
class GrammarDone:
    """A grammar that a thread is through with: what is wrong with it, if anything."""

    job: Job
    problem: str | Exception


class Worker(CompilesBeside, Actor):
    """Executes steps on one rank."""

    accepts = worker.In
    private = Executed | Launched | GrammarDone | Look | LookAtGrammars
    mailbox = MailboxSpec(count_max=16)
    # Grammars are compiled beside the steps.
    offload_threads = {"forward": 1, "device": 1, "grammar": compiles.THREADS}
    context: Context

    def __init__(
        self,
        model: ModelConfig,
        cache: CacheConfig,
        scheduler: SchedulerConfig,
        worker: WorkerConfig,
        paths: Paths,
    ) -> None:
        super().__init__(scheduler.grammar_timeout_s)
        self.model = model
        self.options = options_of(model, cache, scheduler, worker)
        self.runner: Runner
        self.epoch: int | None = None
        self.lock = threading.Lock()  # of the runner, between the two threads
        self.hang_s = worker.hang_s
        self.watch = Watch(worker.hang_s)
        self.effort = Effort()
        self.step_count = 0  # that have come and are not answered
        self.epoch_come: int | None = None  # of the last step that came

    @staticmethod
    def prepare(
        model: ModelConfig,
        cache: CacheConfig,
        scheduler: SchedulerConfig,
        worker: WorkerConfig,
        paths: Paths,
    ) -> Runner:
        """Loads the model in a process in reserve. With one thread: any others that were started
        here would for ever be as unimportant as this one."""
        options = replace(options_of(model, cache, scheduler, worker), threads=1)
        runner = Runner.load(Path(model.path), options)
        runner.warm_up()
        Grammars(runner, model.path).start()
        return runner

    async def on_start(self) -> bytes:
        begin = self.load if self.prepared is None else self.take_over
        self.runner = await self.context.in_thread(begin, lane="forward")
        self.runner.when_computing(self.let_go)
        self.grammars = Grammars(self.runner, self.model.path)
        longest_s = HANG_STEPS * self.runner.facts.largest_step_s
        self.watch = Watch(max(self.hang_s, longest_s))
        facts = self.runner.facts
        return msgspec.msgpack.encode(
            worker.Facts(
                model=facts.name,
                vocab_size=facts.vocab_size,
                context_len=facts.context_len,
                page_size=facts.page_size,
                page_count=facts.page_count,
                eos_ids=facts.eos_ids,
                dtype=facts.dtype,
                device=facts.device,
                credits=CREDITS_AHEAD if self.runner.is_asynchronous else CREDITS,
                parameter_count=facts.parameter_count,
                hidden_len=facts.hidden_len,
                vector_lens=facts.vector_lens,
            )
        )

    def load(self) -> Runner:
        """Runs in the forward thread: reads the weights and warms up."""
        log = self.context.log
        shown = 0

        def progress(what: str, done: int, total: int) -> None:
            nonlocal shown
            tenth = 10 * done // max(total, 1)
            if tenth != shown or done == total:
                shown = tenth
                log.info("loading", what=what, done=done, total=total)

        forget_freed()  # what a life before this one in the same process has left
        try:
            runner = Runner.load(Path(self.model.path), self.options, progress)
            runner.warm_up(progress)
            Grammars(runner, self.model.path).start()
        except MemoryError as error:
            raise MemoryError(f"{error}; {MORE_MEMORY}") from error
        self.say_loaded(runner)
        return runner

    def take_over(self) -> Runner:
        """Runs in the forward thread: the model has been loaded before this life began."""
        runner: Runner = self.prepared
        self.prepared = None
        runner.set_threads(self.options.threads)
        self.say_loaded(runner)
        return runner

    def say_loaded(self, runner: Runner) -> None:
        facts = runner.facts
        self.context.log.info(
            "model loaded",
            model=facts.name,
            dtype=facts.dtype,
            device=facts.device,
            pages=facts.page_count,
            page_size=facts.page_size,
            graph_mib=runner.graph_bytes >> 20,
            how="; ".join(facts.notes),
        )
        if runner.graphs_left:
            log = self.context.log
            log.warning("not all graphs were captured at the start", left=runner.graphs_left)

    def on_step(self, message: worker.Step) -> None:
        asker = self.context.sender
        assert asker is not None, "a step without a sender cannot be answered"
        if message.epoch != self.epoch_come:
            if message.step != 1:
                # It waited in the mailbox of a life that crashed; whoever sent it ends with that.
                self.context.count("histrio_stale_steps_total")
                return
            self.epoch_come = message.epoch
        self.step_count += 1
        if self.step_count == 1:
            self.watch.begin(self.progress())
            self.context.start_timer("look", Look(), every_s=self.watch.look_s)
        self.context.offload(
            lambda: self.watched(lambda: self.launch(message, asker)),
            lambda done: done if isinstance(done, Launched) else Executed(message, asker, done),
            lane="forward",
            keeps=not self.runner.is_asynchronous,
        )

    def let_go(self) -> None:
        """Called in the forward thread. What a step brought is told once the next one computes:
        while that was being prepared it would have to wait for the interpreter, until all that
        follows from the answer was done."""
        self.context.let_go(lane="forward")

    def progress(self) -> int:
        """What changes while the forward goes on. Without a finer count, the processor time of the
        threads that do: one that waits for ever uses none."""
        counted = self.runner.progress()
        return counted if counted is not None else self.effort.spent()

    def on_look(self, message: Look) -> None:
        quiet_s = self.watch.look(self.progress())
        if quiet_s is not None:
            self.context.hung(f"a forward made no progress for {quiet_s:g} s")

    def on_launched(self, message: Launched) -> None:
        self.context.offload(
            lambda: self.watched(lambda: self.land(message)),
            lambda answer: Executed(message.step, message.asker, answer),
            lane="device",
        )

    def compile(self, job: Job) -> None:
        self.context.offload(
            partial(self.grammars.compile, job.grammar), partial(GrammarDone, job), lane="grammar"
        )

    def on_grammar_done(self, message: GrammarDone) -> None:
        if isinstance(message.problem, Exception):
            raise message.problem
        self.compiled(message.job, message.problem)

    def launch(
        self, step: worker.Step, asker: Address
    ) -> worker.StepDone | worker.StepFailed | Launched:
        """Runs in the forward thread: one step from wire to wire, or to the device."""
        begin_s = time.perf_counter()
        with self.lock:
            if step.epoch != self.epoch:
                self.runner.reset(keep_kv=True)
                self.epoch = step.epoch
            self.grammars.make_ready(step.opened)
            try:
                flight = self.runner.launch(translate.step_input(step))
            except MemoryError as error:
                failed = worker.StepFailed(
                    epoch=step.epoch,
                    step=step.step,
                    slots=step.slots,
                    detail=f"out of memory: {error}",
                )
                if self.runner.is_asynchronous:
                    return Launched(step, asker, begin_s, failed)  # answers keep their order
                return failed
            if self.runner.is_asynchronous:
                return Launched(step, asker, begin_s, flight)
            return self.done(step, flight, begin_s)

    def watched(self, work: Callable[[], T]) -> T:
        """Runs in a thread. Raises DeviceLost instead of what comes of one that is lost."""
        self.effort.count_me()
        try:
            return work()
        except Exception as error:
            self.runner.check_device(error)
            raise

    def land(self, launched: Launched) -> worker.StepDone | worker.StepFailed:
        """Runs in the device's thread: waits for a step."""
        flight = launched.flight
        if isinstance(flight, worker.StepFailed):
            return flight
        flight.wait()
        with self.lock:
            return self.done(launched.step, flight, launched.begin_s)

    def done(self, step: worker.Step, flight: Flight, begin_s: float) -> worker.StepDone:
        output = flight.result()
        return translate.step_done(step, output, int((time.perf_counter() - begin_s) * 1e6))

    async def on_stop(self, reason: Reason) -> None:
        """Steps that have begun end first: a thread inside the device's code when the interpreter
        ends takes the whole process down with it."""
        await self.context.in_thread(lambda: None, lane="forward")

    def on_end(self) -> None:
        """Whoever still holds this life, its model's memory is free for the next one."""
        self.__dict__.pop("runner", None)
        self.__dict__.pop("grammars", None)

    def on_executed(self, message: Executed) -> None:
        answer = message.answer
        self.step_count -= 1
        if self.step_count:
            self.watch.begin(self.progress())  # the next one has begun: that is progress as well
        else:
            self.context.cancel_timer("look")
        if isinstance(answer, DeviceLost):
            LOST.append(self.runner)
            self.context.broken(str(answer))
            return
        if isinstance(answer, Exception):
            raise answer
        if isinstance(answer, worker.StepDone):
            self.context.observe(
                "histrio_forward_seconds", answer.elapsed_us / 1e6, bounds=FORWARD_BOUNDS_S
            )
        self.context.ref(message.asker).tell(answer)


def options_of(
    model: ModelConfig, cache: CacheConfig, scheduler: SchedulerConfig, worker: WorkerConfig
) -> RunnerOptions:
    return RunnerOptions(
        dtype=model.dtype,
        device=model.device,
        load_format=model.load_format,
        context_len=model.context_len,
        seed=model.seed,
        page_size=cache.page_size,
        kv_tokens=cache.kv_tokens,
        kv_dtype=cache.kv_dtype,
        slot_count=scheduler.running_max,
        step_tokens_max=max(scheduler.prefill_budget, scheduler.running_max),
        attention=worker.attention,
        grammar=worker.grammar,
        token_jump=worker.token_jump,
        threads=worker.threads,
        memory_fraction=worker.memory_fraction,
        graphs=worker.graphs,
        lazy_graphs=worker.lazy_graphs,
        deterministic=worker.deterministic,
        graph_seconds=worker.graph_start_s,
        graph_bytes=worker.graph_bytes_max,
    )
