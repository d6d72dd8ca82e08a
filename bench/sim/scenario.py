"""This file draws worlds: what is deployed, who asks for what, and what goes wrong.

It does not know how anything is run. Each stream of draws has a name of its own (shape, workload,
faults; the wire and the loop have theirs), so that a change of one does not shift the others. Each
seed draws its own rates (a swarm), since what a mean world does hardly ever, some world does all
the time. What was thought of later is drawn from a stream of its own (`enrich`), so that a seed
which once found a bug can still be drawn as it was then.
"""

from __future__ import annotations

import random
from typing import NamedTuple

from actors.runtime.clock import rng_for
from bench.sim.shadow import CHOICE_STRIDE, continuation
from bench.sim.text import END, VOCAB_SIZE

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
# Several gateways on one port: the tree's own placement, by the number of front ends.
FRONTS = {"two fronts": 2, "three fronts": 3}


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
    waits: bool = False  # those rooms make who sends to them wait, instead of refusing
    spares: bool = False  # a process in reserve for each: the second launch takes no time
    compile_s: float = 0.0  # how long the worker takes for a grammar
    grammar_timeout_s: float = 10.0
    encode_s: float = 0.0  # mean of what any work in a thread takes, a prompt's encoding for one
    resume_s: float = 10.0  # how long a stream is kept for a client that was cut
    resume_streams_max: int = 128


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
    # plain | slow | stuck | leaves | hasty | http [leaves | slow | whole | returns | hasty |
    # background]
    reader: str
    after: int  # tokens until it is stuck or leaves
    pause_s: float  # of a slow one, between reads; of a hasty one, until it leaves
    front: int = 0  # which of several gateways it comes to first
    penalised: bool = False
    grammar: tuple[str, ...] = ()  # kind and text
    is_impossible: bool = False  # its grammar is one that the worker refuses
    meets: str = ""  # what its own text is to meet: a stop "string" or "pattern"
    stop_pattern: str = ""  # all its matches are of one length
    wants: str = ""  # instead of text: "vector" or "scores"
    text: str = ""  # what `prompt` is made from, where it is given as text

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


class Drain(NamedTuple):
    """SIGTERM at the end of the world, with work under way."""

    asks: tuple[Ask, ...]
    after_s: float
    grace_s: float
    kills: bool = False  # something dies just before: the server ends while it restarts


class Scenario(NamedTuple):
    seed: int
    duration_s: float
    shape: Shape
    asks: tuple[Ask, ...]
    menu: Menu
    poison: int | None = None  # the worker dies of a prompt that begins with this token
    drain: Drain | None = None
    spoils: bool = False  # the work of a supervisor fails, which nobody foresaw


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
MORE_FAULTS = ("restart asked for", "forward hangs", "swizzle", "everything stands still")
# What is counted when it happens, by whoever does it; all but the last three are in `Menu`.
COUNTED = (
    *(fault for fault in FAULTS if fault not in ("kill at a message", "launch fails")),
    *MORE_FAULTS,
    "kill before a message",
    "kill after a message",
    "killed again",
    "launch failed",
    "frame dropped",
    "frame repeated",
    "frame cut off",
)
# What must be seen sometimes, over many worlds: a run in which one never is does not test it.
SOMETIMES = (
    "resumed after tokens",
    "resumed with a seed",
    "resumed with a grammar: regex",
    "resumed with a grammar: choice",
    "resumed with a grammar: json_schema",
    "resumed with a grammar: ebnf",
    "resumed with a grammar: structural_tag",
    "resumed with penalties",
    "resumed with log probabilities",
    "resumed with a stop string",
    "resumed within a stop string",
    "resumed with a stop pattern",
    "resumed within a character",
    "a vector or scores were asked for again",
    "a response was made in the background",
    "a response in the background was come back to",
    "resumed a choice other than the first",
    "resumed from cached pages",
    "tokens were forced",
    "retracted",
    "a prefix was found",
    "came back to its gateway",
    "came back to another gateway",
    "came back after its gateway died",
    "left, and its request ended in time",
    "drained with whole answers",
    "drained with a typed end",
    "poison was given up",
    "a grammar was refused",
    "a forward that hung was found",
    "a node that hung was killed",
    "a restart was asked for with streams open",
    "refused with Retry-After",
    "a mailbox was full",
    "a stale step was left out",
    "a spare was used",
    "the root gave up",
    "the work of a supervisor failed",
    "drained while a part restarted",
    "all stood still, and nobody was blamed",
)
POISON = VOCAB_SIZE - 1
GRAMMARS = (
    ("regex", "[a-f0-9]{4,40}"),
    ("regex", "(yes|no)( and (yes|no)){0,8}"),
    ("choice", '["heads", "tails", "neither of the two"]'),
    ("json_schema", '{"type":"object","properties":{"a":{"type":"integer"},"b":{"type":"boolean"}},'
     '"required":["a","b"],"additionalProperties":false}'),
    ("ebnf", 'root ::= item (", " item)*\nitem ::= "one" | "two" | [0-9] [0-9]'),
    ("structural_tag", '[{"trigger":"e","begin":"e=","schema":{"type":"integer"},"end":";"}]'),
    ("regex", "(yes|no){1,9}", "", "."),  # constrained behind the first full stop
)  # fmt: skip
WORDS = ("one", "small", "letter", "naïve", "→", "house", "in", "the", "sound", "猫")
IMPOSSIBLE = ("regex", "[z&&a]x(")


def draw(seed: int, duration_s: float, *, shuffles: bool = False, is_rich: bool = True) -> Scenario:
    """`is_rich`: with what `enrich` adds."""
    shape = draw_shape(rng_for(seed, "shape"), shuffles)
    menu = draw_menu(rng_for(seed, "menu"))
    more = rng_for(seed, "more")
    # A deployment's day has its nights: a part of it in which hardly anybody asks for anything.
    quiet_s = duration_s * more.choice((0.0, 0.3, 0.6)) if is_rich else 0.0
    asks = draw_asks(rng_for(seed, "workload"), duration_s - quiet_s, shape)
    scenario = Scenario(seed, duration_s, shape, asks, menu)
    return enrich(scenario, quiet_s, more) if is_rich else scenario


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
