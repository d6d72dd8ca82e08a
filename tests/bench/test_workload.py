"""Workloads are seeded; reports say what they were given."""

from __future__ import annotations

import itertools
import json

import pytest

from bench.client import Outcome
from bench.report import Report, median, percentile, table
from bench.serve import middle, summary
from bench.workload import FIRST_ID, PRESETS, chosen, lengths, word


def test_a_seed_gives_the_same_wave_and_another_seed_another() -> None:
    load = PRESETS["c8"]
    assert load.wave(1, 0, 1000) == load.wave(1, 0, 1000)
    assert load.wave(1, 0, 1000) != load.wave(2, 0, 1000)


def test_no_two_waves_share_a_prompt() -> None:
    load = PRESETS["c32"]
    prompts = [r.ids[:16] for repeat in range(4) for r in load.wave(0, repeat, 30_000)]
    assert len(set(prompts)) == len(prompts)


def test_a_shared_prefix_is_shared_within_a_wave_only() -> None:
    load = PRESETS["shared32"]
    first, second = load.wave(0, 0, 30_000), load.wave(0, 1, 30_000)
    assert len({r.ids[:512] for r in first}) == 1
    assert len({r.ids for r in first}) == 32
    assert first[0].ids[:16] != second[0].ids[:16]
    assert all(len(r.ids) == 544 and r.output_len == 64 for r in first)


def test_lengths_and_ids_stay_in_their_ranges() -> None:
    load = PRESETS["c8"]._replace(input_len=lengths("3:9"), output_len=lengths("5"), count=200)
    wave = load.wave(0, 0, 400)
    assert {len(r.ids) for r in wave} == set(range(3, 10))
    assert {r.output_len for r in wave} == {5}
    assert all(FIRST_ID <= i < 400 for r in wave for i in r.ids)


@pytest.mark.parametrize("text", ["0", "9:3", "-1", "a", "1:b", ""])
def test_bad_lengths_are_refused(text: str) -> None:
    with pytest.raises(ValueError):
        lengths(text)


def test_presets_can_be_chosen_by_name() -> None:
    assert [load.name for load in chosen("bs1,c32")] == ["bs1", "c32"]
    assert [load.name for load in chosen("all")] == list(PRESETS)
    with pytest.raises(ValueError, match="no preset 'x'"):
        chosen("x")


def test_words_are_distinct() -> None:
    words = [word(index) for index in range(3000)]
    assert len(set(words)) == len(words)


def test_percentiles_are_values_that_occur() -> None:
    values = list(range(1, 101))
    assert percentile(values, 0.5) == 50
    assert percentile(values, 0.99) == 99
    assert percentile(values, 1.0) == 100
    assert percentile([7.0], 0.01) == 7.0
    assert percentile([], 0.5) != percentile([], 0.5)  # nan


def test_the_median_is_in_the_middle() -> None:
    assert all(median(p) == 2 for p in itertools.permutations([1, 2, 9]))
    assert median([1, 2, 3, 10]) == 2.5


def outcome(sent: float, arrivals: tuple[float, ...], tokens: int) -> Outcome:
    return Outcome(sent, arrivals, arrivals[-1], "x", 32, tokens, "length")


def test_a_summary_counts_tokens_over_the_whole_wave() -> None:
    row = summary(PRESETS["c8"], [outcome(0.0, (1.0, 1.5, 2.0), 3), outcome(0.5, (1.0, 4.0), 2)])
    assert row["tokens/s"] == pytest.approx(5 / 4)
    assert row["total tokens/s"] == pytest.approx((5 + 64) / 4)
    assert row["ttft p99 ms"] == pytest.approx(1000)
    assert row["itl p99 ms"] == pytest.approx(3000)
    assert row["errors"] == 0


def test_the_headline_of_prefill_is_input_tokens() -> None:
    row = summary(PRESETS["prefill512"], [outcome(0.0, (2.0,), 1)._replace(prompt_tokens=512)])
    assert row["tokens/s"] == pytest.approx(256)


def test_failed_requests_count_as_errors_and_not_as_tokens(
    capsys: pytest.CaptureFixture[str],
) -> None:
    bad = outcome(0.0, (1.0,), 100)._replace(error="cut")
    row = summary(PRESETS["c8"], [outcome(0.0, (2.0,), 1), bad])
    assert (row["errors"], row["tokens/s"]) == (1, pytest.approx(0.5))
    assert "1 failed, the first: cut" in capsys.readouterr().err


def test_the_wave_of_median_rate_is_shown() -> None:
    waves = [{"tokens/s": rate, "errors": 1, "seconds": i} for i, rate in enumerate((9.0, 1, 5))]
    row = middle(waves)
    assert (row["seconds"], row["errors"], row["range"]) == (2, 3, "1-9")


def test_a_table_aligns_numbers_to_the_right() -> None:
    text = table([{"load": "a", "rate": 1234.5}, {"load": "longer", "rate": 2.0}])
    assert text.splitlines() == [
        "load     rate",
        "------  -----",
        "a       1,234",
        "longer   2.00",
    ]


def test_json_is_one_object_a_line_with_machine_and_commit(
    capsys: pytest.CaptureFixture[str],
) -> None:
    report = Report("x", as_json=True, url="u")
    report.add(load="a", rate=1.5)
    report.add(load="b", rate=2.5)
    report.close()
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["rate"] for line in lines] == [1.5, 2.5]
    assert all(line["machine"] and line["commit"] and line["url"] == "u" for line in lines)
