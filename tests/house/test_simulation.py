"""The whole house under a seed: whatever is shared, chunked, retracted, delayed or killed, each
client gets the tokens (or the vector) that a plain function of its prompt gives, and a seed replays
exactly.

Replay one by `pytest tests/house/test_simulation.py -k 'kills and 7'`.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.house.sim import Client, Got, draw_scenario, simulate


def assert_right(client: Client, got: Got, *, may_fail: bool = False) -> None:
    expected = client.expected()
    if client.leaves_after is not None and got.finish is None:
        assert list(got.tokens) == expected[: len(got.tokens)]
        return
    if may_fail and got.problem is not None:
        assert got.problem.code in ("interrupted", "repeatedly_interrupted")
        assert list(got.tokens) == expected[: len(got.tokens)]
        return
    assert got.problem is None
    assert list(got.tokens) == expected
    assert got.vector == client.expected_vector()
    assert got.finish == ("stop" if expected[-1] == 2 and not client.ignore_eos else "length")


@pytest.mark.parametrize("seed", range(12))
def test_each_client_gets_its_tokens(seed: int, tiny: Path) -> None:
    scenario = draw_scenario(seed)
    result = simulate(scenario, tiny)
    for client, got in zip(scenario.clients, result.got, strict=True):
        assert_right(client, got)


@pytest.mark.parametrize("seed", range(1000, 1024))
def test_kills_change_no_token(seed: int, tiny: Path) -> None:
    scenario = draw_scenario(seed, kill_count=3)
    result = simulate(scenario, tiny)
    assert result.launch_count > 3
    for client, got in zip(scenario.clients, result.got, strict=True):
        assert_right(client, got, may_fail=True)


def test_a_seed_replays_exactly(tiny: Path) -> None:
    scenario = draw_scenario(5, kill_count=2)
    assert simulate(scenario, tiny) == simulate(scenario, tiny)


def test_seeds_differ(tiny: Path) -> None:
    runs = {simulate(draw_scenario(seed), tiny).step_count for seed in range(3)}
    assert len(runs) == 3
