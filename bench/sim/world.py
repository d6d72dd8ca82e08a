"""This file runs one world from its seed to its end, and says what came of it.

Real actors and the real transport's links on a virtual clock; clients, faults and laws around them.
Phases: trouble and work; then peace, in which everything must come to its end in bounded time; then
quiet, in which nothing may be held any more; then an orderly stop.

Law: a run is a function of its scenario. `chain` is a hash over all that arrived anywhere and when:
equal for two runs, in whatever process.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import hashlib
from collections import Counter, deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import structlog

from actors.gateway.actor import Gateway
from actors.gateway.record import LOSSES_MAX
from actors.router.actor import Router
from actors.runtime.actor import MailboxSpec
from actors.runtime.codec import kind_of
from actors.runtime.node import Node
from actors.runtime.simloop import SimLoop
from actors.runtime.system import System
from actors.tokenizer.actor import Tokenizer
from actors.vocab.vocab import Vocab
from bench.sim import laws, rooms
from bench.sim.clients import Client, Outcome, with_stop
from bench.sim.faults import Injector
from bench.sim.house import House, Probe
from bench.sim.rooms import Device, Pace
from bench.sim.scenario import CONTEXT_LEN, PLACES, Scenario
from bench.sim.wire import Trouble, Wire
from messages.config import (
    CacheConfig,
    Config,
    GatewayConfig,
    ModelConfig,
    RuntimeConfig,
    SchedulerConfig,
    TokenizerConfig,
)
from messages.system import Cause, Reason
from messages.types import Fault, Problem

ROOT_PID = 999
LAST_EVENTS = 60
PEACE_S = 300.0  # after the last fault: by then every client has its end
QUIET_S = 150.0  # after that: by then nothing is held (a lost cancel is waited for a minute)
STALL_S = 5.0  # how long a gateway here lets a stream lie unread
RECOVER_S = 30.0  # how long it lets a request wait for a lost part
BACK_S = 30.0  # after the last death: back-off, launch and start of all that died with it
STEPS_MAX = 40_000_000
GATEWAY_ENDS = ("The gateway failed", "The server is shutting down")


class Broken(AssertionError):
    """A law was broken. `events` are the last ones before it."""

    def __init__(self, what: str, events: list[str]) -> None:
        super().__init__(what)
        self.events = events


class Result(NamedTuple):
    seed: int
    simulated_s: float
    step_count: int
    request_count: int
    whole_count: int
    refused: Counter[str]  # by code
    fired: Counter[str]
    check_count: int
    death_count: int
    gave_up: bool
    chain: str


def run_world(scenario: Scenario, model: Path) -> Result:
    """Raises Broken."""
    world = World(scenario, model)
    loop = SimLoop(scenario.seed, shuffles=scenario.shape.shuffles, steps_max=STEPS_MAX)
    loop.set_exception_handler(world.unhandled)
    rooms.paces[scenario.seed] = world.pace
    was_enabled = gc.isenabled()
    gc.disable()  # a collection runs finalizers at any moment: between worlds is soon enough
    try:
        with world.small_mailboxes(), asyncio.Runner(loop_factory=lambda: loop) as runner:
            runner.run(world.play(loop))
        if world.failures:
            raise world.failures[0]
        return world.result(loop)
    except Exception as error:
        what = f"{type(error).__name__}: {error}"
        if world.failures:
            what = f"{world.failures[0]}"
        raise Broken(what, world.last_events()) from error
    finally:
        del rooms.paces[scenario.seed]
        if was_enabled:
            gc.enable()
        gc.collect()


class World:
    def __init__(self, scenario: Scenario, model: Path) -> None:
        self.scenario = scenario
        self.model = model
        self.model_name = str(model).encode()
        self.vocab = Vocab.load(model)
        self.pace = Pace()
        self.digest = hashlib.blake2b(digest_size=16)
        self.events: deque[tuple[float, str, str, str, bytes]] = deque(maxlen=LAST_EVENTS)
        self.failures: list[AssertionError] = []
        self.check_count = 0
        self.deaths: list[tuple[float, str, Reason]] = []
        self.outcomes: list[Outcome] = []
        self.gave_up: Reason | None = None
        self.log = structlog.wrap_logger(structlog.ReturnLogger(), processors=[])

    # What happens

    def tell(self, source: str, target: str, what: str, data: bytes) -> None:
        now_s = self.loop.time()
        # Where the tokenizer's files lie is the one thing that differs between processes.
        data = data.replace(self.model_name, b"model")
        self.digest.update(f"{now_s!r}|{source}|{target}|{what}|{len(data)}|".encode() + data)
        self.events.append((now_s, source, target, what, data))

    def tell_fault(self, what: str) -> None:
        self.tell("", "", what, b"")

    def last_events(self) -> list[str]:
        lines = []
        for at_s, source, target, what, data in self.events:
            if source:
                name = kind_of(data)
                lines.append(f"{at_s:12.4f}  {source} -> {target}  frame {name} {len(data)} bytes")
            else:
                lines.append(f"{at_s:12.4f}  {what}")
        return lines

    def before(self, node: Node, header: Any, body: Any) -> None:
        self.tell("", "", f"  {node.name} takes {kind_of(body)} for {header.target}", b"")
        self.injector.before(node, body)
        life = node.lives.get(header.target.path)
        self._counted = (life, life.mailbox.bounded_count if life is not None else 0)

    def after(self, node: Node, header: Any, body: Any) -> None:
        life, count = self._counted
        if life is not None and life.address != header.target and not life.is_dead:
            self.hold(
                life.mailbox.bounded_count == count,
                f"{life.address} was given a message for {header.target}",
            )
        self.injector.after(node, body)
        self.check_count += 1
        with self.judged():
            laws.check_always(self.system, self.nodes())

    def hold(self, is_so: bool, what: str) -> None:
        if not is_so:
            self.fail(AssertionError(what))

    @contextlib.contextmanager
    def judged(self) -> Iterator[None]:
        try:
            yield
        except AssertionError as error:
            self.fail(error)

    def fail(self, error: AssertionError) -> None:
        self.failures.append(error)
        raise error

    def unhandled(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error = context.get("exception")
        if "was destroyed but it is pending" in context["message"]:
            return
        self.failures.append(AssertionError(f"{context['message']}: {error!r}"))

    def nodes(self) -> list[Node]:
        found = [self.system.node]
        for name in self.house.processes:
            node = self.house.node(name)
            if node is not None:
                found.append(node)
        return found

    def died(self, leaf: Any, reason: Reason) -> None:
        self.deaths.append((self.loop.time(), leaf.path, reason))
        text = reason.detail + "\n".join(reason.last_lines)
        if "a simulated bug" not in text and reason.cause.value == "crashed":
            if not any(word in text for word in ("was lost:", "not built")):
                trace = "\n".join(reason.last_lines)
                self.failures.append(
                    AssertionError(f"{leaf.path} crashed: {reason.detail}\n{trace}")
                )

    # For clients

    async def gateway(self) -> Gateway | None:
        """The gateway, as soon as there is one; None when the root has given up."""
        while self.gave_up is None:
            for node in self.nodes():
                life = node.lives.get("gateway")
                is_stopped = self.house.is_stopped(node.name)
                if life is not None and life.state.value == "running" and not is_stopped:
                    actor = life.actor
                    assert isinstance(actor, Gateway)
                    return actor
            await asyncio.sleep(0.1)
        return None

    async def gateway_died_since(self, at_s: float, problem: Problem | None) -> bool:
        """Whether a client's failure is the gateway's own death. The client may see it first."""
        is_its_end = problem is None or problem.message.startswith(GATEWAY_ENDS)
        until_s = self.loop.time() + (20.0 if is_its_end else 0.0)
        while self.gave_up is None:
            if any(path == "gateway" and when >= at_s for when, path, _ in self.deaths):
                await asyncio.sleep(0.5)
                return is_its_end
            if self.loop.time() >= until_s:
                return False
            await asyncio.sleep(0.5)
        return False

    # The play

    def config(self) -> Config:
        shape = self.scenario.shape
        return Config(
            model=ModelConfig(path=str(self.model), name="tiny", context_len=CONTEXT_LEN),
            gateway=GatewayConfig(http=False, stream_stall_s=STALL_S, recover_s=RECOVER_S),
            tokenizer=TokenizerConfig(),
            scheduler=SchedulerConfig(
                running_max=shape.running_max,
                queued_max=shape.queued_max,
                prefill_budget=shape.prefill_budget,
                policy=shape.policy,
            ),
            cache=CacheConfig(
                page_size=shape.page_size,
                kv_tokens=shape.kv_tokens,
                prefix_cache=shape.prefix_cache,
            ),
            runtime=RuntimeConfig(placement="inline"),
        )

    @contextlib.contextmanager
    def small_mailboxes(self) -> Iterator[None]:
        count = self.scenario.shape.mailbox_max
        front: tuple[Any, ...] = (Tokenizer, Router)
        kept = [room.mailbox for room in front]
        try:
            if count:
                for room in front:
                    room.mailbox = MailboxSpec(count_max=count)
            yield
        finally:
            for room, mailbox in zip(front, kept, strict=True):
                room.mailbox = mailbox

    async def play(self, loop: SimLoop) -> None:
        self.loop = loop
        scenario, shape = self.scenario, self.scenario.shape
        self.wire = Wire(scenario.seed, Trouble(delay_s=shape.delay_s), self.tell)
        self.house = House(
            loop,
            self.wire,
            seed=scenario.seed,
            heartbeat_s=shape.heartbeat_s,
            hang_s=shape.hang_s,
            launch_s=shape.launch_s,
            log=self.log,
            before=self.before,
            after=self.after,
        )
        self.injector = Injector(
            scenario.seed, scenario.menu, self.house, self.wire, self.pace, self.nodes,
            self.tell_fault,
        )  # fmt: skip
        device = Device(step_s=shape.step_s, credits=shape.credits, poison=scenario.poison)
        root, nodes = rooms.build(
            self.config(), device, PLACES[shape.placement], shape.restarts_max
        )
        self.system = system = System(
            root,
            nodes=nodes,
            seed=scenario.seed,
            heartbeat_s=shape.heartbeat_s,
            hang_s=shape.hang_s,
            fabric=self.house,
            log=self.log,
            check=True,
        )
        system.node.pid = ROOT_PID
        leaf_died = system._leaf_died

        def noted(leaf: Any, reason: Reason) -> None:
            self.died(leaf, reason)
            leaf_died(leaf, reason)

        system._leaf_died = noted  # type: ignore[method-assign]
        await system.start()
        assert self.house.main is not None
        self.house.main._inbound = Probe(system.node, self.before, self.after)
        self.wire.trouble.drop = scenario.menu.drop
        self.wire.trouble.repeat = scenario.menu.repeat
        await self.act(loop, system)

    async def act(self, loop: SimLoop, system: System) -> None:
        scenario = self.scenario
        asks = [
            with_stop(ask, self.vocab, (i * 37 % 100) / 100) if i % 7 == 3 else ask
            for i, ask in enumerate(scenario.asks)
        ]
        begin_s = loop.time()
        clients = [loop.create_task(Client(ask, self).run(), name=ask.name) for ask in asks]
        watching = loop.create_task(self.watch(system))
        await self.injector.run(begin_s + scenario.duration_s * 0.8)
        _, late = await asyncio.wait(clients, timeout=scenario.duration_s * 0.2 + PEACE_S)
        if late and self.gave_up is None:
            names = ", ".join(task.get_name() for task in late)
            open_things = laws.open_things(system, self.nodes())
            raise AssertionError(f"still without an end: {names}; open: {open_things}")
        for task in late:
            task.cancel()
        self.outcomes = [task.result() for task in clients if task not in late]
        for outcome in self.outcomes:
            self.judge(outcome)
        if self.gave_up is None:
            await self.settle(system)
        watching.cancel()
        await system.stop()
        for node in self.nodes():
            assert not node.lives, f"{node.name} has {list(node.lives)} after the stop"
        assert not self.house.alive(), f"{self.house.alive()} run after the stop"

    async def watch(self, system: System) -> None:
        self.gave_up = await system.wait()
        self.tell_fault(f"the root gave up: {self.gave_up.detail}")
        self.injector.end()
        await system.stop()

    async def settle(self, system: System) -> None:
        until_s = self.loop.time() + QUIET_S
        while found := laws.open_things(system, self.nodes()):
            assert self.loop.time() < until_s, f"not quiet: {found}"
            await asyncio.sleep(1.0)
            assert self.gave_up is None, f"gave up in peace: {self.gave_up}"
        for node in self.nodes():
            node.check()

    def judge(self, outcome: Outcome) -> None:
        """Whether a client that did not get all had a reason not to."""
        ask, problem = outcome.ask, outcome.problem
        if outcome.is_whole or (problem is None and ask.reader.endswith("leaves")):
            return
        if self.gave_up is not None:
            return
        where = f"{ask.name} ({ask.reader})"
        assert problem is not None, f"{where} has no end"
        deaths = {
            round(at_s, 3)  # what dies together counts once
            for at_s, path, reason in self.deaths
            if outcome.begin_s <= at_s <= outcome.end_s
            and path != "metrics"
            and reason.cause is not Cause.STOPPED
        }
        shape = self.scenario.shape
        if problem.code == "stream_cut":
            assert ask.reader in ("stuck", "slow", "http slow"), f"{where} was cut"
        elif problem.code == "interrupted":
            waited_s = outcome.end_s - outcome.begin_s
            assert waited_s >= RECOVER_S, f"{where} given up after {waited_s:g} s"
            calm_s = outcome.end_s - self.trouble_before(outcome.end_s)
            assert calm_s <= RECOVER_S + BACK_S, f"{where} given up {calm_s:g} s after all trouble"
        elif problem.code == "repeatedly_interrupted":
            assert len(deaths) >= LOSSES_MAX, f"{where} was blamed for {deaths}"
        elif problem.fault is Fault.OVERLOADED:
            others = sum(
                other.begin_s <= outcome.end_s and other.end_s >= outcome.begin_s
                for other in self.outcomes
            )
            is_full = shape.mailbox_max or others * 3 > shape.queued_max
            assert is_full, f"{where}: {problem.message}"
        else:
            raise AssertionError(f"{where}: {problem}")

    def trouble_before(self, at_s: float) -> float:
        """When the last thing that went wrong before was over."""
        ends = [until_s for when, until_s in self.injector.troubles if when <= at_s]
        ends += [when for when, _, _ in self.deaths if when <= at_s]
        return max(ends, default=0.0)

    def result(self, loop: SimLoop) -> Result:
        refused = Counter(
            outcome.problem.code or outcome.problem.fault.value
            for outcome in self.outcomes
            if outcome.problem is not None
        )
        fired = self.injector.fired + self.house.fired + self.wire.fired
        return Result(
            seed=self.scenario.seed,
            simulated_s=loop.time(),
            step_count=loop.step_count,
            request_count=sum(outcome.tries for outcome in self.outcomes),
            whole_count=sum(outcome.is_whole for outcome in self.outcomes),
            refused=refused,
            fired=fired,
            check_count=self.check_count,
            death_count=len(self.deaths),
            gave_up=self.gave_up is not None,
            chain=self.digest.hexdigest(),
        )
