"""What is left after some requests, of which clients left some and the server refused some."""

from __future__ import annotations

from bench.leak import look


async def test_nothing_of_a_request_is_left_when_it_has_ended() -> None:
    before, after = await look(60, 20, 4, 1, traces=False)
    assert after.leased == after.running == 0
    assert (after.timers, after.lives) == (before.timers, before.lives)
    assert after.tasks <= before.tasks
    assert after.fds <= before.fds
