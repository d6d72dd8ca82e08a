"""This file draws worlds: what is deployed, who asks for what, and what goes wrong.

It does not know how anything is run. Each stream of draws has a name of its own (shape, workload,
faults; the wire and the loop have theirs), so that a change of one does not shift the others. Each
seed draws its own rates (a swarm), since what a mean world does hardly ever, some world does all
the time.
"""

from __future__ import annotations

import random
from typing import NamedTuple

from actors.runtime.clock import rng_for
from bench.sim.rooms import END
from bench.sim.shadow import CHOICE_STRIDE, continuation
from bench.sim.text import VOCAB_SIZE

CONTEXT_LEN = 192

# Where the actors live: as `serve` does it, as the Engine does it, and further apart.
SERVE = {
    "metrics": "front",
    "detokenizer": "front",
    "router": "front",
    "tokenizer": "front",
    "gateway": "front",
    "scheduler": "engine",
    "cache": "engine",
    "worker": "worker",
}
ENGINE = {**SERVE, "gateway": "main"}
APART = {
    "metrics": "main",
    "detokenizer": "detokenizer",
    "router": "router",
    "tokenizer": "tokenizer",
    "gateway": "main",
    "scheduler": "scheduler",
    "cache": "cache",
    "worker": "worker",
}
PLACES = {"serve": SERVE, "engine": ENGINE, "apart": APART}


class Shape(NamedTuple):
    """The deployment."""

    placement: str
    page_size: int
    kv_tokens: int
    running_max: int
    queued_max: int
    prefill_budget: int
    policy: str
    prefix_cache: bool
    credits: int
    step_s: float
    delay_s: float
    heartbeat_s: float
    hang_s: float
    launch_s: float
    restarts_max: int
    mailbox_max: int  # of front rooms; 0: as they are
    shuffles: bool  # the order of callbacks is the seed's as well


class Ask(NamedTuple):
    """One call of one client."""

    name: str
    at_s: float
    prompt: tuple[int, ...]
    max_tokens: int
    seed: int
    ignore_eos: bool
    stop_ids: tuple[int, ...]
    stop: str
    logprobs: bool
    choice_count: int
    namespace: str
    reader: str  # plain | slow | stuck | leaves | http | http leaves | http slow
    after: int  # tokens until it is stuck or leaves
    pause_s: float  # of a slow one, between reads

    def tokens(self, choice: int) -> list[int]:
        """What it gets: a plain function of what it asks."""
        tokens = continuation(
            list(self.prompt),
            self.max_tokens,
            namespace=self.namespace,
            seed=self.seed + CHOICE_STRIDE * choice,
            vocab_size=VOCAB_SIZE,
        )
        ends = set(self.stop_ids) | (set() if self.ignore_eos else {END})
        for index, token in enumerate(tokens):
            if token in ends:
                return tokens[: index + 1]
        return tokens


class Menu(NamedTuple):
    """How often each fault comes, relative to the others, and the rates of the wire."""

    gap_s: float  # mean time between faults
    weights: dict[str, float]
    drop: float
    repeat: float


class Scenario(NamedTuple):
    seed: int
    duration_s: float
    shape: Shape
    asks: tuple[Ask, ...]
    menu: Menu
    poison: int | None = None  # the worker dies of a prompt that begins with this token


FAULTS = (
    "kill",
    "kill at a message",
    "kill in pairs",
    "stop",
    "stop for long",
    "crash an actor",
    "clog",
    "cut one way",
    "cut",
    "slow device",
    "launch fails",
    "killed in start",
    "crash loop",
)


def draw(seed: int, duration_s: float, *, shuffles: bool = False) -> Scenario:
    shape = draw_shape(rng_for(seed, "shape"), shuffles)
    asks = draw_asks(rng_for(seed, "workload"), duration_s, shape)
    menu = draw_menu(rng_for(seed, "menu"))
    return Scenario(seed, duration_s, shape, asks, menu)


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
