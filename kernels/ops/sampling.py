"""This file picks the next token of every row of a batch from its logits.

Order: repetition, presence and frequency penalties, logit bias, tokens barred until min_tokens;
then argmax (the lowest id among equals), or temperature, top-k, top-p over what is left, min-p, and
a draw by the inverse of the cumulative distribution in order of ids. Noise is one number per (seed,
position, choice) and comes from nowhere else; position counts generated tokens. Log-probabilities
are those of the bare logits. It does not know pages or attention.

Laws: a row's result does not depend on other rows (operators over whole rows, whose order of
reduction is the vocabulary's; sums in float64); a row whose logits are not numbers fails alone.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kernels.batch import Ints, TokenLogprobs
from kernels.ops.base import Ops
from kernels.slots import GREEDY_BELOW, SamplingColumns, Slots

LOGPROB_MIN = -9999.0  # JSON has no -inf
CANDIDATES = 512  # sorted first for top-p and min-p; a row that keeps more is sorted whole


@dataclass(frozen=True, slots=True, eq=False)
class Sampled:
    """`tokens[i]` for row i; meaningless where `failed[i]`."""

    tokens: Ints  # [S]
    failed: NDArray[np.bool_]  # [S]
    logprobs: list[TokenLogprobs | None] | None  # None: no row asked


def sample(logits: Tensor, slots: Slots, rows: Ints, eos_ids: tuple[int, ...], ops: Ops) -> Sampled:
    """A token for each of the slots `rows` [S] from logits float32 [S, vocab], which stay."""
    peak, tokens = ops.best(logits)
    failed = ~torch.isfinite(peak)
    logprobs = None
    special = np.flatnonzero(~slots.columns.plain[rows])
    if len(special):
        index = torch.from_numpy(special).to(logits.device)
        changed = logits.index_select(0, index)
        changed.masked_fill_(failed.index_select(0, index)[:, None], 0.0)
        tokens[index] = sample_special(changed, slots, rows[special], eos_ids)
        logprobs = sample_logprobs(logits, slots.columns, rows, tokens, failed)
    return Sampled(tokens.cpu().numpy().astype(np.int32), failed.cpu().numpy(), logprobs)


def sample_special(logits: Tensor, slots: Slots, rows: Ints, eos_ids: tuple[int, ...]) -> Tensor:
    """Rows with any parameter set: logits [D, vocab] (overwritten) -> tokens int64 [D]."""
    columns = slots.columns
    penalize(logits, slots, rows)
    bias(logits, columns, rows)
    generated = slots.known_len[rows] - slots.prompt_len[rows]
    bar(logits, columns, rows, generated, eos_ids)
    tokens = logits.argmax(dim=-1)
    drawn = np.flatnonzero(columns.temperature[rows] >= GREEDY_BELOW)
    if len(drawn):
        slots_drawn = rows[drawn]
        index = torch.from_numpy(drawn).to(logits.device)
        noise = uniform(columns.seed[slots_drawn], generated[drawn], columns.choice[slots_drawn])
        tokens[index] = draw(logits.index_select(0, index), columns, slots_drawn, noise)
    return tokens


def penalize(logits: Tensor, slots: Slots, rows: Ints) -> None:
    """Repetition over all known tokens of a row, presence and frequency over its generated ones."""
    columns = slots.columns
    wanted = (
        (columns.repetition[rows] != 1.0)
        | (columns.presence[rows] != 0.0)
        | (columns.frequency[rows] != 0.0)
    )
    local = np.flatnonzero(wanted)
    if not len(local):
        return
    chosen = rows[local]
    vocab_size = logits.shape[1]
    known, prompt = slots.known_len[chosen], slots.prompt_len[chosen]

    def counts(begin: Ints, end: Ints) -> Tensor:
        """How often each token occurs in [begin, end) of each slot: int64 [rows, vocab]."""
        lengths = end - begin
        row = np.repeat(np.arange(len(chosen)), lengths)
        first = np.cumsum(lengths) - lengths
        at = np.arange(len(row)) - np.repeat(first - begin, lengths)
        tokens = slots.tokens[chosen[row], at].astype(np.int64)
        flat = np.bincount(row * vocab_size + tokens, minlength=len(chosen) * vocab_size)
        return torch.from_numpy(flat.reshape(len(chosen), vocab_size)).to(logits.device)

    def column(values: NDArray[np.float64]) -> Tensor:
        return torch.from_numpy(values[chosen].astype(np.float32))[:, None].to(logits.device)

    index = torch.from_numpy(local).to(logits.device)
    changed = logits.index_select(0, index)
    generated = counts(prompt, known)
    seen = (generated + counts(np.zeros_like(prompt), prompt)) > 0
    repetition = column(columns.repetition)
    damped = torch.where(changed > 0, changed / repetition, changed * repetition)
    changed = torch.where(seen, damped, changed)
    changed -= generated.float() * column(columns.frequency)
    changed -= (generated > 0).float() * column(columns.presence)
    logits[index] = changed


def bias(logits: Tensor, columns: SamplingColumns, rows: Ints) -> None:
    for row, slot in enumerate(rows.tolist()):
        if columns.bias_ids[slot]:
            ids = torch.tensor(columns.bias_ids[slot], device=logits.device)
            values = torch.tensor(columns.bias_values[slot], device=logits.device)
            logits[row].index_add_(0, ids, values.to(logits.dtype))


def bar(
    logits: Tensor, columns: SamplingColumns, rows: Ints, generated: Ints, eos_ids: tuple[int, ...]
) -> None:
    """Takes out what would end a row that has not yet its min_tokens."""
    for row in np.flatnonzero(generated < columns.min_tokens[rows]).tolist():
        slot = int(rows[row])
        ids = (*columns.stop_ids[slot], *(() if columns.ignore_eos[slot] else eos_ids))
        ids = tuple(token for token in ids if 0 <= token < logits.shape[1])
        if ids:
            logits[row, torch.tensor(ids, device=logits.device)] = -torch.inf


def draw(
    logits: Tensor, columns: SamplingColumns, rows: Ints, noise: NDArray[np.float64]
) -> Tensor:
    """logits [D, vocab] (overwritten), noise [D] in [0, 1) -> tokens int64 [D]."""
    device, vocab_size = logits.device, logits.shape[1]
    temperature = torch.from_numpy(columns.temperature[rows].astype(np.float32)).to(device)
    logits -= logits.amax(dim=-1, keepdim=True)
    weights = torch.softmax(logits.div_(temperature[:, None]), dim=-1)
    top_k, top_p, min_p = columns.top_k[rows], columns.top_p[rows], columns.min_p[rows]
    top_k = np.where((top_k <= 0) | (top_k > vocab_size), vocab_size, top_k)
    filtered = np.flatnonzero((top_k < vocab_size) | (top_p < 1.0) | (min_p > 0.0))
    if len(filtered):
        index = torch.from_numpy(filtered).to(device)
        limits = [torch.from_numpy(each[filtered]).to(device) for each in (top_k, top_p, min_p)]
        weights[index] = keep(weights.index_select(0, index), *limits)
    below = weights.double().cumsum(dim=-1)
    total = below[:, -1:]
    target = torch.from_numpy(noise).to(device)[:, None] * total
    # noise < 1, but the product may round up to the total, past the last token
    target = torch.minimum(target, torch.nextafter(total, torch.zeros_like(total)))
    return torch.searchsorted(below, target, right=True).squeeze(1)


def keep(weights: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """weights [F, vocab] with all but the tokens that pass the filters set to 0. Among equals at
    the edge those with the lowest ids stay."""
    vocab_size = weights.shape[1]
    limited = top_k[top_k < vocab_size]
    candidates = max(CANDIDATES, int(limited.max()) if len(limited) else 0)
    values = weights.topk(min(candidates, vocab_size), dim=-1).values
    count, settled = keep_count(weights, values, top_k, top_p, min_p)
    if not settled:
        values = weights.sort(dim=-1, descending=True).values
        count, _ = keep_count(weights, values, top_k, top_p, min_p)
    edge = values.gather(1, count[:, None] - 1)
    kept = weights >= edge
    if not torch.equal(kept.sum(dim=-1), count):
        above = weights > edge
        equal = kept & ~above
        room = count - above.sum(dim=-1)
        kept = above | (equal & (equal.cumsum(dim=-1) <= room[:, None]))
    return weights * kept


def keep_count(
    weights: Tensor, values: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor
) -> tuple[Tensor, bool]:
    """How many of the largest weights each row keeps, int64 [F], at least 1; and whether `values`
    [F, M], the M largest in order, were enough to tell."""
    width, vocab_size = values.shape[1], weights.shape[1]
    wide = values.double()
    through = wide.cumsum(dim=-1)
    whole = weights.double().cumsum(dim=-1)[:, -1:]  # not sum: its order depends on the row count
    within_k = through.gather(1, top_k.clamp(max=width)[:, None] - 1)
    total = torch.where((top_k < vocab_size)[:, None], within_k, whole)
    rank = torch.arange(width, device=values.device)
    passed = rank < top_k[:, None]
    passed &= ((through - wide) < top_p[:, None] * total) | (top_p >= 1.0)[:, None]
    passed &= wide >= min_p[:, None] * wide[:, :1]
    count = passed.sum(dim=-1)
    settled = width == vocab_size or bool(((count < width) | (top_k <= width)).all())
    return count.clamp(min=1), settled


def sample_logprobs(
    logits: Tensor, columns: SamplingColumns, rows: Ints, tokens: Tensor, failed: Tensor
) -> list[TokenLogprobs | None] | None:
    """Log-probabilities of the rows that asked, of the bare logits; None if none did."""
    wanted = [columns.logprobs[slot] for slot in rows.tolist()]
    asking = [row for row, count in enumerate(wanted) if count is not None and not failed[row]]
    if not asking:
        return None
    index = torch.tensor(asking, device=logits.device)
    scores = torch.log_softmax(logits.index_select(0, index), dim=-1).clamp_(min=LOGPROB_MIN)
    chosen = scores.gather(1, tokens.index_select(0, index)[:, None]).squeeze(1).tolist()
    best_count = min(max(wanted[row] or 0 for row in asking), logits.shape[1])
    best = scores.topk(best_count, dim=-1)
    values, ids = best.values.tolist(), best.indices.tolist()
    chosen_ids = tokens.tolist()
    result: list[TokenLogprobs | None] = [None] * len(wanted)
    for nth, row in enumerate(asking):
        pairs = sorted(
            zip(ids[nth], values[nth], strict=True), key=lambda pair: (-pair[1], pair[0])
        )
        result[row] = TokenLogprobs(chosen_ids[row], chosen[nth], tuple(pairs[: wanted[row]]))
    return result


def uniform(
    seed: NDArray[np.uint64], position: Ints, choice: NDArray[np.uint64]
) -> NDArray[np.float64]:
    """One number in [0, 1) for each (seed, position, choice): splitmix64's finisher, chained."""
    state = mix(seed.astype(np.uint64))
    state = mix(state ^ choice.astype(np.uint64))
    state = mix(state ^ position.astype(np.uint64))
    return (state >> np.uint64(11)).astype(np.float64) * 2.0**-53


def mix(state: NDArray[np.uint64]) -> NDArray[np.uint64]:
    state = state + np.uint64(0x9E3779B97F4A7C15)
    state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return state ^ (state >> np.uint64(31))
