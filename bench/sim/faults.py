"""This file does to a world what its seed says, until it is time to leave it in peace.

It does not know what is right afterwards (`laws.py`). What it does is counted by kind, so that it
can be seen whether a fault has ever happened.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from typing import Any

from actors.gateway.actor import Gateway
from actors.runtime.clock import rng_for
from actors.runtime.codec import kind_of
from actors.runtime.life import Life
from actors.runtime.node import Node
from bench.sim.house import House
from bench.sim.rooms import Pace
from bench.sim.scenario import Menu
from bench.sim.wire import Wire
from messages.system import State

AFTERMATH_S = 5.0  # links are made anew, a hang is found
STUCK_S = 30.0  # how long a forward that hangs may trouble others, its watch included


class Injector:
    """The faults of one world."""

    def __init__(
        self,
        seed: int,
        menu: Menu,
        house: House,
        wire: Wire,
        pace: Pace,
        nodes: Callable[[], list[Node]],
        tell: Callable[[str], None],
    ) -> None:
        self.rng = rng_for(seed, "faults")
        self.menu = menu
        self.house = house
        self.wire = wire
        self.pace = pace
        self.nodes = nodes
        self.tell = tell
        self.fired: Counter[str] = Counter()
        self.site: tuple[str, int, bool] | None = None  # kind, how many to let pass, before it
        self.loop_of: tuple[str, int] | None = None  # a node that dies each time it is up
        self.is_over = False
        self.peace_s: float | None = None  # since when
        self.later: list[asyncio.TimerHandle] = []
        self.restarts: list[tuple[float, str, int]] = []  # asked for: when, of which life
        self.stills: list[tuple[float, float]] = []  # when everything stood still, and until when
        self.troubles: list[tuple[float, float]] = []  # when something was done, and its end

    async def run(self, until_s: float) -> None:
        loop = asyncio.get_running_loop()
        kinds, weights = zip(*self.menu.weights.items(), strict=True)
        while True:
            next_s = loop.time() + self.rng.expovariate(1.0 / self.menu.gap_s)
            await asyncio.sleep(min(next_s, until_s) - loop.time())
            if next_s >= until_s:
                break
            self.fire(self.rng.choices(kinds, weights)[0])
        self.end()

    def is_trouble(self, now_s: float) -> bool:
        """What was done has not passed yet."""
        if self.pace.factor > 1.0 or self.pace.is_stuck or self.loop_of is not None:
            return True
        return any(until_s + AFTERMATH_S > now_s for _, until_s in self.troubles)

    def end(self) -> None:
        """Peace: nothing new happens, and what was held is let go."""
        if not self.is_over:
            self.peace_s = self.house.loop.time()
        self.is_over = True
        for timer in self.later:
            timer.cancel()
        self.site = None
        self.loop_of = None
        self.pace.factor = 1.0
        self.pace.is_stuck = False
        self.wire.trouble.heal()
        self.house.launches_to_fail = self.house.launches_to_break = 0
        for name in self.house.alive():
            self.house.go_on(name)

    def fire(self, kind: str) -> None:
        house, rng = self.house, self.rng
        alive = house.alive()
        name = rng.choice(alive) if alive else None
        now_s = until_s = house.loop.time()
        match kind:
            case "kill":
                if name is None or not house.kill(name):
                    return
            case "kill in pairs":
                if len(alive) < 2:
                    return
                for other in rng.sample(alive, 2):
                    house.kill(other)
            case "kill at a message":
                body, passes = rng.choice(self.menu.sites), rng.randrange(self.menu.passes_max)
                self.site = (body, passes, rng.random() < 0.5)
                return  # counted when it happens
            case "stop" | "stop for long":
                is_long = kind == "stop for long"
                low_s, high_s = (
                    (house.hang_s, 4 * house.hang_s) if is_long else (0.01, house.hang_s)
                )
                if name is None or not house.stop(name):
                    return
                until_s += rng.uniform(low_s, high_s)
                self.later.append(house.loop.call_at(until_s, house.go_on, name))
            case "crash an actor":
                if not self.crash():
                    return
            case "clog" | "cut one way" | "cut":
                pair = self.pair()
                if pair is None:
                    return
                until_s = now_s + rng.choice((0.1, 1.0, house.hang_s, 5 * house.hang_s))
                trouble = self.wire.trouble
                (trouble.clogged if kind == "clog" else trouble.cut)[pair] = until_s
                if kind == "cut":
                    trouble.cut[pair[1], pair[0]] = until_s
            case "swizzle":
                until_s = self.swizzle()
            case "everything stands still":
                # The host of all of it: time has passed, and nobody had a part of it.
                until_s += rng.choice((0.5, house.hang_s, 4 * house.hang_s))
                house.loop.jump(until_s - now_s)
                self.stills.append((now_s, until_s))
            case "slow device":
                self.pace.factor = rng.choice((1.0, 10.0, 100.0))
            case "forward hangs":
                self.pace.is_stuck = True
                until_s += STUCK_S
            case "restart asked for":
                if not self.restart():
                    return
            case "launch fails":
                house.launches_to_fail = rng.randint(1, 2)
                return
            case "killed in start":
                house.launches_to_break = rng.randint(1, 2)
                return
            case "crash loop":
                if name is None:
                    return
                self.loop_of = (name, rng.randint(1, 3))
                house.kill(name)
        self.fired[kind] += 1
        self.troubles.append((now_s, until_s))
        self.tell(f"{kind} {name or ''}")

    def swizzle(self) -> float:
        """Some nodes' links are clogged one after the other, and freed in another order. Returns
        when the last one is."""
        names = ["main", *self.house.alive()]
        now_s, hang_s = self.house.loop.time(), self.house.hang_s
        last_s = now_s
        for name in self.rng.sample(names, self.rng.randint(1, len(names))):
            begin_s = now_s + self.rng.uniform(0.0, hang_s)
            end_s = begin_s + self.rng.uniform(0.0, hang_s)
            self.later.append(self.house.loop.call_at(begin_s, self._clog, name, end_s))
            last_s = max(last_s, end_s)
        return last_s

    def _clog(self, name: str, until_s: float) -> None:
        if self.is_over:
            return
        for other in ("main", *self.house.processes):
            if other != name:
                for pair in ((name, other), (other, name)):
                    clogged = self.wire.trouble.clogged
                    clogged[pair] = max(until_s, clogged.get(pair, 0.0))

    def pair(self) -> tuple[str, str] | None:
        names = ["main", *self.house.alive()]
        if len(names) < 2:
            return None
        one, other = self.rng.sample(names, 2)
        return one, other

    def crash(self) -> bool:
        """A bug in some actor: it is restarted in place."""
        lives = self.lives()
        if not lives:
            return False
        life = self.rng.choice(lives)
        if life.state in (State.STOPPING, State.STOPPED):
            return False
        self.tell(f"crash of {life.address} in {life.state}")
        life.crash(RuntimeError("a simulated bug"))
        return True

    def restart(self) -> bool:
        """An operator asks some gateway for a new life of any actor: a rolling restart, one by
        one."""
        gateways = [life for life in self.lives() if isinstance(life.actor, Gateway)]
        running = [life for life in gateways if life.state is State.RUNNING]
        if not running:
            return False
        gateway = self.rng.choice(running).actor
        assert isinstance(gateway, Gateway)
        known = sorted(row.path for row in gateway.controls.actor_rows())
        path = self.rng.choice(self.menu.restarted or known)
        self.tell(f"restart of {path} asked for")
        now_s = self.house.loop.time()
        self.restarts += [
            (now_s, path, life.address.incarnation)
            for life in self.lives()
            if life.address.path == path and life.state is State.RUNNING
        ]
        if any(life.actor.calls.open for life in gateways if isinstance(life.actor, Gateway)):
            self.pace.seen["a restart was asked for with streams open"] += 1
        return gateway.controls.ask_restart(path)

    def lives(self) -> list[Life]:
        return [
            life
            for node in self.nodes()
            for life in node.lives.values()
            if not self.house.is_stopped(node.name)
        ]

    # Sites

    def before(self, node: Node, body: Any) -> None:
        self._at_site(node, body, is_before=True)

    def after(self, node: Node, body: Any) -> None:
        if self.is_over:
            return
        self._at_site(node, body, is_before=False)
        if self.loop_of is not None and self.loop_of[0] == node.name and node.lives:
            name, count = self.loop_of
            self.loop_of = (name, count - 1) if count > 1 else None
            self.house.loop.call_later(self.rng.uniform(0, 0.5), self._kill_again, name)

    def _kill_again(self, name: str) -> None:
        if not self.is_over and self.house.kill(name):
            self.fired["killed again"] += 1
            self.tell(f"kill again {name}")

    def _at_site(self, node: Node, body: Any, *, is_before: bool) -> None:
        if self.site is None or self.site[2] is not is_before:
            return
        if kind_of(body) != self.site[0]:
            return
        kind, left, _ = self.site
        if left > 0:
            self.site = (kind, left - 1, is_before)
            return
        self.site = None
        # Not within the call: the message that is in the transport's hands has arrived or is lost.
        if is_before:
            if self.house.kill(node.name):
                self.fired["kill before a message"] += 1
                self.tell(f"kill {node.name} before {kind}")
            return
        delay_s = self.rng.choice((0.0, 0.0001, 0.001))
        self.house.loop.call_later(delay_s, self._kill_after, node.name, kind)

    def _kill_after(self, name: str, kind: str) -> None:
        if not self.is_over and self.house.kill(name):
            self.fired["kill after a message"] += 1
            self.tell(f"kill {name} after {kind}")
