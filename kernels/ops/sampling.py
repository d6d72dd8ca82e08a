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
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kernels.batch import Ints, PromptLogprobs, TokenLogprobs
from kernels.ops.base import Filters, Ops
from kernels.slots import GREEDY_BELOW, Flags, SamplingColumns, Slots, ToldRow

LOGPROB_MIN = -9999.0  # JSON has no -inf


@dataclass(frozen=True, slots=True, eq=False)
class Sampled:
    """`tokens[i]` for row i; meaningless where `failed[i]`."""

    tokens: Ints  # [S]
    failed: Flags  # [S]
    logprobs: list[TokenLogprobs | None] | None  # None: no row asked


def sample(logits: Tensor, slots: Slots, rows: Ints, eos_ids: tuple[int, ...], ops: Ops) -> Sampled:
    """A token for each of the slots `rows` [S] from logits float32 [S, vocab], which stay."""
    peak, tokens = ops.best(logits)
    failed = ~torch.isfinite(peak)
    logprobs = None
    usable = ~failed.cpu().numpy()
    special = np.flatnonzero(~slots.columns.plain[rows] & usable)
    if len(special):
        index = torch.from_numpy(special).to(logits.device)
        tokens[index] = sample_special(logits, index, slots, rows[special], eos_ids, ops)
        logprobs = sample_logprobs(logits, slots.columns, rows, tokens, usable)
    return Sampled(tokens.cpu().numpy().astype(np.int32), ~usable, logprobs)


def sample_special(
    logits: Tensor, index: Tensor, slots: Slots, rows: Ints, eos_ids: tuple[int, ...], ops: Ops
) -> Tensor:
    """Rows with any parameter set: logits[index] of the slots `rows` [D] -> tokens int64 [D]."""
    columns = slots.columns
    generated = slots.known_len[rows] - slots.prompt_len[rows]
    if sample_changes(columns, rows, generated):
        logits = logits.index_select(0, index)
        index = torch.arange(len(rows), device=logits.device)
        penalize(logits, slots, rows)
        bias(logits, columns, rows)
        bar(logits, columns, rows, generated, eos_ids)
        restrict(logits, slots, rows)
    drawn = columns.temperature[rows] >= GREEDY_BELOW
    if not drawn.all():
        _, tokens = ops.best(logits.index_select(0, index))
    else:
        tokens = torch.empty(len(rows), dtype=torch.int64, device=logits.device)
    if drawn.any():
        at = torch.from_numpy(np.flatnonzero(drawn)).to(logits.device)
        own = rows[drawn]
        noise = uniform(columns.seed[own], generated[drawn], columns.choice[own])
        noise_there = torch.from_numpy(noise).to(logits.device)
        filters = filters_of(columns, own, logits.shape[1], logits.device)
        tokens[at] = ops.draw(logits, index[at], filters, noise_there)
    return tokens


def sample_changes(columns: SamplingColumns, rows: Ints, generated: Ints) -> bool:
    """Whether any of the rows has its logits changed before it is chosen from."""
    return bool(
        (columns.repetition[rows] != 1.0).any()
        or (columns.presence[rows] != 0.0).any()
        or (columns.frequency[rows] != 0.0).any()
        or (generated < columns.min_tokens[rows]).any()
        or columns.restricted[rows].any()
        or any(columns.bias_ids[slot] for slot in rows.tolist())
    )


def filters_of(
    columns: SamplingColumns, rows: Ints, vocab_size: int, device: torch.device
) -> Filters:
    top_k = columns.top_k[rows]
    top_k = np.where((top_k <= 0) | (top_k > vocab_size), vocab_size, top_k)

    def there(values: NDArray[Any]) -> Tensor:
        return torch.from_numpy(values).to(device)

    return Filters(
        temperature=there(columns.temperature[rows].astype(np.float32)),
        top_k=there(top_k),
        top_p=there(columns.top_p[rows]),
        min_p=there(columns.min_p[rows]),
    )


def penalize(logits: Tensor, slots: Slots, rows: Ints) -> None:
    """Repetition over all known tokens of a row, presence and frequency over its generated ones.
    Touches those tokens only."""
    columns = slots.columns
    wanted = (
        (columns.repetition[rows] != 1.0)
        | (columns.presence[rows] != 0.0)
        | (columns.frequency[rows] != 0.0)
    )
    local = np.flatnonzero(wanted)
    if not len(local):
        return
    vocab_size = logits.shape[1]
    known, prompt = slots.known_len[rows[local]], slots.prompt_len[rows[local]]
    nth = np.repeat(np.arange(len(local)), known)  # of each known token: which of the rows
    position = np.arange(len(nth)) - np.repeat(np.cumsum(known) - known, known)
    tokens = slots.tokens[rows[local][nth], position].astype(np.int64)
    flat, place = np.unique(local[nth] * vocab_size + tokens, return_inverse=True)
    generated = np.bincount(place, weights=position >= prompt[nth], minlength=len(flat))
    slot = rows[flat // vocab_size]

    def there(values: NDArray[np.float64]) -> Tensor:
        return torch.from_numpy(values.astype(np.float32)).to(logits.device)

    index = torch.from_numpy(flat).to(logits.device)
    changed = logits.view(-1).index_select(0, index)
    repetition = there(columns.repetition[slot])
    changed = torch.where(changed > 0, changed / repetition, changed * repetition)
    changed -= there(generated * columns.frequency[slot])
    changed -= there((generated > 0) * columns.presence[slot])
    logits.view(-1).index_copy_(0, index, changed)


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


def restrict(logits: Tensor, slots: Slots, rows: Ints) -> None:
    """Takes out what a row may not get: all but its allowed ids, and what would complete one of its
    bad sequences. Where nothing would be left, the row stays as it is."""
    columns = slots.columns
    for row in np.flatnonzero(columns.restricted[rows]).tolist():
        slot = int(rows[row])
        kept = logits[row]
        if columns.allowed_ids[slot]:
            allowed = torch.tensor(columns.allowed_ids[slot], device=logits.device)
            kept = torch.full_like(kept, -torch.inf)
            kept[allowed] = logits[row, allowed]
        said = slots.tokens[slot, slots.prompt_len[slot] : slots.known_len[slot]]
        barred = [
            bad[-1] for bad in columns.bad_sequences[slot] if restrict_completes(bad[:-1], said)
        ]
        if barred:
            kept = kept.index_fill(0, torch.tensor(barred, device=logits.device), -torch.inf)
        if kept.max() > -torch.inf:
            logits[row] = kept


def restrict_completes(begin: tuple[int, ...], said: Ints) -> bool:
    """Whether the generated tokens end with `begin`."""
    return not begin or tuple(said[len(said) - len(begin) :].tolist()) == begin


def sample_logprobs(
    logits: Tensor, columns: SamplingColumns, rows: Ints, tokens: Tensor, usable: Flags
) -> list[TokenLogprobs | None] | None:
    """Log-probabilities of the rows that asked, of the bare logits; None if none did. A token that
    could not come is not among the best."""
    wanted = [columns.logprobs[slot] for slot in rows.tolist()]
    asking = [row for row, count in enumerate(wanted) if count is not None and usable[row]]
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
        found = zip(ids[nth], values[nth], strict=True)
        pairs = sorted(
            (pair for pair in found if pair[1] > LOGPROB_MIN), key=lambda pair: (-pair[1], pair[0])
        )
        result[row] = TokenLogprobs(chosen_ids[row], chosen[nth], tuple(pairs[: wanted[row]]))
    return result


def prompt_logprobs(logits: Tensor, told: ToldRow, first_token: int) -> PromptLogprobs:
    """What logits float32 [P, vocab] say of the prompt tokens `told.tokens` [P]. With the prompt's
    beginning comes its first token, of which nothing can be said."""
    rows: list[TokenLogprobs] = []
    index = told.index
    if index == 1:
        index = 0
        rows.append(TokenLogprobs(first_token, 0.0, ()))
    if len(told.tokens):
        scores = torch.log_softmax(logits, dim=-1).clamp_(min=LOGPROB_MIN)
        ids = torch.from_numpy(told.tokens.astype(np.int64)).to(logits.device)
        chosen = scores.gather(1, ids[:, None]).squeeze(1).tolist()
        best = scores.topk(min(told.count, logits.shape[1]), dim=-1)
        values, best_ids = best.values.tolist(), best.indices.tolist()
        for nth, token in enumerate(told.tokens.tolist()):
            pairs = zip(best_ids[nth], values[nth], strict=True)
            ordered = sorted(pairs, key=lambda pair: (-pair[1], pair[0]))
            rows.append(TokenLogprobs(token, chosen[nth], tuple(ordered)))
    return PromptLogprobs(told.slot, index, rows)


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
