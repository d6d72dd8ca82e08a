"""This file is the cache's ledger: who holds which page, and what may be shared with whom.

It does not know tensors, steps or time. Everything that a request gets or gives passes here, as one
transaction each: `acquire` either leases all that the request needs or changes nothing.

    tokens of a request   [0 ........ committed)[committed ...... pages)[granted ..)
    its pages             in the tree, locked    its own alone           reserved, unknown to us
                                                                         until `release`

Laws: a page is free, in the tree, one request's own, or reserved, and exactly one of these; what a
request reads is locked; prefixes are shared within one namespace only; at least the last token of
a request is never matched.
"""

from __future__ import annotations

from typing import NamedTuple

from actors.cache.evict import EVICTIONS, EvictionPolicy
from actors.cache.pages import Pages
from actors.cache.radix import TOKEN_BYTES, Match, Node, RadixTree
from messages.cache import Candidate
from messages.scheduler import Acquired, Deferred, Freed, Granted
from messages.types import Int32s, pack, unpack

Key = tuple[str, int]  # request, attempt


class Counts(NamedTuple):
    """The pool, split. `leased`: some request reads or writes it; `cached`: kept for reuse only."""

    free: int
    leased: int
    cached: int
    reserved: int


class Lease:
    """What one request holds."""

    __slots__ = ("committed", "namespace", "node", "pages", "pending", "tokens")

    def __init__(self, namespace: str, tokens: Int32s, node: Node | None, pages: list[int]) -> None:
        self.namespace = namespace
        self.tokens = tokens
        self.node = node  # its lock: the tree has its first `committed` pages up to here
        self.pages = pages
        self.committed = 0
        self.pending: tuple[Node, bytes] | None = None  # the page that it says it is computing


class Ledger:
    """All pages of one replica."""

    def __init__(
        self,
        page_count: int,
        page_size: int,
        *,
        prefix_cache: bool = True,
        policy: EvictionPolicy | None = None,
    ) -> None:
        self.page_size = page_size
        self.prefix_cache = prefix_cache
        self._page_bytes = page_size * TOKEN_BYTES
        self._pages = Pages(page_count)
        self._tree = RadixTree(page_size, policy or EVICTIONS.get("lru"))
        self._leases: dict[Key, Lease] = {}
        self._reserved: set[int] = set()
        # Who computes the page that follows a node, for those who would compute the same. A node
        # here is the end of the owner's lock: it can't go, and a split leaves it the lower part.
        self._pending: dict[tuple[Node, bytes], str] = {}
        self._wanting = False  # somebody got less than asked for, and has not been told since

    @property
    def available_count(self) -> int:
        """Pages that the next lease could get, the cached ones included."""
        return self._pages.free_count + self._tree.evictable_count

    def acquire(
        self, request: str, attempt: int, tokens: Int32s, namespace: str = ""
    ) -> Acquired | Deferred:
        """Leases the pages of [0, len(tokens)), or says who or what it has to wait for."""
        key = (request, attempt)
        assert key not in self._leases, f"{request} holds its pages already"
        token_count = len(tokens) // TOKEN_BYTES
        assert token_count > 0, f"{request} has no tokens"
        page_count = -(-token_count // self.page_size)
        assert page_count <= self._pages.page_count, f"{request} needs {page_count} pages"
        if not self.prefix_cache:
            if page_count > self.available_count:
                self._wanting = True
                return Deferred(request, attempt)
            pages = self._take(page_count)
            self._leases[key] = Lease(namespace, tokens, None, pages)
            return Acquired(request, attempt, 0, pack(pages))

        page_max = (token_count - 1) // self.page_size
        match = self._tree.find(namespace, tokens, page_max)
        matched = len(match.pages)
        behind = self._computing(match, tokens, page_max)
        if behind is not None:
            return Deferred(request, attempt, behind)
        missing = page_count - matched
        if missing > self.available_count - self._tree.unlocked_count(match):
            self._wanting = True
            return Deferred(request, attempt)
        node = self._tree.lock(namespace, match)
        lease = Lease(namespace, tokens, node, match.pages + self._take(missing))
        lease.committed = matched
        self._leases[key] = lease
        self._announce(request, lease)
        return Acquired(request, attempt, matched * self.page_size, pack(lease.pages))

    def commit(self, request: str, attempt: int, computed_len: int) -> None:
        """Shares the request's full pages of [0, computed_len). Frees nothing.

        Where the tree has the same tokens under other numbers by now, the rest stays the request's
        own until its release: its page table names these pages, and a lock on the others would
        make one request hold more than it needs.
        """
        lease = self._leases[request, attempt]
        if lease.node is None:
            return
        count = computed_len // self.page_size
        assert count <= len(lease.pages), f"{request} computed {computed_len} tokens"
        if count > lease.committed and not lease.node.has(
            self._page(lease.tokens, lease.committed)
        ):
            self._withdraw(lease)
            duplicates = self._share(lease, lease.tokens, count)
            assert not duplicates, f"{request} shared what was there"
            self._announce(request, lease)

    def release(self, request: str, attempt: int, tokens: Int32s, granted: Int32s = b"") -> None:
        """Ends the lease. The full pages of `tokens` stay cached, the rest is free."""
        lease = self._leases.pop((request, attempt))
        for page in unpack(granted):
            self._reserved.remove(page)
            lease.pages.append(page)
        self._withdraw(lease)
        if lease.node is not None:
            count = len(tokens) // self._page_bytes
            assert count <= len(lease.pages), f"{request} computed more than it has pages for"
            if count > lease.committed:
                self._pages.give(self._share(lease, tokens, count))
            self._tree.unlock(lease.node)
        self._pages.give(lease.pages[lease.committed :])

    def reserve(self, page_count: int) -> Granted:
        """Leases up to `page_count` pages to the scheduler itself."""
        count = min(page_count, self.available_count)
        if count < page_count:
            self._wanting = True
        pages = self._take(count)
        self._reserved.update(pages)
        return Granted(pack(pages))

    def take_back(self, pages: Int32s) -> None:
        """Frees reserved pages."""
        for page in unpack(pages):
            self._reserved.remove(page)
            self._pages.give((page,))

    def forget_leases(self) -> None:
        """Ends all that a dead scheduler held. What was shared stays cached."""
        for request, attempt in list(self._leases):
            self.release(request, attempt, b"")
        self._pages.give(sorted(self._reserved))
        self._reserved.clear()
        self._wanting = False

    @property
    def leased_count(self) -> int:
        """Pages that requests hold, those included that they only read."""
        return self.counts().leased

    def clear(self) -> int:
        """Forgets all that is cached and not held. Returns how many pages that were."""
        pages = self._tree.evict(self._tree.evictable_count)
        self._pages.give(pages)
        return len(pages)

    def probe(self, rows: tuple[Candidate, ...]) -> list[int]:
        """How many tokens of each candidate would be found cached now. Changes nothing."""
        size = self.page_size
        lens: list[int] = []
        for row in rows:
            page_max = (len(row.tokens) // TOKEN_BYTES - 1) // size
            lens.append(len(self._tree.find(row.namespace, row.tokens, page_max).pages) * size)
        return lens

    def take_freed(self) -> Freed | None:
        """To be asked after pages came back: what to tell the one who is waiting for them."""
        if not self._wanting or self.available_count == 0:
            return None
        self._wanting = False
        return Freed(self.available_count)

    def counts(self) -> Counts:
        """O(1)."""
        free, cached, reserved = (
            self._pages.free_count,
            self._tree.evictable_count,
            len(self._reserved),
        )
        return Counts(free, self._pages.page_count - free - cached - reserved, cached, reserved)

    def _computing(self, match: Match, tokens: Int32s, page_max: int) -> str | None:
        """Who computes the first page of `tokens` that `match` lacks and could have had."""
        node, matched = match.node, len(match.pages)
        if node is None or matched >= page_max or match.within < len(node.pages):
            return None
        return self._pending.get((node, self._page(tokens, matched)))

    def _page(self, tokens: Int32s, index: int) -> bytes:
        return tokens[index * self._page_bytes : (index + 1) * self._page_bytes]

    def _take(self, count: int) -> list[int]:
        """Hands out `count` pages, evicting what it must."""
        short = count - self._pages.free_count
        if short > 0:
            self._pages.give(self._tree.evict(short))
        return self._pages.take(count)

    def _share(self, lease: Lease, tokens: Int32s, count: int) -> list[int]:
        """Puts the lease's pages [committed, count) into the tree; returns those of them that the
        tree has already, under other numbers."""
        assert lease.node is not None
        begin, size = lease.committed, self._page_bytes
        lease.node, duplicates = self._tree.extend(
            lease.node, tokens[begin * size : count * size], lease.pages[begin:count]
        )
        lease.committed = count
        return duplicates

    def _announce(self, request: str, lease: Lease) -> None:
        """Says which full page the request computes next, unless another one computes it too."""
        assert lease.node is not None
        page = self._page(lease.tokens, lease.committed)
        if len(page) == self._page_bytes:
            place = (lease.node, page)
            if place not in self._pending:
                self._pending[place] = request
                lease.pending = place

    def _withdraw(self, lease: Lease) -> None:
        if lease.pending is not None:
            del self._pending[lease.pending]
            lease.pending = None

    def check(self) -> None:
        """Asserts the laws. O(pages)."""
        self._pages.check()
        self._tree.check()
        holder = [""] * self._pages.page_count

        def hold(pages: list[int], name: str) -> None:
            for page in pages:
                assert not holder[page], f"page {page}: {holder[page]} and {name}"
                holder[page] = name

        in_tree: set[int] = set()
        for node in self._tree.nodes():
            hold(node.pages, "tree")
            in_tree.update(node.pages)
        hold(sorted(self._reserved), "reserved")
        for (request, _), lease in self._leases.items():
            hold(lease.pages[lease.committed :], request)
            shared = set(lease.pages[: lease.committed])
            assert shared <= in_tree, f"{request} reads pages that the tree has lost"
            self._check_locked(request, lease)
        free = [page for page in range(len(holder)) if self._pages.is_free(page)]
        hold(free, "free")
        lost = [page for page, name in enumerate(holder) if not name]
        assert not lost, f"pages {lost} are nobody's"
        counts = self.counts()
        assert sum(counts) == len(holder), f"{counts} is not {len(holder)} pages"
        assert min(counts) >= 0, f"{counts}"
        announced = {lease.pending for lease in self._leases.values() if lease.pending}
        assert announced == set(self._pending), "a page is announced by nobody"

    def _check_locked(self, request: str, lease: Lease) -> None:
        """The way from the root to the lease's node spells its tokens, and is locked."""
        node, key = lease.node, b""
        if node is None:
            assert not self.prefix_cache, f"{request} has no place in the tree"
            return
        while node is not None:
            assert node.lock_count > 0, f"{request} reads what is not locked"
            assert node.namespace == lease.namespace, f"{request} reads another namespace"
            key, node = node.key + key, node.parent
        assert len(key) == lease.committed * self._page_bytes, f"{request} is locked elsewhere"
        assert lease.tokens.startswith(key), f"{request} reads other tokens than its own"
