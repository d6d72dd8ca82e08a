"""This file adds to a widened world what was thought of after that: chats whose model chooses
whether to call a tool, and batches that a drain interrupts, whose server is started anew.

It does not know how anything is run. Each theme has a stream of draws of its own, as in `widen.py`.

Law: what is added keeps the device's work within the time of peace.
"""

from __future__ import annotations

import random

from actors.runtime.clock import rng_for
from bench.sim.scenario import (
    CHOICE_WAYS,
    FORM_NAMES,
    FRONTS,
    PEACE_S,
    PLEASE,
    WORDS,
    Again,
    Ask,
    Drain,
    Scenario,
)
from bench.sim.widen import (
    bearable,
    changed,
    chunk_of,
    draw_batches,
    pace_of,
    rows_of,
    steps_of,
)

READERS = ("http", "http whole", "http returns", "http returns", "http slow")


def extend(scenario: Scenario) -> Scenario:
    rng = rng_for(scenario.seed, "choices of tools")
    if rng.random() < 0.35:
        form = rng.choice(FORM_NAMES)

        def change(ask: Ask, rng: random.Random) -> Ask:
            return some_choices(ask, rng, form)

        scenario = scenario._replace(shape=scenario.shape._replace(form=form))
        scenario = changed(scenario, change, rng)
        scenario = bearable(scenario, set(), rng_for(scenario.seed, "load of choices"))
    rng = rng_for(scenario.seed, "batches and a drain")
    if rng.random() < 0.3:
        scenario = interrupted(scenario, rng)
    return scenario


def some_choices(ask: Ask, rng: random.Random, form: str) -> Ask:
    """Those that must call may do so instead, and others as well."""
    if ask.tools:
        if rng.random() < 0.4:
            return ask
    elif ask.namespace or ask.reader not in ("plain", *READERS) or rng.random() < 0.5:
        return ask
    return ask._replace(
        tools=rng.choice(CHOICE_WAYS),
        form=form,
        text=" ".join([PLEASE, *rng.choices(WORDS, k=rng.randint(0, 6))]),
        reader=rng.choice(READERS),
        after=rng.randint(0, 30),
        max_tokens=rng.choice((30, 100, 120)),
        ignore_eos=False,
        stop_ids=(),
        stop="",
        grammar=(),
        meets="",
        penalised=ask.penalised and rng.random() < 0.5,
    )


def interrupted(scenario: Scenario, rng: random.Random) -> Scenario:
    """A server that ends with batches under way, and begins again."""
    # See `widen`: a batch tries on.
    shape = scenario.shape._replace(batches=True, mailbox_max=0, waits=False)
    scenario = scenario._replace(shape=shape, spoils=False)
    drain = scenario.drain or Drain(
        asks=(), after_s=rng.uniform(0.5, 3.0), grace_s=rng.choice((1.0, 20.0)), kills=False
    )
    batches = [
        ask._replace(name=f"late{ask.name}", at_s=rng.uniform(0.0, drain.after_s))
        for ask in draw_batches(scenario, rng)
    ]
    batches = within_peace(scenario, batches)
    if not batches:
        return scenario
    placement = rng.choice((shape.placement, shape.placement, "serve", *FRONTS))
    late = tuple(
        ask._replace(name=f"again{ask.name}", at_s=rng.uniform(0.0, 5.0), lines=ask.lines[:2])
        for ask in batches[:1]
    )
    asks = drain.asks + tuple(batches)
    return scenario._replace(drain=drain._replace(asks=asks, again=Again(placement, late)))


def within_peace(scenario: Scenario, batches: list[Ask]) -> list[Ask]:
    """As many of their lines as a device computes in half of the time of peace."""
    shape = scenario.shape
    lines = [line for batch in batches for line in batch.lines]
    rows = rows_of(lines, shape)
    chunk_len, a_step_s = chunk_of(rows, shape), pace_of(shape)
    left_s = PEACE_S / 2
    found = []
    for batch in batches:
        kept = []
        for line in batch.lines:
            left_s -= a_step_s * steps_of(line, rows, chunk_len)
            if left_s >= 0.0:
                kept.append(line)
        if kept:
            found.append(batch._replace(lines=tuple(kept)))
    return found
