"""How many pages there is memory for, and what is said where there is too little."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kernels.fit import CACHED_FACTOR, Wanted, gib, largest_step, settle_page_count
from tests.kernels.conftest import Answered
from tests.kernels.driver import load

WANTED = Wanted(
    page_bytes=1 << 20,
    page_size=16,
    context_len=1024,
    slot_count=256,
    kv_tokens=0,
    memory_fraction=0.9,
    graph_bytes=1 << 30,
)


def test_the_pool_gets_its_share_of_what_graphs_leave() -> None:
    assert settle_page_count(WANTED, 11 << 30) == int(10240 * 0.9)
    assert settle_page_count(replace(WANTED, graph_bytes=0), 11 << 30) == int(11264 * 0.9)


def test_a_stated_pool_is_made_or_refused() -> None:
    wanted = replace(WANTED, kv_tokens=16 * 1000 - 3)
    assert settle_page_count(wanted, 3 << 30) == 1000
    with pytest.raises(MemoryError, match=r"15997 tokens needs 1000\.0 MiB; .* 500\.0 MiB are mis"):
        settle_page_count(wanted, (1 << 30) + (500 << 20))


@given(st.integers(0, 1 << 34), st.floats(0.05, 1.0), st.integers(1, 300), st.integers(16, 9000))
def test_what_is_said_to_be_missing_is_enough(
    free: int, fraction: float, slots: int, context_len: int
) -> None:
    wanted = replace(
        WANTED, slot_count=slots, context_len=context_len, memory_fraction=fraction, page_bytes=9973
    )
    try:
        count = settle_page_count(wanted, free)
    except MemoryError as error:
        found = re.search(r"([\d.]+) (\w+) are missing", str(error))
        assert found is not None, error
        unit = {"GiB": 1 << 30, "MiB": 1 << 20, "KiB": 1 << 10, "bytes": 1}[found[2]]
        # To the precision that was said; graphs first get what they may take.
        more = (float(found[1]) + 0.1) * unit + 9973 + max(wanted.graph_bytes - free, 0)
        assert settle_page_count(wanted, int(free + more)) >= wanted.least_count
    else:
        assert wanted.least_count <= count <= slots * (context_len // 16 + 1)
        assert count * 9973 <= free * fraction


@given(st.integers(1, 64), st.integers(1, 5000), st.integers(1, 300), st.integers(1, 9000))
def test_the_largest_step_is_full_and_within_the_context(
    page_size: int, context_len: int, slot_count: int, tokens: int
) -> None:
    step, page_count = largest_step(page_size, context_len, slot_count, tokens)
    assert step.counts.sum() == min(tokens, len(step.slots) * context_len)
    assert len(step.slots) == min(slot_count, tokens) == len(step.opened)
    for row, count in zip(step.opened, step.counts.tolist(), strict=True):
        assert row.cached_len + count == row.prompt_len == len(row.tokens) <= context_len
        assert row.prompt_len <= (1 + CACHED_FACTOR) * count
        assert len(row.pages) == page_count <= -(-context_len // page_size)
        assert row.prompt_len <= page_count * page_size


def test_the_largest_step_runs(tiny_models: dict[str, Answered]) -> None:
    runner = load(tiny_models["qwen3"].path, slot_count=5, step_tokens_max=64)
    for k, v in runner.kv.layers:  # as a new pool has it
        k.zero_()
        v.zero_()
    facts = runner.facts
    step, _ = largest_step(facts.page_size, facts.context_len, 5, 64)
    output = runner.execute(step)
    assert len(output.slots) == 5 and output.logprobs is not None
    runner.slots.check()


def test_sizes_are_written_for_people() -> None:
    assert [gib(n) for n in (10, 2048, 3 << 20, 5 << 29)] == [
        "10 bytes",
        "2.0 KiB",
        "3.0 MiB",
        "2.5 GiB",
    ]
