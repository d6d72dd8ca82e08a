"""When a forward counts as hung: by what it does, never by how long it takes."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from actors.worker.watch import FACTOR, LOOKS, Watch


def test_a_forward_that_stands_still_is_hung_in_time() -> None:
    watch = Watch(1.6)
    watch.begin(7)
    looks = 1
    while watch.look(7) is None:
        looks += 1
    assert looks * watch.look_s <= 1.6
    assert looks == LOOKS - 1


@given(st.lists(st.integers(1, LOOKS - 2), min_size=1, max_size=200))
def test_a_forward_that_goes_on_is_never_hung(quiets: list[int]) -> None:
    watch = Watch(1.0)
    progress = 0
    watch.begin(progress)
    for quiet in quiets:
        for _ in range(quiet):
            assert watch.look(progress) is None
        progress += 1
        assert watch.look(progress) is None


def test_who_was_once_quiet_for_long_may_be_so_again() -> None:
    watch = Watch(1.0)
    watch.begin(0)
    for _ in range(LOOKS - 2):
        assert watch.look(0) is None
    assert watch.look(1) is None
    for _ in range(FACTOR * (LOOKS - 2) - 1):
        assert watch.look(1) is None
    assert watch.look(1) is not None


def test_a_new_forward_begins_a_new_quiet() -> None:
    watch = Watch(1.0)
    watch.begin(0)
    for _ in range(LOOKS - 2):
        assert watch.look(0) is None
    watch.begin(0)
    for _ in range(LOOKS - 2):
        assert watch.look(0) is None
