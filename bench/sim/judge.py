"""This file judges what clients of a simulated world got: whether one that has less than all had a
reason for it, and whether what a client left behind came to its end in time.

It does not know how faults are made: only when there was trouble, and who died.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from typing import Any

from actors.gateway.record import LOSSES_MAX
from actors.runtime.life import Life
from actors.scheduler.grammars import busy
from actors.worker.compiles import THREADS
from bench.sim import laws
from bench.sim.clients import Outcome
from bench.sim.deploy import RECOVER_S
from bench.sim.faults import AFTERMATH_S
from messages.system import Cause
from messages.types import Fault

PATIENCE_S = 30.0  # a part may go on dying of its trouble for a while: back-off, launch, start
POISON_WORD = "dies of this prompt"
POISON_DEATHS_MAX = 6  # until it is suspect, is found in its group, and dies alone
ORDERED_S = 10.0  # until an order has been carried out
WHOLE_S = 10.0  # in a whole house nobody waits longer than this to be tried again
NEWS_S = 2.0  # from a death until a gateway has heard of it, in peace
NOTICED_S = 0.1  # until a gateway has heard that a client left
LEFT_S = 10.0  # in peace, whatever a client left has ended after this and a few steps
LEFT_STEPS = 6


class Health:
    """When a house was whole: all parts running, no trouble."""

    def __init__(self, time: Callable[[], float]) -> None:
        self.time = time
        self.spans: list[list[float]] = []  # [first, last] looks that found it so
        self.is_whole = False

    def note(self, is_whole: bool) -> None:
        now_s = self.time()
        if is_whole and not self.is_whole:
            self.spans.append([now_s, now_s])
        elif is_whole:
            self.spans[-1][1] = now_s
        self.is_whole = is_whole

    def whole_for(self, at_s: float) -> float:
        return max((at_s - first for first, last in self.spans if first <= at_s <= last), default=0)


def news_since(at_s: float, troubles: Iterable[tuple[float, float]]) -> float:
    """The earliest death whose news may still come to a gateway at `at_s`: they take a while, and
    that stands still while a gateway, or all, stand still or are cut off. `troubles`: when each
    began, and its end."""
    since_s, left_s = at_s, NEWS_S
    for begin_s, until_s in sorted(troubles, key=lambda trouble: trouble[1], reverse=True):
        calm_s = max(0.0, since_s - until_s)
        if calm_s > left_s:
            break
        left_s -= calm_s
        since_s = min(since_s, begin_s)
    return since_s - left_s


class Judge:
    def __init__(self, world: Any) -> None:
        self.world = world

    def outcome(self, outcome: Outcome) -> None:
        """Raises AssertionError where nothing explains it."""
        ask, problem, world = outcome.ask, outcome.problem, self.world
        where = f"{ask.name} ({ask.reader})"
        if outcome.is_whole:
            assert not ask.is_impossible, f"{where} fits a grammar that nothing fits"
            assert ask.prompt[0] != world.scenario.poison, f"{where} outlived its poison"
            return
        if problem is None and ask.reader.endswith(("leaves", "hasty")):
            return
        if world.gave_up is not None:
            return
        assert problem is not None, f"{where} has no end"
        shape = world.scenario.shape
        match problem.code:
            case "stream_cut":
                assert ask.reader in ("stuck", "slow", "http slow"), f"{where} was cut"
            case "interrupted":
                waited_s = outcome.end_s - outcome.begin_s
                assert waited_s >= RECOVER_S, f"{where} given up after {waited_s:g} s"
                whole_s = world.health.whole_for(outcome.end_s)
                assert whole_s <= WHOLE_S, f"{where} given up by a house whole for {whole_s:g} s"
            case "repeatedly_interrupted":
                # Who asks while the news of a death is under way is blamed for it too.
                begin_s = news_since(outcome.begin_s, world.injector.troubles)
                deaths = self.deaths(begin_s, outcome.end_s)
                assert len(deaths) >= LOSSES_MAX, f"{where} was blamed for {deaths}"
                if ask.prompt[0] == world.scenario.poison:
                    world.seen["poison was given up"] += 1
            case "invalid_grammar":
                assert ask.is_impossible, f"{where}: {problem.message}"
                world.seen["a grammar was refused"] += 1
            case "grammar_timeout":
                # Only its own time counts, whatever messages and troubles take.
                is_slow = shape.compile_s > shape.grammar_timeout_s
                assert ask.grammar and is_slow, f"{where}: {problem.message}"
            case _:
                assert problem.fault is Fault.OVERLOADED, f"{where}: {problem}"
                self.overload(outcome, where)

    def restarts(self) -> None:
        """Who was asked to restart, with nothing else going on, has had another life since."""
        world = self.world
        for at_s, path, incarnation in world.injector.restarts:
            if world.loop.time() < at_s + ORDERED_S:  # the play has ended meanwhile
                continue
            others = [
                when
                for when, until_s in world.injector.troubles
                if when != at_s and when <= at_s + ORDERED_S and until_s + ORDERED_S >= at_s
            ]
            others += [when for when, _, _ in world.deaths if abs(when - at_s) <= ORDERED_S]
            lives_on = world.system.leaves[path].incarnation == incarnation
            assert others or not lives_on, f"{path} was asked to restart at {at_s:g} s, and is not"

    def stillness(self) -> None:
        """Where all stood still together, and nothing else was done, nobody is taken for hung, but
        for a silence that was too long without it: a wire may lose many beats in a row."""
        world = self.world
        for at_s, until_s in world.injector.stills:
            others = [
                when
                for when, end_s in world.injector.troubles
                if when != at_s and when <= until_s + ORDERED_S and end_s + ORDERED_S >= at_s
            ]
            others += [
                when
                for when in world.pace.stuck_at
                if at_s - ORDERED_S <= when <= until_s + ORDERED_S
            ]
            hung = [
                path
                for when, path, reason in world.deaths
                if reason.cause is Cause.HUNG
                and at_s <= when <= until_s + ORDERED_S
                and self.silence_s(when, path) <= world.scenario.shape.hang_s
            ]
            assert others or not hung, f"{hung} were killed at {until_s:g} s, when all stood still"
            if not others:
                world.seen["all stood still, and nobody was blamed"] += 1

    def silence_s(self, when: float, path: str) -> float:
        """For how long the root had not heard of the node of who died, while time went on."""
        since_s = self.world.silent_since[when, path]
        stood_s = sum(
            max(0.0, min(until_s, when) - max(at_s, since_s))
            for at_s, until_s in self.world.injector.stills
        )
        return when - since_s - stood_s

    def giving_up(self, at_s: float) -> None:
        """In peace a house gives up only of what was done to it just before, or of poison: those
        deaths are counted as any others. `at_s`: when the root gave up."""
        injector, shape = self.world.injector, self.world.scenario.shape
        if injector.peace_s is None or at_s <= injector.peace_s:
            return
        deaths = [death for death in self.world.deaths if death[2].cause is not Cause.STOPPED]
        last_s = max((when for when, _, _ in deaths), default=0.0)
        assert at_s - last_s <= PATIENCE_S, f"gave up in peace, {at_s - last_s:g} s after a death"
        strange = [
            (when, path, reason.detail)
            for when, path, reason in deaths
            if when > injector.peace_s + shape.hang_s + AFTERMATH_S
            and POISON_WORD not in reason.detail
        ]
        assert not strange, f"gave up in peace, of {strange}"

    def poison(self) -> None:
        """A part may die of a guilty request a few times, until it is found; not for ever."""
        guilty = [
            outcome.asked
            for outcome in self.world.outcomes
            if outcome.ask.prompt[0] == self.world.scenario.poison
        ]
        deaths = [at_s for at_s, _, reason in self.world.deaths if POISON_WORD in reason.detail]
        limit = POISON_DEATHS_MAX * sum(guilty)
        assert len(deaths) <= limit, f"{len(deaths)} deaths of poison, by {guilty} requests"

    def overload(self, outcome: Outcome, where: str) -> None:
        shape, problem = self.world.scenario.shape, outcome.problem
        assert problem is not None
        is_told = problem.retry_after_s is not None
        assert is_told, f"{where} is not told when to try again: {problem}"
        self.world.seen["refused with Retry-After"] += 1
        # What a dead gateway asked for is there until the news has come, also for who has an end.
        begin_s = news_since(outcome.begin_s, self.world.injector.troubles)
        asked = sum(
            3 * other.asked
            for other in self.world.outcomes
            if other.came_s <= outcome.end_s and other.end_s >= begin_s
        )
        if problem.message == busy().message:
            self.turn(outcome, where)
            return
        is_full = shape.mailbox_max or asked > shape.queued_max
        assert is_full, f"{where}: {problem.message}"

    def turn(self, outcome: Outcome, where: str) -> None:
        """Whose constraint had no turn: others' were there, more than are compiled at once, and
        took long, or whoever compiles them was in trouble or hard to reach."""
        shape, asks = self.world.scenario.shape, self.world.scenario.asks
        grammars = {ask.grammar for ask in asks if ask.grammar or ask.tools}
        assert len(grammars) > THREADS, f"{where} waits for a turn, among {len(grammars)}"
        waited_s = outcome.end_s - outcome.begin_s
        assert waited_s >= shape.grammar_timeout_s, f"{where} had no turn for {waited_s:g} s"
        calm_s = outcome.end_s - self.trouble_before(outcome.end_s)
        is_troubled = calm_s <= shape.grammar_timeout_s + PATIENCE_S
        is_slow = shape.compile_s * len(grammars) > THREADS * shape.grammar_timeout_s
        is_troubled |= shape.mailbox_max > 0 or self.world.scenario.menu.drop > 0
        assert is_slow or is_troubled, f"{where} had no turn, and nothing was in its way"
        self.world.seen["a constraint had no turn"] += 1

    def deaths(self, begin_s: float, end_s: float) -> set[float]:
        """When something died that a request may be blamed for. What dies together counts once."""
        return {
            round(at_s, 3)
            for at_s, path, reason in self.world.deaths
            if begin_s <= at_s <= end_s and path != "metrics" and reason.cause is not Cause.STOPPED
        }

    def trouble_before(self, at_s: float) -> float:
        """When the last thing that went wrong before was over."""
        ends = [until_s for when, until_s in self.world.injector.troubles if when <= at_s]
        ends += [when for when, _, _ in self.world.deaths if when <= at_s]
        return max(ends, default=0.0)

    async def see_off(self, life: Life, call_id: str) -> None:
        """A client has left. Its call is over at once; what ran for it, soon."""
        world, loop = self.world, asyncio.get_running_loop()
        left_s = loop.time()
        await asyncio.sleep(NOTICED_S)
        is_there = not life.is_dead and not world.house.is_stopped(life.address.node)
        if is_there and self.trouble_before(loop.time()) < left_s:
            calls, records = life.actor.calls.open, life.actor.recovery.ledger.records  # type: ignore[attr-defined]
            assert call_id not in calls, f"{call_id} is open, and its client has left"
            running = [
                name
                for name, record in records.items()
                if record.call_id == call_id and record.stage.value != "cancelled"
            ]
            assert not running, f"{running} go on, and their client has left"
        shape = world.scenario.shape
        step_s = shape.step_s * world.pace.factor
        await asyncio.sleep(LEFT_S + LEFT_STEPS * step_s)
        troubled = self.trouble_before(loop.time()) > left_s - LEFT_S or world.pace.factor > 1.0
        if troubled or shape.mailbox_max or world.gave_up is not None:
            return  # a cancel may have been lost, and is waited for then: peace looks after it
        left = laws.what_is_left_of(call_id, world.nodes())
        assert not left, f"{left}, {loop.time() - left_s:g} s after their client has left"
        world.seen["left, and its request ended in time"] += 1
