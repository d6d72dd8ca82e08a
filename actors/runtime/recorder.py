"""This file is the flight recorder of one process: the headers of the last messages, in memory that
outlives it.

It does not know processes, nor who reads: it writes into a buffer that another process has mapped
too, and reads one that may have been left in mid-record. A record is of a fixed size and begins and
ends with its number; where the two differ, or are not of its place, it was being written. Names
(paths, kinds of messages) are in a table in the same memory, each written before it is counted.

Laws: `read` gives the last records, at most `capacity`, in order and each whole; whatever the bytes
are, it raises nothing. What does not fit into the table is named "?", and a request's id is cut.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator
from struct import Struct
from typing import NamedTuple

CAPACITY = 4096
NAMES_BYTES = 32_768
NAME_BYTES_MAX = 120
NAMES_MAX = 0xFFFF
# number, when, how long, count, event, lane, receiver, sender, kind, request, number again. Native:
# both ends are on one machine, and fields are copied whole.
RECORD = Struct("=QddIBBHHH28sQ")
REQUEST_BYTES = 28
OUTCOME = Struct("=dI")
OUTCOME_AT = 16  # of `how long` in a record
HEAD = Struct("=Q")  # how many names there are
NAME = Struct("=B")  # how long one is
UNKNOWN = "?"
SIZE = HEAD.size + NAMES_BYTES + CAPACITY * RECORD.size


class Event(enum.IntEnum):
    """What a record is of."""

    HANDLED = 1  # by an actor of this node: a message, or several of one kind in a row
    CAME = 2  # from another node
    WENT = 3  # to another node
    THREAD = 4  # work in a thread of an actor


class Flight(NamedTuple):
    """One record, as it is read."""

    number: int
    at_s: float  # the clock of all loops of one machine
    took_s: float | None  # None: it had not ended, or nothing is to be waited for
    times: int  # how many messages
    event: int
    lane: int
    receiver: str
    sender: str
    kind: str
    request: str

    @property
    def is_open(self) -> bool:
        """It had begun and had not ended."""
        return self.took_s is None and self.event in (Event.HANDLED, Event.THREAD)


class Recorder:
    """Writes. `buffer` is zeroed memory of `size_of(capacity)` bytes."""

    __slots__ = ("_buffer", "_capacity", "_ids", "_names_end", "_number", "_records_at")

    def __init__(self, buffer: bytearray | memoryview, capacity: int = CAPACITY) -> None:
        self._buffer = memoryview(buffer)
        assert len(self._buffer) >= size_of(capacity), (len(self._buffer), capacity)
        self._capacity = capacity
        self._records_at = HEAD.size + NAMES_BYTES
        self._names_end = HEAD.size
        self._number = 0
        self._ids: dict[str, int] = {}

    def note(
        self,
        event: int,
        lane: int,
        at_s: float,
        receiver: str,
        sender: str,
        kind: str,
        request: str | None = None,
    ) -> int:
        """Writes one record. Returns its number, for `ended`."""
        ids = self._ids
        number = self._number = self._number + 1
        RECORD.pack_into(
            self._buffer,
            self._records_at + number % self._capacity * RECORD.size,
            number,
            at_s,
            0.0,
            0,
            event,
            lane,
            ids.get(receiver) or self._name(receiver),
            ids.get(sender) or self._name(sender),
            ids.get(kind) or self._name(kind),
            request.encode() if request else b"",
            number,
        )
        return number

    def ended(self, number: int, took_s: float, count: int) -> None:
        """What a record is of has ended, and stood for `count` messages."""
        if self._number - number < self._capacity:
            at = self._records_at + number % self._capacity * RECORD.size + OUTCOME_AT
            OUTCOME.pack_into(self._buffer, at, took_s, count)

    def _name(self, name: str) -> int:
        """The id of a name that is new; 0 for one that there is no room for."""
        data = name.encode()[:NAME_BYTES_MAX]
        begin, end = self._names_end, self._names_end + NAME.size + len(data)
        if end > self._records_at or len(self._ids) >= NAMES_MAX:
            return 0
        NAME.pack_into(self._buffer, begin, len(data))
        self._buffer[begin + NAME.size : end] = data
        self._names_end = end
        self._ids[name] = len(self._ids) + 1
        HEAD.pack_into(self._buffer, 0, len(self._ids))
        return len(self._ids)


def size_of(capacity: int) -> int:
    """Bytes that a recorder of so many records needs."""
    return HEAD.size + NAMES_BYTES + capacity * RECORD.size


def read(buffer: bytes | bytearray | memoryview, capacity: int = CAPACITY) -> list[Flight]:
    """The records that are whole, the oldest first."""
    data = bytes(buffer[: size_of(capacity)])
    if len(data) < size_of(capacity):
        return []
    names = list(read_names(data))

    def name(index: int) -> str:
        return names[index - 1] if 0 < index <= len(names) else UNKNOWN

    found: list[Flight] = []
    records = memoryview(data)[HEAD.size + NAMES_BYTES :]
    for place, fields in enumerate(RECORD.iter_unpack(records)):
        number, at_s, took_s, count, event, lane, receiver, sender, kind, request, again = fields
        if number == 0 or number != again or number % capacity != place:
            continue
        found.append(
            Flight(
                number,
                at_s,
                took_s if count else None,
                count,
                event,
                lane,
                name(receiver),
                name(sender),
                name(kind),
                request.rstrip(b"\0").decode(errors="replace"),
            )
        )
    found.sort()
    # What is older than the ring is long was being written over: its place has no later one.
    return [one for one in found if found[-1].number - one.number < capacity]


def read_names(data: bytes) -> Iterator[str]:
    (count,) = HEAD.unpack_from(data)
    at = HEAD.size
    for _ in range(min(count, NAMES_MAX)):
        if at >= HEAD.size + NAMES_BYTES:
            return
        (length,) = NAME.unpack_from(data, at)
        at += NAME.size
        yield data[at : at + length].decode(errors="replace")
        at += length
