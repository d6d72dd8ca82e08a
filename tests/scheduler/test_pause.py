"""Goal: an operator may pause, let go on and clear the cache at any moment, and no output changes.

Method: the scheduler with the real cache and a shadow worker; messages in an order by the seed.
"""

from __future__ import annotations

import random

import pytest

from messages.cache import Clear, Cleared
from messages.scheduler import Continue, Inspect, Load, Pause
from messages.types import FinishReason
from tests.scheduler.test_simulation import add_request, make_world
from tests.scheduler.world import World


def say(world: World, message: Pause | Continue) -> Load:
    world.scheduler.tell(message)
    world.collect()
    found = world.scheduler.replies[-1]
    assert isinstance(found, Load)
    return found


def clear(world: World) -> Cleared:
    world.cache.tell(Clear())
    world.collect()
    found = world.cache.replies[-1]
    assert isinstance(found, Cleared)
    world.cache_actor.check()
    return found


def finish(world: World) -> None:
    world.settle()
    for name in world.clients:
        world.verify(name)
    world.verify_idle()


def prompt_of(length: int) -> list[int]:
    return [(7 * i) % 64 for i in range(length)]


def running_world(*, steps: int = 6) -> World:
    world = World()
    world.submit("a", prompt_of(10), max_tokens=40)
    for _ in range(steps * 10):
        world.deliver()
    assert world.scheduler_actor.schedule.running_count == 1
    return world


def test_nothing_is_launched_while_paused_and_all_goes_on_afterwards() -> None:
    world = running_world()
    load = say(world, Pause())
    assert load.is_paused and load.running_count == 1 and load.used_len >= 10
    world.settle()
    had = len(world.clients["a"].output)
    world.submit("b", prompt_of(6))
    world.settle()
    assert world.clients["b"].output == [] and len(world.clients["a"].output) == had
    assert world.scheduler_actor.schedule.running_count == 1, "it keeps its place"
    load = say(world, Continue())
    assert not load.is_paused
    finish(world)


def test_a_retracting_pause_gives_every_page_back() -> None:
    world = running_world()
    say(world, Pause(retract=True))
    world.settle()
    world.scheduler.tell(Inspect())
    load = world.scheduler.replies[-1]
    assert isinstance(load, Load)
    assert (load.running_count, load.waiting_count, load.used_len) == (0, 1, 0)
    assert load.waiting_len > 10
    cleared = clear(world)
    assert cleared.leased_count == 0 and cleared.freed_count > 0
    counts = world.cache_actor.ledger.counts()
    assert counts.free == world.shadow.facts.page_count
    say(world, Continue())
    finish(world)


def test_the_cache_is_not_cleared_under_those_who_run() -> None:
    world = running_world()
    cleared = clear(world)
    assert cleared.leased_count > 0 and cleared.freed_count == 0
    finish(world)
    world.submit("again", prompt_of(10))
    world.settle()
    assert world.clients["again"].usage.cached_tokens > 0
    assert clear(world).freed_count > 0
    world.submit("once more", prompt_of(10))
    world.settle()
    assert world.clients["once more"].usage.cached_tokens == 0
    finish(world)


def test_a_cancel_is_acknowledged_while_paused() -> None:
    world = running_world()
    say(world, Pause())
    world.submit("b", prompt_of(6))
    world.settle()
    for name in ("a", "b"):
        world.cancel(name)
    world.settle()
    for name in ("a", "b"):
        assert world.clients[name].finish is FinishReason.ABORT
    say(world, Continue())
    finish(world)


@pytest.mark.parametrize("seed", range(150))
def test_pauses_and_clears_at_any_moment_change_no_output(seed: int) -> None:
    rng = random.Random(seed)
    world = make_world(rng, seed)
    stems = [[rng.randrange(world.vocab_size) for _ in range(40)] for _ in range(2)]
    for index in range(rng.randint(1, 8)):
        add_request(rng, world, index, stems)
        for _ in range(rng.randint(0, 30)):
            world.deliver()
            chance = rng.random()
            if chance < 0.04:
                say(world, Pause(retract=rng.random() < 0.5))
            elif chance < 0.1:
                say(world, Continue())
            elif chance < 0.14:
                clear(world)
            world.scheduler_actor.check()
    world.settle()
    say(world, Continue())
    finish(world)
