"""This file says what happens in a world, in which order, and what must hold at each turn.

Phases: trouble and work; then peace, in which everything must come to its end in bounded time; then
quiet, in which nothing may be held any more; then, in some worlds, an orderly end with work under
way; then a stop; and after some of those ends the server is started anew. It does not know how a
world is built (`world.py`), nor what is right for one client (`judge.py`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import TYPE_CHECKING

from actors.runtime.system import System
from bench.sim import laws
from bench.sim.clients import Client, Outcome
from bench.sim.deploy import owners_of
from bench.sim.judge import Health
from bench.sim.scenario import PEACE_S, Again, Ask, Drain

if TYPE_CHECKING:
    from bench.sim.world import World

QUIET_S = 150.0  # after that: by then nothing is held (a lost cancel is waited for a minute)
FAULTS_SHARE = 0.85  # of a world's time
ENDED_S = 1.0  # after the stop, for what only has to see that it is over
SPOILED = "a simulated bug of the supervisor"
HEARD_S = 2.0  # from the order to drain until each gateway has it
# What a client is told as its gateway ends.
GATEWAY_ENDS = ("The gateway failed", "The server is shutting down")


class Play:
    """The phases of one world, whose system runs. Raises AssertionError where a law is broken."""

    def __init__(self, world: World, system: System) -> None:
        self.world, self.system = world, system
        self.loop, self.injector = world.loop, world.injector
        self.gave_up_s: float | None = None

    async def run(self) -> None:
        """From the first client to the stop."""
        world, system, loop = self.world, self.system, self.loop
        scenario = world.scenario
        begin_s = loop.time()
        clients = self.come(scenario.asks)
        world.health = Health(loop.time)
        looking = loop.create_task(self.look())
        self.watching = loop.create_task(self.watch())
        end_s = begin_s + scenario.duration_s
        if scenario.spoils:
            loop.call_at(begin_s + scenario.duration_s / 2, self.spoil)
        await self.injector.run(begin_s + scenario.duration_s * FAULTS_SHARE)
        _, late = await asyncio.wait(clients, timeout=end_s - loop.time() + PEACE_S)
        if late:
            names = ", ".join(task.get_name() for task in late)
            open_things = laws.open_things(system, world.nodes())
            raise AssertionError(f"still without an end: {names}; open: {open_things}")
        world.outcomes = [task.result() for task in clients]
        for outcome in world.outcomes:
            world.judge.outcome(outcome)
        world.judge.poison()
        if world.gave_up is None:
            world.judge.restarts()
            world.judge.stillness()
        await asyncio.gather(*world.seeing_off)
        while world.gave_up is None:
            if not self.injector.is_trouble(loop.time()):
                break
            await asyncio.sleep(1.0)
        if world.gave_up is None:
            await self.settle()
            await asyncio.sleep(max(0.0, end_s - loop.time()))  # and nothing comes up again
            await self.settle()
        if self.gave_up_s is not None:
            await self.watching
            world.judge.giving_up(self.gave_up_s)
        elif scenario.drain is not None:
            await self.drain(scenario.drain)
        self.watching.cancel()
        looking.cancel()
        self.injector.is_over = True
        await self.stop()
        drain = scenario.drain
        if drain is not None and drain.again is not None and world.gave_up is None:
            await self.begin_anew(drain.again)

    async def stop(self) -> None:
        world = self.world
        await asyncio.gather(self.system.stop(), self.system.stop())
        for node in world.nodes():
            assert not node.lives, f"{node.name} has {list(node.lives)} after the stop"
        assert not world.house.alive(), f"{world.house.alive()} run after the stop"
        await asyncio.sleep(ENDED_S)
        self.judge_end()

    async def begin_anew(self, again: Again) -> None:
        """Another run of the server: what it has kept on the disk is there and goes on."""
        world = self.world
        world.journal.note("begins anew")
        world.begin_anew(again.placement)
        self.system = world.system
        gone = owners_of(world.scenario, world.model) - set(world.system.leaves)
        world.seen["a batch of a front end that was no more went on"] += bool(gone)
        await world.start()
        clients = self.come(world.settled(ask, index) for index, ask in enumerate(again.asks))
        known = [batch for batch in world.batches if batch.batch_id]
        going = [
            self.loop.create_task(batch.go_on(), name=f"{batch.ask.name} in the next run")
            for batch in known
        ]
        _, late = await asyncio.wait([*clients, *going], timeout=PEACE_S)
        assert not late, f"{[task.get_name() for task in late]} have no end in the next run"
        await asyncio.gather(*going)
        for client in clients:
            assert client.result().is_whole, f"{client.get_name()} has no end in the next run"
            world.outcomes.append(client.result())
        await self.settle()
        await self.stop()

    def spoil(self) -> None:
        """What is started next fails, by a bug of the supervisor."""
        self.world.is_spoiled = not self.injector.is_over

    def judge_end(self) -> None:
        """Nothing of a house that was stopped goes on, and no message was of a wrong kind."""
        world = self.world
        current = asyncio.current_task()
        assert current is not None
        running = [name for name in world.house.running() if name != current.get_name()]
        assert not running, f"{running} go on after the stop"
        unreadable = [
            dict(labels)["kind"]
            for (name, labels), count in world.counted.items()
            if name == "histrio_dead_letters_total" and ("cause", "unreadable") in labels and count
        ]
        assert not unreadable, f"{unreadable} could not be read"
        world.journal.note(f"draws {world.wire.drawn()} {self.injector.rng.random()}")

    def come(self, asks: Iterable[Ask]) -> list[asyncio.Task[Outcome]]:
        return [self.loop.create_task(Client(ask, self.world).run(), name=ask.name) for ask in asks]

    async def drain(self, drain: Drain) -> None:
        """As SIGTERM with work under way: what ends within the grace is whole, and the rest is told
        that the server ends."""
        world = self.world
        asks = [world.settled(ask, index) for index, ask in enumerate(drain.asks)]
        clients = self.come(asks)
        await asyncio.sleep(drain.after_s)
        begin_s = self.loop.time()
        world.journal.note("drain")
        if drain.kills and world.house.alive():
            world.house.kill(self.injector.rng.choice(world.house.alive()))
            self.injector.troubles.append((begin_s, begin_s))
            world.seen["drained while a part restarted"] += 1
        world.is_draining = True
        await self.system.drain(drain.grace_s)
        took_s = self.loop.time() - begin_s
        assert took_s <= drain.grace_s + 0.1, f"drained {took_s:g} s, with {drain.grace_s:g} s"
        self.watching.cancel()
        await self.system.stop()
        world.is_closed = True
        _, late = await asyncio.wait(clients, timeout=60.0)
        assert not late, f"{[task.get_name() for task in late]} have no end after the server's"
        await asyncio.gather(*world.seeing_off)
        world.earlier, world.outcomes = world.outcomes, [task.result() for task in clients]
        for outcome in world.outcomes:
            problem = outcome.problem
            if outcome.begin_s > begin_s + HEARD_S:
                where = f"{outcome.ask.name}, which came to a server that drains,"
                assert not outcome.is_whole, f"{where} was served"
                waited_s = 0.0 if problem is None else outcome.end_s - outcome.begin_s
                # A gateway that is just being restarted hears of it once it runs.
                bound_s = drain.grace_s if drain.kills else HEARD_S
                if outcome.ask.reader == "http slow":
                    bound_s += outcome.ask.pause_s  # at its first piece, before it sees the end
                assert waited_s <= bound_s, f"{where} was refused after {waited_s:g} s"
            if outcome.is_whole:
                world.seen["drained with whole answers"] += 1
            elif problem is not None and problem.message.startswith(GATEWAY_ENDS):
                world.seen["drained with a typed end"] += 1
            elif outcome.is_unserved:
                world.seen["came when the doors were closed"] += 1
            else:
                world.judge.outcome(outcome)

    async def watch(self) -> None:
        """Notes that the root gave up, and ends the house as its program would."""
        world = self.world
        world.gave_up = await self.system.wait()
        self.gave_up_s = self.loop.time()
        world.seen["the root gave up"] += 1
        if SPOILED in world.gave_up.detail:
            world.seen["the root gave up as its own work failed"] += 1
        world.journal.note(f"the root gave up: {world.gave_up.detail}")
        self.injector.end()
        await self.system.stop()

    async def look(self) -> None:
        """Notes when all parts run and nothing is done to them."""
        while True:
            await asyncio.sleep(1.0)
            self.world.health.note(
                not self.injector.is_trouble(self.loop.time())
                and laws.all_run(self.system, self.world.nodes())
            )

    async def settle(self) -> None:
        """Waits for quiet, or until the root has given up."""
        world = self.world
        until_s = self.loop.time() + QUIET_S
        while world.gave_up is None:
            found = laws.open_things(self.system, world.nodes())
            if not found:
                break
            assert self.loop.time() < until_s, f"not quiet: {found}"
            await asyncio.sleep(1.0)
        if world.gave_up is not None:
            return
        for branch in laws.branches_of(self.system.root):
            branch.restarts.check()
        for node in world.nodes():
            node.check()
            assert node.transport is not None
            node.transport.check()
