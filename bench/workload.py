"""This file makes the requests of a load: seeded lengths and token ids, and the named presets.

It does not know how they are sent. Law: the same seed gives the same requests, and no two waves of
one bench have a prompt in common unless the workload says so (else the prefix cache would be what
is measured).
"""

from __future__ import annotations

import random
from typing import NamedTuple


class Lengths(NamedTuple):
    """Uniform over [low, high]."""

    low: int
    high: int

    def draw(self, rng: random.Random) -> int:
        return rng.randint(self.low, self.high)


def lengths(text: str) -> Lengths:
    """Reads `128` or `64:256`. Raises ValueError: not of that form, or not a range."""
    low, _, high = text.partition(":")
    found = Lengths(int(low), int(high or low))
    if not 1 <= found.low <= found.high:
        raise ValueError(f"{text!r} is not N or LOW:HIGH with 1 <= LOW <= HIGH")
    return found


class Request(NamedTuple):
    ids: tuple[int, ...]
    output_len: int

    def text(self) -> str:
        """The prompt as words instead of ids, one for each."""
        return " ".join(word(index) for index in self.ids)


SYLLABLES = ("ka", "lo", "mi", "ne", "ru", "sa", "ti", "vo")


def word(index: int) -> str:
    """A pronounceable stand-in for token `index`; distinct for distinct ones."""
    found = SYLLABLES[index % 8]
    while index := index // 8:
        found += SYLLABLES[index % 8]
    return found


class Workload(NamedTuple):
    """`count` requests of which `concurrency` are open at once, as soon as there is room."""

    name: str
    count: int
    concurrency: int
    input_len: Lengths
    output_len: Lengths
    shared_len: int = 0  # tokens that all prompts of one wave begin with
    headline: str = "output"  # which rate is the figure: of output or of input tokens
    repeats: int = 3

    def wave(self, seed: int, repeat: int, vocab: int) -> list[Request]:
        """The requests of one repeat. Ids are drawn from [FIRST_ID, vocab)."""
        rng = random.Random(f"{self.name}/{seed}/{repeat}")
        shared = draw_ids(rng, self.shared_len, vocab)
        return [
            Request(
                shared + draw_ids(rng, self.input_len.draw(rng), vocab), self.output_len.draw(rng)
            )
            for _ in range(self.count)
        ]


# Special tokens usually come first in a vocabulary, or last; these are neither.
FIRST_ID = 300
VOCAB = 30_000


def draw_ids(rng: random.Random, count: int, vocab: int) -> tuple[int, ...]:
    return tuple(rng.randrange(FIRST_ID, vocab) for _ in range(count))


def fixed(value: int) -> Lengths:
    return Lengths(value, value)


# The workloads of the README's table.
PRESETS: dict[str, Workload] = {
    "bs1": Workload("bs1", 1, 1, fixed(32), fixed(128), repeats=5),
    "c8": Workload("c8", 8, 8, fixed(32), fixed(128)),
    "c32": Workload("c32", 32, 32, fixed(32), fixed(128)),
    "prefill512": Workload("prefill512", 1, 1, fixed(512), fixed(1), headline="input", repeats=9),
    "shared32": Workload("shared32", 32, 32, fixed(32), fixed(64), shared_len=512),
}


def chosen(preset: str) -> list[Workload]:
    """One preset, several with commas, or `all`. Raises ValueError naming an unknown one."""
    names = list(PRESETS) if preset == "all" else preset.split(",")
    for name in names:
        if name not in PRESETS:
            raise ValueError(f"no preset {name!r}: there are {', '.join(PRESETS)} and all")
    return [PRESETS[name] for name in names]
