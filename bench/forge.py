"""This file makes hostile bytes: noise, valid bytes that were tampered with, bombs, false lengths.

It does not know who reads them. All chance is the caller's `random.Random`, so that a seed replays.
What is valid to begin with is made from the types themselves, so that a new message is covered
without a line here.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
from msgspec import inspect

INTS = (0, 1, 2, -1, 63, 127, 128, 255, 65_536, 2**31 - 1, 2**31, 2**53, 2**63 - 1, -(2**63))
FLOATS = (0.0, -0.0, 1.5, 1e308, -1e308, float("inf"), float("-inf"), float("nan"))
TEXTS = ("", "a", "main", "replica/worker", "é\u2028\U0001f600", "\x00", "x" * 300)
# Headers of msgpack that announce more than follows: array, map, str, bin and ext of 2^32 - 1.
GREAT = (
    b"\xdd\xff\xff\xff\xff",
    b"\xdf\xff\xff\xff\xff",
    b"\xdb\xff\xff\xff\xff",
    b"\xc6\xff\xff\xff\xff",
    b"\xc9\xff\xff\xff\xff\x01",
    b"\xdd\x7f\xff\xff\xff",
    b"\xdf\x00\xff\xff\xff",
)
DEPTHS = (10, 200, 1000, 5000)
COUNT_MAX = 3  # of what a list holds


def value_of(info: inspect.Type, rng: random.Random) -> Any:
    """Something that the type allows, leaning to what is at a limit."""
    match info:
        case inspect.StructType():
            return info.cls(
                **{
                    field.name: value_of(field.type, rng)
                    for field in info.fields
                    if keeps(field, rng)
                }
            )
        case inspect.UnionType():
            return value_of(rng.choice(info.types), rng)
        case inspect.IntType():
            return rng.choice(INTS)
        case inspect.FloatType():
            return rng.choice(FLOATS)
        case inspect.BoolType():
            return rng.random() < 0.5
        case inspect.StrType():
            return rng.choice(TEXTS)
        case inspect.BytesType():
            return rng.randbytes(rng.choice((0, 1, 4, 64)))
        case inspect.EnumType():
            return rng.choice(list(info.cls))
        case inspect.LiteralType():
            return rng.choice(info.values)
        case inspect.ListType() | inspect.VarTupleType():
            values = [value_of(info.item_type, rng) for _ in range(rng.randrange(COUNT_MAX))]
            return values if isinstance(info, inspect.ListType) else tuple(values)
        case inspect.TupleType():
            return tuple(value_of(item, rng) for item in info.item_types)
        case inspect.DictType():
            count = rng.randrange(COUNT_MAX)
            return {
                value_of(info.key_type, rng): value_of(info.value_type, rng) for _ in range(count)
            }
        case inspect.NoneType() | inspect.AnyType():
            return None
        case _:
            raise NotImplementedError(f"no value for {info}")


def keeps(field: inspect.Field, rng: random.Random) -> bool:
    return field.required or rng.random() < 0.6


class Maker:
    """Makes encoded values of one type."""

    def __init__(self, type_: Any) -> None:
        self._info = inspect.type_info(type_)
        self._encode = msgspec.msgpack.Encoder().encode

    def make(self, rng: random.Random) -> bytes:
        return self._encode(value_of(self._info, rng))


# What is done to valid bytes; each takes them and a chance.


def flipped(data: bytes, rng: random.Random) -> bytes:
    changed = bytearray(data)
    for _ in range(rng.randrange(1, 4)):
        if changed:
            changed[rng.randrange(len(changed))] ^= 1 << rng.randrange(8)
    return bytes(changed)


def cut(data: bytes, rng: random.Random) -> bytes:
    return data[: rng.randrange(len(data) + 1)]


def lengthened(data: bytes, rng: random.Random) -> bytes:
    return data + rng.randbytes(rng.randrange(1, 20))


def spliced(data: bytes, rng: random.Random) -> bytes:
    """A piece of it is repeated, left out or moved."""
    begin, end, to = (rng.randrange(len(data) + 1) for _ in range(3))
    return data[:to] + data[min(begin, end) : max(begin, end)] + data[to:]


def misdescribed(data: bytes, rng: random.Random) -> bytes:
    """Somewhere in it a header announces more than there is."""
    at = rng.randrange(len(data) + 1)
    return data[:at] + rng.choice(GREAT) + data[at + rng.randrange(3) :]


def bombed(data: bytes, rng: random.Random) -> bytes:
    """Somewhere in it are arrays or maps within each other, deeper than any reader's stack."""
    at = rng.randrange(len(data) + 1)
    depth = rng.choice(DEPTHS)
    bomb = rng.choice((b"\x91", b"\x81\xa1a", b"\xdc\x00\x01", b"\xc7\x01\x05\x91")) * depth
    return data[:at] + bomb + data[at:]


def longer_by_one(data: bytes, rng: random.Random) -> bytes:
    """A message with a field more than it has, itself anything: what a later version would send."""
    if not data or not 0x90 <= data[0] < 0x9F:
        return data
    extra = rng.choice((b"\xc0", b"\x91" * 2000 + b"\xc0", *GREAT, b"\xa1x", b"\xc1"))
    return bytes([data[0] + 1]) + data[1:] + extra


Change = Callable[[bytes, random.Random], bytes]
CHANGES: tuple[Change, ...] = (
    flipped,
    cut,
    lengthened,
    spliced,
    misdescribed,
    bombed,
    longer_by_one,
)
NOISE_SHARE = 0.1
FRESH_SHARE = 0.02  # of cases for which a new valid value is made
STOCK_MAX = 512


class Forge:
    """Hostile bytes near what a reader takes. `untouched`: how many of them are valid as made."""

    def __init__(self, types: Sequence[Any], rng: random.Random, *, untouched: float = 0.0) -> None:
        self._makers = [Maker(type_) for type_ in types]
        self._rng = rng
        self._untouched = untouched
        self._stock = [rng.choice(self._makers).make(rng) for _ in range(STOCK_MAX)]

    def strike(self) -> bytes:
        rng = self._rng
        chance = rng.random()
        if chance < NOISE_SHARE:
            return rng.randbytes(rng.choice((0, 1, 2, 9, 33, 400)))
        place = rng.randrange(STOCK_MAX)
        if chance > 1 - FRESH_SHARE:
            self._stock[place] = rng.choice(self._makers).make(rng)
        data = self._stock[place]
        if rng.random() < self._untouched:
            return data
        for _ in range(rng.choice((1, 1, 1, 2, 3))):
            data = rng.choice(CHANGES)(data, rng)
        return data
