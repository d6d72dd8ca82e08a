"""This file estimates the bytes that a message holds, for the bounds of mailboxes and transports.

It does not know what they are used for. Each class of messages is looked at once; one whose every
field is a word has the same size always, and is in `fixed_sizes` from then on.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from typing import Any

import msgspec

_WORD_BYTES = 16  # of a field that has no length of its own
_sizers: dict[type, Callable[[Any], int]] = {}
fixed_sizes: dict[type, int] = {}  # of the classes whose every field is a word


def size_of(value: Any) -> int:
    """Estimates the bytes that a message holds: exact for text and buffers, a word for numbers;
    a tuple counts as its first element times its length. Constant time for each field."""
    kind = type(value)
    if kind is bytes or kind is str:
        return len(value) + _WORD_BYTES
    if kind is tuple:
        return _WORD_BYTES + (len(value) * size_of(value[0]) if value else 0)
    sizer = _sizers.get(kind)
    if sizer is None:
        sizer = _sizers[kind] = _sizer_of(kind)
    return sizer(value)


def _sizer_of(kind: type) -> Callable[[Any], int]:
    if not (isinstance(kind, type) and issubclass(kind, msgspec.Struct)):
        return lambda value: _WORD_BYTES
    fields = msgspec.structs.fields(kind)
    fixed_bytes = _WORD_BYTES * (1 + len(fields))
    open_fields = tuple(f.name for f in fields if not _is_word(f.type))
    if not open_fields:
        fixed_sizes[kind] = fixed_bytes
        return lambda value: fixed_bytes

    def sizer(value: Any) -> int:
        total = fixed_bytes
        for name in open_fields:
            total += size_of(getattr(value, name))
        return total

    return sizer


def _is_word(annotation: Any) -> bool:
    return annotation in (int, float, bool, type(None)) or (
        isinstance(annotation, type) and issubclass(annotation, enum.Enum)
    )
