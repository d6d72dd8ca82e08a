"""Hostile bytes, a few of the million that `bench/wire.py` throws."""

from __future__ import annotations

import random

import msgspec
import pytest

from bench.wire import attack_decoders, attack_socket, frames_of, hostile, spoilt
from bench.wire_within import KINDS, attack


def test_decoders_raise_nothing_but_the_error_of_the_boundary() -> None:
    outcome = attack_decoders(6000, 1)
    assert sum(outcome.values()) == 6000
    assert min(outcome.values()) > 0


async def test_a_node_hears_nobody_without_the_token_and_its_friend_still() -> None:
    refused = await attack_socket(2000, 1)
    assert {"unreadable", "stranger", "shape", "route"} <= set(refused)


@pytest.mark.parametrize("kind", KINDS)
async def test_no_strike_from_within_breaks_a_law(kind: str) -> None:
    await attack(kind, 3000, 1)  # raises at the first


def test_what_is_drawn_is_a_function_of_the_seed_and_mostly_unreadable() -> None:
    def draw(seed: int) -> list[bytes]:
        rng = random.Random(seed)
        good = frames_of(rng)
        return [hostile(rng, [b"\x01"], good) for _ in range(300)]

    assert draw(3) == draw(3) != draw(4)
    unreadable = 0
    for data in draw(3):
        try:
            msgspec.msgpack.decode(data)
        except (msgspec.MsgspecError, RecursionError, ValueError):
            unreadable += 1
    assert unreadable > 100


def test_what_is_spoilt_may_be_empty() -> None:
    rng = random.Random(0)
    assert any(spoilt(rng, b"ab") == b"" for _ in range(300))
