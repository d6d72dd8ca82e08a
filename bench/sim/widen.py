"""This file adds to a drawn world what was thought of last: more grammars, log probabilities,
clients that come back, another dialect, a wall clock that is put forward and back.

It does not know what the world was drawn from, nor how anything is run. Each theme has a stream of
draws of its own, and most worlds have some themes only (a swarm).

Law: the device can compute all that is asked in the time of peace, so that who has no end by then
is stuck, and not only late.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Any

from actors.runtime.clock import rng_for
from bench.sim.scenario import (
    FRONTS,
    GRAMMARS,
    LONG_GRAMMARS,
    LONG_STOP,
    PEACE_S,
    TOOL_WAYS,
    WORDS,
    Ask,
    Leap,
    Menu,
    Scenario,
    Shape,
)

LEAP_S = (1.0, 60.0, 3600.0, 4 * 3600.0)
LEAP_MAX_S = 10 * 3600.0  # off what it was, together: less than what is kept for a day
# Messages of steps, which come while there is work.
WORKING = ("Step", "StepDone", "Tokens", "Deltas", "Acquired")
ROLLED = ("replica/scheduler",) * 3 + ("replica/worker", "replica/cache")
# Those that leave one way on, for many tokens.
FORCING = tuple(grammar for grammar in LONG_GRAMMARS if grammar[0] in ("regex", "choice"))
# What an ask has that is more than its text.
NOTHING: dict[str, Any] = {
    "choice_count": 1, "stop_ids": (), "stop": "", "logprobs": False, "namespace": "",
    "penalised": False, "grammar": (), "is_impossible": False, "meets": "", "stop_pattern": "",
    "wants": "", "text": "", "tools": "", "form": "",
}  # fmt: skip
Change = Callable[[Ask, random.Random], Ask]


def widen(scenario: Scenario) -> Scenario:
    first_count = len(scenario.asks)
    rng = rng_for(scenario.seed, "crowd")
    if rng.random() < 0.35:
        scenario = scenario._replace(asks=crowded(scenario.asks, rng))
    copies = {ask.name for ask in scenario.asks[first_count:]}
    for name, change, share in (
        ("grammars", more_grammars, 0.5),
        ("returns", more_returns, 0.35),
        ("log probabilities", more_logprobs, 0.35),
        ("native", some_native, 0.3),
        ("tools", some_tools, 0.35),
        ("stops", long_stops, 0.35),
    ):
        rng = rng_for(scenario.seed, name)
        if rng.random() < share:
            scenario = changed(scenario, change, rng)
            if name == "returns":
                scenario = restless(scenario, rng)
    rng = rng_for(scenario.seed, "beside poison")
    if scenario.poison is not None and rng.random() < 0.6:
        scenario = beside_poison(scenario, rng)
    rng = rng_for(scenario.seed, "batches")
    if rng.random() < 0.25 and scenario.asks:
        # A call of several choices never fits into a mailbox of one message, and a batch tries on.
        shape = scenario.shape._replace(batches=True, mailbox_max=0, waits=False)
        scenario = scenario._replace(shape=shape, asks=scenario.asks + draw_batches(scenario, rng))
    if rng_for(scenario.seed, "ahead").random() < 0.3:
        scenario = scenario._replace(shape=scenario.shape._replace(credits=3))
    if rng_for(scenario.seed, "spoils").random() < 0.15:
        scenario = scenario._replace(spoils=True)
    rng = rng_for(scenario.seed, "wear")
    if rng.random() < 0.5:
        scenario = scenario._replace(
            shape=scenario.shape._replace(wear_max=rng.choice((3, 20, 200)))
        )
    rng = rng_for(scenario.seed, "strikes")
    if rng.random() < 0.5:
        scenario = scenario._replace(menu=struck(scenario.menu, rng))
    rng = rng_for(scenario.seed, "rolling")
    if rng.random() < 0.3:
        scenario = scenario._replace(menu=rolling(scenario.menu, rng))
    scenario = bearable(scenario, copies, rng_for(scenario.seed, "load"))
    return scenario._replace(
        leaps=draw_leaps(rng_for(scenario.seed, "wall clock"), scenario.duration_s)
    )


def struck(menu: Menu, rng: random.Random) -> Menu:
    """Faults that wait for a message, and so come while there is work."""
    weights = menu.weights | {"kill at a message": rng.choice((3.0, 10.0))}
    gap_s = min(menu.gap_s, rng.choice((5.0, 20.0)))
    return menu._replace(weights=weights, gap_s=gap_s, sites=WORKING, passes_max=12)


def rolling(menu: Menu, rng: random.Random) -> Menu:
    """Restarts that are asked for, of who has most to say to others."""
    weights = menu.weights | {"restart asked for": 10.0}
    gap_s = min(menu.gap_s, rng.choice((3.0, 10.0)))
    return menu._replace(weights=weights, gap_s=gap_s, restarted=ROLLED)


def crowded(asks: tuple[Ask, ...], rng: random.Random) -> tuple[Ask, ...]:
    """More of the same, with other noise: so that something is under way most of the time."""
    more = [
        ask._replace(
            name=f"{ask.name}x{copy}",
            at_s=ask.at_s + rng.uniform(0.0, 20.0),
            seed=rng.randrange(1 << 20),
        )
        for copy in range(2)
        for ask in asks
    ]
    return asks + tuple(more)


def beside_poison(scenario: Scenario, rng: random.Random) -> Scenario:
    """Many who run with the guilty one, and go on coming while it is looked for: with each death
    somebody else has been near."""
    innocent = [
        ask
        for ask in scenario.asks
        if ask.prompt[0] != scenario.poison and ask.reader == "plain" and not ask.is_impossible
    ]
    guilty = [ask for ask in scenario.asks if ask.prompt[0] == scenario.poison]
    if not innocent:
        return scenario
    beside = tuple(
        ask._replace(
            name=f"{culprit.name}p{nth}",
            at_s=culprit.at_s + max(0.0, rng.uniform(-1.0, 3.0)),
            max_tokens=min(8, ask.max_tokens),
            seed=rng.randrange(1 << 20),
        )
        for culprit in guilty
        for nth, ask in enumerate(rng.choices(innocent, k=40))
    )
    shape = scenario.shape._replace(queued_max=256, mailbox_max=0, waits=False)
    return scenario._replace(asks=scenario.asks + beside, shape=shape)


def bearable(scenario: Scenario, copies: set[str], rng: random.Random) -> Scenario:
    """Without as many asks as the device could not get done in peace, when faults have let it do
    nothing before. The crowd's `copies` go first; who is guilty stays, and so do batches."""
    shape, asks = scenario.shape, scenario.asks
    lines = [line for ask in asks for line in ask.lines or (ask,)]
    rows = rows_of(lines, shape)
    chunk_len, a_step_s = chunk_of(rows, shape), pace_of(shape)
    work_s = {ask.name: a_step_s * steps_of(ask, rows, chunk_len) for ask in asks}
    going = [ask for ask in asks if ask.prompt[0] != scenario.poison and not ask.lines]
    rng.shuffle(going)
    going.sort(key=lambda ask: ask.name in copies)
    while going and sum(work_s.values()) > PEACE_S:
        del work_s[going.pop().name]
    return scenario._replace(asks=tuple(ask for ask in asks if ask.name in work_s))


def rows_of(lines: list[Ask], shape: Shape) -> float:
    """How many of them run at once, each in whole pages of its own."""
    pages = [math.ceil((len(line.prompt) + line.max_tokens) / shape.page_size) for line in lines]
    page_count = shape.kv_tokens // shape.page_size
    return max(1.0, min(shape.running_max, page_count * len(lines) / max(1, sum(pages))))


def chunk_of(rows: float, shape: Shape) -> float:
    """How much of a prompt a step computes beside others' decoding: whole pages, or a page in some
    steps."""
    left_len = max(1.0, shape.prefill_budget - rows + 1)
    if left_len >= shape.page_size:
        return left_len // shape.page_size * shape.page_size
    return shape.page_size / math.ceil(shape.page_size / left_len)


def pace_of(shape: Shape) -> float:
    """Seconds from one step to the next. As many are under way as there are credits, and each of
    them has gone to the worker and come back."""
    return max(shape.step_s, (shape.step_s + 2 * shape.delay_s) / shape.credits)


def steps_of(ask: Ask, rows: float, chunk_len: float) -> float:
    """How many steps it takes, of which each computes `rows` requests and `chunk_len` of a
    prompt, when nothing is cached."""
    if ask.lines:
        return sum(steps_of(line, rows, chunk_len) for line in ask.lines)
    token_count = ask.max_tokens
    if ask.reader.endswith(("leaves", "hasty")):
        token_count = min(token_count, ask.after + 1)
    return ask.choice_count * (token_count / rows + len(ask.prompt) / chunk_len)


def changed(scenario: Scenario, change: Change, rng: random.Random) -> Scenario:
    """All asks that may be asked otherwise, those of the drain as well."""

    def one(ask: Ask) -> Ask:
        is_fixed = ask.is_impossible or ask.wants or ask.prompt[0] == scenario.poison
        return ask if is_fixed else change(ask, rng)

    drain = scenario.drain
    if drain is not None:
        drain = drain._replace(asks=tuple(map(one, drain.asks)))
    return scenario._replace(asks=tuple(map(one, scenario.asks)), drain=drain)


def more_grammars(ask: Ask, rng: random.Random) -> Ask:
    """Each kind as often as any other, and long enough that something happens meanwhile."""
    if ask.stop_ids or ask.reader.endswith(("leaves", "hasty")):
        return ask
    if not ask.grammar and rng.random() < 0.5:
        return ask
    found = [grammar for grammar in (*GRAMMARS, *LONG_GRAMMARS) if fits(grammar, ask.reader)]
    kind = rng.choice(sorted({grammar[0] for grammar in found}))
    grammar = rng.choice([grammar for grammar in found if grammar[0] == kind])
    max_tokens = max(ask.max_tokens, rng.choice((3, 30, 60)))
    return ask._replace(grammar=grammar, ignore_eos=False, max_tokens=max_tokens)


def fits(grammar: tuple[str, ...], reader: str) -> bool:
    """Whether what this reader sends has a field for it."""
    if not grammar:
        return True
    if reader == "http background":
        return grammar[0] == "json_schema"
    if reader == "http native":
        return grammar[0] in ("regex", "json_schema", "ebnf") and len(grammar) == 2
    return not reader.startswith("http") or (len(grammar) == 2 and grammar[0] != "structural_tag")


def more_returns(ask: Ask, rng: random.Random) -> Ask:
    is_http = ask.reader.startswith("http") and ask.reader != "http background"
    is_plain = ask.reader == "plain" and not ask.namespace
    if is_plain and not fits(ask.grammar, "http"):
        return ask
    if not (is_http or is_plain) or rng.random() < 0.2:
        return ask
    ask = ask._replace(reader="http returns", after=rng.randint(0, 20))
    if ask.stop_ids or ask.tools or rng.random() < 0.2:
        return ask
    # Of forced tokens a worker appends as many as it may: the next time in other pieces.
    max_tokens = rng.choice((30, 60))
    return ask._replace(
        grammar=rng.choice(FORCING), logprobs=True, ignore_eos=False, max_tokens=max_tokens
    )


def restless(scenario: Scenario, rng: random.Random) -> Scenario:
    """Where who comes back finds another gateway, and its answer made in other pieces."""
    shape = scenario.shape._replace(
        placement=rng.choice(tuple(FRONTS)),
        page_size=rng.choice((4, 16)),
        jumps_vary=True,
        resume_streams_max=rng.choice((1, 128)),
        step_s=rng.choice((scenario.shape.step_s, 0.2)),
    )
    menu = scenario.menu
    if rng.random() < 0.7:
        menu = struck(menu, rng)._replace(gap_s=3.0)
    return scenario._replace(shape=shape, menu=menu)


def more_logprobs(ask: Ask, rng: random.Random) -> Ask:
    if ask.reader == "http background":
        return ask
    return ask._replace(logprobs=ask.logprobs or rng.random() < 0.6)


def some_native(ask: Ask, rng: random.Random) -> Ask:
    is_one = ask.reader in ("http", "http whole") and fits(ask.grammar, "http native")
    if is_one and rng.random() < 0.5:
        return ask._replace(reader="http native", choice_count=1)
    return ask


def some_tools(ask: Ask, rng: random.Random) -> Ask:
    readers = ("http", "http whole", "http returns", "http slow")
    if ask.reader not in (*readers, "plain") or ask.namespace or rng.random() < 0.6:
        return ask
    return ask._replace(
        tools=rng.choice(TOOL_WAYS),
        text=" ".join(rng.choices(WORDS, k=rng.randint(1, 6))),
        reader=rng.choice(readers),
        max_tokens=rng.choice((30, 100, 120)),
        ignore_eos=False,
        stop_ids=(),
        grammar=(),
        meets="",
    )


def long_stops(ask: Ask, rng: random.Random) -> Ask:
    stop, grammar = LONG_STOP
    if ask.tools or ask.reader == "http background" or rng.random() < 0.6:
        return ask
    return ask._replace(
        stop=stop, grammar=grammar, max_tokens=80, ignore_eos=False, stop_ids=(), meets=""
    )


def draw_batches(scenario: Scenario, rng: random.Random) -> tuple[Ask, ...]:
    """Of what others ask as well; all lines of one go to one path."""
    usable = [
        ask._replace(reader="http line", namespace="", front=0)
        for ask in scenario.asks
        if not ask.is_impossible and not ask.wants and ask.prompt[0] != scenario.poison
        and ask.reader != "http background" and fits(ask.grammar, "http")
    ]  # fmt: skip
    batches = []
    for number in range(rng.randint(1, 3)):
        wants_tools = rng.random() < 0.5
        pool = [ask for ask in usable if bool(ask.tools) == wants_tools] or usable
        if not pool:
            break
        is_chat = bool(pool[0].tools)
        pool = [ask for ask in pool if bool(ask.tools) == is_chat]
        lines = rng.choices(pool, k=rng.randint(1, 8))
        first = scenario.asks[0]
        batches.append(
            first._replace(
                name=f"b{number}",
                at_s=rng.uniform(0.0, 0.6 * scenario.duration_s),
                prompt=(3,),
                max_tokens=1,
                reader="http batch",
                after=rng.randint(0, 12),
                front=rng.randrange(6),
                lines=tuple(line._replace(name=f"b{number}n{i}") for i, line in enumerate(lines)),
                **NOTHING,
            )
        )
    return tuple(batches)


def draw_leaps(rng: random.Random, duration_s: float) -> tuple[Leap, ...]:
    if rng.random() < 0.4:
        return ()
    leaps: list[Leap] = []
    off_s = 0.0
    for at_s in sorted(rng.uniform(0.0, duration_s) for _ in range(rng.choice((1, 8, 100)))):
        by_s = rng.choice(LEAP_S) * rng.choice((1, -1))
        if abs(off_s + by_s) > LEAP_MAX_S:
            by_s = -by_s
        off_s += by_s
        leaps.append(Leap(at_s, by_s))
    return tuple(leaps)
