"""This file is the radix tree: which pages hold the KV of which token prefix.

It does not know who holds a lease, where free pages are, or what a token means. One tree for each
namespace; an edge is a run of whole pages, so every node begins and ends on a page border, and the
children of a node differ in their first page.

    root ── [sys sys sys] ─┬─ [question a]             key:   tokens of the run, int32 bytes
                           └─ [question b] ── [answer]  pages: one number for each page of tokens

Laws: a page is in one node; a node's lock count is at least the sum of its children's (a lock on a
node locks the way to the root); only unlocked leaves are evicted, tail first; a locked node never
loses a page; `evictable_count` is the number of pages in unlocked nodes.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from typing import NamedTuple

from actors.cache.evict import EvictionPolicy

TOKEN_BYTES = 4


class Node:
    """A run of pages below its parent's. The root of a namespace has none."""

    __slots__ = (
        "children",
        "created_at",
        "hit_count",
        "key",
        "lock_count",
        "namespace",
        "pages",
        "parent",
        "stamp",
        "used_at",
    )

    def __init__(self, namespace: str, key: bytes, pages: list[int], parent: Node | None) -> None:
        self.namespace = namespace
        self.key = key
        self.pages = pages
        self.parent = parent
        self.children: dict[bytes, Node] = {}  # by their first page's tokens
        self.lock_count = 0
        self.used_at = 0
        self.created_at = 0
        self.hit_count = 0
        self.stamp = 0  # of its valid entry in the eviction heap; 0: none

    def has(self, page: bytes) -> bool:
        """Whether some run below begins with the tokens `page`."""
        return page in self.children


class Match(NamedTuple):
    """How far a prompt is known: up to page `within` of `node`. Valid until the tree changes."""

    node: Node | None  # None: the namespace is unknown
    within: int
    pages: list[int]  # from the root down


class RadixTree:
    """The trees of all namespaces, with one count of pages and one order of eviction."""

    def __init__(self, page_size: int, policy: EvictionPolicy) -> None:
        assert page_size > 0, page_size
        self.page_bytes = page_size * TOKEN_BYTES
        self.page_count = 0
        self.evictable_count = 0
        self._policy = policy
        self._roots: dict[str, Node] = {}
        self._tick = 0
        self._stamp = 0
        self._node_count = 0
        # Unlocked leaves, first to go first. An entry is stale when its node's stamp is another.
        self._heap: list[tuple[tuple[int, ...], int, Node]] = []

    def find(self, namespace: str, tokens: bytes, page_max: int) -> Match:
        """The longest known prefix of `tokens`, of at most `page_max` pages. Changes nothing."""
        node = self._roots.get(namespace)
        if node is None:
            return Match(None, 0, [])
        size = self.page_bytes
        pages: list[int] = []
        at = 0
        while page_max > 0:
            child = node.children.get(tokens[at : at + size])
            if child is None:
                break
            count = len(child.pages)
            if count <= page_max and tokens.startswith(child.key, at):
                pages += child.pages
            else:
                common = self._common(child, tokens, at, page_max)
                pages += child.pages[:common]
                return Match(child, common, pages)
            node = child
            at += len(child.key)
            page_max -= count
        return Match(node, len(node.pages), pages)

    def lock(self, namespace: str, match: Match) -> Node:
        """Locks what `match` found, and the way to the root. Splits at most one node."""
        node = match.node
        if node is None:
            node = self._roots[namespace] = Node(namespace, b"", [], None)
        elif match.within < len(node.pages):
            node = self._split(node, match.within)
        self._tick += 1
        at: Node | None = node
        while at is not None:
            if at.lock_count == 0:
                self.evictable_count -= len(at.pages)
                at.stamp = 0
            at.lock_count += 1
            at.used_at = self._tick
            at.hit_count += 1
            at = at.parent
        return node

    def unlock(self, node: Node) -> None:
        """Ends one lock on `node` and the way to the root. Frees nothing."""
        self._tick += 1
        at: Node | None = node
        while at is not None:
            assert at.lock_count > 0, "unlocked more often than locked"
            parent = at.parent
            at.lock_count -= 1
            at.used_at = self._tick
            if at.lock_count == 0:
                self.evictable_count += len(at.pages)
                self._settle(at)
            at = parent

    def extend(self, node: Node, key: bytes, pages: list[int]) -> tuple[Node, list[int]]:
        """Puts `pages`, which hold `key`, below `node`, where the tree does not have them yet.

        The caller's lock on `node` moves down to the node returned. The pages returned are those
        that the tree already has under other numbers: still the caller's, not the tree's.
        """
        assert node.lock_count > 0, "extended without a lock"
        size = self.page_bytes
        assert len(key) == len(pages) * size, f"{len(key)} bytes for {len(pages)} pages"
        self._tick += 1
        duplicates: list[int] = []
        at = 0
        while at < len(pages):
            child = node.children.get(key[at * size : (at + 1) * size])
            if child is None:
                return self._attach(node, key[at * size :], pages[at:]), duplicates
            common = self._common(child, key, at * size, len(pages) - at)
            if common < len(child.pages):
                child = self._split(child, common)
            duplicates += pages[at : at + common]
            if child.lock_count == 0:
                self.evictable_count -= len(child.pages)
                child.stamp = 0
            child.lock_count += 1
            child.used_at = self._tick
            node = child
            at += common
        return node, duplicates

    def unlocked_count(self, match: Match) -> int:
        """How many of the match's pages are evictable now, and would not be once it is locked."""
        node, count = match.node, 0
        if node is None or node.lock_count > 0:
            return 0
        count = match.within
        node = node.parent
        while node is not None and node.lock_count == 0:
            count += len(node.pages)
            node = node.parent
        return count

    def evict(self, count: int) -> list[int]:
        """Forgets `count` pages (the caller has checked that as many are evictable)."""
        assert 0 <= count <= self.evictable_count, f"{count} of {self.evictable_count}"
        freed: list[int] = []
        while len(freed) < count:
            _, stamp, node = heapq.heappop(self._heap)
            if node.stamp != stamp:
                continue
            assert node.lock_count == 0, "evicting what is being read"
            assert not node.children, "evicting what others stand on"
            node.stamp = 0
            keep = len(node.pages) - (count - len(freed))
            if keep > 0:
                # The head of a run is worth more than its tail: others may share it.
                freed += node.pages[keep:]
                del node.pages[keep:]
                node.key = node.key[: keep * self.page_bytes]
                self._queue(node)
            else:
                freed += node.pages
                self._detach(node)
        self.page_count -= count
        self.evictable_count -= count
        return freed

    def _common(self, child: Node, tokens: bytes, at: int, page_max: int) -> int:
        """How many first pages of `child` are `tokens` from byte `at`. The first is known to be."""
        size = self.page_bytes
        high = min(len(child.pages), page_max)
        key = child.key
        if tokens.startswith(key[: high * size], at):
            return high
        low = 1
        while high - low > 1:
            middle = (low + high) // 2
            if tokens.startswith(key[low * size : middle * size], at + low * size):
                low = middle
            else:
                high = middle
        return low

    def _split(self, node: Node, count: int) -> Node:
        """Cuts `node` after `count` pages; returns the new upper part. Leases keep the lower."""
        assert 0 < count < len(node.pages), f"cut at {count} of {len(node.pages)}"
        parent = node.parent
        assert parent is not None
        size = self.page_bytes
        upper = Node(node.namespace, node.key[: count * size], node.pages[:count], parent)
        upper.lock_count = node.lock_count
        upper.used_at, upper.created_at = node.used_at, node.created_at
        upper.hit_count = node.hit_count
        node.key = node.key[count * size :]
        node.pages = node.pages[count:]
        node.parent = upper
        upper.children[node.key[:size]] = node
        parent.children[upper.key[:size]] = upper
        self._node_count += 1
        return upper

    def _attach(self, parent: Node, key: bytes, pages: list[int]) -> Node:
        node = Node(parent.namespace, key, pages, parent)
        node.lock_count = 1
        node.used_at = node.created_at = self._tick
        node.hit_count = 1
        parent.children[key[: self.page_bytes]] = node
        self.page_count += len(pages)
        self._node_count += 1
        return node

    def _detach(self, node: Node) -> None:
        parent = node.parent
        assert parent is not None
        del parent.children[node.key[: self.page_bytes]]
        node.parent = None
        self._node_count -= 1
        if parent.lock_count == 0:
            self._settle(parent)

    def _settle(self, node: Node) -> None:
        """An unlocked node may be next to go; a root without children is forgotten at once."""
        if node.children:
            return
        if node.parent is None:
            # Namespaces are the clients' to invent: an empty one must not stay for ever.
            del self._roots[node.namespace]
        else:
            self._queue(node)

    def _queue(self, node: Node) -> None:
        self._stamp += 1
        node.stamp = self._stamp
        heapq.heappush(self._heap, (self._policy(node), node.stamp, node))
        if len(self._heap) > 64 + 4 * self._node_count:
            self._heap = [entry for entry in self._heap if entry[2].stamp == entry[1]]
            heapq.heapify(self._heap)

    def nodes(self) -> Iterator[Node]:
        """All nodes but the roots."""
        stack = list(self._roots.values())
        while stack:
            node = stack.pop()
            if node.parent is not None:
                yield node
            stack.extend(node.children.values())

    def check(self) -> None:
        """Asserts the laws. O(pages)."""
        size = self.page_bytes
        seen: set[int] = set()
        page_count = evictable_count = node_count = 0
        for root in self._roots.values():
            assert root.parent is None, "a root has a parent"
            assert not root.pages, "a root has pages"
            assert root.children or root.lock_count, f"namespace {root.namespace!r} is empty"
            assert root.lock_count >= sum(node.lock_count for node in root.children.values())
        valid = {entry[1] for entry in self._heap if entry[2].stamp == entry[1]}
        for node in self.nodes():
            node_count += 1
            assert node.pages, "a node without pages"
            assert len(node.key) == len(node.pages) * size, "key and pages differ in length"
            assert node.parent is not None
            assert node.parent.children.get(node.key[:size]) is node, "filed under another page"
            below = sum(child.lock_count for child in node.children.values())
            assert node.lock_count >= below, f"{node.lock_count} locks above {below}"
            assert seen.isdisjoint(node.pages), "a page is in two nodes"
            seen.update(node.pages)
            page_count += len(node.pages)
            if node.lock_count == 0:
                evictable_count += len(node.pages)
            is_next = node.lock_count == 0 and not node.children
            assert (node.stamp in valid) == is_next, "the heap has not the unlocked leaves"
        assert len(seen) == page_count, "a page is twice in one node"
        assert page_count == self.page_count, f"{page_count} pages, {self.page_count} counted"
        assert evictable_count == self.evictable_count, f"{evictable_count} evictable"
        assert node_count == self._node_count, f"{node_count} nodes"
