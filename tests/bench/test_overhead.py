"""What `bench overhead` compares is the same: steps that are computed again, and either ledger."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

import pytest

from actors.engine import Engine
from actors.gateway.record import Ledger
from bench.overhead import (
    TIMES_NS,
    Careless,
    Timed,
    actor_of,
    ledger,
    one_wave,
    recorded,
    replayed,
)
from messages.config import Paths
from tests.house.tiny import VOCAB, make_model

FOUND = argparse.Namespace(sequences=3, tokens=12, vocab=VOCAB)


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    model: Path = make_model(tmp_path_factory.mktemp("overhead") / "model")
    with Engine(str(model), kv_tokens=4096, threads=1) as engine:
        yield engine


def test_steps_computed_again_come_to_the_same_and_the_engine_goes_on(engine: Engine) -> None:
    for nth in range(2):
        _, steps, token_s = engine.call(recorded(engine, FOUND, nth))
        assert token_s > 0
        assert sum(len(launched.step.opened) for launched in steps) == FOUND.sequences
        assert all(each.begin_s < each.computes_s < each.end_s for each in steps)
        step_s, parts = engine.call(replayed(engine, steps, FOUND.sequences))  # asserts the tokens
        assert step_s > 0 and parts.before_s > 0 and parts.between_s > 0
    assert engine.generate("after it", max_tokens=3, ignore_eos=True).usage.completion_tokens == 3


@pytest.mark.parametrize("kind", [Careless, Timed])
def test_waves_under_another_ledger_leave_the_real_one_as_it_was(
    engine: Engine, kind: type[Ledger]
) -> None:
    TIMES_NS.clear()
    with ledger(engine, kind):
        engine.call(one_wave(engine, FOUND, 7))
    own = actor_of(engine, Paths().gateway).recovery.ledger
    assert type(own) is Ledger and len(own) == 0
    assert len(TIMES_NS) >= (FOUND.sequences * FOUND.tokens if kind is Timed else 0)
