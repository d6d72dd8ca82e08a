"""This file is a node's copy of who is where. The root decides; every node holds a replica.

It does not know how changes travel. Laws: for one path, what is known never goes back to an earlier
incarnation or to an earlier state of it; each change of service (up, down) is told once.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from messages.base import Address
from messages.system import Cause, Known, Reason, State

if TYPE_CHECKING:
    from actors.runtime.life import Life

UP = frozenset({State.RUNNING, State.DRAINING})


class Change(enum.Enum):
    """What an update means for those who watch the path."""

    NONE = "none"
    UP = "up"
    DOWN = "down"


class Entry:
    """One path. Refs point here, so that finding a peer is an attribute, not a look-up."""

    __slots__ = ("address", "is_exact", "known", "life", "note", "path", "seen_up", "watchers")

    is_exact: bool

    def __init__(self, path: str) -> None:
        self.path = path
        self.is_exact = False
        self.known: Known | None = None
        self.note: bytes | None = None  # of the last life that was in service
        self.address: Address | None = None  # of the incarnation in service
        self.life: Life | None = None  # set while it serves on this very node
        self.seen_up = 0  # the last incarnation that watchers were told is up
        self.watchers: list[Life] = []

    @property
    def last_down(self) -> tuple[Address, Reason] | None:
        """The present incarnation and how it died, when it is dead."""
        known = self.known
        if known is None or known.incarnation == 0 or known.last_exit is None:
            return None
        if known.state in (State.RESTARTING, State.STOPPED, State.FAILED):
            return Address(known.node, self.path, known.incarnation), known.last_exit
        return None

    def update(self, known: Known) -> list[tuple[Change, Address, Reason | None]]:
        """Takes one change from the root. Returns what watchers must be told, in order."""
        changes: list[tuple[Change, Address, Reason | None]] = []
        old = self.known
        if old is not None and known.incarnation < old.incarnation:
            return changes
        self.known = known
        address = Address(known.node, self.path, known.incarnation)
        present = self.address
        is_up = known.state in UP
        if is_up or known.note:
            self.note = known.note
        if present is not None and (present.incarnation < known.incarnation or not is_up):
            self.address = None
        if self.seen_up and (self.seen_up < known.incarnation or not is_up):
            # Down of a life whose end was overtaken by the news of its successor counts too.
            dead = Address(old.node if old is not None else known.node, self.path, self.seen_up)
            # While it is being stopped, the last exit that is known is that of the life before.
            told = None if known.state is State.STOPPING else known.last_exit
            reason = told or Reason(Cause.STOPPED)
            changes.append((Change.DOWN, dead, reason))
            self.seen_up = 0
        if is_up and self.seen_up != known.incarnation:
            self.seen_up = known.incarnation
            self.address = address
            changes.append((Change.UP, address, None))
        return changes


class ExactTarget:
    """One incarnation of a path."""

    __slots__ = ("_address", "entry")
    is_exact = True

    def __init__(self, address: Address, entry: Entry) -> None:
        self._address = address
        self.entry = entry

    @property
    def path(self) -> str:
        return self._address.path

    @property
    def address(self) -> Address | None:
        known = self.entry.known
        if known is not None and known.incarnation > self._address.incarnation:
            return None
        return self._address

    @property
    def life(self) -> Life | None:
        life = self.entry.life
        if life is not None and life.address == self._address:
            return life
        return None


class Notes(Mapping[str, bytes]):
    """The Ready notes of the directory, by path: of the life in service, or else of the last one
    that was, so that who starts while a peer is being restarted need not fail for it."""

    def __init__(self, entries: Mapping[str, Entry]) -> None:
        self._entries = entries

    def __getitem__(self, path: str) -> bytes:
        entry = self._entries.get(path)
        if entry is None or entry.note is None:
            raise KeyError(path)
        return entry.note

    def __iter__(self) -> Iterator[str]:
        return (p for p, e in self._entries.items() if e.note is not None)

    def __len__(self) -> int:
        return sum(1 for _ in self)
