"""This file is the four loads of `bench gpu`: token ids and output lengths, from seeds alone.

Equal seeds give equal ids in any Python 3, so that other engines can be given the same. Lengths of
outputs are exact (end of sequence is ignored); ids lie in [0, 10000].
"""

from __future__ import annotations

import random
from typing import NamedTuple


class Load(NamedTuple):
    """Requests that arrive at once."""

    prompts: list[list[int]]
    output_lens: list[int]

    @property
    def input_count(self) -> int:
        return sum(map(len, self.prompts))

    @property
    def output_count(self) -> int:
        return sum(self.output_lens)


def random_prompts(seed: int, count: int, length: int) -> list[list[int]]:
    chance = random.Random(seed)
    return [[chance.randint(0, 10000) for _ in range(length)] for _ in range(count)]


def mixed(seed: int, count: int = 256, low: int = 100, high: int = 1024) -> Load:
    """W1: many requests, inputs and outputs uniform in [low, high]."""
    chance = random.Random(seed)
    prompts = [
        [chance.randint(0, 10000) for _ in range(chance.randint(low, high))] for _ in range(count)
    ]
    return Load(prompts, [chance.randint(low, high) for _ in range(count)])


def single(nth: int, output_len: int) -> Load:
    """W2: one request of 128 tokens."""
    seed = (2000 if output_len == 1 else 2100) + nth
    return Load(random_prompts(seed, 1, 128), [output_len])


def shared(warm: bool) -> Load:
    """W3: 64 requests that share their first 2,048 tokens."""
    prefix = random_prompts(3000, 1, 2048)[0]
    tails = random_prompts(3002 if warm else 3001, 64, 64)
    return Load([prefix + tail for tail in tails], [64] * 64)


def prefill(nth: int) -> Load:
    """W4: 16 prompts of 8,192 tokens, one token out."""
    return Load(random_prompts(4000 + nth, 16, 8192), [1] * 16)


def warm_ups() -> list[Load]:
    """What runs before anything is measured."""
    prompts, _ = mixed(977, 64)
    return [
        Load(prompts, [16] * 64),
        Load(random_prompts(978, 256, 32), [8] * 256),
        Load(random_prompts(979, 2, 8192), [1, 1]),
    ]
