"""This file is where chance comes from: streams of random numbers, each a function of its names.

Time comes from the event loop and nowhere else (`loop.time`), so that `simloop` controls it. Law:
two streams with different names don't shift each other, whatever order they are drawn in.
"""

from __future__ import annotations

import hashlib
import random


def rng_for(seed: int, *names: str | int) -> random.Random:
    """A stream that depends on `seed` and `names` only: not on the process or its hash seed."""
    text = "\x1f".join([str(seed), *(str(n) for n in names)])
    return random.Random(hashlib.blake2b(text.encode(), digest_size=8).digest())
