"""Whole deployments under seeds, with faults: see `bench/sim/`. A failure prints what replays it.

Here are a bounded number of seeds, and those that have found a bug; `python -m app simulate` runs
as many as there is time for.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from bench.sim.scenario import FAULTS, Menu, draw
from bench.sim.shadow import ShadowWorker
from bench.sim.text import make_tokenizer
from bench.sim.world import Result, run_world
from bench.simulate import main

ROOT = Path(__file__).resolve().parents[2]
WORLD_S = 240.0
SEEDS = 32
# Each was the first to show a bug, at this many simulated seconds.
FOUND = {
    5: 120.0,  # a front that starts while the worker is down crashed until the root gave up
    7: 120.0,  # a step sent before the link was up was lost, and nobody tried again
    19: 120.0,  # the end of a stream, refused by a full detokenizer, was lost
    24: 120.0,  # tokens for a detokenizer that the scheduler's node did not know yet were lost
    34: 120.0,  # who died while its siblings were being started got two lives
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tokenizer(tmp_path_factory.mktemp("worlds"))


def hours(seconds: float) -> str:
    return repr(seconds / 3600)


@pytest.mark.parametrize("seed", range(SEEDS))
def test_a_world_keeps_its_laws(seed: int, model: Path) -> None:
    run_world(draw(seed, WORLD_S), model)


@pytest.mark.parametrize("seed", FOUND)
def test_a_world_that_found_a_bug_stays_whole(seed: int, model: Path) -> None:
    run_world(draw(seed, FOUND[seed], is_rich=False), model)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(10_000, 10_030))
def test_a_world_keeps_its_laws_in_any_order_of_callbacks(seed: int, model: Path) -> None:
    run_world(draw(seed, WORLD_S, shuffles=True), model)


def test_a_world_is_the_same_in_every_process() -> None:
    command = [sys.executable, "-m", "app", "simulate", "--seeds", "2", "--first-seed", "40"]
    command += ["--hours", hours(120.0), "--jobs", "1", "--chains"]
    chains = []
    for hash_seed in ("0", "4711"):
        environment = {**os.environ, "PYTHONHASHSEED": hash_seed}
        ran = subprocess.run(
            command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=200
        )
        assert ran.returncode == 0, ran.stdout + ran.stderr
        chains.append([line for line in ran.stdout.splitlines() if " chain " in line])
    assert len(chains[0]) == 2
    assert chains[0] == chains[1]


@pytest.mark.parametrize("seed", range(300, 306))
def test_a_request_that_the_worker_dies_of_fails_alone(seed: int, model: Path) -> None:
    """However many others are in flight with it, and are thrown back by its deaths."""
    drawn = draw(seed, 60.0, is_rich=False)
    shape = drawn.shape._replace(
        restarts_max=5, queued_max=64, mailbox_max=0, launch_s=0.05, placement="engine"
    )
    poison = 511
    others = tuple(
        ask._replace(at_s=5.0 + i / 100, reader="plain", namespace="", max_tokens=30)
        for i, ask in enumerate(drawn.asks[:24])
        if ask.prompt[0] != poison
    )
    guilty = others[0]._replace(name="guilty", at_s=5.1, prompt=(poison, 5, 6), stop_ids=())
    peace = Menu(gap_s=1e9, weights={"kill": 1.0}, drop=0.0, repeat=0.0)
    result = run_world(
        drawn._replace(shape=shape, asks=(*others, guilty), menu=peace, poison=poison), model
    )
    assert result.refused == {"repeatedly_interrupted": 1}
    assert result.whole_count == len(others)
    assert not result.gave_up


def test_worlds_differ_and_their_faults_happen(model: Path) -> None:
    results: list[Result] = [run_world(draw(seed, 60.0), model) for seed in range(200, 212)]
    assert len({result.chain for result in results}) == len(results)
    kinds = {kind for result in results for kind, count in result.fired.items() if count}
    assert len(kinds & set(FAULTS)) >= 6
    assert sum(result.check_count for result in results) > 1000


def test_a_failing_seed_is_shown_with_the_command_that_replays_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    read = ShadowWorker._read  # a worker that does not see the first token
    monkeypatch.setattr(ShadowWorker, "_read", lambda self, tenant: read(self, tenant)[1:])
    code = main(["--seeds", "1", "--first-seed", "3", "--hours", hours(60.0), "--jobs", "1"])
    said = capsys.readouterr().out
    assert code == 1
    assert "seed 3 FAILED" in said
    assert f"python -m app simulate --seeds 1 --first-seed 3 --hours {hours(60.0)}" in said
    assert "last events:" in said
