"""This file runs the whole house in one thread under a seed: real rooms, a shadow for the device.

Time is virtual, messages between nodes are delayed by a seeded weather, nodes are killed at seeded
times. It does not know what is right: it returns what each client got, and the tests compare.
"""

from __future__ import annotations

import asyncio
import random
from collections import deque
from pathlib import Path
from typing import ClassVar, NamedTuple

import msgspec
import structlog

from actors import tree
from actors.gateway.actor import Gateway
from actors.gateway.call import Call, Prompt
from actors.gateway.errors import Refused
from actors.runtime import spec
from actors.runtime.actor import Actor, MailboxSpec
from actors.runtime.simloop import SimLoop
from actors.runtime.simulation import SimFabric
from actors.runtime.system import System
from actors.runtime.transport.memory import Weather
from bench.sim.vectors import vector_of
from messages import worker
from messages.base import Address
from messages.config import (
    CacheConfig,
    Config,
    GatewayConfig,
    ModelConfig,
    Paths,
    SchedulerConfig,
    WorkerConfig,
)
from messages.scheduler import Compiled
from messages.types import Problem, Sampling, pack, unpack
from tests.house.shadow import ShadowWorker, continuation

VOCAB = 512
END = 2  # of the tiny tokenizer
STEP_S = 0.02


class Done(NamedTuple):
    """The forward of the oldest step is over."""


class ShadowRoom(Actor):
    """The worker's room with a shadow instead of a model; a step takes seeded virtual time."""

    accepts = worker.In
    private: ClassVar[type] = Done
    mailbox = MailboxSpec(count_max=16)

    def __init__(
        self,
        model: ModelConfig,
        cache: CacheConfig,
        scheduler: SchedulerConfig,
        worker: WorkerConfig,
        paths: Paths,
    ) -> None:
        self.shadow = ShadowWorker(
            page_count=cache.kv_tokens // cache.page_size,
            page_size=cache.page_size,
            vocab_size=VOCAB,
            context_len=model.context_len,
            eos_ids=(END,),
        )
        self.steps: deque[tuple[worker.Step, Address]] = deque()

    async def on_start(self) -> bytes:
        self.rng = self.context.rng("forward")
        return msgspec.msgpack.encode(self.shadow.facts)

    def on_step(self, message: worker.Step) -> None:
        assert self.context.sender is not None
        self.steps.append((message, self.context.sender))
        assert len(self.steps) <= self.shadow.facts.credits, "more steps than credits"
        if len(self.steps) == 1:
            self.begin()

    def on_compile(self, message: worker.Compile) -> None:
        assert self.context.sender is not None
        self.context.ref(self.context.sender).tell(Compiled(message.number))

    def begin(self) -> None:
        self.context.start_timer("forward", Done(), after_s=STEP_S * (0.5 + self.rng.random()))

    def on_done(self, message: Done) -> None:
        step, sender = self.steps.popleft()
        self.context.ref(sender).tell(self.shadow.execute(step))
        if self.steps:
            self.begin()


class Client(NamedTuple):
    """What one client asks, when, and after how many tokens it leaves (None: it stays)."""

    prompt: tuple[int, ...]
    max_tokens: int
    seed: int
    ignore_eos: bool
    after_s: float
    leaves_after: int | None
    wants: str = ""  # instead of text: a vector, or scores

    def sampling(self) -> Sampling:
        sampling = Sampling(seed=self.seed, ignore_eos=self.ignore_eos, max_tokens=self.max_tokens)
        if not self.wants:
            return sampling
        changes = {"vector": {"want_vector": True}, "scores": {"label_ids": (7, 4)}}[self.wants]
        return msgspec.structs.replace(sampling, max_tokens=1, **changes)

    def expected_vector(self) -> bytes:
        cells = [(token, at, "") for at, token in enumerate(self.prompt)]
        return vector_of(cells, self.sampling())

    def expected(self) -> list[int]:
        """A plain function of the request: no batch, page, cache or kill in sight."""
        count = self.sampling().max_tokens
        tokens = continuation(list(self.prompt), count, seed=self.seed, vocab_size=VOCAB)
        if not self.ignore_eos and END in tokens:
            tokens = tokens[: tokens.index(END) + 1]
        return tokens


class Got(NamedTuple):
    tokens: tuple[int, ...]
    finish: str | None = None
    problem: Problem | None = None
    vector: bytes = b""


class Kill(NamedTuple):
    node: str
    after_s: float


class Scenario(NamedTuple):
    """One run, a function of its seed."""

    seed: int
    clients: tuple[Client, ...]
    kills: tuple[Kill, ...]
    page_size: int
    kv_tokens: int
    running_max: int
    prefill_budget: int
    policy: str
    delay_s_max: float


class Result(NamedTuple):
    got: tuple[Got, ...]
    step_count: int  # of the loop: two equal runs have equal counts
    end_s: float
    launch_count: int


def draw_scenario(seed: int, *, kill_count: int = 0) -> Scenario:
    rng = random.Random(f"scenario/{seed}")
    shared = tuple(rng.randrange(3, VOCAB) for _ in range(40))
    page_size = rng.choice((1, 4, 16))
    kv_tokens = rng.choice((192, 256, 1024)) // page_size * page_size
    clients = []
    for _ in range(rng.randint(4, 14)):
        prompt = shared[: rng.choice((0, 0, 17, 40))]
        prompt += tuple(rng.randrange(3, VOCAB) for _ in range(rng.randint(1, 50)))
        clients.append(
            Client(
                prompt=prompt,
                max_tokens=rng.randint(1, 60),
                seed=rng.randrange(4),
                ignore_eos=rng.random() < 0.5,
                after_s=rng.uniform(0.0, 2.0),
                leaves_after=rng.randint(0, 20) if rng.random() < 0.15 else None,
                wants=rng.choice(("", "", "", "", "vector", "scores")),
            )
        )
    kills = [
        Kill(rng.choice(("worker", "engine", "front")), 0.3 + index * 3.0 + rng.uniform(0, 2.0))
        for index in range(kill_count)
    ]
    return Scenario(
        seed,
        tuple(clients),
        tuple(kills),
        page_size,
        kv_tokens,
        running_max=rng.choice((2, 4, 16)),
        prefill_budget=rng.choice((16, 33, 256)),
        policy=rng.choice(("fcfs", "lpm")),
        delay_s_max=rng.choice((0.0, 0.005, 0.05)),
    )


def config_of(scenario: Scenario, model: Path) -> Config:
    return Config(
        model=ModelConfig(path=str(model), name="tiny", context_len=160),
        gateway=GatewayConfig(http=False),
        scheduler=SchedulerConfig(
            running_max=scenario.running_max,
            prefill_budget=scenario.prefill_budget,
            policy=scenario.policy,
        ),
        cache=CacheConfig(page_size=scenario.page_size, kv_tokens=scenario.kv_tokens),
    )


def with_shadow(branch: spec.Supervisor) -> spec.Supervisor:
    """The same tree with the shadow in the worker's place."""
    children = []
    for child in branch.children:
        if isinstance(child, spec.Supervisor):
            children.append(with_shadow(child))
        elif child.name == "worker":
            factory = "tests.house.sim:ShadowRoom"
            children.append(msgspec.structs.replace(child, factory=factory))
        else:
            children.append(child)
    return msgspec.structs.replace(branch, children=tuple(children))


def simulate(scenario: Scenario, model: Path) -> Result:
    """Runs it to the end. Every law of every room is asserted after every message."""
    loop = SimLoop(scenario.seed)
    with asyncio.Runner(loop_factory=lambda: loop) as runner:
        got, launch_count = runner.run(play(scenario, model))
        return Result(got, loop.step_count, loop.time(), launch_count)


async def play(scenario: Scenario, model: Path) -> tuple[tuple[Got, ...], int]:
    config = config_of(scenario, model)
    root, nodes = tree.build(config)
    silent = structlog.wrap_logger(structlog.ReturnLogger(), processors=[])
    weather = Weather(scenario.seed, delay_s_max=scenario.delay_s_max)
    fabric = SimFabric(weather=weather, log=silent)
    system = System(
        with_shadow(root),
        nodes=nodes,
        seed=scenario.seed,
        fabric=fabric,
        log=silent,
        check=True,
    )
    await system.start()
    loop = asyncio.get_running_loop()

    async def kill(one: Kill) -> None:
        await asyncio.sleep(one.after_s)
        fabric.kill(one.node)

    killing = [loop.create_task(kill(one)) for one in scenario.kills]
    clients = [loop.create_task(ask(system, client)) for client in scenario.clients]
    got = tuple(await asyncio.gather(*clients))
    await asyncio.gather(*killing)
    await settle(system, fabric)
    await system.stop()
    return got, fabric.launch_count


async def ask(system: System, client: Client) -> Got:
    await asyncio.sleep(client.after_s)
    gateway = system.local("gateway")
    assert isinstance(gateway, Gateway)
    call = Call(
        prompts=(Prompt(ids=pack(client.prompt)),),
        sampling=client.sampling(),
    )
    vector = b""
    tokens: list[int] = []
    finish = None
    try:
        stream = gateway.open(call)
        try:
            while rows := await stream.read():
                for row in rows:
                    assert row.delta.index == len(tokens), "a gap or a repetition"
                    tokens.extend(unpack(row.delta.token_ids))
                    if row.delta.problem is not None:
                        return Got(tuple(tokens), problem=row.delta.problem)
                    assert finish is None, "a delta after the last"
                    finish = row.delta.finish
                    vector += row.delta.vector
                if client.leaves_after is not None and len(tokens) >= client.leaves_after:
                    return Got(tuple(tokens), finish, vector=vector)
        finally:
            stream.close()
    except Refused as refused:
        return Got(tuple(tokens), problem=refused.problem)
    return Got(tuple(tokens), finish, vector=vector)


async def settle(system: System, fabric: SimFabric) -> None:
    """Until nothing is open and all parts run; then the laws of all rooms hold, and no page is
    held."""
    await asyncio.sleep(120.0)
    gateway = system.local("gateway")
    assert isinstance(gateway, Gateway)
    assert not gateway.calls.open, "a call is open that nobody reads"
    assert not len(gateway.recovery.ledger), "a request is in the ledger that nobody reads"
    assert not gateway.controls.missing(), f"not in service: {gateway.controls.missing()}"
    system.check()
    fabric.check()
