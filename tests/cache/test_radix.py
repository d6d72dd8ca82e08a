"""Goal: the tree finds the longest prefix, and forgets only what nobody reads.

Method: a state machine beside a dictionary of every prefix ever put in; each policy in turn.
"""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from actors.cache.evict import EVICTIONS
from actors.cache.pages import Pages
from actors.cache.radix import Node, RadixTree
from messages.types import pack

TOKENS = st.lists(st.integers(0, 2), max_size=24)
NAMESPACES = st.sampled_from(["", "x"])


class TreeMachine(RuleBasedStateMachine):
    @initialize(page_size=st.sampled_from([1, 2, 4]), policy=st.sampled_from(EVICTIONS.names()))
    def begin(self, page_size: int, policy: str) -> None:
        self.size = page_size
        self.tree = RadixTree(page_size, EVICTIONS.get(policy))
        self.model: dict[tuple[str, tuple[int, ...]], int] = {}  # prefix -> its last page
        self.locks: list[tuple[Node, str, tuple[int, ...]]] = []
        self.next_page = 0

    def prefixes(self, tokens: list[int]) -> list[tuple[int, ...]]:
        count = len(tokens) // self.size
        return [tuple(tokens[: pages * self.size]) for pages in range(1, count + 1)]

    def known(self, namespace: str, tokens: list[int]) -> list[int]:
        pages: list[int] = []
        for prefix in self.prefixes(tokens):
            if (namespace, prefix) not in self.model:
                break
            pages.append(self.model[namespace, prefix])
        return pages

    @rule(namespace=NAMESPACES, tokens=TOKENS, keep=st.booleans())
    def insert(self, namespace: str, tokens: list[int], keep: bool) -> None:
        wanted = self.prefixes(tokens)
        match = self.tree.find(namespace, pack(tokens), len(wanted))
        assert match.pages == self.known(namespace, tokens)
        node = self.tree.lock(namespace, match)
        missing = wanted[len(match.pages) :]
        pages = list(range(self.next_page, self.next_page + len(missing)))
        self.next_page += len(pages)
        at = len(match.pages) * self.size
        key = pack(tokens[at : len(wanted) * self.size])
        node, duplicates = self.tree.extend(node, key, pages)
        assert duplicates == []
        for prefix, page in zip(missing, pages, strict=True):
            self.model[namespace, prefix] = page
        if keep:
            self.locks.append((node, namespace, tuple(tokens[: len(wanted) * self.size])))
        else:
            self.tree.unlock(node)

    @rule(namespace=NAMESPACES, tokens=TOKENS)
    def insert_from_the_root_what_may_be_there(self, namespace: str, tokens: list[int]) -> None:
        wanted = self.prefixes(tokens)
        node = self.tree.lock(namespace, self.tree.find(namespace, b"", 0))
        pages = list(range(self.next_page, self.next_page + len(wanted)))
        self.next_page += len(pages)
        known = len(self.known(namespace, tokens))
        node, duplicates = self.tree.extend(node, pack(tokens[: len(wanted) * self.size]), pages)
        assert duplicates == pages[:known]
        for prefix, page in list(zip(wanted, pages, strict=True))[known:]:
            self.model[namespace, prefix] = page
        self.tree.unlock(node)

    @precondition(lambda self: self.locks)
    @rule(data=st.data())
    def unlock(self, data: st.DataObject) -> None:
        index = data.draw(st.integers(0, len(self.locks) - 1))
        self.tree.unlock(self.locks.pop(index)[0])

    @rule(share=st.floats(0, 1))
    def evict(self, share: float) -> None:
        freed = self.tree.evict(int(self.tree.evictable_count * share))
        gone = set(freed)
        assert len(gone) == len(freed)
        self.model = {key: page for key, page in self.model.items() if page not in gone}

    @invariant()
    def laws_hold(self) -> None:
        if not hasattr(self, "tree"):
            return
        self.tree.check()
        assert self.tree.page_count == len(self.model)
        locked: set[int] = set()
        for _, namespace, tokens in self.locks:
            pages = self.known(namespace, list(tokens))
            assert len(pages) * self.size == len(tokens), "a locked prefix lost a page"
            locked.update(pages)
        assert self.tree.evictable_count == len(self.model) - len(locked)

    def teardown(self) -> None:
        if hasattr(self, "tree"):
            for node, _, _ in self.locks:
                self.tree.unlock(node)
            assert self.tree.evictable_count == self.tree.page_count
            self.tree.evict(self.tree.page_count)
            self.tree.check()
            assert not list(self.tree.nodes())


TestTree = TreeMachine.TestCase
TestTree.settings = settings(max_examples=120, stateful_step_count=40)


def grow(tree: RadixTree, tokens: list[int], first_page: int) -> None:
    match = tree.find("", pack(tokens), len(tokens))
    node = tree.lock("", match)
    known = len(match.pages)
    pages = list(range(first_page, first_page + len(tokens) - known))
    node, _ = tree.extend(node, pack(tokens[known:]), pages)
    tree.unlock(node)


@pytest.mark.parametrize(("policy", "gone"), [("lru", 20), ("lfu", 20), ("fifo", 10)])
def test_policies_choose_different_leaves(policy: str, gone: int) -> None:
    tree = RadixTree(1, EVICTIONS.get(policy))
    grow(tree, [1], 10)
    grow(tree, [2], 20)
    grow(tree, [1], 30)
    assert tree.evict(1) == [gone]


def test_an_empty_namespace_is_forgotten() -> None:
    tree = RadixTree(1, EVICTIONS.get("lru"))
    for index in range(100):
        node = tree.lock(f"salt {index}", tree.find(f"salt {index}", b"", 0))
        tree.unlock(node)
    tree.check()
    assert tree.find("salt 0", b"", 0).node is None


def test_allocator_hands_out_each_page_once() -> None:
    pages = Pages(8)
    taken = pages.take(8)
    assert sorted(taken) == list(range(8))
    with pytest.raises(AssertionError):
        pages.take(1)
    pages.give(taken[:3])
    assert set(pages.take(3)) == set(taken[:3])
    pages.give(taken)
    with pytest.raises(AssertionError):
        pages.give([0])
    pages.check()
