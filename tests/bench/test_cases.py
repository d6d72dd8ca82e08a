"""Cases asked of servers: the table, and that a wrong answer is not taken for right."""

from __future__ import annotations

import json

import pytest

from bench import cases
from bench.cases.asking import Failed, Reply, expect, read_events
from bench.cases.table import CASES, SETTINGS

CHUNK = {"choices": [{"index": 0, "text": "a", "finish_reason": None}]}


def reply(raw: bytes, status: int = 200, kind: str = "application/json") -> Reply:
    return Reply(status, {"content-type": kind}, raw, 0.0)


def test_every_case_has_a_name_of_its_own_and_known_settings() -> None:
    names = [case.name for case in CASES]
    assert len(names) == len(set(names)) > 50
    assert {case.settings for case in CASES} == set(SETTINGS)


def test_cases_are_chosen_by_name_and_slow_ones_only_when_asked_for() -> None:
    assert [case.name for case in cases.choose("B145,B005", slow=False)] == ["B005", "B145"]
    slow = {case.name for case in CASES if case.slow}
    assert slow and not slow & {case.name for case in cases.choose("", slow=False)}
    assert slow < {case.name for case in cases.choose("", slow=True)}


def test_a_stream_is_read_to_its_end() -> None:
    raw = b"data: " + json.dumps(CHUNK).encode() + b"\n\ndata: [DONE]\n\n"
    assert read_events(reply(raw)) == [CHUNK]


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"data: {}\n\n",
        b"data: [DONE]\n",
        b"data: [DONE]\n\ndata: [DONE]\n\n",
        b"data: {\n\ndata: [DONE]\n\n",
        b'data: {"x": NaN}\n\ndata: [DONE]\n\n',
        b"x: {}\n\ndata: [DONE]\n\n",
        b'data: {"error": {}}\n\ndata: [DONE]\n\n',
    ],
)
def test_a_stream_that_is_wrong_is_no_stream(raw: bytes) -> None:
    with pytest.raises(Failed):
        read_events(reply(raw))


def test_a_refusal_is_whole_or_none() -> None:
    error = {"message": "`n` is wrong", "type": "t", "param": "n", "code": None}
    good = json.dumps({"error": error}).encode()
    assert reply(good, 400).expect_refused(400, param="n") == error
    for wrong in (
        reply(good),
        reply(good, 500),
        reply(good, 400, "text/plain"),
        reply(b"no", 400),
        reply(b'{"error": {"message": "x"}}', 400),
    ):
        with pytest.raises(Failed):
            wrong.expect_refused()
    with pytest.raises(Failed, match="`top_k` is not named"):
        reply(good, 400).expect_refused(400, param="top_k")


def test_what_is_found_is_told() -> None:
    expect(True, "nothing")
    with pytest.raises(Failed, match="3 tokens"):
        expect(False, "3 tokens")
