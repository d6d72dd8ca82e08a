"""What `bench.chaos` makes of what it saw; `tests/house/test_hangs.py` runs it."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.chaos import done_before, left_of, resumed_s, wanted
from bench.chaos_load import is_broken, joined
from bench.client import CUT, Outcome, Said


def outcome(status: int, finish: str | None, error: str | None) -> Outcome:
    return Outcome(0.0, (), 0.0, finish=finish, error=error, status=status)


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        (outcome(200, None, CUT), True),
        (outcome(200, "stop", CUT), True),  # one of its choices has ended
        (outcome(0, None, "no connection: refused"), True),
        (outcome(503, None, "status 503: starting"), True),
        (outcome(200, "length", None), False),
        (outcome(400, None, "status 400: no"), False),
    ],
)
def test_a_client_comes_back_where_its_connection_was_lost(found: Outcome, expected: bool) -> None:
    assert is_broken(found) is expected


def test_what_the_connections_of_a_stream_have_said_is_one() -> None:
    parts = [
        {0: Said((1, 2), "ab", None, (-0.5, None)), 1: Said((7,), "x", "stop")},
        {},
        {0: Said((3,), "c", "length", (-0.25,))},
    ]
    assert joined(parts) == {
        0: Said((1, 2, 3), "abc", "length", (-0.5, None, -0.25)),
        1: Said((7,), "x", "stop"),
    }


def test_a_token_from_before_the_fault_that_comes_late_is_not_taken_for_the_first_after_it() -> (
    None
):
    times = [0.9, 1.0, 1.02, 1.04, 1.3, 1.32, 9.0]  # struck at 1.01, all parts back at 1.2
    assert resumed_s(times, 1.01, 1.2) == 1.3
    assert resumed_s([5.0], 1.01, 1.2) == 5.0


def test_each_role_gets_its_faults_in_turn_and_a_journal_says_what_is_left(tmp_path: Path) -> None:
    faults = wanted("worker,gateway", "kill:2,deadlock:1")
    assert faults == [
        ("worker", "kill"),
        ("gateway", "kill"),
        ("worker", "kill"),
        ("gateway", "kill"),
        ("worker", "deadlock"),
    ]
    assert done_before(tmp_path / "none.jsonl") == []
    journal = tmp_path / "journal.jsonl"
    row = '{"role":"gateway","way":"kill","seen_s":0.1,"up_s":0.2,"next_s":0.3,"all_s":[0.3],'
    journal.write_text(row + '"count":2,"equal":2,"errors":[]}\n', "utf-8")
    left = left_of(faults, done_before(journal))
    assert sorted(left) == sorted([*faults[:1], *faults[2:]])


@pytest.mark.parametrize(("roles", "ways"), [("worker,cook", "kill"), ("worker", "starve:2")])
def test_what_is_no_role_or_way_is_refused(roles: str, ways: str) -> None:
    with pytest.raises(ValueError, match="no such role or way"):
        wanted(roles, ways)
