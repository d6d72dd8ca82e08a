"""This file is where chance comes from: streams of random numbers, each a function of its names.

Time comes from the event loop and nowhere else (`loop.time`), so that `simloop` controls it. Law:
two streams with different names don't shift each other, whatever order they are drawn in.
"""

from __future__ import annotations

import asyncio
import hashlib
import random
import time
from collections.abc import Callable


def rng_for(seed: int, *names: str | int) -> random.Random:
    """A stream that depends on `seed` and `names` only: not on the process or its hash seed."""
    text = "\x1f".join([str(seed), *(str(n) for n in names)])
    return random.Random(hashlib.blake2b(text.encode(), digest_size=8).digest())


def clock_of(loop: asyncio.AbstractEventLoop) -> Callable[[], float]:
    """The loop's clock: where that is asyncio's own, without the cost of going through the loop."""
    if type(loop).time is asyncio.BaseEventLoop.time:
        return time.monotonic
    return loop.time
