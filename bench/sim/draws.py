"""This file draws worlds, each from its seed.

It does not know how anything is run. Each stream of draws has a name of its own (shape, workload,
faults; the wire and the loop have theirs), so that a change of one does not shift the others. Each
seed draws its own rates (a swarm), since what a mean world does hardly ever, some world does all
the time. What was thought of later is drawn from streams of its own, age by age (`enrich`, then
`widen.py`, then `extend.py`), so that a seed which once found a bug can still be drawn as it was
then.
"""

from __future__ import annotations

import enum
import random

from actors.runtime.clock import rng_for
from bench.sim.extend import extend
from bench.sim.scenario import (
    FRONTS,
    GRAMMARS,
    IMPOSSIBLE,
    POISON,
    WORDS,
    Ask,
    Drain,
    Menu,
    Scenario,
    Shape,
)
from bench.sim.sights import FAULTS, MORE_FAULTS
from bench.sim.text import VOCAB_SIZE
from bench.sim.widen import widen


class Age(enum.IntEnum):
    """When a world was drawn as it is: what is kept stays as it was when it found its bug."""

    FIRST = 1
    RICH = 2  # with `enrich`
    WIDE = 3  # and with `widen`
    LONG = 4  # and with `extend`


def draw(seed: int, duration_s: float, *, shuffles: bool = False, age: Age = Age.LONG) -> Scenario:
    shape = draw_shape(rng_for(seed, "shape"), shuffles)
    menu = draw_menu(rng_for(seed, "menu"))
    if age is Age.FIRST:
        asks = draw_asks(rng_for(seed, "workload"), duration_s, shape)
        return Scenario(seed, duration_s, shape, asks, menu)
    more = rng_for(seed, "more")
    # A deployment's day has its nights: a part of it in which hardly anybody asks for anything.
    quiet_s = duration_s * more.choice((0.0, 0.3, 0.6))
    asks = draw_asks(rng_for(seed, "workload"), duration_s - quiet_s, shape)
    scenario = enrich(Scenario(seed, duration_s, shape, asks, menu), quiet_s, more)
    if age is Age.RICH:
        return scenario
    scenario = widen(scenario)
    return scenario if age is Age.WIDE else extend(scenario)


def enrich(scenario: Scenario, quiet_s: float, rng: random.Random) -> Scenario:
    shape, menu = scenario.shape, scenario.menu
    # Most worlds need no more than one heartbeat a second, which leaves the time to others.
    heartbeat_s = rng.choice((shape.heartbeat_s, 1.0, 1.0))
    placement = rng.choice((shape.placement, shape.placement, *FRONTS))
    shape = shape._replace(
        placement=placement,
        heartbeat_s=heartbeat_s,
        hang_s=8 * heartbeat_s,
        spares=rng.random() < 0.5,
        waits=shape.mailbox_max > 0 and rng.random() < 0.6,
        compile_s=rng.choice((0.0, 0.01, 0.3, 4.0)),
        grammar_timeout_s=rng.choice((2.0, 10.0, 10.0)),
        resume_s=rng.choice((1.0, 10.0, 30.0)),
        resume_streams_max=rng.choice((1, 128, 128)),
        encode_s=rng.choice((0.0, 0.001, 0.05, 1.0)),
    )
    weights = menu.weights | {fault: rng.choice((0.0, 0.0, 1.0, 3.0)) for fault in MORE_FAULTS}
    dusk_s = rng.uniform(0.0, max((ask.at_s for ask in scenario.asks), default=0.0))
    asks = tuple(
        enrich_ask(ask._replace(at_s=ask.at_s + quiet_s * (ask.at_s > dusk_s)), rng)
        for ask in scenario.asks
    )
    poison = None
    if rng.random() < 0.2 and asks:
        poison = POISON
        guilty = rng.sample(range(len(asks)), min(len(asks), rng.choice((1, 1, 2))))
        asks = tuple(
            poisoned(ask) if index in guilty else without(POISON, ask)
            for index, ask in enumerate(asks)
        )
    drain = None
    if rng.random() < 0.4 and asks:
        chosen = [rng.choice(asks) for _ in range(rng.randint(1, 12))]
        drain = Drain(
            tuple(
                without(POISON, ask)._replace(name=f"late{i}", at_s=rng.uniform(0, 3.0))
                for i, ask in enumerate(chosen)
            ),
            after_s=rng.uniform(0.5, 3.0),
            grace_s=rng.choice((1.0, 20.0, 60.0)),
            kills=rng.random() < 0.4,
        )
    return scenario._replace(
        shape=shape,
        asks=asks,
        menu=menu._replace(weights=weights, gap_s=rng.choice((menu.gap_s, menu.gap_s, 30.0))),
        poison=poison,
        drain=drain,
        spoils=rng.random() < 0.03,
    )


def enrich_ask(ask: Ask, rng: random.Random) -> Ask:
    ask = ask._replace(front=rng.randrange(6), penalised=rng.random() < 0.2)
    if ask.reader.startswith("http"):
        reader = rng.choice((ask.reader, ask.reader, "http whole", "http returns", "http returns"))
        ask = ask._replace(reader=reader)
    if rng.random() < 0.12 and ask.reader in ("plain", "http"):
        # It leaves with most of the work before it, which then must not be done.
        reader = "leaves" if ask.reader == "plain" else "http leaves"
        ask = ask._replace(reader=reader, after=rng.randint(0, 3), max_tokens=80, ignore_eos=True)
    if rng.random() < 0.15 and not ask.stop_ids:
        of_bodies = [each for each in GRAMMARS if len(each) == 2 and each[0] != "structural_tag"]
        grammars = of_bodies if ask.reader.startswith("http") else GRAMMARS
        ask = ask._replace(grammar=rng.choice(grammars), ignore_eos=False)
    elif rng.random() < 0.02:
        ask = ask._replace(grammar=IMPOSSIBLE, is_impossible=True, stop_ids=(), ignore_eos=False)
    return enrich_more(ask, rng)


def enrich_more(ask: Ask, rng: random.Random) -> Ask:
    """Ways to ask and to end; and who leaves before anything has come."""
    chance = rng.random()
    if ask.is_impossible:
        return ask
    if chance < 0.2:
        ask = ask._replace(meets=rng.choice(("string", "pattern")))
    elif chance < 0.25 and ask.reader in ("plain", "http whole"):
        wants = "vector" if ask.reader == "http whole" else rng.choice(("vector", "scores"))
        ask = ask._replace(
            wants=wants, max_tokens=1, choice_count=1, grammar=(), stop_ids=(), ignore_eos=True,
            penalised=False, logprobs=False,
        )  # fmt: skip
    elif chance < 0.3 and ask.reader in ("plain", "http"):
        reader = "hasty" if ask.reader == "plain" else "http hasty"
        ask = ask._replace(reader=reader, pause_s=rng.choice((0.0, 0.02, 0.3)), max_tokens=80,
                           ignore_eos=True, stop_ids=(), grammar=())  # fmt: skip
    elif chance < 0.34 and ask.reader.startswith("http"):
        grammar = ask.grammar if ask.grammar[:1] == ("json_schema",) else ()
        ask = ask._replace(reader="http background", choice_count=1, stop_ids=(), grammar=grammar,
                           meets=ask.meets and "string")  # fmt: skip
    if ask.reader.startswith("http") and rng.random() < 0.2 and not ask.wants:
        ask = ask._replace(logprobs=ask.reader != "http background")
    is_text = ask.reader == "http background" or (rng.random() < 0.15 and not ask.wants)
    if is_text:
        words = rng.choices(WORDS, k=rng.randint(1, 12))
        ask = ask._replace(text=" ".join(words))
    return ask


def without(token: int, ask: Ask) -> Ask:
    """The same with another beginning, where it begins with `token`."""
    return ask._replace(prompt=(3, *ask.prompt[1:])) if ask.prompt[0] == token else ask


def poisoned(ask: Ask) -> Ask:
    """What the worker dies of. It stays to hear so."""
    return ask._replace(
        prompt=(POISON, *ask.prompt[1:]),
        reader="http" if ask.reader.startswith("http") else "plain",
        grammar=(),
        is_impossible=False,
        choice_count=1,
        text="",
        wants="",
    )


def draw_shape(rng: random.Random, shuffles: bool) -> Shape:
    page_size = rng.choice((1, 4, 16))
    heartbeat_s = rng.choice((0.25, 0.25, 1.0))
    return Shape(
        placement=rng.choice(("serve", "engine", "apart")),
        page_size=page_size,
        kv_tokens=rng.choice((208, 272, 640)) // page_size * page_size,
        running_max=rng.choice((2, 4, 16)),
        queued_max=rng.choice((2, 64, 64)),
        prefill_budget=rng.choice((16, 33, 256)),
        policy=rng.choice(("fcfs", "lpm")),
        prefix_cache=rng.random() < 0.9,
        credits=rng.choice((1, 2, 2)),
        step_s=rng.choice((0.005, 0.05, 0.2)),
        delay_s=rng.choice((0.0001, 0.002, 0.01, 0.05)),
        heartbeat_s=heartbeat_s,
        hang_s=8 * heartbeat_s,
        launch_s=rng.choice((0.05, 0.5, 3.0)),
        restarts_max=rng.choice((5, 1_000_000, 1_000_000, 1_000_000)),
        mailbox_max=rng.choice((0, 0, 0, 1, 4)),
        shuffles=shuffles,
    )


def draw_asks(rng: random.Random, duration_s: float, shape: Shape) -> tuple[Ask, ...]:
    """Bursts with quiet in between; prompts that share beginnings, within and across namespaces."""
    shared = tuple(rng.randrange(3, VOCAB_SIZE) for _ in range(60))
    asks: list[Ask] = []
    at_s = 0.0
    while at_s < duration_s * 0.7 and len(asks) < 400:
        for _ in range(rng.choice((1, 2, 4, 12))):
            asks.append(draw_ask(rng, f"c{len(asks)}", at_s + rng.uniform(0, 2.0), shared))
        at_s += rng.expovariate(1 / 20.0)
    return tuple(asks)


def draw_ask(rng: random.Random, name: str, at_s: float, shared: tuple[int, ...]) -> Ask:
    prompt = shared[: rng.choice((0, 0, 17, 32, 60))]
    prompt += tuple(rng.randrange(3, VOCAB_SIZE) for _ in range(rng.randint(1, 40)))
    if rng.random() < 0.1:  # just what another one asks
        prompt = shared[: rng.choice((16, 48))]
    max_tokens = rng.choice((1, 3, 10, 30, 60))
    reader = rng.choice(
        ("plain",) * 8 + ("slow", "stuck", "leaves", "http", "http", "http leaves", "http slow")
    )
    is_http = reader.startswith("http")
    ask = Ask(
        name=name,
        at_s=at_s,
        prompt=prompt,
        max_tokens=max_tokens,
        seed=rng.randrange(4),
        ignore_eos=rng.random() < 0.6,
        stop_ids=(),
        stop="",
        logprobs=not is_http and rng.random() < 0.2,
        choice_count=rng.choice((1,) * 9 + (3,)),
        namespace="" if is_http else rng.choice(("", "", "a", "b")),
        reader=reader,
        after=rng.randint(0, 12),
        pause_s=rng.choice((0.05, 0.5, 2.0)),
    )
    if rng.random() < 0.1:
        ask = ask._replace(stop_ids=(rng.choice(ask.tokens(0)),))
    return ask


def draw_menu(rng: random.Random) -> Menu:
    weights = {fault: rng.choice((0.0, 0.0, 1.0, 3.0)) for fault in FAULTS}
    if not any(weights.values()):
        weights["kill"] = 1.0
    return Menu(
        gap_s=rng.choice((1.0, 5.0, 20.0, 60.0)),
        weights=weights,
        drop=rng.choice((0.0, 0.0, 0.01, 0.05)),
        repeat=rng.choice((0.0, 0.0, 0.01, 0.05)),
    )
