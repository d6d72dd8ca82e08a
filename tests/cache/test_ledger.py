"""Goal: no sequence of acquire, commit, release, reserve and evict lets two writers share a page, a
reader lose one, or the counts drift.

Method: a state machine drives the ledger beside a dull model that remembers, for each page, which
tokens its owner has computed into it. What the ledger promises about a page is compared with that.
"""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from actors.cache.ledger import Ledger
from messages.cache import Candidate
from messages.scheduler import Acquired, Deferred
from messages.types import pack, unpack

TOKENS = st.lists(st.integers(0, 2), min_size=1, max_size=18)
NAMESPACES = st.sampled_from(["", "adapter"])


class Held:
    """What the model knows of one running request."""

    def __init__(self, tokens: list[int], namespace: str, pages: list[int], shared: int) -> None:
        self.tokens = tokens
        self.namespace = namespace
        self.pages = pages
        self.shared = shared  # of its pages, those that were found cached
        self.computed_len = 0
        self.granted: list[int] = []


class LedgerMachine(RuleBasedStateMachine):
    @initialize(
        page_size=st.sampled_from([1, 4, 16]),
        page_count=st.integers(18, 60),
        prefix_cache=st.sampled_from([True, True, True, False]),
    )
    def begin(self, page_size: int, page_count: int, prefix_cache: bool) -> None:
        self.size = page_size
        self.page_count = page_count
        self.prefix_cache = prefix_cache
        self.ledger = Ledger(page_count, page_size, prefix_cache=prefix_cache)
        self.held: dict[str, Held] = {}
        self.content: dict[int, tuple[str, tuple[int, ...]]] = {}  # page -> whose prefix it ends
        self.reserved: list[int] = []
        self.shared_ever: set[tuple[str, tuple[int, ...]]] = set()
        self.was_short = False  # then the ledger may have evicted
        self.serial = 0

    def write(self, held: Held, tokens: list[int], begin: int, end: int) -> None:
        """The worker computes tokens [begin, end): a page's content is the prefix up to it."""
        pages = held.pages + held.granted
        for at in range(begin, end):
            page = pages[at // self.size]
            assert page not in self.pages_of_others(held), "two writers"
            self.content[page] = (held.namespace, tuple(tokens[: at + 1]))

    def pages_of_others(self, held: Held) -> set[int]:
        others = (other for other in self.held.values() if other is not held)
        return {page for other in others for page in other.pages + other.granted}

    def expected_match(self, tokens: list[int], namespace: str) -> int:
        """The longest prefix that somebody has shared, by trying each."""
        count = 0
        for pages in range(1, (len(tokens) - 1) // self.size + 1):
            if (namespace, tuple(tokens[: pages * self.size])) not in self.shared_ever:
                break
            count = pages
        return count * self.size

    @rule(tokens=TOKENS, namespace=NAMESPACES)
    def acquire(self, tokens: list[int], namespace: str) -> None:
        self.serial += 1
        name = f"r{self.serial}"
        before = self.ledger.counts()
        answer = self.ledger.acquire(name, 1, pack(tokens), namespace)
        page_count = -(-len(tokens) // self.size)
        if isinstance(answer, Deferred):
            assert self.ledger.counts() == before, "a deferral took something"
            if answer.behind is None:
                assert before.free + before.cached < page_count
            else:
                owner = self.held[answer.behind]
                assert owner.namespace == namespace
                done = owner.computed_len // self.size * self.size
                assert owner.tokens[: done + self.size] == tokens[: done + self.size]
                assert done + self.size < len(tokens)
            return
        assert isinstance(answer, Acquired)
        pages = list(unpack(answer.pages))
        assert len(set(pages)) == len(pages) == page_count
        assert answer.cached_len % self.size == 0
        assert answer.cached_len < len(tokens)
        shared = answer.cached_len // self.size
        for index in range(shared):
            end = (index + 1) * self.size
            assert self.content[pages[index]] == (namespace, tuple(tokens[:end]))
        taken = {page for held in self.held.values() for page in held.pages + held.granted}
        assert taken.isdisjoint(pages[shared:]), "a page in use was handed out"
        assert set(self.reserved).isdisjoint(pages), "a reserved page was handed out"
        if not self.was_short and self.prefix_cache:
            assert answer.cached_len == self.expected_match(tokens, namespace)
        self.was_short |= page_count - shared > before.free
        held = Held(tokens, namespace, pages, shared)
        held.computed_len = answer.cached_len
        self.held[name] = held

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def commit(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.held)))
        held = self.held[name]
        if held.computed_len == len(held.tokens):
            return
        end = data.draw(st.integers(held.computed_len + 1, len(held.tokens)))
        self.write(held, held.tokens, held.computed_len, end)
        held.computed_len = end
        self.ledger.commit(name, 1, end)
        self.remember(held, held.tokens[:end])

    def remember(self, held: Held, tokens: list[int]) -> None:
        if self.prefix_cache:
            for pages in range(1, len(tokens) // self.size + 1):
                self.shared_ever.add((held.namespace, tuple(tokens[: pages * self.size])))

    @precondition(lambda self: self.held)
    @rule(data=st.data(), output=st.lists(st.integers(0, 2), max_size=8))
    def release(self, data: st.DataObject, output: list[int]) -> None:
        """Sometimes in the middle of the prompt, sometimes after some output."""
        name = data.draw(st.sampled_from(sorted(self.held)))
        held = self.held[name]
        tokens = held.tokens[: held.computed_len]
        if held.computed_len == len(held.tokens):
            room = (len(held.pages) + len(self.reserved)) * self.size
            tokens = (held.tokens + output)[:room]
            while len(held.pages + held.granted) * self.size < len(tokens):
                held.granted.append(self.reserved.pop())
            self.write(held, tokens, len(held.tokens), len(tokens))
        self.ledger.release(name, 1, pack(tokens), pack(held.granted))
        del self.held[name]
        self.remember(held, tokens)

    @rule(count=st.integers(0, 12))
    def reserve(self, count: int) -> None:
        before = self.ledger.counts()
        pages = list(unpack(self.ledger.reserve(count).pages))
        assert len(pages) == min(count, before.free + before.cached)
        taken = {page for held in self.held.values() for page in held.pages + held.granted}
        assert taken.isdisjoint(pages)
        self.was_short |= len(pages) > before.free
        self.reserved += pages

    @precondition(lambda self: self.reserved)
    @rule(count=st.integers(1, 12))
    def take_back(self, count: int) -> None:
        self.ledger.take_back(pack(self.reserved[:count]))
        del self.reserved[:count]

    @rule(tokens=TOKENS, namespace=NAMESPACES)
    def probe(self, tokens: list[int], namespace: str) -> None:
        (found,) = self.ledger.probe((Candidate(pack(tokens), namespace),))
        assert found <= self.expected_match(tokens, namespace)
        if not self.was_short:
            assert found == self.expected_match(tokens, namespace)

    @rule()
    def forget_when_the_scheduler_dies(self) -> None:
        self.ledger.forget_leases()
        self.held.clear()
        self.reserved.clear()
        counts = self.ledger.counts()
        assert counts.free + counts.cached == self.page_count

    @invariant()
    def laws_hold(self) -> None:
        if not hasattr(self, "ledger"):
            return
        self.ledger.check()
        counts = self.ledger.counts()
        assert counts.reserved == len(self.reserved)
        used = {page for held in self.held.values() for page in held.pages}
        assert counts.leased >= len(used)
        for held in self.held.values():
            for at in range(0, held.computed_len, self.size):
                end = min(at + self.size, held.computed_len)
                content = self.content[held.pages[at // self.size]]
                assert content[0] == held.namespace
                assert content[1][:end] == tuple(held.tokens[:end]), "overwritten under a reader"

    def teardown(self) -> None:
        if not hasattr(self, "ledger"):
            return
        for name in list(self.held):
            self.ledger.release(name, 1, b"", pack(self.held[name].granted))
        self.ledger.take_back(pack(self.reserved))
        counts = self.ledger.counts()
        assert counts.free + counts.cached == self.page_count
        assert len(unpack(self.ledger.reserve(self.page_count).pages)) == self.page_count
        self.ledger.check()
        assert self.ledger.counts().cached == 0


TestLedger = LedgerMachine.TestCase
TestLedger.settings = settings(max_examples=150, stateful_step_count=40)


def acquired(answer: Acquired | Deferred) -> Acquired:
    assert isinstance(answer, Acquired)
    return answer


def test_a_prompt_is_never_wholly_cached() -> None:
    """B139: at exact multiples of the page at least the last token is computed."""
    for length in (4, 8, 12, 3, 5, 7, 9):
        ledger = Ledger(64, 4)
        tokens = pack(range(length))
        for turn in range(3):
            answer = acquired(ledger.acquire("r", turn, tokens))
            assert answer.cached_len == (0 if turn == 0 else (length - 1) // 4 * 4)
            ledger.commit("r", turn, length)
            ledger.release("r", turn, tokens)
            ledger.check()


def test_prompts_shorter_than_a_page_find_and_leave_nothing() -> None:
    """B141."""
    ledger = Ledger(8, 16)
    for length in range(1, 16):
        for turn in range(2):
            answer = acquired(ledger.acquire("r", turn, pack(range(length))))
            assert answer.cached_len == 0
            ledger.commit("r", turn, length)
            ledger.release("r", turn, pack(range(length)))
            assert ledger.counts() == (8, 0, 0, 0)


def test_those_who_arrive_together_compute_the_shared_prefix_once() -> None:
    ledger = Ledger(256, 16)
    prefix = list(range(512))
    first = acquired(ledger.acquire("r0", 1, pack([*prefix, 1000])))
    assert first.cached_len == 0
    for index in range(1, 32):
        tokens = pack([*prefix, 1000 + index])
        assert ledger.acquire(f"r{index}", 1, tokens) == Deferred(f"r{index}", 1, "r0")
    ledger.commit("r0", 1, 512)
    for index in range(1, 32):
        tokens = pack([*prefix, 1000 + index])
        answer = acquired(ledger.acquire(f"r{index}", 1, tokens))
        assert answer.cached_len == 512
    ledger.check()


def test_release_of_the_one_computing_lets_the_next_compute() -> None:
    ledger = Ledger(64, 4)
    tokens = pack(range(20))
    acquired(ledger.acquire("a", 1, tokens))
    assert ledger.acquire("b", 1, tokens) == Deferred("b", 1, "a")
    ledger.release("a", 1, b"")
    assert acquired(ledger.acquire("b", 1, tokens)).cached_len == 0
    ledger.check()


def test_a_prompt_that_parts_earlier_does_not_wait() -> None:
    """Found by the state machine: the page after the fork looked like the one being computed."""
    ledger = Ledger(18, 1)
    acquired(ledger.acquire("a", 1, pack([2, 1, 0])))
    ledger.commit("a", 1, 2)
    assert acquired(ledger.acquire("b", 1, pack([2, 0, 0]))).cached_len == 1
    ledger.check()


def test_other_namespaces_neither_wait_nor_share() -> None:
    ledger = Ledger(64, 4)
    tokens = pack(range(20))
    acquired(ledger.acquire("a", 1, tokens, "one"))
    assert acquired(ledger.acquire("b", 1, tokens, "two")).cached_len == 0
    ledger.commit("a", 1, 20)
    assert acquired(ledger.acquire("c", 1, tokens, "three")).cached_len == 0
    assert acquired(ledger.acquire("d", 1, tokens, "one")).cached_len == 16


def test_duplicate_pages_live_until_their_reader_ends() -> None:
    """B137: the last full page is computed by both; the second keeps its own copy of it."""
    ledger = Ledger(16, 4)
    tokens = pack(range(8))
    first = acquired(ledger.acquire("a", 1, tokens))
    ledger.commit("a", 1, 8)
    second = acquired(ledger.acquire("b", 1, tokens))
    assert second.cached_len == 4
    assert unpack(second.pages)[0] == unpack(first.pages)[0]
    assert unpack(second.pages)[1] != unpack(first.pages)[1]
    ledger.commit("b", 1, 8)
    ledger.check()
    own = unpack(second.pages)[1]
    third = acquired(ledger.acquire("c", 1, pack(range(100, 148))))
    assert own not in unpack(third.pages), "a page was freed under its reader"
    ledger.release("b", 1, tokens)
    assert ledger.counts().free == 2
    ledger.check()


def test_a_request_locks_no_page_that_it_does_not_read() -> None:
    """Or one that runs alone could not have the whole pool, and would wait for ever."""
    ledger = Ledger(3, 4)
    acquired(ledger.acquire("a", 1, pack(range(7))))
    ledger.release("a", 1, pack(range(7)))
    acquired(ledger.acquire("b", 1, pack(range(4))))
    ledger.commit("b", 1, 4)
    assert ledger.counts() == (1, 1, 1, 0)
    assert len(unpack(ledger.reserve(2).pages)) == 2


def test_short_of_pages_is_told_once_when_some_come_back() -> None:
    ledger = Ledger(4, 4)
    acquired(ledger.acquire("a", 1, pack(range(16))))
    assert ledger.take_freed() is None
    assert ledger.acquire("b", 1, pack(range(50, 54))) == Deferred("b", 1)
    ledger.release("a", 1, b"")
    freed = ledger.take_freed()
    assert freed is not None
    assert freed.available_count == 4
    assert ledger.take_freed() is None


def test_eviction_takes_tails_before_heads_and_old_before_new() -> None:
    ledger = Ledger(6, 1)
    for name, begin in (("old", 0), ("new", 10)):
        tokens = pack(range(begin, begin + 3))
        acquired(ledger.acquire(name, 1, tokens))
        ledger.release(name, 1, tokens)
    assert ledger.counts() == (0, 0, 6, 0)
    ledger.reserve(2)
    old, new = ledger.probe((Candidate(pack([0, 1, 2, 9])), Candidate(pack([10, 11, 12, 9]))))
    assert (old, new) == (1, 3)
