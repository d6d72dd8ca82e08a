"""Processors of logits: what the built-in ones bar, and that a row's are its own affair."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from kernels.batch import Ints, Sampling
from kernels.processors.base import LogitsProcessor, process
from kernels.processors.ngram import Runs, no_repeat_ngram
from kernels.processors.thinking import thinking_budget
from kernels.slots import Slots
from tests.kernels.conftest import Answered
from tests.kernels.driver import Driver, ints, load

V = 6
BEGIN, END, MORE = 4, 5, 3


@dataclass
class Ngram:
    size: int
    window: int = 0
    allowed_ids: tuple[int, ...] = ()


@dataclass
class Budget:
    budget: int
    begin_ids: tuple[int, ...] = (BEGIN,)
    end_ids: tuple[int, ...] = field(default=(END,))


def left(processor: LogitsProcessor, prompt: list[int], generated: list[int]) -> set[int]:
    """What may still come, where all could; and what is kept is not changed."""
    row = torch.arange(V, dtype=torch.float32)
    processor(row, ints(prompt), ints(generated))
    kept = torch.isfinite(row)
    assert (row == torch.arange(V))[kept].all()
    return set(kept.nonzero().flatten().tolist())


def repeats(tokens: list[int], size: int) -> bool:
    """Whether the run at the end was there before."""
    runs = [tokens[i : i + size] for i in range(len(tokens) - size + 1)]
    return bool(runs) and runs[-1] in runs[:-1]


@given(
    st.lists(st.integers(0, V - 1), max_size=24),
    st.integers(1, 5),
    st.integers(0, 12),
    st.sets(st.integers(0, V - 1)),
)
def test_no_repeat_ngram_bars_what_would_repeat_a_run(
    said: list[int], size: int, window: int, allowed: set[int]
) -> None:
    processor = no_repeat_ngram(Ngram(size, window, tuple(allowed)))
    seen = said[-window:] if window else said
    free = {token for token in range(V) if token in allowed or not repeats([*seen, token], size)}
    assert left(processor, [0, 1, 0, 1], said) == free


class Looked(dict[int, dict[int, int]]):
    """Counts the tokens that are looked at."""

    count = 0

    def setdefault(self, key: int, default: Any = None) -> dict[int, int]:
        self.count += 1
        return super().setdefault(key, default)


@pytest.mark.parametrize("size", [1, 3, 40])
def test_each_token_of_a_row_is_looked_at_once_however_long_it_grows(size: int) -> None:
    runs = Runs(size)
    looked = runs.followed = Looked()
    tokens = ints([place * place % 7 for place in range(300)])
    for count in range(1, len(tokens) + 1):
        runs.read(tokens[:count])
    assert looked.count == len(tokens) - size + 1


def test_tokens_that_are_others_than_before_are_read_anew() -> None:
    processor = no_repeat_ngram(Ngram(2))
    assert left(processor, [], [0, 1, 0]) == set(range(V)) - {1}
    assert left(processor, [], [2, 3, 0, 5, 0]) == set(range(V)) - {5}
    assert left(processor, [], [0]) == set(range(V))
    assert left(processor, [], [0, 1, 0]) == set(range(V)) - {1}


def spoken(processor: LogitsProcessor, prompt: list[int], said: list[int]) -> list[int]:
    """As `said`, but for tokens that are barred: then the first that is not."""
    tokens: list[int] = []
    for token in said:
        free = left(processor, prompt, tokens)
        tokens.append(token if token in free else min(free))
    return tokens


@given(
    st.lists(st.integers(0, V - 1), max_size=8),
    st.lists(st.integers(0, V - 1), max_size=24),
    st.integers(0, 6),
    st.sampled_from([(END,), (END, MORE), (MORE, END, END)]),
)
def test_reasoning_ends_within_its_budget_and_nothing_else_changes(
    prompt: list[int], said: list[int], budget: int, end_ids: tuple[int, ...]
) -> None:
    processor = thinking_budget(Budget(budget, end_ids=end_ids))
    tokens = spoken(processor, prompt, said)
    size, begun = len(end_ids), None
    for at, token in enumerate([*prompt, *tokens]):
        before = ([*prompt, *tokens])[: at + 1]
        forced = begun is not None and at - begun >= budget and at >= len(prompt)
        if forced:
            assert begun is not None
            assert token == end_ids[(at - begun - budget) % size]
        elif at >= len(prompt):
            assert token == said[at - len(prompt)]
        if token == BEGIN and before[-1:] == [BEGIN]:
            begun = at + 1
        elif begun is not None and tuple(before[begun:][-size:]) == end_ids:
            begun = None


def slots_with(*processors: tuple[LogitsProcessor, ...]) -> Slots:
    slots = Slots(len(processors), 16, 4, 64)
    for slot, own in enumerate(processors):
        slots.open[slot] = True
        slots.tokens[slot, :3] = [1, 2, slot]
        slots.known_len[slot], slots.prompt_len[slot] = 3, 2
        slots.columns.fill(slot, Sampling(temperature=0.0, processors=own))
    return slots


def test_a_processor_at_fault_fails_its_row_alone() -> None:
    seen: list[Any] = []

    def look(row: Tensor, prompt: Ints, generated: Ints) -> None:
        seen.append((prompt.tolist(), generated.tolist()))
        row[1] += 5

    def fails(row: Tensor, prompt: Ints, generated: Ints) -> None:
        row.zero_()
        generated[0] = 7

    def spoils(row: Tensor, prompt: Ints, generated: Ints) -> None:
        row[2] = torch.nan

    def bars(row: Tensor, prompt: Ints, generated: Ints) -> None:
        row.fill_(-torch.inf)

    slots = slots_with((look,), (fails,), (), (spoils,), (bars,), (look, look))
    logits = torch.randn(6, V)
    before = logits.clone()
    problem = process(logits, slots, ints(range(6)))
    assert "read-only" in problem
    expected = before.clone()
    expected[0, 1] += 5
    expected[5, 1] += 5
    expected[5, 1] += 5
    for row in (0, 2, 4, 5):
        assert torch.equal(logits[row], expected[row])
    assert logits[1].isnan().all() and logits[3].isnan().any()
    assert seen == [([1, 2], [0])] + [([1, 2], [5])] * 2
    assert slots.tokens[1, 2] == 1


def test_rows_with_processors_say_what_they_say_alone(tiny_models: dict[str, Answered]) -> None:
    """Whatever is in the batch, however they are chunked, and after a resumption."""
    known = tiny_models["llama"]
    prompts = known.prompts[:4]
    plain = Sampling(temperature=0.0)
    hot = {"temperature": 1.2, "seed": 3}
    samplings = [
        Sampling(temperature=0.0, processors=(no_repeat_ngram(Ngram(1)),)),
        plain,
        Sampling(processors=(no_repeat_ngram(Ngram(2)),), presence_penalty=0.5, **hot),  # type: ignore[arg-type]
        Sampling(processors=(no_repeat_ngram(Ngram(1)),), logprobs=1, **hot),  # type: ignore[arg-type]
    ]

    def run(which: list[int], begun: dict[int, list[int]], chunk: int = 100) -> list[list[int]]:
        driver = Driver(load(known.path), seed=len(which))
        return driver.generate(
            [prompts[i] + begun.get(i, []) for i in which],
            10,
            chunk=chunk,
            sampling=[samplings[i] for i in which],
            prompt_lens=[len(prompts[i]) for i in which],
        )

    together = run([0, 1, 2, 3], {})
    assert together[1] == known.answers[1][:10]
    assert len(set(together[0])) == len(set(together[3])) == 10
    assert together[0] != known.answers[0][:10]
    for i in (0, 2):
        assert run([i], {}, chunk=3) == [together[i]]
        assert run([i], {i: together[i][:4]}) == [together[i]]


@pytest.mark.parametrize("size", [1, 3])
def test_an_empty_output_bars_nothing(size: int) -> None:
    assert left(no_repeat_ngram(Ngram(size)), [1, 1, 1], []) == set(range(V))
