"""This file is the one registry type of every seam: names to factories.

It does not know what it holds. Built-ins register by decorator when their module is imported (the
registry imports every module of `package` at the first look-up); installed packages register by an
entry point in the group `histrio.<seam>`. Adding an entry is one new file and no change elsewhere.
Pure standard library: every room may import this file.

Laws: a name has one owner; names are looked up as written; nothing is imported before it is asked.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points
from typing import Generic, TypeVar

T = TypeVar("T")
R = TypeVar("R")


class UnknownName(LookupError):
    """The caller asked for an entry that the seam does not have; the text lists those it has."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One line of `histrio plugins`."""

    seam: str
    name: str
    origin: str  # "built in", or the distribution that brings it


class Registry(Generic[T]):
    """Entries of one seam. `register` at import time; `get` and `names` afterwards."""

    def __init__(self, seam: str, package: str | None = None) -> None:
        """`package`: whose modules hold the built-in entries; None if the owner imports them."""
        self.seam = seam
        self._package = package
        self._built_in: dict[str, T] = {}
        self._installed: dict[str, EntryPoint] | None = None

    def register(self, *names: str) -> Callable[[R], R]:
        """Makes the decorated object the entry for each of `names`.

        Raises ValueError if a name is taken: our bug, or two copies of one module.
        """
        assert names, f"{self.seam}: an entry needs a name"

        def keep(entry: R) -> R:
            for name in names:
                if name in self._built_in:
                    raise ValueError(f"{self.seam} {name!r} is registered twice")
                self._built_in[name] = entry  # type: ignore[assignment]
            return entry

        return keep

    def get(self, name: str) -> T:
        """The entry called `name`. Raises UnknownName with the list of what there is."""
        installed = self._discover()
        if name in self._built_in:
            return self._built_in[name]
        if name in installed:
            entry: T = installed[name].load()
            return entry
        known = ", ".join(self.names()) or "none"
        raise UnknownName(f"unknown {self.seam} {name!r}; known are: {known}")

    def names(self) -> list[str]:
        """All names, sorted."""
        installed = self._discover()
        return sorted({*self._built_in, *installed})

    def entries(self) -> list[Entry]:
        """All entries with where they come from, sorted by name."""
        installed = self._discover()
        return [
            Entry(
                self.seam,
                name,
                "built in" if name in self._built_in else registry_origin(installed[name]),
            )
            for name in self.names()
        ]

    def _discover(self) -> dict[str, EntryPoint]:
        if self._installed is None:
            if self._package is not None:
                for module in pkgutil.iter_modules(importlib.import_module(self._package).__path__):
                    importlib.import_module(f"{self._package}.{module.name}")
            found = {point.name: point for point in entry_points(group=f"histrio.{self.seam}")}
            taken = sorted(set(found) & set(self._built_in))
            if taken:
                raise ValueError(
                    f"{self.seam} {taken[0]!r} is built in; {registry_origin(found[taken[0]])} "
                    "must register under another name"
                )
            self._installed = found
        return self._installed


def registry_origin(point: EntryPoint) -> str:
    return point.dist.name if point.dist is not None else point.value
