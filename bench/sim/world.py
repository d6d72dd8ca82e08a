"""This file runs one world from its seed to its end, and says what came of it.

Real actors and the real transport's links on a virtual clock; clients, faults and laws around them.
Here they are put together, and everything that is taken anywhere is watched; `play.py` says what
happens in which order.

Law: a run is a function of its scenario. `chain` is a hash over all that arrived anywhere and when:
equal for two runs, in whatever process.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import structlog

from actors.gateway.actor import Gateway
from actors.runtime.life import Life
from actors.runtime.node import Node
from actors.runtime.simloop import SimLoop
from actors.runtime.system import System
from bench.sim import laws, rooms
from bench.sim.batching import Batch
from bench.sim.clients import Outcome
from bench.sim.deploy import (
    config_of,
    files_for,
    nothing_from_outside,
    pieces_are_seen,
    small_mailboxes,
    threads_take_time,
)
from bench.sim.faults import Injector
from bench.sim.house import House, Probe
from bench.sim.journal import Journal
from bench.sim.judge import Judge
from bench.sim.oracle import oracle_of
from bench.sim.play import GATEWAY_ENDS, SPOILED, Play
from bench.sim.rooms import Device, Pace
from bench.sim.scenario import Ask, Scenario
from bench.sim.site import SimSite
from bench.sim.wire import Trouble, Wire
from messages.system import Beat, Cause, Labels, Reason, State
from messages.types import Problem

ROOT_PID = 999
DEATH_KNOWN_S = 60.0  # a client may see a death so long before the root, of a node that is stopped
STEPS_MAX = 40_000_000


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
    seen: Counter[str]  # what is to happen sometimes
    check_count: int
    death_count: int
    gave_up: bool
    chain: str
    cpu_s: float = 0.0  # of the processor, for all of it


def run_world(scenario: Scenario, model: Path) -> Result:
    """Raises Broken."""
    loop = SimLoop(scenario.seed, shuffles=scenario.shape.shuffles, steps_max=STEPS_MAX)
    world = World(scenario, model)
    world.journal = Journal(loop.time, str(model).encode())
    loop.set_exception_handler(world.unhandled)
    rooms.paces[scenario.seed] = world.pace
    was_enabled = gc.isenabled()
    gc.disable()  # a collection runs finalizers at any moment: between worlds is soon enough
    try:
        with (
            nothing_from_outside(loop, scenario.leaps),
            pieces_are_seen(world.seen),
            small_mailboxes(scenario.shape),
            threads_take_time(loop, scenario.shape.encode_s, world.is_killed),
            files_for(scenario, model, world.pace),
            asyncio.Runner(loop_factory=lambda: loop) as runner,
        ):
            runner.run(world.run(loop))
        if world.failures:
            raise world.failures[0]
        return world.result(loop)
    except Exception as error:
        what = f"{type(error).__name__}: {error}"
        if world.failures:
            what = f"{world.failures[0]}"
        raise Broken(what, world.journal.last_events()) from error
    finally:
        del rooms.paces[scenario.seed]
        if was_enabled:
            gc.enable()
        gc.collect()


class World:
    """One deployment and all that is known of its run. What clients, the judge and the play need of
    each other they find here."""

    def __init__(self, scenario: Scenario, model: Path) -> None:
        self.model = model
        self.oracle = oracle_of(str(model))
        asks = tuple(self.settled(ask, i) for i, ask in enumerate(scenario.asks))
        self.scenario = scenario._replace(asks=asks)
        self.pace = Pace({ask.name: ask for ask in asks})
        self.seen = self.pace.seen
        self.judge = Judge(self)
        self.failures: list[AssertionError] = []
        self.check_count = 0
        self.deaths: list[tuple[float, str, Reason]] = []
        self.heard_s: dict[str, float] = {}  # when the root last heard of a node
        self.silent_since: dict[tuple[float, str], float] = {}  # of a death: when, and of whom
        self.outcomes: list[Outcome] = []  # of the play, then of the drain
        self.earlier: list[Outcome] = []  # of the play, where there was a drain
        self.batches: list[Batch] = []  # all that were asked for
        self.seeing_off: dict[asyncio.Task[None], None] = {}
        self.gave_up: Reason | None = None
        self.is_draining = self.is_closed = False
        self.is_spoiled = False  # the next start of an actor fails as nobody foresaw
        self.counted: Counter[tuple[str, Labels]] = Counter()  # what all actors have reported
        self.log = structlog.wrap_logger(structlog.ReturnLogger(), processors=[])

    def settled(self, ask: Ask, index: int) -> Ask:
        """With what depends on the vocabulary."""
        if ask.lines:
            lines = (self.settled(line, index + nth) for nth, line in enumerate(ask.lines))
            return ask._replace(lines=tuple(lines))
        ask = self.oracle.with_prompt(ask)
        is_met = bool(ask.meets) or index % 7 == 3
        if not is_met or ask.is_impossible or ask.wants:
            return ask
        return self.oracle.with_stop(ask, (index * 37 % 100) / 100)

    # What happens

    def born(self, node: Node) -> None:
        """What the actors of each node count is counted here as well."""
        count = node.tally.count

        def counted(name: str, increase: float, labels: Labels) -> None:
            self.counted[name, labels] += int(increase)
            count(name, increase, labels)

        node.tally.count = counted  # type: ignore[method-assign]

    def tally_seen(self) -> Counter[str]:
        seen: Counter[str] = Counter()
        for (name, labels), count in self.counted.items():
            match name, dict(labels):
                case "histrio_retractions_total", _:
                    seen["retracted"] += count
                case "histrio_detokenizer_dropped_total", {"reason": "dead"}:
                    seen["a dead scheduler's tokens came late"] += count
                case "histrio_dead_letters_total", {"cause": "full"}:
                    seen["a mailbox was full"] += count
        for _, _, reason in self.deaths:
            if reason.cause is Cause.HUNG and "forward" not in reason.detail:
                seen["a node that hung was killed"] += 1
        return seen

    def before(self, node: Node, header: Any, body: Any) -> None:
        self.journal.taken(node.name, str(header.target), body)
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
        if self.scenario.shape.waits:
            with self.judged():
                node.streams.check()
        self.injector.after(node, body)
        self.check_count += 1
        with self.judged():
            laws.check_always(self.system, self.nodes())

    def is_killed(self) -> bool:
        return self.house.is_killed()

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

    async def gateway(self, nth: int) -> Life | None:
        """A gateway that runs: the nth, or else another one, as soon as there is one. None when the
        root has given up."""
        while self.gave_up is None and not self.is_closed:
            running = [
                life
                for node in self.nodes()
                for life in node.lives.values()
                if isinstance(life.actor, Gateway)
                and life.state in (State.RUNNING, State.DRAINING)
                and not self.house.is_stopped(node.name)
            ]
            if running:
                return running[nth % len(running)]
            await asyncio.sleep(0.1)
        return None

    def site(self, life: Life) -> SimSite:
        """The door of a gateway; made when somebody comes."""
        gateway: Any = life.actor
        if gateway.site is None:
            gateway.site = SimSite(gateway, self.house.context(life.address.node))
        site = gateway.site
        assert isinstance(site, SimSite)
        return site

    async def gateway_died_since(self, life: Life, at_s: float, problem: Problem | None) -> bool:
        """Whether a client's failure is the gateway's own death. The client may see it first."""
        is_its_end = problem is None or problem.message.startswith(GATEWAY_ENDS)
        if self.is_draining:
            return problem is None
        until_s = self.loop.time() + (DEATH_KNOWN_S if is_its_end else 0.0)
        path = life.address.path
        while self.gave_up is None:
            if any(path == dead and when >= at_s for when, dead, _ in self.deaths):
                await asyncio.sleep(0.5)
                return is_its_end
            if self.loop.time() >= until_s:
                return False
            await asyncio.sleep(0.5)
        return problem is None  # the whole house has ended

    def left(self, life: Life, call_id: str) -> None:
        """A client has left its call."""
        task = self.loop.create_task(self.judge.see_off(life, call_id))
        self.seeing_off[task] = None

    # The run

    async def run(self, loop: SimLoop) -> None:
        self.loop = loop
        self.build(loop)
        await self.start()
        self.wire.trouble.drop = self.scenario.menu.drop
        self.wire.trouble.repeat = self.scenario.menu.repeat
        await Play(self, self.system).run()

    async def start(self) -> None:
        self.listen(self.loop, self.system)
        await self.system.start()
        assert self.house.main is not None
        self.house.main._inbound = Probe(self.system.node, self.before, self.after)

    def begin_anew(self, placement: str) -> None:
        """Another run of the same server, which knows of the last one what is on the disk. Its
        operator has set the seed."""
        self.house.begin_anew()
        self.system = self.system_of(placement)
        self.is_draining = self.is_closed = False

    def build(self, loop: SimLoop) -> None:
        """Wire, house, faults and system; nothing runs yet."""
        scenario, shape = self.scenario, self.scenario.shape
        self.wire = Wire(scenario.seed, Trouble(delay_s=shape.delay_s), self.journal.frame)
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
            born=self.born,
            spares=shape.spares,
        )
        self.injector = Injector(
            scenario.seed, scenario.menu, self.house, self.wire, self.pace, self.nodes,
            self.journal.note,
        )  # fmt: skip
        self.system = self.system_of(shape.placement)

    def system_of(self, placement: str) -> System:
        """It has not started yet."""
        scenario, shape = self.scenario, self.scenario.shape
        device = Device(
            step_s=shape.step_s,
            credits=shape.credits,
            poison=scenario.poison,
            compile_s=shape.compile_s,
            jumps_vary=shape.jumps_vary,
            wear_max=shape.wear_max,
            form=shape.form,
        )
        root, nodes = rooms.build(
            config_of(scenario, self.model), device, placement, shape.restarts_max
        )
        system = System(
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
        self.born(system.node)
        return system

    def listen(self, loop: SimLoop, system: System) -> None:
        """What the root hears of its nodes and does to its leaves is known here as well."""
        leaf_died, start_leaf = system._leaf_died, system.start_leaf
        beat, link_up = system.nodes.beat, system.nodes.link_up

        async def started(leaf: Any) -> None:
            if self.is_spoiled:
                self.is_spoiled = False
                self.seen["the work of a supervisor failed"] += 1
                raise RuntimeError(SPOILED)
            await start_leaf(leaf)

        def noted(leaf: Any, reason: Reason) -> None:
            now_s = loop.time()
            self.silent_since[now_s, leaf.path] = self.heard_s.get(leaf.child.node, now_s)
            self.died(leaf, reason)
            leaf_died(leaf, reason)

        def heard(name: str, message: Beat) -> None:
            self.heard_s[name] = loop.time()
            beat(name, message)

        def linked(name: str, incarnation: int) -> None:
            self.heard_s[name] = loop.time()
            link_up(name, incarnation)

        system.nodes.beat = heard  # type: ignore[method-assign]
        system.nodes.link_up = linked  # type: ignore[method-assign]
        system._leaf_died = noted  # type: ignore[method-assign]
        system.start_leaf = started  # type: ignore[method-assign]

    def result(self, loop: SimLoop) -> Result:
        outcomes = self.earlier + self.outcomes
        refused = Counter(
            outcome.problem.code or outcome.problem.fault.value
            for outcome in outcomes
            if outcome.problem is not None
        )
        fired = self.injector.fired + self.house.fired + self.wire.fired
        seen = self.seen + self.tally_seen()
        for leap in self.scenario.leaps:
            if leap.at_s <= loop.time():
                fired[f"the wall clock was put {'forward' if leap.by_s > 0 else 'back'}"] += 1
        if fired["a spare was used"]:
            seen["a spare was used"] = fired.pop("a spare was used")
        return Result(
            seed=self.scenario.seed,
            simulated_s=loop.time(),
            step_count=loop.step_count,
            request_count=sum(outcome.tries for outcome in outcomes),
            whole_count=sum(outcome.is_whole for outcome in outcomes),
            refused=refused,
            fired=fired,
            seen=seen,
            check_count=self.check_count,
            death_count=len(self.deaths),
            gave_up=self.gave_up is not None,
            chain=self.journal.chain,
        )
