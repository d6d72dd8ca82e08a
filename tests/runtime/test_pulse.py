"""This file tests the judgement of heartbeats: who is silent, and when nobody may be accused."""

from __future__ import annotations

import pytest

from actors.runtime.pulse import Pulse


def make() -> Pulse:
    pulse = Pulse(beat_s=0.25, hang_s=2.0, now_s=0.0)
    pulse.add("a", 0.0)
    pulse.add("b", 0.0)
    return pulse


def beat_times(until_s: float) -> list[float]:
    return [0.25 * number for number in range(1, int(until_s / 0.25) + 1)]


def test_who_is_silent_for_long_is_named() -> None:
    pulse = make()
    for now_s in beat_times(2.0):
        pulse.hear("b", now_s)
        assert pulse.tick(now_s) == ()
    pulse.hear("b", 2.25)
    assert pulse.tick(2.25) == ("a",)


def test_a_node_that_was_late_itself_accuses_nobody() -> None:
    pulse = make()
    assert pulse.tick(10.0) == ()  # this loop was held up for ten seconds
    assert pulse.late_count == 1
    for now_s in beat_times(1.75):
        assert pulse.tick(10.0 + now_s) == ()
    assert set(pulse.tick(12.5)) == {"a", "b"}  # time of its own attention counts


def test_lateness_is_no_alibi_for_silence_before_it() -> None:
    pulse = make()
    for now_s in beat_times(1.5):
        pulse.tick(now_s)
    pulse.tick(5.0)
    assert set(pulse.tick(5.25)) == set()
    assert set(pulse.tick(5.5)) == {"a", "b"}


def test_a_peer_that_was_dropped_is_not_named_and_not_kept_by_a_late_beat() -> None:
    pulse = make()
    pulse.drop("a")
    pulse.drop("nobody")
    pulse.hear("a", 1.0)
    for now_s in beat_times(2.0):
        pulse.tick(now_s)
    assert pulse.tick(2.25) == ("b",)


@pytest.mark.parametrize("lag_s", [0.0, 0.2])
def test_a_little_lag_is_not_lateness(lag_s: float) -> None:
    pulse = make()
    for now_s in beat_times(4.0):
        pulse.hear("a", now_s)
        pulse.hear("b", now_s)
        assert pulse.tick(now_s + (lag_s if now_s % 0.5 else 0.0)) == ()
    assert pulse.late_count == 0
