"""This file is a worker without tensors, whose answers show every fault in the use of pages.

It does not know actors or time. Each slot of its KV holds (token, position, namespace) instead of
keys and values, and the next token is a hash of what is really found through the page table. A
wrong page, an early eviction, a stale slot or a reused page changes the output, which
`continuation` gives as a plain function of the prompt. Where a penalty is asked for, what was
generated before is hashed as well; where a grammar is, the hash picks among what the real matcher
allows: so a state that was rebuilt wrongly for a resumed request shows too.

It also asserts what the step protocol promises: counts past the known tokens, pages that are
missing, and writes to a page that another sequence reads, are errors of the scheduler.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from bench.sim.vectors import HIDDEN_LEN, vector_of
from kernels.batch import Constraint
from kernels.constrain import Constrainer, Masks
from messages.types import Logprob, Sampling, pack, unpack
from messages.worker import Facts, Row, Step, StepDone, StepFailed, Vector

if TYPE_CHECKING:
    from bench.sim.habit import Habit

Cell = tuple[int, int, str]  # token, position, namespace
CHOICE_STRIDE = 1_000_003


class Wish(NamedTuple):
    """A token that a model is inclined to say."""

    token: int
    odds: int  # of 256


def next_token(
    cells: Iterable[Cell],
    seed: int,
    vocab_size: int,
    said: Sequence[int] | None = None,
    allowed: Sequence[int] | None = None,
    wish: Wish | None = None,
) -> int:
    """What the model says after `cells`. `said`: the generated tokens, where a penalty counts
    them. `allowed`: at least one id, in order; None: all. `wish`: what it is inclined to say."""
    heard: tuple[object, ...] = (seed, list(cells))
    if said is not None:
        heard += (sorted(Counter(said).items()),)
    digest = hashlib.blake2b(repr(heard).encode(), digest_size=8).digest()
    number = int.from_bytes(digest, "little")
    if wish is not None and digest[7] < wish.odds and (allowed is None or wish.token in allowed):
        return wish.token
    return number % vocab_size if allowed is None else allowed[number % len(allowed)]


def is_penalised(sampling: Sampling) -> bool:
    return bool(sampling.presence_penalty or sampling.frequency_penalty)


def continuation(
    prompt: list[int],
    count: int,
    *,
    namespace: str = "",
    seed: int = 0,
    vocab_size: int = 64,
    penalised: bool = False,
) -> list[int]:
    """`count` tokens after `prompt`, with no page, batch or cache in sight."""
    tokens = list(prompt)
    for _ in range(count):
        cells = [(token, position, namespace) for position, token in enumerate(tokens)]
        said = tokens[len(prompt) :] if penalised else None
        tokens.append(next_token(cells, seed, vocab_size, said))
    return tokens[len(prompt) :]


class Tenant:
    """A sequence in a slot."""

    def __init__(self, row: Row, namespace: str) -> None:
        self.request = row.request
        self.namespace = namespace
        # Noise is a function of seed, choice and position.
        self.seed = row.sampling.seed + CHOICE_STRIDE * row.sampling.choice
        self.logprobs = row.sampling.logprobs
        self.tokens = list(unpack(row.tokens))
        self.prompt_len = row.prompt_len
        self.penalised = is_penalised(row.sampling)
        self.pages = list(unpack(row.pages))
        self.sampling = row.sampling
        self.computed_len = row.cached_len
        self.is_spoiled = False


class ShadowWorker:
    """Executes steps in order. `namespace_of` says what a request's prefixes belong to."""

    def __init__(
        self,
        *,
        page_count: int,
        page_size: int,
        vocab_size: int = 64,
        context_len: int = 4096,
        eos_ids: tuple[int, ...] = (),
        namespace_of: Callable[[str], str] = lambda request: "",
        constrainer: Constrainer | None = None,
        jump_max: Callable[[], int] | None = None,
        habit: Habit | None = None,
    ) -> None:
        """`jump_max`: how many forced tokens are appended at most, asked each time."""
        self.jump_max = jump_max
        self.habit = habit
        self.facts = Facts(
            model="shadow",
            vocab_size=vocab_size,
            context_len=context_len,
            page_size=page_size,
            page_count=page_count,
            eos_ids=eos_ids,
            dtype="none",
            device="none",
            hidden_len=HIDDEN_LEN,
        )
        self.namespace_of = namespace_of
        self.constrainer = constrainer
        self.cells: list[Cell | None] = [None] * (page_count * page_size)
        self.tenants: dict[int, Tenant] = {}
        self.epoch: int | None = None
        self.step = 0
        self.computed_count = 0  # tokens, over all steps
        self.jumped_count = 0  # tokens that grammars forced
        self.row_counts: list[int] = []  # of each step
        self.token_counts: list[int] = []

    def execute(self, step: Step, spoiled: Collection[int] = ()) -> StepDone:
        """One forward. Asserts that the step is one that a scheduler may send. Rows of the slots
        `spoiled` come to nothing, as for logits that are not numbers."""
        if step.epoch != self.epoch:
            self.epoch = step.epoch
            self._forget_all()
            self.step = 0
        self.step += 1
        assert step.step == self.step, f"step {step.step} instead of {self.step}"
        self._apply(step)
        slots, counts = unpack(step.slots), unpack(step.counts)
        assert len(slots) == len(counts) > 0, "a step without rows"
        assert len(set(slots)) == len(slots), "a slot has two rows"
        # As on a device: all rows write, then all read. A page with two owners shows.
        for slot, count in zip(slots, counts, strict=True):
            self._write(self.tenants[slot], count)
        done_slots, tokens = array("i"), array("i")
        logprobs: list[Logprob | None] = []
        vectors: list[Vector] = []
        failed = [slot for slot in slots if self.tenants[slot].is_spoiled]
        for slot in slots:
            tenant = self.tenants[slot]
            if tenant.computed_len == len(tenant.tokens) and not tenant.is_spoiled:
                if slot in spoiled:
                    tenant.is_spoiled = True  # until it is closed
                    failed.append(slot)
                    continue
                if len(tenant.tokens) == tenant.prompt_len:
                    values = vector_of(self._read(tenant), tenant.sampling)
                    vectors += [Vector(slot, values)] if values else []
                token = self._sample(slot, tenant)
                tenant.tokens.append(token)
                done_slots.append(slot)
                tokens.append(token)
                wants = tenant.logprobs is not None
                logprobs.append(Logprob(token, -len(tenant.tokens)) if wants else None)
        jumped_slots, jumped_tokens = self._jump(done_slots)
        self.row_counts.append(len(slots))
        self.token_counts.append(sum(counts))
        return StepDone(
            epoch=step.epoch,
            step=step.step,
            slots=done_slots.tobytes(),
            tokens=tokens.tobytes(),
            logprobs=tuple(logprobs) if any(logprobs) else (),
            elapsed_us=1,
            failed=pack(failed),
            detail="not a number" if failed else "",
            jumped_slots=jumped_slots.tobytes(),
            jumped_tokens=jumped_tokens.tobytes(),
            vectors=tuple(vectors),
        )

    def fail(self, step: Step, slots: Iterable[int]) -> StepFailed:
        """The step's changes are applied, but nothing is computed; `slots` are at fault."""
        if step.epoch != self.epoch:
            self.epoch = step.epoch
            self._forget_all()
            self.step = 0
        self.step += 1
        self._apply(step)
        return StepFailed(step.epoch, step.step, pack(slots), "out of memory")

    def _sample(self, slot: int, tenant: Tenant) -> int:
        said = tenant.tokens[tenant.prompt_len :] if tenant.penalised else None
        one = np.array([slot], np.int32)
        masks = None if self.constrainer is None else self.constrainer.masks(one)
        allowed = None if masks is None else ids_of(masks, self.facts.vocab_size)
        cells = self._read(tenant)
        wish = None
        if self.habit is not None:
            wish = self.habit.wish([cell[0] for cell in cells], tenant.prompt_len)
        token = next_token(cells, tenant.seed, self.facts.vocab_size, said, allowed, wish)
        if self.constrainer is not None:
            self.constrainer.take(one, np.array([token], np.int32))
        return token

    def _jump(self, slots: array[int]) -> tuple[array[int], array[int]]:
        """Appends what grammars force behind the sampled tokens, as far as there are pages."""
        jumped_slots, jumped_tokens = array("i"), array("i")
        if self.constrainer is None:
            return jumped_slots, jumped_tokens
        rooms = [self._room(self.tenants[slot]) for slot in slots]
        found = self.constrainer.jump(np.array(slots, np.int32), np.array(rooms, np.int32))
        for slot, token in zip(*(column.tolist() for column in found), strict=True):
            self.tenants[slot].tokens.append(token)
            jumped_slots.append(slot)
            jumped_tokens.append(token)
        self.jumped_count += len(jumped_tokens)
        return jumped_slots, jumped_tokens

    def _room(self, tenant: Tenant) -> int:
        placed = min(len(tenant.pages) * self.facts.page_size, self.facts.context_len)
        room = max(0, placed - len(tenant.tokens))
        return room if self.jump_max is None else min(room, self.jump_max())

    def _forget_all(self) -> None:
        self.tenants.clear()
        if self.constrainer is not None:
            self.constrainer.clear()

    def _apply(self, step: Step) -> None:
        for slot in unpack(step.closed):
            # Closed twice only when a step that closed it did not run.
            self.tenants.pop(slot, None)
            if self.constrainer is not None:
                self.constrainer.close(slot)
        for row in step.opened:
            assert row.slot not in self.tenants, f"slot {row.slot} has a tenant"
            assert 0 < row.prompt_len <= len(row.tokens) // 4
            assert row.cached_len < len(row.tokens) // 4, "nothing is left to compute"
            assert row.cached_len % self.facts.page_size == 0
            tenant = self.tenants[row.slot] = Tenant(row, self.namespace_of(row.request))
            if row.grammar is not None and self.constrainer is not None:
                grammar = row.grammar
                constraint = Constraint(grammar.kind, grammar.text, grammar.begin, grammar.end)
                self.constrainer.open(row.slot, constraint, tenant.tokens[tenant.prompt_len :])
        for slot, page in zip(unpack(step.grown_slots), unpack(step.grown_pages), strict=True):
            self.tenants[slot].pages.append(page)

    def _write(self, tenant: Tenant, count: int) -> None:
        if tenant.is_spoiled:
            return
        begin, end = tenant.computed_len, tenant.computed_len + count
        assert count > 0, f"{tenant.request}: an empty row"
        assert end <= len(tenant.tokens), f"{tenant.request}: computes what is not known"
        size = self.facts.page_size
        assert end <= len(tenant.pages) * size, f"{tenant.request}: no page for {end} tokens"
        written = {tenant.pages[position // size] for position in range(begin, end)}
        for other in self.tenants.values():
            if other is not tenant:
                shared = written.intersection(other.pages)
                assert not shared, f"{tenant.request} writes {shared}, of {other.request}"
        for position in range(begin, end):
            place = tenant.pages[position // size] * size + position % size
            self.cells[place] = (tenant.tokens[position], position, tenant.namespace)
        tenant.computed_len = end
        self.computed_count += count

    def _read(self, tenant: Tenant) -> list[Cell]:
        size = self.facts.page_size
        cells: list[Cell] = []
        for position in range(tenant.computed_len):
            cell = self.cells[tenant.pages[position // size] * size + position % size]
            assert cell is not None, f"{tenant.request} reads what nobody wrote"
            cells.append(cell)
        return cells


def ids_of(masks: Masks, vocab_size: int) -> list[int]:
    """What the only row of a mask allows."""
    assert not len(masks.broken), "a grammar gave out"
    return [int(token) for token in np.flatnonzero(masks.allowed(vocab_size)[0])]
