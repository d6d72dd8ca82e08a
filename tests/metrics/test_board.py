"""Merging what nodes flush, and the text that Prometheus reads."""

from __future__ import annotations

import math
import re

from hypothesis import given
from hypothesis import strategies as st

from actors.metrics.actor import Metrics
from actors.metrics.board import Board
from actors.metrics.histogram import Histogram
from actors.metrics.prometheus import exposition
from actors.runtime.testkit import Cell
from messages.config import Paths
from messages.metrics import Counter, Flush, Gauge, Labels, Page, Scrape
from messages.metrics import Histogram as Part

STOP: Labels = (("outcome", "stop"),)


def test_counters_are_sums_over_nodes_and_time() -> None:
    board = Board()
    for node, increase in (("a", 2.0), ("b", 3.0), ("a", 1.0)):
        board.merge(Flush(node, counters=(Counter("n_total", STOP, increase),)))
    assert board.counters["n_total", STOP] == 6.0
    board.check()


def test_a_gauge_is_the_sum_of_each_nodes_last_value() -> None:
    board = Board()
    for node, value in (("a", 2.0), ("b", 3.0), ("a", 1.0)):
        board.merge(Flush(node, gauges=(Gauge("g", (), value),)))
    assert board.gauge(("g", ())) == 4.0


def test_a_name_keeps_its_kind_and_its_bounds() -> None:
    board = Board()
    board.merge(Flush("a", counters=(Counter("x", (), 1.0),)))
    board.merge(Flush("a", gauges=(Gauge("x", (), 1.0),)))
    board.merge(Flush("a", counters=(Counter("x", (), -1.0),)))
    board.merge(Flush("a", histograms=(Part("h", (), (1.0, 2.0), (1, 0, 0), 0.5),)))
    board.merge(Flush("a", histograms=(Part("h", (), (1.0, 3.0), (1, 0, 0), 0.5),)))
    assert board.refused_count == 3
    assert board.counters["x", ()] == 1.0
    assert board.histograms["h", ()].count == 1
    board.check()


def test_series_are_bounded() -> None:
    board = Board(series_max=3)
    counters = tuple(Counter("n", (("i", str(i)),), 1.0) for i in range(10))
    board.merge(Flush("a", counters=counters))
    board.merge(Flush("a", counters=counters[:3]))
    assert len(board.counters) == 3 and board.refused_count == 7
    board.check()


def parse(text: str) -> dict[str, dict[str, float]]:
    """A dull reader of the format: name to label text to value."""
    values: dict[str, dict[str, float]] = {}
    for line in text.splitlines():
        if not line.startswith("#"):
            match = re.fullmatch(r"([a-zA-Z_:][\w:]*)(?:\{(.*)\})? (\S+)", line)
            assert match is not None, line
            values.setdefault(match[1], {})[match[2] or ""] = float(match[3])
    return values


def test_the_page_has_help_type_and_samples_of_one_name_together() -> None:
    board = Board()
    board.merge(
        Flush(
            "a",
            counters=(
                Counter("histrio_requests_total", STOP, 2.0),
                Counter("histrio_requests_total", (("outcome", "error"),), 1.0),
            ),
            gauges=(Gauge("histrio_streams_open", (), 3.0),),
            histograms=(Part("histrio_ttft_seconds", (), (0.1, 1.0), (1, 2, 4), 9.5),),
        )
    )
    text = exposition(board)
    assert text.endswith("\n")
    lines = text.splitlines()
    begin = lines.index("# TYPE histrio_requests_total counter")
    assert lines[begin - 1].startswith("# HELP histrio_requests_total Requests that ended")
    assert lines[begin + 1 : begin + 6] == [
        'histrio_requests_total{outcome="abort"} 0',
        'histrio_requests_total{outcome="error"} 1',
        'histrio_requests_total{outcome="length"} 0',
        'histrio_requests_total{outcome="refused"} 0',
        'histrio_requests_total{outcome="stop"} 2',
    ]
    values = parse(text)
    assert values["histrio_ttft_seconds_bucket"] == {
        'le="0.1"': 1,
        'le="1"': 3,
        'le="+Inf"': 7,
    }
    assert values["histrio_ttft_seconds_sum"][""] == 9.5
    assert values["histrio_ttft_seconds_count"][""] == 7
    assert values["histrio_streams_open"][""] == 3
    assert values["histrio_metrics_refused_total"][""] == 0
    for name in re.findall(r"# TYPE (\S+)", text):
        assert text.count(f"# TYPE {name} ") == 1


@given(st.text(max_size=20), st.floats())
def test_any_label_and_value_stays_on_its_line(label: str, value: float) -> None:
    board = Board()
    board.merge(Flush("a", gauges=(Gauge("g", (("l", label),), value),)))
    text = exposition(board)
    line = next(line for line in text.split("\n") if line.startswith("g{"))
    match = re.fullmatch(r'g\{l="((?:[^"\\]|\\.)*)"\} (\S+)', line)
    assert match is not None
    unescaped = re.sub(r"\\(.)", lambda m: {"n": "\n"}.get(m[1], m[1]), match[1])
    assert unescaped == label
    read = float(match[2])
    assert read == value or (math.isnan(read) and math.isnan(value))


@given(st.lists(st.lists(st.integers(0, 9), min_size=4, max_size=4), max_size=5))
def test_merged_buckets_add_up(flushes: list[list[int]]) -> None:
    histogram = Histogram((1.0, 2.0, 3.0))
    for counts in flushes:
        histogram.merge(tuple(counts), float(sum(counts)))
        histogram.check()
    assert histogram.count == sum(map(sum, flushes))
    assert histogram.cumulative()[-1] == histogram.count
    assert histogram.cumulative() == sorted(histogram.cumulative())


def test_what_was_never_counted_is_shown_as_nothing() -> None:
    assert "\nhistrio_retractions_total 0\n" in exposition(Board())
    board = Board()
    board.merge(Flush("a", counters=(Counter("histrio_retractions_total", (), 2.0),)))
    assert "\nhistrio_retractions_total 2\n" in exposition(board)


def test_a_scrape_shows_what_was_flushed() -> None:
    cell = Cell(Metrics(Paths()), path="metrics")
    cell.start()
    cell.tell(Flush("a", counters=(Counter("histrio_x_total", (), 2.0),)))
    cell.tell(Scrape())
    assert isinstance(cell.replies[0], Page)
    assert "histrio_x_total 2\n" in cell.replies[0].text
