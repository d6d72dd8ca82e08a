"""This file adds to a widened world what was thought of after that: chats whose model chooses
whether to call a tool.

It does not know how anything is run. Each theme has a stream of draws of its own, as in `widen.py`.

Law: what is added keeps the device's work within the time of peace.
"""

from __future__ import annotations

import random

from actors.runtime.clock import rng_for
from bench.sim.scenario import (
    CHOICE_WAYS,
    FORM_NAMES,
    PLEASE,
    WORDS,
    Ask,
    Scenario,
)
from bench.sim.widen import bearable, changed

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
