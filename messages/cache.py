"""This file is the cache's mailbox. The cache owns page numbers; it never touches a tensor.

Per request the scheduler speaks to the cache at admission, after each prefill chunk and at the end;
decode growth spends pages reserved in advance.
"""

from __future__ import annotations

from messages.base import Message, Part
from messages.types import Int32s


class Acquire(Message, frozen=True):
    """Match `tokens` against the tree, lease what matched, allocate pages up to `len(tokens)`.

    All or nothing: answered by `Acquired` or `Deferred`. At most `len(tokens) - 1` tokens count as
    cached, rounded down to a page.
    """

    request: str
    attempt: int
    tokens: Int32s
    namespace: str = ""


class Commit(Message, frozen=True):
    """Tokens [0, computed_len) of the request's KV are computed: its full pages may be shared."""

    request: str
    attempt: int
    computed_len: int


class Release(Message, frozen=True):
    """The request ends or is retracted: its leases end.

    `tokens` are those whose KV is computed (their full pages go into the tree, or are freed if the
    tree has the same prefix already); `pages` are those that it got through `Granted`, in order
    after the ones of `Acquired`.
    """

    request: str
    attempt: int
    tokens: Int32s
    pages: Int32s = b""


class Reserve(Message, frozen=True):
    """Lease up to `page_count` pages to the scheduler itself, for decode growth."""

    page_count: int


class Return(Message, frozen=True):
    """Give back reserved pages that no request uses."""

    pages: Int32s


class Candidate(Part, frozen=True):
    """A waiting request, as far as the cache needs to know it."""

    tokens: Int32s
    namespace: str = ""


class Probe(Message, frozen=True):
    """How much of each candidate is cached? Answered by `Probed`; nothing is leased."""

    rows: tuple[Candidate, ...]


class Clear(Message, frozen=True):
    """Forget every prefix, if no request holds a page; answered by `Cleared`. From an operator, by
    a gateway."""


class Cleared(Message, frozen=True):
    """The answer to `Clear`. With `leased_count` pages held nothing was forgotten."""

    freed_count: int
    leased_count: int


In = Acquire | Commit | Release | Reserve | Return | Probe | Clear
