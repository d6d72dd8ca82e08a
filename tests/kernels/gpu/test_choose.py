"""Rows with filters, penalties, edited logits and log-probabilities get on the device what the
plain reference gives them in float64, and nothing of it depends on who else is in the batch."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kernels.batch import Sampling, SlotOpen, StepInput, TokenLogprobs
from kernels.slots import GREEDY_BELOW, Slots
from tests.kernels.driver import ints
from tests.kernels.test_sampling import adjusted, distribution, noise

# Triton's interpreter computes with numpy, which warns of infinities.
pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore::RuntimeWarning")]

EOS = (3, 9)
EDGE = 2e-5  # sums in float32 move an edge of the distribution by less
PROMPT = [1, 2, 3, 40, 2]


@dataclass
class Chosen:
    tokens: list[int]
    failed: list[bool]
    logprobs: list[TokenLogprobs | None] | None


class Bench:
    """Slots, and a picker and a chooser over them, as `DeviceSteps` has them."""

    def __init__(self, device: torch.device, vocab: int, slot_count: int) -> None:
        from kernels.ops.triton.chooser import Chooser
        from kernels.ops.triton.ops import TritonOps
        from kernels.ops.triton.picker import Picker

        self.device, self.vocab = device, vocab
        self.slots = Slots(slot_count, 96, 16, 8 * slot_count)
        self.last = torch.full((slot_count,), -7, dtype=torch.int32, device=device)
        self.picker = Picker(TritonOps(device), vocab, self.last)
        self.chooser = Chooser(self.slots, EOS, vocab, self.last)
        self.count = 0

    def open(self, slot: int, own: Sampling, prompt: list[int], generated: list[int]) -> None:
        closed = ints([slot] if self.slots.open[slot] else [])
        opened = SlotOpen(slot, ints(prompt + generated), len(prompt), 0, ints(range(6)), own)
        self.slots.apply(StepInput(ints([]), ints([]), opened=[opened], closed=closed))

    def chances(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        columns = self.slots.columns
        heat = columns.temperature[rows]
        heat = np.where(heat < GREEDY_BELOW, 0.0, heat).astype(np.float32)
        drawn = [
            noise(
                Sampling(seed=int(columns.seed[slot]), choice=int(columns.choice[slot])),
                int(self.slots.known_len[slot] - self.slots.prompt_len[slot]),
            )
            for slot in rows.tolist()
        ]
        return heat, np.minimum(drawn, 1 - 2.0**-24).astype(np.float32)

    def step(self, logits: np.ndarray, rows: list[int], landed: bool = True) -> Chosen:
        """The next token of each of the slots `rows`, appended; not `landed`: the host isn't told
        which it is."""
        slots = ints(rows)
        heat, chance = self.chances(slots)
        there = torch.from_numpy(np.ascontiguousarray(logits)).to(self.device)
        on_device = (torch.from_numpy(each).to(self.device) for each in (heat, chance, slots))
        result = self.picker.pick(there, *on_device)
        special = np.flatnonzero(~self.slots.columns.quick[slots])
        scores = None
        if len(special):
            scores = self.chooser.choose(
                there, result, slots, special, heat, chance, self.count % 4
            )
        self.count += 1
        tokens, failed = result.cpu().numpy()
        assert np.array_equal(there.cpu().numpy(), logits, equal_nan=True)
        last = self.last.cpu().numpy()
        assert (last[slots] == tokens).all()
        self.slots.tokens[slots, self.slots.known_len[slots]] = tokens if landed else -1
        self.slots.known_len[slots] += 1
        self.chooser.told.check()
        told = None if scores is None else scores.told(np.arange(len(rows)), tokens)
        return Chosen(tokens.tolist(), [bool(bad) for bad in failed], told)


def choose(
    device: torch.device,
    logits: np.ndarray,
    each: list[Sampling],
    prompt: list[int] = PROMPT,
    generated: list[int] = (),  # type: ignore[assignment]
) -> Chosen:
    bench = Bench(device, logits.shape[1], len(each))
    for slot, own in enumerate(each):
        bench.open(slot, own, prompt, list(generated))
    return bench.step(logits, list(range(len(each))))


def edited(row: np.ndarray, own: Sampling, prompt: list[int], generated: list[int]) -> np.ndarray:
    """What the row is chosen from, in float64."""
    row = adjusted(row, own, prompt, generated)
    kept = row.copy()
    if own.allowed_ids:
        kept[:] = -np.inf
        kept[list(own.allowed_ids)] = row[list(own.allowed_ids)]
    for bad in own.bad_sequences:
        begin = list(bad[:-1])
        if not begin or generated[len(generated) - len(begin) :] == begin:
            kept[bad[-1]] = -np.inf
    return kept if kept.max() > -np.inf else row


def check(
    token: int, row: np.ndarray, own: Sampling, prompt: list[int], generated: list[int]
) -> None:
    """Asserts that the token is the one which the noise stands for, up to rounding."""
    values = edited(row, own, prompt, generated)
    if own.temperature < GREEDY_BELOW:
        assert values[token] >= values.max() - 1e-5 * max(1, abs(values.max()))
        return
    assert values[token] > -np.inf
    weights = distribution(values, own)
    below = weights.cumsum()
    at = noise(own, len(generated))
    low, high = below[token] - weights[token], below[token]
    assert low - EDGE <= at <= high + EDGE, (token, low, at, high)


# Of equal values none of these keeps a whole number: rounding may give one more or less.
FILTERS = [
    {"top_k": 1},
    {"top_k": 2},
    {"top_k": 37},
    {"top_k": 900},
    {"top_p": 1e-6},
    {"top_p": 0.3},
    {"top_p": 0.9},
    {"top_p": 0.9999},
    {"min_p": 0.02},
    {"min_p": 0.5},
    {"min_p": 1.0},
    {"top_k": 20, "top_p": 0.52},
    {"top_k": 50, "top_p": 0.91, "min_p": 0.05},
    {"top_p": 0.95, "min_p": 0.001},
    {"top_k": 10_000, "top_p": 0.8},
]


def shapes(rng: np.random.Generator, count: int, vocab: int) -> dict[str, np.ndarray]:
    plain = rng.standard_normal((count, vocab)).astype(np.float32)
    coarse = (plain * 3 * 4).round() / 4  # equal values everywhere
    lone = np.full((count, vocab), -np.inf, np.float32)
    lone[:, vocab // 3] = -5.0
    holes = plain * 4
    holes[:, rng.random(vocab) < 0.9] = -np.inf
    halves = np.zeros((count, vocab), np.float32)
    halves[:, ::2] = 1.0
    steep = -(np.arange(vocab, dtype=np.float32) ** 1.5)[None].repeat(count, 0)
    return {
        "spread": plain * 3,
        "wide": plain * 40,
        "flat": plain * 1e-3,
        "equal": np.full((count, vocab), 2.5, np.float32),
        "coarse": coarse.astype(np.float32),
        "two values": halves,
        "one": lone,
        "holes": holes,
        "steep": steep,
        "low": plain - 3.3e38,
        "high": plain * 2 + 1e6,
        "zeros": np.where(plain > 0, np.float32(0.0), np.float32(-0.0)),
    }


@pytest.mark.parametrize("vocab", [53, 4096, 9001])
def test_filters_keep_what_sorting_keeps(device: torch.device, vocab: int) -> None:
    rng = np.random.default_rng(vocab)
    each = [
        Sampling(temperature=heat, seed=17 * nth + 1, **kind)
        for nth, (kind, heat) in enumerate((kind, heat) for kind in FILTERS for heat in (0.7, 1.5))
    ]
    for nth, (name, logits) in enumerate(shapes(rng, len(each), vocab).items()):
        # The interpreter takes some tenths of a second for a row.
        rows = slice(None) if device.type == "cuda" else slice((nth + vocab) % 5, None, 5)
        chosen = choose(device, logits[rows], each[rows])
        assert not any(chosen.failed), name
        for token, row, own in zip(chosen.tokens, logits[rows], each[rows], strict=True):
            check(token, row, own, PROMPT, [])


@pytest.mark.parametrize("heat", [1.1e-5, 1e-3, 50.0])
def test_filters_at_any_temperature(device: torch.device, heat: float) -> None:
    rng = np.random.default_rng(3)
    each = [Sampling(temperature=heat, seed=nth, **kind) for nth, kind in enumerate(FILTERS)]
    for nth, (name, logits) in enumerate(shapes(rng, len(each), 701).items()):
        if name in ("high", "low") and heat < 0.01:
            continue  # one float32 and the next are too far apart for anything to be between
        rows = slice(None) if device.type == "cuda" else slice(nth % 5, None, 5)
        chosen = choose(device, logits[rows], each[rows])
        for token, row, own in zip(chosen.tokens, logits[rows], each[rows], strict=True):
            check(token, row, own, PROMPT, [])


def test_of_equals_at_the_edge_the_lowest_ids_stay(device: torch.device) -> None:
    vocab, count = (10_000, 256) if device.type == "cuda" else (200, 24)
    high = vocab // 2
    logits = np.zeros((2 * count, vocab), np.float32)
    logits[:, high] = 1.0
    each = [Sampling(temperature=1.0, top_k=4, seed=seed) for seed in range(count)]
    share = (3.5 + np.e) / (vocab - 1 + np.e)
    each += [Sampling(temperature=1.0, top_p=float(share), seed=seed) for seed in range(count)]
    tokens = choose(device, logits, each).tokens
    assert set(tokens[:count]) == {0, 1, 2, high}
    assert set(tokens[count:]) == {0, 1, 2, 3, high}


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
    allowed_ids=st.sampled_from([(), (), (7, 11, 500), tuple(range(0, 600, 2))]),
    bad_sequences=st.sampled_from([(), (), ((4,), (5, 6), (7,)), ((11,), (12, 500))]),
    logprobs=st.sampled_from([None, 0, 3, 20]),
)


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    each=st.lists(samplings, min_size=1, max_size=6),
    generated=st.lists(st.integers(0, 12), max_size=5),
    spread=st.sampled_from([0.01, 1.0, 8.0]),
    seed=st.integers(0, 2**31),
)
def test_tokens_are_those_of_the_plain_reference(
    device: torch.device, each: list[Sampling], generated: list[int], spread: float, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    prompt = rng.integers(0, 600, 8).tolist()
    logits = (rng.standard_normal((len(each), 600)) * spread).astype(np.float32)
    logits[:, ::50] = logits[:, :1]
    chosen = choose(device, logits, each, prompt, generated)
    assert not any(chosen.failed)
    for row, own in enumerate(each):
        check(chosen.tokens[row], logits[row], own, prompt, generated)
        told = None if chosen.logprobs is None else chosen.logprobs[row]
        if own.logprobs is None:
            assert told is None
            continue
        assert told is not None
        check_scores(told, logits[row], chosen.tokens[row], own.logprobs)


def check_scores(told: TokenLogprobs, row: np.ndarray, token: int, count: int) -> None:
    wide = row.astype(np.float64)
    scores = wide - wide.max() - np.log(np.exp(wide - wide.max()).sum())
    order = sorted(range(len(row)), key=lambda token: (-row[token], token))
    finite = [token for token in order[:count] if row[token] > -np.inf]
    assert told.token_id == token
    assert told.logprob == pytest.approx(max(scores[token], -9999.0), abs=2e-4)
    assert [pair[0] for pair in told.best] == finite
    for best, score in told.best:
        assert score == pytest.approx(scores[best], abs=2e-4)


@pytest.mark.parametrize("vocab", [30, 4096, 20_000])
def test_log_probabilities_are_of_the_bare_logits(device: torch.device, vocab: int) -> None:
    rng = np.random.default_rng(vocab)
    logits = (rng.standard_normal((6, vocab)) * 3).astype(np.float32)
    logits[1] = logits[1].round()  # equals
    logits[2, 5:] = -np.inf
    logits[3] = 0.25
    kinds = [0, 20, 20, 7, 1]
    bias = ((4, 300.0),)
    each = [Sampling(temperature=0.0, logit_bias=bias, logprobs=count) for count in kinds]
    each.append(Sampling(temperature=0.0))
    chosen = choose(device, logits, each)
    assert chosen.tokens[:5] == [4] * 5
    assert chosen.logprobs is not None and chosen.logprobs[5] is None
    for row, count in enumerate(kinds):
        told = chosen.logprobs[row]
        assert told is not None
        check_scores(told, logits[row], 4, count)
    # A token that could not come has the least that there is.
    logits[:, 4] = -np.inf
    logits[:, 3] = 1.0
    told = choose(device, logits[:1], [replace(each[0], logit_bias=((3, 300.0),))]).logprobs
    assert told is not None and told[0] is not None and told[0].logprob > -9999.0


@pytest.mark.parametrize("landed", [True, False])
def test_penalties_count_what_the_host_has_not_read(device: torch.device, landed: bool) -> None:
    """Slots that are resumed, reused and given tokens between; the tokens of steps before may have
    stayed on the device."""
    vocab, rng = 5000, np.random.default_rng(8)
    kinds = [
        Sampling(temperature=0.0, frequency_penalty=0.7),
        Sampling(temperature=0.0, presence_penalty=1.5),
        Sampling(temperature=0.0, repetition_penalty=1.5),
        Sampling(temperature=0.8, repetition_penalty=0.8, frequency_penalty=0.2, seed=4),
        Sampling(temperature=0.0),
        Sampling(temperature=0.9, top_p=0.7, presence_penalty=0.3, seed=5, logprobs=2),
    ]
    bench = Bench(device, vocab, 8)
    said: dict[int, tuple[Sampling, list[int], list[int]]] = {}

    def begin(slot: int, own: Sampling, generated: list[int]) -> None:
        prompt = rng.integers(0, 30, 6).tolist()
        said[slot] = own, prompt, generated
        bench.open(slot, own, prompt, generated)

    for slot, own in enumerate(kinds):
        begin(slot, own, [7, 7, 8] if slot % 2 else [])
    for nth in range(24):
        if nth == 9:
            begin(1, kinds[0], [7, 9])  # another tenant, who is resumed
            begin(6, kinds[2], [])
        if nth == 15:
            begin(3, kinds[4], [])
        if nth == 20:
            begin(3, kinds[1], [])
        if nth in (12, 18):  # by a grammar
            bench.slots.extend(ints([0, 0, 2]), ints([5, 6, 5]))
            said[0][2].extend([5, 6])
            said[2][2].append(5)
        rows = [slot for slot in said if (nth + slot) % 3 or slot == 0]
        logits = (rng.standard_normal((len(rows), vocab)) * 0.3).astype(np.float32)
        logits[:, 5:12] += 4.0  # few tokens, over and over
        chosen = bench.step(logits, rows, landed)
        assert not any(chosen.failed)
        for row, slot in enumerate(rows):
            own, prompt, generated = said[slot]
            check(chosen.tokens[row], logits[row], own, prompt, generated)
            generated.append(chosen.tokens[row])
    table = bench.chooser.table
    assert table is not None
    for slot, (own, prompt, generated) in said.items():
        if own != kinds[4]:
            wanted = np.bincount(generated, minlength=vocab) * 2
            wanted[prompt] += 1
            assert np.array_equal(table[slot].cpu().numpy(), wanted)


def test_a_step_that_was_given_up_counts_for_nothing(device: torch.device) -> None:
    bench = Bench(device, 64, 2)
    own = Sampling(temperature=0.0, frequency_penalty=0.5)
    bench.open(0, own, [1, 2], [])
    logits = np.zeros((1, 64), np.float32)
    logits[0, 9] = 1.0
    assert bench.step(logits, [0]).tokens == [9]
    bench.step(logits, [0])
    bench.slots.known_len[0] -= 1  # it is run again
    assert bench.step(logits, [0]).tokens == [9]
    table = bench.chooser.table
    assert table is not None and table[0, 9].item() == 4


def test_ends_are_barred_until_there_are_enough_tokens(device: torch.device) -> None:
    logits = np.zeros((3, 40), np.float32)
    logits[:, list(EOS)] = 5.0
    logits[:, 11] = 4.0
    each = [
        Sampling(temperature=0.0, min_tokens=2, stop_ids=(11, 99)),
        Sampling(temperature=0.0, min_tokens=2, ignore_eos=True),
        Sampling(temperature=1.0, top_k=1, min_tokens=1),
    ]
    bench = Bench(device, 40, 3)
    for slot, own in enumerate(each):
        bench.open(slot, own, PROMPT, [])
    answers = [bench.step(logits, [0, 1, 2]).tokens for _ in range(3)]
    assert answers == [[0, 3, 11], [0, 3, 3], [3, 3, 3]]


def test_a_restriction_that_leaves_nothing_is_not_applied(device: torch.device) -> None:
    vocab = 9000
    logits = np.arange(vocab, dtype=np.float32)[None].repeat(5, 0)
    logits[:, 100:8000] = -np.inf
    each = [
        Sampling(temperature=0.0, allowed_ids=(200, 300)),
        Sampling(temperature=0.0, allowed_ids=(200, 7, 9)),
        Sampling(temperature=0.0, bad_sequences=tuple((t,) for t in range(8000, vocab))),
        Sampling(temperature=0.0, allowed_ids=(8001,), bad_sequences=((8001,),)),
        Sampling(temperature=0.0, allowed_ids=(5, 6), logit_bias=((5, 3.0),)),
    ]
    assert choose(device, logits, each).tokens == [8999, 9, 99, 8999, 5]


def test_a_row_that_is_no_number_fails_alone(device: torch.device) -> None:
    vocab = 9000
    logits = np.zeros((5, vocab), np.float32)
    logits[:, 5] = 9.0
    logits[1, 8000] = np.nan
    logits[2, :] = -np.inf
    logits[3, 17] = np.inf
    own = Sampling(temperature=0.8, top_p=0.5, min_p=0.1, frequency_penalty=0.3, logprobs=2)
    bench = Bench(device, vocab, 5)
    for slot in range(5):
        bench.open(slot, replace(own, top_k=3 * slot), [8, 9], [5])
    chosen = bench.step(logits, [0, 1, 2, 3, 4])
    assert chosen.failed == [False, True, True, True, False]
    assert chosen.tokens[0] == chosen.tokens[4] == 5
    assert chosen.logprobs is not None
    assert all(row is not None and row.best[0][0] == 5 for row in chosen.logprobs[::4])
    table = bench.chooser.table
    assert table is not None and table[:, 5].tolist() == [4, 2, 2, 2, 4]


def test_a_row_whose_edits_leave_nothing_gets_a_token(device: torch.device) -> None:
    logits = np.full((2, 60), -np.inf, np.float32)
    logits[:, EOS[0]] = 1.0
    each = [
        Sampling(temperature=0.0, min_tokens=3),
        Sampling(temperature=0.7, top_p=0.5, min_tokens=3),
    ]
    chosen = choose(device, logits, each)
    assert chosen.tokens == [0, 0] and not any(chosen.failed)


def test_a_row_is_chosen_for_the_same_in_any_company(device: torch.device) -> None:
    rng = np.random.default_rng(5)
    vocab = 6000
    each = [
        Sampling(temperature=0.7, top_p=0.9, seed=1),
        Sampling(temperature=0.0, logit_bias=((9, 2.0),), logprobs=3),
        Sampling(temperature=1.2, min_p=0.02, frequency_penalty=0.4, seed=2, logprobs=5),
        Sampling(temperature=0.0),
        Sampling(temperature=1.0, top_k=30, allowed_ids=tuple(range(0, 900, 3)), seed=3),
        Sampling(temperature=1.0, seed=4),
    ]
    logits = (rng.standard_normal((len(each), vocab)) * 3).astype(np.float32)
    together = choose(device, logits, each, generated=[4, 4])
    order = [3, 5, 2, 0, 4, 1]
    mixed = choose(device, logits[order], [each[row] for row in order], generated=[4, 4])
    assert [together.tokens[row] for row in order] == mixed.tokens
    assert together.logprobs is not None and mixed.logprobs is not None
    assert [together.logprobs[row] for row in order] == mixed.logprobs
    for row, own in enumerate(each):
        alone = choose(device, logits[row : row + 1], [own], generated=[4, 4])
        assert alone.tokens[0] == together.tokens[row]
        assert (alone.logprobs or [None])[0] == together.logprobs[row]
