"""This file says what the shadow worker's model makes of a prompt: a vector that is a hash of what
is really found through the page table, as its tokens are.

It does not know slots or steps. Law: the numbers depend on the cells alone, not on the noise of a
request or on what is asked for beside them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

from messages.types import Float32s, Sampling, pack_floats

HIDDEN_LEN = 4
LABEL_IDS = (7, 4)  # that scores are asked for


def vector_of(cells: Iterable[tuple[int, int, str]], sampling: Sampling) -> Float32s:
    """See `Sampling.want_vector`: numbers of length 1 together, or a log probability for each of
    the label ids. Empty where neither is asked for."""
    if not sampling.want_vector and not sampling.label_ids:
        return b""
    seed = hashlib.blake2b(repr(list(cells)).encode(), digest_size=16).digest()
    if sampling.label_ids:
        return pack_floats(
            -1 - part(seed, label_id) % 1000 / 100 for label_id in sampling.label_ids
        )
    values = [part(seed, index) % 2001 / 1000 - 1 for index in range(HIDDEN_LEN)]
    length = sum(value * value for value in values) ** 0.5
    return pack_floats(value / max(length, 1e-12) for value in values)


def part(seed: bytes, number: int) -> int:
    """A number in [0, 2**32) for each number."""
    return int.from_bytes(hashlib.blake2b(seed + b"%d" % number, digest_size=4).digest())
