"""Goal: on the simulated loop a run is a function of its seed, and nothing escapes."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from typing import Any

import pytest

from actors.runtime.simloop import Deadlock, Escape, SimLoop, StepsExceeded


def run(coro: Coroutine[Any, Any, Any], seed: int = 0, **options: Any) -> Any:
    with asyncio.Runner(loop_factory=lambda: SimLoop(seed, **options)) as runner:
        return runner.run(coro)


async def race(log: list[int]) -> None:
    async def runner(n: int) -> None:
        for _ in range(3):
            log.append(n)
            await asyncio.sleep(0)

    await asyncio.gather(*(runner(n) for n in range(5)))


def order(seed: int) -> list[int]:
    log: list[int] = []
    run(race(log), seed)
    return log


def test_a_seed_is_an_order() -> None:
    assert order(1) == order(1)
    assert len({tuple(order(seed)) for seed in range(10)}) > 5


def test_time_jumps_to_the_next_timer() -> None:
    async def sleeper() -> float:
        await asyncio.sleep(3600)
        async with asyncio.timeout(10):
            await asyncio.sleep(5)
        return asyncio.get_running_loop().time()

    assert run(sleeper()) == 3605.0


def test_timers_fire_in_the_order_of_their_times() -> None:
    async def main() -> list[float]:
        fired: list[float] = []
        loop = asyncio.get_running_loop()
        for delay_s in (3.0, 1.0, 2.0):
            loop.call_later(delay_s, fired.append, delay_s)
        await asyncio.sleep(5)
        return fired

    for seed in range(5):
        assert run(main(), seed) == [1.0, 2.0, 3.0]


def test_a_cancelled_timer_neither_fires_nor_moves_time() -> None:
    async def main() -> float:
        loop = asyncio.get_running_loop()
        loop.call_later(100, pytest.fail, "fired").cancel()
        await asyncio.sleep(1)
        return loop.time()

    assert run(main()) == 1.0


def test_waiting_for_ever_is_a_deadlock_that_shows_the_last_steps() -> None:
    async def main() -> None:
        await asyncio.get_running_loop().create_future()

    with pytest.raises(Deadlock, match=r"every task waits for ever \(seed 7") as caught:
        run(main(), 7)
    assert "main" in str(caught.value)


def test_a_loop_without_end_is_an_error() -> None:
    async def main() -> None:
        while True:  # noqa: ASYNC110 - a loop without end is the point
            await asyncio.sleep(0)

    with pytest.raises(StepsExceeded, match="more than 100 steps"):
        run(main(), steps_max=100)


def test_what_reaches_outside_raises() -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        with pytest.raises(Escape):
            loop.call_soon_threadsafe(print)
        with pytest.raises(Escape):
            await asyncio.to_thread(threading.get_ident)
        with pytest.raises(Escape):
            await asyncio.open_connection("127.0.0.1", 9)
        with pytest.raises(Escape):
            loop.add_reader(0, print)
        with pytest.raises(Escape):
            await asyncio.create_subprocess_exec("true")

    run(main())


def test_laws_are_checked_after_each_step() -> None:
    steps: list[int] = []
    loop = SimLoop(0, after_step=lambda: steps.append(1))
    with asyncio.Runner(loop_factory=lambda: loop) as runner:
        runner.run(asyncio.sleep(1))
        assert len(steps) == loop.step_count > 1


def test_a_broken_law_ends_the_run() -> None:
    def check() -> None:
        raise AssertionError("a law is broken")

    loop = SimLoop(0, after_step=check)
    runner = asyncio.Runner(loop_factory=lambda: loop)
    with pytest.raises(AssertionError, match="a law is broken"):
        runner.run(asyncio.sleep(1))
    loop.after_step = None
    runner.close()


@pytest.mark.sim(seeds=3)
async def test_a_marked_test_runs_on_a_simulated_loop() -> None:
    loop = asyncio.get_running_loop()
    assert isinstance(loop, SimLoop)
    await asyncio.sleep(1_000_000)
    assert loop.time() >= 1_000_000


async def test_an_unmarked_test_runs_on_a_real_loop() -> None:
    assert not isinstance(asyncio.get_running_loop(), SimLoop)
