"""This file is the seam of custom logits processors: what changes a row's logits before a token is
chosen. A request names entries that the operator has allowed, and gives parameters.

An entry is a declaration, light enough for the front rooms: the parameters' type, and by text what
does the work, which the worker alone imports. An installed package adds one by an entry point of
the group `histrio.logits_processor`.

Laws: nothing that comes with a request is executed, imported or unpickled: its name is looked up
among those allowed, its parameters are decoded into the entry's own type. What a processor does
follows from its parameters and the row's own tokens and logits; else recovery would show.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from kernels.registry import Registry

Encode = Callable[[str], list[int]]


class BadParams(ValueError):
    """The parameters make no sense for this model; the text is for whoever gave them."""


@dataclass(frozen=True, slots=True)
class Declaration:
    """`params`: a msgspec Struct that forbids unknown fields; what a request may say.

    `work` is "module:name" of a function that makes a `kernels.processors.base.LogitsProcessor` of
    the parameters. `settle`, if there is one, first turns them into another Struct, `settled`, in
    the tokenizer: texts into ids. It raises BadParams.
    """

    params: type[msgspec.Struct]
    work: str
    settle: Callable[[Any, Encode], msgspec.Struct] | None = None
    settled: type[msgspec.Struct] | None = None

    def read(self, given: bytes, encode: Encode) -> bytes:
        """What a request gave, as the worker gets it. Raises msgspec.ValidationError, BadParams."""
        params = msgspec.json.decode(given or b"{}", type=self.params)
        return msgspec.json.encode(self.settle(params, encode) if self.settle else params)

    def again(self, read: bytes) -> msgspec.Struct:
        """What `read` made."""
        return msgspec.json.decode(read, type=self.settled or self.params)


PROCESSORS: Registry[Declaration] = Registry("logits_processor", "actors.processors")


def allowed_of(setting: str) -> tuple[str, ...]:
    """The names of a setting, between commas. Raises UnknownName for one that is no entry."""
    names = tuple(name for part in setting.split(",") if (name := part.strip()))
    for name in names:
        PROCESSORS.get(name)
    return names


def ids_of(words: Sequence[str], encode: Encode) -> tuple[tuple[int, ...], ...]:
    """Raises BadParams for a text that this model has no token for."""
    found = tuple(tuple(encode(word)) for word in words)
    for word, ids in zip(words, found, strict=True):
        if not ids:
            raise BadParams(f"this model has no token for {word!r}")
    return found
