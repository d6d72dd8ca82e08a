"""Sampling against a plain float64 reference, row by row, and the laws of `ops/sampling.py`."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.batch import Sampling, SlotOpen, StepInput
from kernels.ops import sampling as under_test
from kernels.ops.base import OPS, Ops, OpsUnavailable
from kernels.ops.reference import ReferenceOps
from kernels.ops.sampling import Sampled, sample, uniform
from kernels.slots import Slots
from tests.kernels.driver import ints

VOCAB = 600  # more than CANDIDATES: the whole row gets sorted now and then
EOS = (3, 9)
PLAIN = Sampling(temperature=0.0)
CPU = torch.device("cpu")


def flavours() -> list[Ops]:
    """The reference, and the compiled operators where they can run."""
    try:
        return [ReferenceOps(CPU), OPS.get("cpu")(CPU)]
    except OpsUnavailable:
        return [ReferenceOps(CPU)]


FLAVOURS = flavours()


def fill(each: list[Sampling], prompt: list[int], generated: list[int]) -> Slots:
    """Slot i has `each[i]`, the prompt, and what was generated."""
    slots = Slots(len(each), 64, 16, 64)
    tokens = ints(prompt + generated)
    opened = [
        SlotOpen(slot, tokens, len(prompt), 0, ints(range(4)), own) for slot, own in enumerate(each)
    ]
    slots.apply(StepInput(ints([]), ints([]), opened=opened))
    return slots


def draw(
    logits: np.ndarray,
    each: list[Sampling],
    prompt: list[int],
    generated: list[int],
    ops: Ops = FLAVOURS[-1],
) -> Sampled:
    """Leaves `logits` as they are."""
    slots = fill(each, prompt, generated)
    before = logits.copy()
    sampled = sample(torch.from_numpy(logits), slots, ints(range(len(each))), EOS, ops)
    assert np.array_equal(before, logits, equal_nan=True)
    return sampled


def adjusted(row: np.ndarray, own: Sampling, prompt: list[int], generated: list[int]) -> np.ndarray:
    """Penalties, bias and barred tokens, in float64, one token at a time."""
    row = row.astype(np.float64)
    for token in set(prompt + generated):
        scale = own.repetition_penalty
        row[token] = row[token] / scale if row[token] > 0 else row[token] * scale
    for token in set(generated):
        row[token] -= own.frequency_penalty * generated.count(token) + own.presence_penalty
    for token, value in own.logit_bias:
        row[token] += value
    if len(generated) < own.min_tokens:
        for token in (*own.stop_ids, *(() if own.ignore_eos else EOS)):
            row[token] = -np.inf
    return row


def distribution(row: np.ndarray, own: Sampling) -> np.ndarray:
    """What is drawn from, in float64, by sorting everything."""
    scaled = (row - row.max()) / own.temperature
    weights = np.exp(scaled) / np.exp(scaled).sum()
    order = sorted(range(len(row)), key=lambda token: (-row[token], token))
    kept = order[: own.top_k] if own.top_k else order
    total = sum(weights[token] for token in kept)
    if own.top_p < 1:
        before, nucleus = 0.0, []
        for token in kept:
            if before >= own.top_p * total and nucleus:
                break
            nucleus.append(token)
            before += weights[token]
        kept = nucleus
    kept = [token for token in kept if weights[token] >= own.min_p * weights.max()]
    filtered = np.zeros_like(weights)
    filtered[kept] = weights[kept]
    return filtered / filtered.sum()


def noise(own: Sampling, position: int) -> float:
    """splitmix64's finisher over Python's integers."""

    def mix(state: int) -> int:
        state = (state + 0x9E3779B97F4A7C15) % 2**64
        state = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
        state = (state ^ (state >> 27)) * 0x94D049BB133111EB % 2**64
        return state ^ (state >> 31)

    return (mix(mix(mix(own.seed % 2**64) ^ own.choice) ^ position) >> 11) * 2.0**-53


samplings = st.builds(
    Sampling,
    temperature=st.sampled_from([0.0, 1e-7, 0.3, 1.0, 1.7]),
    top_k=st.sampled_from([0, 1, 2, 20, 550, 600, 10_000]),
    top_p=st.sampled_from([1e-6, 0.1, 0.5, 0.9, 0.99999, 1.0]),
    min_p=st.sampled_from([0.0, 0.01, 0.3, 1.0]),
    presence_penalty=st.sampled_from([0.0, -1.0, 2.0]),
    frequency_penalty=st.sampled_from([0.0, 0.5]),
    repetition_penalty=st.sampled_from([1.0, 1.3, 0.8]),
    logit_bias=st.sampled_from([(), ((0, -100.0), (599, 5.0)), ((7, 100.0),)]),
    seed=st.integers(-(2**63), 2**63 - 1),
    choice=st.integers(0, 3),
    stop_ids=st.sampled_from([(), (11, 7)]),
    ignore_eos=st.booleans(),
    min_tokens=st.sampled_from([0, 2, 4]),
)


@settings(max_examples=150)
@given(
    each=st.lists(samplings, min_size=1, max_size=6),
    generated=st.lists(st.integers(0, 12), max_size=5),
    spread=st.sampled_from([0.01, 1.0, 8.0]),
    seed=st.integers(0, 2**31),
    ops=st.sampled_from(FLAVOURS),
)
def test_tokens_are_those_of_the_plain_reference(
    each: list[Sampling], generated: list[int], spread: float, seed: int, ops: Ops
) -> None:
    rng = np.random.default_rng(seed)
    prompt = rng.integers(0, VOCAB, 8).tolist()
    logits = (rng.standard_normal((len(each), VOCAB)) * spread).astype(np.float32)
    got = draw(logits, each, prompt, generated, ops)
    assert not got.failed.any()
    for row, own in enumerate(each):
        values = adjusted(logits[row], own, prompt, generated)
        token = int(got.tokens[row])
        if own.temperature < 1e-5:
            assert values[token] >= values.max() - 1e-5 * max(1, abs(values.max()))
            continue
        weights = distribution(values, own)
        below = weights.cumsum()
        at = noise(own, len(generated))
        # Rounding in float32 may tip a draw that lies at the edge of a token's interval, or a token
        # at the edge of a filter.
        low, high = below[token] - weights[token], below[token]
        edge = 1e-4
        assert low - edge <= at <= high + edge, (token, low, at, high)


@settings(max_examples=60)
@given(
    each=st.lists(samplings, min_size=2, max_size=7),
    seed=st.integers(0, 2**31),
    ops=st.sampled_from(FLAVOURS),
)
def test_a_row_is_drawn_the_same_in_any_company(each: list[Sampling], seed: int, ops: Ops) -> None:
    rng = np.random.default_rng(seed)
    logits = (rng.standard_normal((len(each), VOCAB)) * 3).astype(np.float32)
    logits[:, ::50] = logits[:, :1]  # ties
    prompt, generated = [1, 2, 3], [5, 5]
    together = draw(logits, each, prompt, generated, ops).tokens
    for row, own in enumerate(each):
        alone = draw(logits[row : row + 1], [own], prompt, generated, ops).tokens
        assert alone[0] == together[row]


@pytest.mark.parametrize("ops", FLAVOURS)
def test_equal_logits_give_the_lowest_id(ops: Ops) -> None:
    logits = np.zeros((3, VOCAB), np.float32)
    logits[:, [17, 18, 40]] = 2.0
    each = [PLAIN, Sampling(temperature=1.0, top_k=1, seed=5), Sampling(top_p=1e-9, seed=6)]
    assert draw(logits, each, [1], [], ops).tokens.tolist() == [17, 17, 17]


@pytest.mark.parametrize("ops", FLAVOURS)
def test_top_k_keeps_no_more_than_k_of_equals(ops: Ops) -> None:
    logits = np.zeros((400, VOCAB), np.float32)
    each = [Sampling(top_k=3, seed=seed) for seed in range(400)]
    assert set(draw(logits, each, [1], [], ops).tokens.tolist()) == {0, 1, 2}


@pytest.mark.parametrize("ops", FLAVOURS)
def test_draws_follow_the_distribution(ops: Ops) -> None:
    weights = np.array([0.5, 0.25, 0.125, 0.0625, 0.0625])
    logits = np.full((4000, VOCAB), -1e4, np.float32)
    logits[:, :5] = np.log(weights)
    each = [Sampling(seed=seed) for seed in range(4000)]
    counts = np.bincount(draw(logits, each, [1], [], ops).tokens, minlength=5)[:5]
    expected = weights * 4000
    assert ((counts - expected) ** 2 / expected).sum() < 25  # chi², 4 degrees: beyond 1e-4


def test_noise_differs_by_seed_position_and_choice() -> None:
    seeds, positions, choices = np.meshgrid(range(8), range(8), range(8), indexing="ij")
    values = uniform(
        seeds.ravel().astype(np.uint64), ints(positions.ravel()), choices.ravel().astype(np.uint64)
    )
    assert len(set(values.tolist())) == 512
    assert (values >= 0).all() and (values < 1).all() and 0.4 < values.mean() < 0.6


@pytest.mark.parametrize("ops", FLAVOURS)
def test_rows_that_are_not_numbers_fail_alone(ops: Ops) -> None:
    rng = np.random.default_rng(0)
    logits = rng.standard_normal((6, VOCAB)).astype(np.float32)
    each = [PLAIN, PLAIN, Sampling(seed=1), Sampling(seed=2, logprobs=2), PLAIN, Sampling(seed=4)]
    clean = draw(logits, each, [1], [], ops)
    broken = logits.copy()
    broken[1, 5] = np.nan
    broken[3, 7] = np.nan
    broken[4, 8] = np.inf
    got = draw(broken, each, [1], [], ops)
    assert got.failed.tolist() == [False, True, False, True, True, False]
    assert (got.tokens == clean.tokens)[[0, 2, 5]].all()
    assert got.logprobs is None or got.logprobs[3] is None


def test_logprobs_are_of_the_bare_logits_and_finite() -> None:
    rng = np.random.default_rng(1)
    logits = (rng.standard_normal((3, VOCAB)) * 4).astype(np.float32)
    logits[1, 100:] = -np.inf
    bias = ((4, 50.0),)
    each = [
        Sampling(seed=1, logprobs=3, logit_bias=bias, temperature=0.2),
        Sampling(temperature=0.0, logprobs=0, logit_bias=((200, 1e9), (200, 0.0))),
        PLAIN,
    ]
    logits[1, 200] = -20_000.0
    got = draw(logits, each, [1], [])
    assert got.logprobs is not None and got.logprobs[2] is None
    first, second = got.logprobs[0], got.logprobs[1]
    assert first is not None and second is not None
    scores = logits[0].astype(np.float64)
    scores -= np.log(np.exp(scores - scores.max()).sum()) + scores.max()
    assert first.token_id == 4
    assert first.logprob == pytest.approx(scores[4], abs=1e-4)
    best = np.argsort(-scores)[:3]
    assert [token for token, _ in first.best] == best.tolist()
    assert [value for _, value in first.best] == pytest.approx(scores[best].tolist(), abs=1e-4)
    assert second.best == () and second.token_id == 200
    assert second.logprob == -9999.0


def test_end_is_barred_until_min_tokens() -> None:
    logits = np.zeros((4, VOCAB), np.float32)
    logits[:, 3], logits[:, 11], logits[:, 20] = 9.0, 8.0, 1.0
    barred = replace(PLAIN, min_tokens=2, stop_ids=(11,))
    each = [barred, replace(barred, ignore_eos=True), replace(barred, stop_ids=()), PLAIN]
    assert draw(logits, each, [1], [0]).tokens.tolist() == [20, 3, 11, 3]
    assert draw(logits, each, [1], [0, 0]).tokens.tolist() == [3, 3, 3, 3]


def test_greedy_rows_alone_take_the_short_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(under_test, "sample_special", None)
    logits = np.random.default_rng(2).standard_normal((5, VOCAB)).astype(np.float32)
    assert draw(logits, [PLAIN] * 5, [1], []).tokens.tolist() == logits.argmax(-1).tolist()


@pytest.mark.parametrize("ops", FLAVOURS, ids=lambda ops: type(ops).__name__)
@pytest.mark.parametrize("temperature", [0.0, 1.5])
def test_only_allowed_tokens_come_and_no_bad_sequence_is_completed(
    ops: Ops, temperature: float
) -> None:
    rng = np.random.default_rng(5)
    logits = rng.normal(size=(4, VOCAB)).astype(np.float32)
    best = np.argsort(-logits, axis=1)
    own = Sampling(temperature=temperature, seed=3)
    each = [
        replace(own, allowed_ids=(5, 17, 400)),
        # Its first token always, the second behind 40 and 41 only, the third not: 9 was not said.
        replace(own, bad_sequences=((int(best[1, 0]),), (40, 41, int(best[1, 1])), (9, 41, 3))),
        replace(own, bad_sequences=((40, 42, int(best[2, 0])), (1, 2, int(best[2, 0])))),
        own,
    ]
    tokens = draw(logits, each, [1, 2], [40, 41], ops).tokens.tolist()
    assert tokens[0] in (5, 17, 400)
    assert tokens[1] not in best[1, :2]
    if temperature == 0.0:
        assert tokens[0] == max((5, 17, 400), key=lambda token: logits[0, token])
        assert tokens[1:] == [best[1, 2], best[2, 0], best[3, 0]]
    alone = draw(logits[3:], [own], [1, 2], [40, 41], ops).tokens.tolist()
    assert tokens[3:] == alone


def test_a_restriction_that_leaves_nothing_is_not_applied() -> None:
    logits = np.zeros((1, VOCAB), np.float32)
    own = replace(PLAIN, allowed_ids=(3,), min_tokens=5)  # 3 ends the sequence: barred as yet
    assert draw(logits, [own], [1], []).tokens.tolist() == [0]
