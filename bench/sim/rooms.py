"""This file is the worker's room with the shadow in the model's place, and the tree around it.

It does not know faults or clients. A step takes seeded virtual time: how long is a property of the
device that the world draws, and can be changed while it runs, as heat or a neighbour would.
"""

from __future__ import annotations

import contextvars
import functools
from collections import Counter, deque
from collections.abc import Mapping
from typing import ClassVar, NamedTuple

import msgspec

from actors import tree
from actors.gateway.actor import Gateway
from actors.runtime import spec
from actors.runtime.actor import Actor, MailboxSpec
from actors.scheduler.actor import Scheduler
from actors.scheduler.request import State
from actors.worker.beside import CompilesBeside, LookAtGrammars
from actors.worker.compiles import Job
from actors.worker.watch import Watch
from bench.sim.bodies import grammar_of
from bench.sim.oracle import oracle_of
from bench.sim.scenario import FRONTS, PLACES, TOOL_WAYS, Ask
from bench.sim.shadow import ShadowWorker, is_penalised
from bench.sim.site import SimSite
from bench.sim.text import END
from bench.sim.wear import WearingEngine
from kernels.batch import Constraint
from kernels.constrain import BadGrammar, Constrainer
from messages import scheduler, worker
from messages.base import Address
from messages.config import (
    CacheConfig,
    Config,
    ModelConfig,
    Paths,
    RuntimeConfig,
    SchedulerConfig,
    Section,
    WorkerConfig,
)
from messages.types import Grammar, unpack

FACTORY = "bench.sim.rooms:ShadowRoom"
GATEWAY_FACTORY = "bench.sim.rooms:SimGateway"
SCHEDULER_FACTORY = "bench.sim.rooms:SimScheduler"


class Device(Section, frozen=True):
    """What the simulated device is like."""

    step_s: float = 0.02
    credits: int = 2
    vocab_size: int = 512
    compile_s: float = 0.0  # for a grammar, beside the steps
    jumps_vary: bool = False  # not all forced tokens that there is room for are appended
    wear_max: int = 0  # tokens after which a grammar is spent for all who share it; 0: never
    poison: int | None = None  # a token that the device dies of, where a prompt begins with it
    form: str = ""  # in which its model writes calls


class Pace:
    """How slow the devices of this world are just now, and what they have seen. One for each world,
    by its seed."""

    def __init__(self, asks: Mapping[str, Ask] | None = None) -> None:
        self.factor = 1.0
        self.is_stuck = False  # the next forward never ends
        self.stuck_at: list[
            float
        ] = []  # when such forwards began: that may be long after the fault
        self.asks = dict(asks or {})  # by name
        self.seen: Counter[str] = Counter()
        self.named: set[str] = set()  # requests that some worker has had
        self.sites: list[SimSite] = []  # all that have had files, of whatever life


paces: dict[int, Pace] = {}  # by the system's seed: an actor finds its world's by what it knows


class Done(NamedTuple):
    """The forward of the oldest step is over."""


class Look(NamedTuple):
    """Look whether the forward goes on."""


class Made(NamedTuple):
    """A grammar is compiled, or refused."""

    job: Job
    problem: str


def namespace_of(request: str) -> str:
    """Requests carry theirs in their id, so that the worker can tell whose prefix it is given."""
    return request.partition("~")[2].partition(".")[0]


class ShadowRoom(CompilesBeside, Actor):
    """Executes steps one after the other."""

    accepts = worker.In
    private: ClassVar[object] = Done | Look | Made | LookAtGrammars
    mailbox = MailboxSpec(count_max=16)

    def __init__(
        self,
        model: ModelConfig,
        cache: CacheConfig,
        scheduler: SchedulerConfig,
        worker: WorkerConfig,
        device: Device,
        paths: Paths,
    ) -> None:
        super().__init__(scheduler.grammar_timeout_s)
        self.device = device
        self.oracle = oracle_of(model.path)
        self.shadow = ShadowWorker(
            page_count=cache.kv_tokens // cache.page_size,
            page_size=cache.page_size,
            vocab_size=device.vocab_size,
            context_len=model.context_len,
            eos_ids=(END,),
            namespace_of=namespace_of,
            constrainer=self.oracle.constrainer(),
            habit=self.oracle.habit(device.form),
        )
        self.watch = Watch(worker.hang_s)
        self.kept: set[Grammar] = set()  # compiled, as the real one keeps them
        self.compile_count = 0
        self.jumped_count = 0
        self.wearing: WearingEngine | None = None
        self.is_stuck = False
        self.known: set[str] = set()  # requests that have had a slot in this epoch
        self.steps: deque[tuple[worker.Step, Address]] = deque()
        self.epoch_come: int | None = None

    async def on_start(self) -> bytes:
        self.rng = self.context.rng("forward")
        if self.device.jumps_vary:
            jumps = self.context.rng("jumps")
            self.shadow.jump_max = lambda: jumps.choice((0, 1, 2, 64))
        if self.device.wear_max:
            wear = self.context.rng("wear")
            room = functools.partial(wear.randint, 0, self.device.wear_max)
            self.wearing = WearingEngine(self.oracle.engine, room)
            self.shadow.constrainer = Constrainer(self.wearing, self.oracle.table)
        self.pace = paces.get(self.context._node.seed, Pace())  # type: ignore[attr-defined]
        facts = msgspec.structs.replace(self.shadow.facts, credits=self.device.credits)
        return msgspec.msgpack.encode(facts)

    def on_step(self, message: worker.Step) -> None:
        assert self.context.sender is not None
        for row in message.opened:
            if unpack(row.tokens)[0] == self.device.poison:
                raise RuntimeError("a simulated bug: the device dies of this prompt")
        newest = max((step.epoch for step, _ in self.steps), default=self.shadow.epoch or 0)
        # A scheduler that is dead must not speak after its successor.
        assert message.epoch >= newest, f"epoch {message.epoch} after {newest}"
        if message.epoch != self.epoch_come and message.step != 1:
            self.pace.seen["a stale step was left out"] += 1
            return  # as the real one: it waited in the mailbox of a life that crashed
        if message.epoch != self.epoch_come:
            self.known.clear()
        self.epoch_come = message.epoch
        self.see(message)
        self.steps.append((message, self.context.sender))
        held = sum(step.epoch == message.epoch for step, _ in self.steps)
        assert held <= self.device.credits, f"{held} steps for {self.device.credits} credits"
        if len(self.steps) == 1:
            self.context.start_timer("look", Look(), every_s=self.watch.look_s)
            self.begin()

    def compile(self, job: Job) -> None:
        grammar = job.grammar
        constraint = Constraint(grammar.kind, grammar.text, grammar.begin, grammar.end)
        problem = ""
        try:
            assert self.shadow.constrainer is not None
            self.shadow.constrainer.prepare(constraint)
        except BadGrammar as error:
            problem = str(error)
        after_s = 0.0 if grammar in self.kept else self.device.compile_s
        self.compile_count += 1
        timer = f"grammar {self.compile_count}"
        self.context.start_timer(timer, Made(job, problem), after_s=after_s)

    def on_made(self, message: Made) -> None:
        self.kept.add(message.job.grammar)
        self.compiled(message.job, message.problem)
        self.compiles.check()

    def progress(self) -> int:
        """Stands still only where a forward is stuck, as the processor time of the real one."""
        return 0 if self.is_stuck else int(self.context.now_s() * 1e6)

    def on_look(self, message: Look) -> None:
        quiet_s = self.watch.look(self.progress())
        if quiet_s is not None:
            self.pace.seen["a forward that hung was found"] += 1
            self.context.hung(f"a forward made no progress for {quiet_s:g} s")

    def begin(self) -> None:
        self.is_stuck, self.pace.is_stuck = self.pace.is_stuck, False
        self.watch.begin(self.progress())
        if self.is_stuck:
            self.pace.stuck_at.append(self.context.now_s())
            return
        after_s = self.device.step_s * (0.5 + self.rng.random()) * self.pace.factor
        self.context.start_timer("forward", Done(), after_s=after_s)

    def on_done(self, message: Done) -> None:
        step, sender = self.steps.popleft()
        self.context.ref(sender).tell(self.shadow.execute(step))
        self.pace.seen["tokens were forced"] += self.shadow.jumped_count > self.jumped_count
        self.jumped_count = self.shadow.jumped_count
        if self.wearing is not None:
            self.pace.seen["a grammar was spent"] += self.wearing.spent_count
            self.wearing.spent_count = 0
        if self.steps:
            self.begin()
        else:
            self.context.cancel_timer("look")

    def see(self, step: worker.Step) -> None:
        """Notes what a request resumes with."""
        seen = self.pace.seen
        for row in step.opened:
            is_new = row.request not in self.known
            self.known.add(row.request)
            is_again = row.request in self.pace.named
            self.pace.named.add(row.request)
            if row.cached_len:
                seen["a prefix was found"] += 1
            if row.sampling.want_vector or row.sampling.label_ids:
                seen["a vector or scores were asked for again"] += is_again
            if len(row.tokens) // 4 == row.prompt_len or not is_new:
                continue
            seen["resumed after tokens"] += 1
            seen["resumed with a seed"] += row.sampling.seed > 0
            seen["resumed with penalties"] += is_penalised(row.sampling)
            seen["resumed with log probabilities"] += row.sampling.logprobs is not None
            seen["resumed a choice other than the first"] += row.sampling.choice > 0
            seen["resumed from cached pages"] += row.cached_len > 0
            ask = self.pace.asks.get(row.request.partition("-")[0])
            text, is_split = self.oracle.so_far(unpack(row.tokens)[row.prompt_len :])
            seen["resumed within a character"] += is_split
            if ask is not None and ask.stop:
                seen["resumed with a stop string"] += 1
                seen["resumed within a stop string"] += text.endswith(ask.stop[:1])
            habit = self.shadow.habit
            is_within = habit is not None and habit.is_within(unpack(row.tokens), row.prompt_len)
            seen["resumed within a call that was chosen"] += is_within
            seen["resumed with a stop pattern"] += ask is not None and bool(ask.stop_pattern)
            if row.grammar is not None:
                seen[f"resumed with a grammar: {row.grammar.kind}"] += 1
                is_call = (row.grammar.kind, row.grammar.text) in map(grammar_of, TOOL_WAYS)
                seen["resumed within a call of a tool"] += is_call


class SimGateway(Gateway):
    """A gateway whose door is there from its start, with files and batches behind it."""

    async def on_start(self) -> bytes:
        note = await super().on_start()
        site = SimSite(self, contextvars.copy_context())
        self.site = site  # type: ignore[assignment]
        paces[self.context._node.seed].sites.append(site)  # type: ignore[attr-defined]
        await site.app.batches.open()
        return note


class SimScheduler(Scheduler):
    """A scheduler with a law more: whose text is complete is in no further step."""

    def on_stop_met(self, message: scheduler.StopMet) -> None:
        super().on_stop_met(message)
        request = self.schedule.live.get(message.request)
        is_it = request is not None and request.attempt == message.attempt
        assert not is_it or request.state is State.DONE, (  # type: ignore[union-attr]
            f"{message.request} goes on, and its text is complete"
        )


def build(
    config: Config, device: Device, placement: str, restarts_max: int
) -> tuple[spec.Supervisor, tuple[spec.Node, ...]]:
    """The real tree, with the shadow in the worker's place and each actor where `placement` says.
    No gateway listens."""
    count = FRONTS.get(placement)
    if count is None:
        places = PLACES[placement]
        root, _ = tree.build(config)
        names = dict.fromkeys(place for place in places.values() if place != "main")
        nodes = tuple(spec.Node(name=name, kind=spec.NodeKind.PROCESS) for name in names)
    else:
        places = {}
        runtime = RuntimeConfig(placement="processes", front_ends=count)
        gateway = msgspec.structs.replace(config.gateway, http=True)
        root, nodes = tree.build(msgspec.structs.replace(config, gateway=gateway, runtime=runtime))

    def placed(branch: spec.Supervisor) -> spec.Supervisor:
        children: list[spec.Child | spec.Supervisor] = []
        for child in branch.children:
            if isinstance(child, spec.Supervisor):
                children.append(placed(child))
                continue
            changes: dict[str, object] = {"node": places.get(child.name, "main")} if places else {}
            if child.name == "worker":
                changes |= {
                    "factory": FACTORY,
                    "arguments": {**child.arguments, "device": device},
                }
            if child.name == "scheduler":
                changes |= {"factory": SCHEDULER_FACTORY}
            if child.name == "gateway":
                changes |= {"arguments": {**child.arguments, "gateway": config.gateway}}
                if config.gateway.batch_dir:
                    changes |= {"factory": GATEWAY_FACTORY}
            children.append(msgspec.structs.replace(child, **changes))
        return msgspec.structs.replace(branch, children=tuple(children), restarts_max=restarts_max)

    return placed(root), nodes
