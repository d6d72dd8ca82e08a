"""This file holds sequences to grammars: which tokens may come next, for each row of a batch.

An engine (`kernels/grammar/`) compiles constraints and moves matchers; this keeps the compiled
ones, one matcher for each slot, and the masks of a step. It does not know pages, models or how a
token is drawn. `prepare` may be called by any thread; all else belongs to the one that runs steps.

Laws: a slot's matcher is its own, whatever its neighbours share; a row whose grammar has ended is
free, since its end is under way; a matcher that breaks fails its row alone: where it takes with it
what others of its grammar share, they go on with a new one; opening a slot with tokens that were
generated before leads to the state they had led to; a forced token is the only one that the mask in
its place would have allowed.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from kernels.batch import Constraint, Ints
from kernels.registry import Registry

Words = NDArray[np.int32]
COMPILED_MAX = 256
RENEWALS_MAX = 2  # of one row within RENEWAL_LEN tokens; the last one shares nothing
RENEWAL_LEN = 256
RENEWED_MAX = 16  # grammars that are compiled again for one step's masks
FILL_ROWS = 2  # masks between two looks at `work`: some take half a second


class BadGrammar(ValueError):
    """The constraint is wrong: the fault of whoever asked for it. The text is for them."""


class EngineUnavailable(RuntimeError):
    """The engine can't run here; the text is the reason."""


@dataclass(frozen=True, slots=True)
class TokenTable:
    """What the model's ids stand for."""

    pieces: Sequence[bytes]  # by id; empty: unassigned
    special: frozenset[int]  # never part of a text
    eos_ids: tuple[int, ...]  # at least one
    vocab_size: int  # columns of the logits
    # How the model's tokenizer cuts a text, without what it adds around one; for any thread.
    encode: Callable[[str], list[int]] | None = None


class Matcher(Protocol):
    """One sequence's place in a grammar."""

    def take(self, token: int) -> bool:
        """Moves on by a token; False: the grammar does not allow it, and the matcher is broken."""

    def forced(self) -> int | None:
        """The one token that the next mask would allow, where that can be told without it."""

    @property
    def is_broken(self) -> bool: ...


class Root(Protocol):
    """A compiled grammar. Shared by threads."""

    def new(self) -> Matcher: ...

    @property
    def is_worn(self) -> bool:
        """What its matchers share is spent: all of them break as they are used, and so do new
        ones."""


class Engine(Protocol):
    """A way to constrain. Relies on nothing of the batch; keeps matchers apart."""

    def compile(self, kind: str, text: str, *, alone: bool = False) -> Root:
        """`alone`: for one row, which may spend more of it than all that share one. Raises
        BadGrammar, also for one that no text satisfies. Its time is bounded."""

    def fill(self, matchers: list[tuple[Matcher, int]], mask: Words) -> None:
        """Sets mask[index] for each matcher: bit t of the row for token t. Rows [D, words]."""

    def replay(self, matcher: Matcher, token: int) -> None:
        """Moves a matcher on by a token that its mask has allowed before."""


GRAMMARS: Registry[Callable[[TokenTable], Engine]] = Registry("grammar", "kernels.grammar")


def load_engine(name: str, table: TokenTable) -> Engine:
    """Raises UnknownName, EngineUnavailable."""
    return GRAMMARS.get(name)(table)


def check_engine(name: str) -> None:
    """Whether it can be loaded, before anybody needs it. Raises UnknownName, EngineUnavailable."""
    probe = [b"", *(bytes([byte]) for byte in range(256))]
    load_engine(name, TokenTable(probe, frozenset({0}), (0,), len(probe)))


class Guide:
    """One slot's way through its reasoning, which is free, and its grammar."""

    __slots__ = (
        *("_tail", "begin_id", "constraint", "end", "is_over"),
        *("matcher", "renewals", "renewed_len", "root", "stage", "taken"),
    )

    def __init__(
        self, constraint: Constraint, root: Root, begin_id: int | None, end: bytes
    ) -> None:
        self.constraint = constraint
        self.root = root
        self.matcher = root.new()
        self.taken: list[int] = []  # by the matcher
        self.renewals = 0  # of late
        self.renewed_len = 0  # tokens taken by then
        self.begin_id = begin_id  # the token that begins the reasoning, while it may come
        self.end = end
        self.is_over = False
        self.stage = "bound" if begin_id is not None or not end else "free"
        self._tail = b""

    @property
    def is_bound(self) -> bool:
        """The next token is subject to the grammar."""
        return self.stage == "bound" and not self.is_over

    def forced(self) -> int | None:
        """The one token that may come next, where there is one."""
        if not self.is_bound or self.begin_id is not None or self.matcher.is_broken:
            return None
        return self.matcher.forced()

    def follow(self, token: int, piece: bytes, is_eos: bool) -> bool:
        """Whether the matcher has to take it."""
        if self.is_over:
            return False
        if self.begin_id is not None:
            if token == self.begin_id:
                self.stage = "free"
            self.begin_id = None
            if self.stage == "free":
                return False
        if self.stage == "free":
            self.is_over = is_eos
            self._tail += piece
            if self.end in self._tail:
                self.stage = "bound"
            self._tail = self._tail[-len(self.end) :]
            return False
        self.taken.append(token)
        self.is_over = is_eos
        return True


class Constrainer:
    """The guides of all slots, and the grammars that are ready."""

    def __init__(self, engine: Engine, table: TokenTable) -> None:
        self.engine = engine
        self.table = table
        self.guides: dict[int, Guide] = {}
        self.broken: set[int] = set()  # slots whose constraint gave out, until they are closed
        self.work = 0  # rises with all that is done; read by any thread
        self._renewed = 0  # of this step
        self._eos = frozenset(table.eos_ids)
        self._by_piece = {piece: token for token, piece in enumerate(table.pieces) if piece}
        self._roots: OrderedDict[tuple[str, str], Root] = OrderedDict()
        self._lock = threading.Lock()

    def prepare(self, constraint: Constraint) -> Root:
        """Compiles it, unless it is ready. Raises BadGrammar."""
        key = (constraint.kind, constraint.text)
        with self._lock:
            root = self._roots.get(key)
            if root is not None:
                self._roots.move_to_end(key)
                return root
        root = self.engine.compile(*key)
        with self._lock:
            self._roots[key] = root
            if len(self._roots) > COMPILED_MAX:
                self._roots.popitem(last=False)
        return root

    def open(self, slot: int, constraint: Constraint, generated: Sequence[int]) -> None:
        """The slot's tenant, with the tokens that it has generated already."""
        assert slot not in self.guides, f"slot {slot} has a guide"
        end = constraint.end.encode()
        begin_id = self._by_piece.get(constraint.begin.encode()) if constraint.begin else None
        if constraint.begin and begin_id is None:
            end = b""  # no single token begins its reasoning: it is constrained from the start
        guide = Guide(constraint, self.prepare(constraint), begin_id, end)
        self.guides[slot] = guide
        for token in generated:
            self._follow(guide, token)
        self._replay(guide)

    def close(self, slot: int) -> None:
        self.guides.pop(slot, None)
        self.broken.discard(slot)

    def clear(self) -> None:
        self.guides.clear()
        self.broken.clear()

    def take(self, slots: Ints, tokens: Ints) -> None:
        """What was sampled for the slots."""
        if not self.guides:
            return
        for slot, token in zip(slots.tolist(), tokens.tolist(), strict=True):
            guide = self.guides.get(slot)
            if guide is not None:
                self._move(guide, token)

    def jump(self, slots: Ints, rooms: Ints) -> tuple[Ints, Ints]:
        """Moves each guide on by the tokens that its grammar forces, `rooms` [S] at most. Tokens in
        order, and for each its slot."""
        jumped: list[tuple[int, int]] = []
        for slot, room in zip(slots.tolist(), rooms.tolist(), strict=True):
            guide = self.guides.get(slot)
            if guide is None:
                continue
            for _ in range(room):
                token = guide.forced()
                if token is None or not guide.matcher.take(token):
                    break  # a matcher that breaks by it did not know what it forced
                self._follow(guide, token)
                self.work += 1
                jumped.append((slot, token))
        moves = np.array(jumped, np.int32).reshape(-1, 2)
        return moves[:, 0].copy(), moves[:, 1].copy()

    def masks(self, slots: Ints) -> Masks | None:
        """What the next tokens of `slots` may be; None where none of them is constrained."""
        guided = [
            (row, self.guides[slot])
            for row, slot in enumerate(slots.tolist())
            if slot in self.guides
        ]
        bound = [(row, guide) for row, guide in guided if guide.is_bound]
        if not bound:
            return None
        words = np.zeros((len(bound), -(-self.table.vocab_size // 32)), np.int32)
        matchers = [guide.matcher for _, guide in bound]
        pairs = [(matcher, i) for i, matcher in enumerate(matchers) if not matcher.is_broken]
        for begin in range(0, len(pairs), FILL_ROWS):
            self.engine.fill(pairs[begin : begin + FILL_ROWS], words)
            self.work += 1
        self._renewed = 0
        # A mask that was made as its root was spent can be wrong without a word.
        worn = {root for root in {guide.root for _, guide in bound} if root.is_worn}
        rows = np.array([row for row, _ in bound], np.int64)
        whole = np.ones(len(bound), np.bool_)
        for index, (row, guide) in enumerate(bound):
            if guide.root in worn:
                whole[index] = self._renew(guide, words[index : index + 1])
            elif guide.matcher.is_broken:  # before, or by what this mask has cost
                whole[index] = False
            if not whole[index]:
                self.broken.add(int(slots[row]))
            elif guide.begin_id is not None:
                word, bit = divmod(guide.begin_id, 32)
                words[index].view(np.uint32)[word] |= np.uint32(1 << bit)
        return Masks(rows[whole], words[whole], rows[~whole])

    def _renew(self, guide: Guide, words: Words) -> bool:
        """Gives the guide of a spent root a new one, at the same place, and its mask: words
        [1, words]. First one that it shares with the others who are in its case; then one for
        itself, so that none of them spends it. If that is spent as well, or if it breaks, its own
        text is at fault: False. Also where too many are in that case at once, since others wait."""
        if len(guide.taken) >= guide.renewed_len + RENEWAL_LEN:
            guide.renewals = 0
        guide.renewed_len = len(guide.taken)
        while guide.renewals < RENEWALS_MAX and guide.root.is_worn:
            guide.renewals += 1
            try:
                root = self._compile_again(guide)
            except BadGrammar:
                return False
            if root is None:
                return False
            guide.root = root
            guide.matcher = guide.root.new()
            self._replay(guide)
            if not guide.matcher.is_broken:
                self.engine.fill([(guide.matcher, 0)], words)
        return not guide.matcher.is_broken and not guide.root.is_worn

    def _compile_again(self, guide: Guide) -> Root | None:
        """None: enough are for this step. Raises BadGrammar."""
        key = (guide.constraint.kind, guide.constraint.text)
        alone = guide.renewals == RENEWALS_MAX
        with self._lock:
            root = None if alone else self._roots.get(key)
        if root is not None and not root.is_worn:
            return root
        if self._renewed == RENEWED_MAX:
            return None
        self._renewed += 1
        root = self.engine.compile(*key, alone=alone)
        self.work += 1
        if not alone:
            with self._lock:
                self._roots[key] = root
        return root

    def _replay(self, guide: Guide) -> None:
        """Moves a new matcher on by what was taken before."""
        for token in guide.taken:
            if guide.matcher.is_broken:
                return
            self.engine.replay(guide.matcher, token)
            self.work += 1

    def _move(self, guide: Guide, token: int) -> None:
        if self._follow(guide, token):
            guide.matcher.take(token)
            self.work += 1

    def _follow(self, guide: Guide, token: int) -> bool:
        pieces = self.table.pieces
        piece = pieces[token] if token < len(pieces) else b""
        return guide.follow(token, piece, token in self._eos)


@dataclass(frozen=True, slots=True, eq=False)
class Masks:
    """Row `rows[i]` of a step may only get tokens whose bit in `words[i]` is set."""

    rows: NDArray[np.int64]  # [D]
    words: Words  # [D, ceil(vocab / 32)]
    broken: NDArray[np.int64]  # rows whose matcher is broken: they are to fail

    def allowed(self, vocab_size: int) -> NDArray[np.bool_]:
        """[D, vocab]"""
        bits = np.unpackbits(self.words.view(np.uint8), axis=1, bitorder="little")
        return bits[:, :vocab_size].view(np.bool_)
