"""Goal: whatever the order of messages, the size of the pool and the moment of a cancel, a
request's output is the plain function of its prompt, it ends once, and all pages come back.

Method: the real scheduler and cache with a shadow worker; each seed is one world, one workload and
one order of delivery. To replay a failure: the seed is the test's parameter.
"""

from __future__ import annotations

import random
from typing import Any

import pytest

from messages.types import unpack
from messages.worker import Step
from tests.house.shadow import continuation
from tests.scheduler.world import World

SEEDS = range(240)


def make_world(rng: random.Random, seed: int) -> World:
    page_size = rng.choice([1, 4, 16])
    capacity_len = rng.choice([48, 64, 96, 160, 400])
    return World(
        page_size=page_size,
        page_count=max(3, capacity_len // page_size),
        running_max=rng.randint(1, 6),
        prefill_budget=rng.choice([1, 5, 16, 64]),
        policy=rng.choice(["fcfs", "lpm"]),
        max_inflight=rng.choice([1, 2, 2, 3]),
        prefix_cache=rng.random() < 0.8,
        context_len=rng.choice([64, 4096]),
        eos_ids=rng.choice([(), (3,)]),
        vocab_size=rng.choice([8, 64]),
        seed=seed,
        jump_len=rng.choice([lambda token: 0, lambda token: token % 5, lambda token: 3 * token]),
    )


def make_prompt(rng: random.Random, world: World, stems: list[list[int]]) -> list[int]:
    """A shared beginning and an own end, of a length that fits."""
    facts = world.shadow.facts
    longest = min(facts.context_len, facts.page_count * facts.page_size) - 1
    stem = rng.choice(stems)[: rng.randint(0, 40)]
    tail = [rng.randrange(world.vocab_size) for _ in range(rng.randint(1, 12))]
    return (stem + tail)[: rng.randint(1, longest)]


def add_request(rng: random.Random, world: World, index: int, stems: list[list[int]]) -> None:
    prompt = make_prompt(rng, world, stems)
    namespace = rng.choice(["", "", "salt"])
    seed = rng.choice([0, 0, index])
    facts = world.shadow.facts
    room = min(facts.context_len, facts.page_count * facts.page_size) - len(prompt)
    max_tokens = rng.randint(1, 24)
    emitted: list[int] = []
    wish: dict[str, Any] = {}
    if rng.random() < 0.25:
        # What is wanted is not text, and it comes with the first token.
        wish = rng.choice([{"want_vector": True}, {"label_ids": (3, 0, 3)}])
        max_tokens = 1
    elif rng.random() < 0.2:
        # A resumed attempt: some of the answer is already with the client.
        count = rng.randint(0, min(max_tokens, room))
        emitted = continuation(
            prompt, count, namespace=namespace, seed=seed, vocab_size=world.vocab_size
        )
        stops = {3, 5}
        ends = [at for at, token in enumerate(emitted) if token in stops]
        emitted = emitted[: ends[0]] if ends else emitted
    world.submit(
        f"r{index}",
        prompt,
        max_tokens=max_tokens,
        emitted=emitted,
        stop_token=rng.choice([None, None, 5]),
        namespace=namespace,
        priority=rng.choice([0, 0, 0, 1]),
        seed=seed,
        stop_ids=rng.choice([(), (5,)]),
        ignore_eos=rng.random() < 0.3,
        min_tokens=rng.choice([0, 0, min(4, max_tokens)]) if not emitted else 0,
        logprobs=rng.choice([None, 0]),
        **wish,
    )


def add_faults(rng: random.Random, world: World) -> None:
    """Some steps do not run, and some rows come to nothing."""

    def pick(step: Step) -> list[int]:
        slots = list(unpack(step.slots))
        if rng.random() < 0.5:
            return slots
        return rng.sample(slots, rng.randint(1, len(slots)))

    world.failures = lambda step: pick(step) if rng.random() < 0.03 else []
    world.spoiled = lambda step: pick(step)[:1] if rng.random() < 0.03 else []


@pytest.mark.parametrize("seed", SEEDS)
def test_every_order_of_events_gives_the_plain_output(seed: int) -> None:
    rng = random.Random(seed)
    world = make_world(rng, seed)
    stems = [[rng.randrange(world.vocab_size) for _ in range(40)] for _ in range(2)]
    count = rng.randint(1, 12)
    cancel_rate = rng.choice([0.0, 0.0, 0.3])
    if rng.random() < 0.25:
        add_faults(rng, world)
    added = 0
    while added < count:
        if rng.random() < 0.15:
            add_request(rng, world, added, stems)
            added += 1
        if rng.random() < cancel_rate * 0.1 and added:
            world.cancel(f"r{rng.randrange(added)}")
        world.deliver()
    restart_rate = rng.choice([0.0, 0.0, 0.02])
    for _ in range(rng.randint(0, 100)):
        world.deliver()
        if rng.random() < restart_rate:
            world.restart_scheduler()
        if rng.random() < cancel_rate * 0.2:
            world.cancel(f"r{rng.randrange(added)}")
    world.settle()
    for name in world.clients:
        world.verify(name)
    world.verify_idle()
    depth = world.scheduler_actor.schedule.depth
    assert world.max_inflight <= depth
    counters = world.scheduler.counters
    if restart_rate:
        return  # metrics are counted by each life
    told = sum(
        len(client.output) - len(client.submit.emitted) // 4 for client in world.clients.values()
    )
    assert counters.get("histrio_generated_tokens_total", 0) == told
    prompt_count = counters.get("histrio_prompt_tokens_total", 0)
    assert counters.get("histrio_cached_tokens_total", 0) <= prompt_count
