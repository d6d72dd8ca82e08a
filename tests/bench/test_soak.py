"""Goal: what the soak says of growth and of deaths is right of samples and a log that are known."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench.chaos import Struck
from bench.soak import Sample, deaths, more_than, slopes


def test_growth_is_said_of_those_that_lived_all_the_time() -> None:
    samples = [
        Sample(
            at_s=100.0 + 30 * step,
            rss_mib=50.0 + step,
            fds=9,
            threads=3,
            children={("worker", 1): 300.0, ("engine", 2 + step // 5): 40.0},
        )
        for step in range(10)
    ]
    assert slopes(samples) == {"root": pytest.approx(2.0), "worker": pytest.approx(0.0)}


def test_of_two_processes_of_a_role_the_growth_of_the_faster_is_said() -> None:
    samples = [
        Sample(60.0 * step, 50.0, 9, 3, {("front", 1): 40.0 - step, ("front", 2): 40.0 + step})
        for step in range(3)
    ]
    assert slopes(samples)["front"] == pytest.approx(1.0)


def test_a_death_that_no_fault_made_is_told(tmp_path: Path) -> None:
    log = tmp_path / "main.jsonl"
    lines = [
        {"event": "node up", "peer": "worker"},
        {"event": "node died", "peer": "worker", "detail": "killed"},
        {"event": "node died", "peer": "front", "detail": "made no progress"},
        {"event": "node died", "peer": "front", "detail": "exit code 1"},
    ]
    log.write_text("".join(json.dumps(line, separators=(",", ":")) + "\n" for line in lines))
    struck = [Struck(role, "kill", None, None, None, (), 0, 0, ()) for role in ("worker", "front")]
    assert more_than(deaths(log), struck) == "front 1: exit code 1"
    assert more_than(deaths(log), struck[1:] * 2) == "worker 1: killed"
