"""This file is the worker's room with the shadow in the model's place, and the tree around it.

It does not know faults or clients. A step takes seeded virtual time: how long is a property of the
device that the world draws, and can be changed while it runs, as heat or a neighbour would.
"""

from __future__ import annotations

from collections import deque
from typing import ClassVar, NamedTuple

import msgspec

from actors import tree
from actors.runtime import spec
from actors.runtime.actor import Actor, MailboxSpec
from bench.sim.shadow import ShadowWorker
from messages import scheduler, worker
from messages.base import Address
from messages.config import (
    CacheConfig,
    Config,
    ModelConfig,
    Paths,
    SchedulerConfig,
    Section,
    WorkerConfig,
)
from messages.types import unpack

END = 2  # of the tiny tokenizer
FACTORY = "bench.sim.rooms:ShadowRoom"


class Device(Section, frozen=True):
    """What the simulated device is like."""

    step_s: float = 0.02
    credits: int = 2
    vocab_size: int = 512
    poison: int | None = None  # a token that the device dies of, where a prompt begins with it


class Pace:
    """How slow the devices of this world are just now. One for each world, by its seed."""

    def __init__(self) -> None:
        self.factor = 1.0


paces: dict[int, Pace] = {}  # by the system's seed: an actor finds its world's by what it knows


class Done(NamedTuple):
    """The forward of the oldest step is over."""


def namespace_of(request: str) -> str:
    """Requests carry theirs in their id, so that the worker can tell whose prefix it is given."""
    return request.partition("~")[2].partition(".")[0]


class ShadowRoom(Actor):
    """Executes steps one after the other."""

    accepts = worker.In
    private: ClassVar[type] = Done
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
        self.device = device
        self.shadow = ShadowWorker(
            page_count=cache.kv_tokens // cache.page_size,
            page_size=cache.page_size,
            vocab_size=device.vocab_size,
            context_len=model.context_len,
            eos_ids=(END,),
            namespace_of=namespace_of,
        )
        self.steps: deque[tuple[worker.Step, Address]] = deque()
        self.epoch_come: int | None = None

    async def on_start(self) -> bytes:
        self.rng = self.context.rng("forward")
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
            return  # as the real one: it waited in the mailbox of a life that crashed
        self.epoch_come = message.epoch
        self.steps.append((message, self.context.sender))
        held = sum(step.epoch == message.epoch for step, _ in self.steps)
        assert held <= self.device.credits, f"{held} steps for {self.device.credits} credits"
        if len(self.steps) == 1:
            self.begin()

    def on_compile(self, message: worker.Compile) -> None:
        assert self.context.sender is not None
        self.context.ref(self.context.sender).tell(scheduler.Compiled(message.number))

    def begin(self) -> None:
        after_s = self.device.step_s * (0.5 + self.rng.random()) * self.pace.factor
        self.context.start_timer("forward", Done(), after_s=after_s)

    def on_done(self, message: Done) -> None:
        step, sender = self.steps.popleft()
        self.context.ref(sender).tell(self.shadow.execute(step))
        if self.steps:
            self.begin()


def build(
    config: Config, device: Device, places: dict[str, str], restarts_max: int
) -> tuple[spec.Supervisor, tuple[spec.Node, ...]]:
    """The real tree, with the shadow in the worker's place and each actor where `places` says."""
    root, _ = tree.build(config)

    def placed(branch: spec.Supervisor) -> spec.Supervisor:
        children: list[spec.Child | spec.Supervisor] = []
        for child in branch.children:
            if isinstance(child, spec.Supervisor):
                children.append(placed(child))
                continue
            changes: dict[str, object] = {"node": places.get(child.name, "main")}
            if child.name == "worker":
                changes |= {
                    "factory": FACTORY,
                    "arguments": {**child.arguments, "device": device},
                }
            children.append(msgspec.structs.replace(child, **changes))
        return msgspec.structs.replace(branch, children=tuple(children), restarts_max=restarts_max)

    names = dict.fromkeys(places.values())
    nodes = tuple(
        spec.Node(name=name, kind=spec.NodeKind.PROCESS) for name in names if name != "main"
    )
    return placed(root), nodes
