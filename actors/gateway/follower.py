"""This file writes a held stream to one connection, so that each event can be come back to.

It does not know connections nor a dialect. An event is named by how far the text is; a row that
becomes several cannot be named by that. Such a row is written in its smallest parts: its tokens,
then each character, then the end. Law: a part has the same events in whatever rows it came.

That a row has several events is known when it is written, and a writer cannot take back. So there
are two: `twin` stands before the row then, and is otherwise behind.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import msgspec

from actors.gateway.call import Row
from actors.gateway.dialect import StreamWriter
from actors.gateway.held import ID_BYTES, Place, cut
from messages.gateway import Delta


class Follower:
    """One connection's writer. `make` makes the dialect's."""

    def __init__(self, place: Place, make: Callable[[], StreamWriter], stream: str) -> None:
        self.place = place
        self.stream = stream
        self.writer = make()
        self.twin = make()
        self.unread: list[Row] = []  # by the twin
        self.begun: set[int] = set()

    def write(self, known: Iterable[Row], fresh: Iterable[Row]) -> bytes:
        """What the client gets. `known`: rows that it has, which come before the others."""
        for row in known:
            self.place.skip(row, self.begin(row))
            self.writer.write([row])
            self.unread.append(row)
        return b"".join([self.tell(part) for row in fresh for part in without_end(row)])

    def tell(self, row: Row) -> bytes:
        begin_count = self.begin(row)
        events = events_in(self.writer.write([row]))
        if len(events) - begin_count <= 1 or not row.delta.text:
            self.unread.append(row)
            return self.place.send(row, events, self.stream, begin_count)
        begin = self.place.send(begin_of(row), events[:begin_count], self.stream, begin_count)
        self.catch_up()
        told = [
            self.place.send(part, events_in(self.twin.write([part])), self.stream)
            for part in smallest(row)
        ]
        return begin + b"".join(told)

    def begin(self, row: Row) -> int:
        """How many events begin the choice, if this is its first row."""
        if row.choice in self.begun:
            return 0
        self.begun.add(row.choice)
        self.catch_up()
        return len(events_in(self.twin.write([begin_of(row)])))

    def catch_up(self) -> None:
        self.twin.write(self.unread)
        self.unread.clear()


def events_in(data: bytes) -> list[bytes]:
    return data.split(b"\n\n")[:-1]


def without_end(row: Row) -> Iterator[Row]:
    """The row, and the end by itself."""
    choice, delta = row
    if delta.finish is not None and (delta.text or delta.token_ids):
        head, delta = cut(delta, len(delta.text), len(delta.token_ids) // ID_BYTES)
        yield Row(choice, head)
    yield Row(choice, delta)


def smallest(row: Row) -> Iterator[Row]:
    """Its tokens, then its characters. It has no end."""
    choice, delta = row
    tokens, rest = cut(delta, 0, len(delta.token_ids) // ID_BYTES)
    yield Row(choice, tokens)
    for character in rest.text:
        yield Row(choice, msgspec.structs.replace(rest, text=character))


def begin_of(row: Row) -> Row:
    """Nothing but what is known when it begins."""
    delta = row.delta
    return Row(row.choice, Delta(delta.request, delta.attempt, delta.index, 0, usage=delta.usage))
