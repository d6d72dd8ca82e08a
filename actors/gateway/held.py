"""This file keeps what a stream has brought, for a client that may come back for it.

It does not know connections, dialects or time. A *mark* says how far a client is: for each choice
how many characters of the model's text it has, and whether it has its end. Marks are of text, not
of events or tokens, since the same text may come in other pieces: from another attempt, or from
another gateway that computes the call again. Where a choice's begin, one character or the end
becomes several events, the mark also counts those that the client has. Beside the text it counts
token ids, which come with text or before it.

Laws: a place gives each row once, in order, cut at its mark; what lies before the mark is given as
known, for the writer's state and not for the client; the shelf never drops who is being read.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import msgspec

from actors.gateway.call import Row
from actors.gateway.outbox import ROW_BYTES
from messages.gateway import Delta
from messages.types import Problem

CALL_CHARS, SEED_CHARS, SECRET_CHARS = 24, 16, 16
ID_CHARS = CALL_CHARS + SEED_CHARS + SECRET_CHARS
MARKS_MAX = 1024
ID_BYTES = 4  # of a token id in `Delta.token_ids`


class StreamId(NamedTuple):
    """Names a stream, and has what another gateway needs to compute it again."""

    call: str  # the id of the call that it began as: hex
    seed: int  # what is drawn where the body has no seed
    secret: str  # so that nobody can guess it: hex

    def __str__(self) -> str:
        return f"{self.call}{self.seed:0{SEED_CHARS}x}{self.secret}"


class Mark(NamedTuple):
    chars: int = 0
    is_ended: bool = False
    events: int = 0  # of what comes there: the choice's begin, the next character or the end
    tokens: int = 0

    def __str__(self) -> str:
        end = "e" if self.is_ended else ""
        events = f"+{self.events}" if self.events else ""
        tokens = f"t{self.tokens}" if self.tokens else ""
        return f"{self.chars}{end}{events}{tokens}"


Marks = tuple[Mark, ...]


def event_id(stream: StreamId | str, marks: Iterable[Mark]) -> str:
    return f"{stream}.{','.join(map(str, marks))}"


def read_stream_id(text: str) -> StreamId | None:
    if len(text) != ID_CHARS or not set(text) <= set("0123456789abcdef"):
        return None
    call, rest = text[:CALL_CHARS], text[CALL_CHARS:]
    return StreamId(call, int(rest[:SEED_CHARS], 16), rest[SEED_CHARS:])


def read_event_id(text: str) -> tuple[StreamId, Marks] | None:
    """None: it is none of ours."""
    name, _, places = text.partition(".")
    stream = read_stream_id(name)
    words = places.split(",")
    if stream is None or len(words) > MARKS_MAX:
        return None
    marks = []
    for word in words:
        rest, _, tokens = word.partition("t")
        place, _, events = rest.partition("+")
        chars = place.removesuffix("e")
        if not is_count(chars) or not is_count(events or "0") or not is_count(tokens or "0"):
            return None
        marks.append(Mark(int(chars), place != chars, int(events or "0"), int(tokens or "0")))
    return stream, tuple(marks)


def is_count(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) <= 12


class Held:
    """All rows of one stream so far, and its end."""

    def __init__(self, choice_count: int) -> None:
        self.choice_count = choice_count
        self.rows: list[Row] = []
        self.bytes_len = 0
        self.is_over = False
        self.problem: Problem | None = None

    def add(self, rows: Iterable[Row]) -> None:
        assert not self.is_over, "a row after the end"
        for row in rows:
            self.rows.append(row)
            self.bytes_len += ROW_BYTES + len(row.delta.text)
            for token in row.delta.logprobs:
                self.bytes_len += ROW_BYTES * (1 + len(token.best))

    def end(self, problem: Problem | None = None) -> None:
        assert not self.is_over, "a second end"
        self.is_over = True
        self.problem = problem


class Place:
    """How far one reader of it is, and with what it began."""

    def __init__(self, held: Held, marks: Marks = ()) -> None:
        self.held = held
        self.index = 0
        blank = (Mark(),) * (held.choice_count - len(marks))
        self.targets = (*marks, *blank)[: held.choice_count]
        self.chars = [0] * held.choice_count  # taken
        self.tokens = [0] * held.choice_count
        self.sent = list(self.targets)  # what the client has
        self.passed = [0] * held.choice_count  # events that there were where the client is

    def send(self, row: Row, events: list[bytes], stream: str, begin_count: int = 0) -> bytes:
        """The events of a row that is new to the client, each with its id, but for those that the
        client has. Rows are sent in the order in which they were taken; the first `begin_count`
        events begin the choice. One with several others is an end, or one character's, alone."""
        choice, delta = row
        found = []
        for index, event in enumerate(events, 1):
            mark = self.sent[choice]
            is_new = True
            if index <= begin_count or moves(delta):  # else it is of tokens, which the mark counts
                self.passed[choice] += 1
                is_new = self.passed[choice] > mark.events
                mark = mark._replace(events=max(mark.events, self.passed[choice]))
            self.sent[choice] = after(mark, delta) if index == len(events) else mark
            if is_new:
                name = event_id(stream, self.sent).encode()
                found.append(b"id: " + name + b"\n" + event + b"\n\n")
        if not events:
            self.sent[choice] = after(self.sent[choice], delta)
        if moves(delta):
            self.passed[choice] = 0
        return b"".join(found)

    def skip(self, row: Row, begin_count: int = 0) -> None:
        """The same for a row that the client has."""
        self.passed[row.choice] = 0 if moves(row.delta) else self.passed[row.choice] + begin_count

    @property
    def is_at_end(self) -> bool:
        return self.held.is_over and self.index == len(self.held.rows)

    def take(self) -> tuple[list[Row], list[Row]]:
        """The rows since the last time: those that the client has, and those that are new to it."""
        known: list[Row] = []
        fresh: list[Row] = []
        rows = self.held.rows
        while self.index < len(rows):
            row = rows[self.index]
            self.index += 1
            choice, delta = row
            target = self.targets[choice]
            begin = self.chars[choice]
            self.chars[choice] = begin + len(delta.text)
            left = max(0, target.chars - begin)
            tokens = len(delta.token_ids) // ID_BYTES
            had = min(tokens, max(0, target.tokens - self.tokens[choice]))
            self.tokens[choice] += tokens
            is_all = delta.finish is None and left >= len(delta.text)
            if target.is_ended or is_all and (left and not had or had and had == tokens):
                known.append(row)
            elif not left and not had:
                fresh.append(row)
            else:
                # It came in other pieces than now: of its text and its tokens some are new.
                head, tail = cut(delta, left, had)
                known.append(Row(choice, head))
                fresh.append(Row(choice, tail))
        return known, fresh

    def check(self) -> None:
        assert 0 <= self.index <= len(self.held.rows)
        for choice, chars in enumerate(self.chars):
            rows = self.held.rows[: self.index]
            assert chars == sum(len(row.delta.text) for row in rows if row.choice == choice)


def cut(delta: Delta, chars: int, tokens: int) -> tuple[Delta, Delta]:
    """Its first characters and tokens, and what is left. Its end is the second's."""
    replace = msgspec.structs.replace
    usage = None if delta.usage is None else replace(delta.usage, completion_tokens=0)
    head = replace(
        delta,
        token_count=tokens,
        text=delta.text[:chars],
        token_ids=delta.token_ids[: ID_BYTES * tokens],
        logprobs=delta.logprobs[:tokens],
        finish=None,
        matched=None,
        usage=usage,
        problem=None,
        spans=delta.spans[: ID_BYTES * tokens],
    )
    tail = replace(
        delta,
        index=delta.index + tokens,
        token_count=delta.token_count - tokens,
        text=delta.text[chars:],
        token_ids=delta.token_ids[ID_BYTES * tokens :],
        logprobs=delta.logprobs[tokens:],
        spans=delta.spans[ID_BYTES * tokens :],
    )
    return head, tail


def moves(delta: Delta) -> bool:
    """What comes behind it comes at another place of the text, or nothing does."""
    return bool(delta.text) or delta.finish is not None


def after(mark: Mark, delta: Delta) -> Mark:
    """Who was at `mark` and has got all of `delta`."""
    tokens = mark.tokens + len(delta.token_ids) // ID_BYTES
    events = 0 if moves(delta) else mark.events
    return Mark(mark.chars + len(delta.text), delta.finish is not None, events, tokens)


class Shelf:
    """The streams that can be come back to, by id. At most `count_max`, the oldest first to go."""

    def __init__(self, count_max: int, bytes_max: int) -> None:
        self.count_max = count_max
        self.bytes_max = bytes_max
        self.held: dict[str, Held] = {}
        self.readers: dict[str, int] = {}

    def put(self, name: str, held: Held) -> bool:
        """False: there is no room. Those to be dropped for it are in `excess` then."""
        if len(self.held) >= self.count_max:
            return False
        self.held[name] = held
        self.readers[name] = 0
        return True

    def remove(self, name: str) -> None:
        self.held.pop(name, None)
        self.readers.pop(name, None)

    def excess(self, wanted_count: int = 0) -> list[str]:
        """Whom to drop so that there is room for `wanted_count` more: the oldest unread ones."""
        count = len(self.held) + wanted_count
        total = sum(held.bytes_len for held in self.held.values())
        found: list[str] = []
        for name, held in self.held.items():
            if count <= self.count_max and total <= self.bytes_max:
                break
            if not self.readers[name]:
                found.append(name)
                count -= 1
                total -= held.bytes_len
        return found

    def check(self) -> None:
        assert set(self.held) == set(self.readers)
        assert len(self.held) <= self.count_max, len(self.held)
        assert all(count >= 0 for count in self.readers.values()), self.readers
