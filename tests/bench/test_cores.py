"""Goal: the benches of scheduler and cache run, and their figures are of work that was done."""

from __future__ import annotations

import json

import pytest

from bench import planner, radix


def test_planner_prints_a_row_for_each_count(capsys: pytest.CaptureFixture[str]) -> None:
    assert planner.main(["--sequences", "2", "8", "--steps", "20", "--json"]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [row["sequences"] for row in rows] == [2, 8]
    assert all(row["step_ms"] >= row["core_ms"] >= 0 for row in rows)


def test_radix_prints_a_row_for_each_page_size(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--page-sizes", "1", "16", "--prompts", "30", "--length", "64", "--json"]
    assert radix.main(words) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [row["page_size"] for row in rows] == [1, 16]
    assert all(row["insert_us"] > 0 for row in rows)
