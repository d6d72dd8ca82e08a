"""This file is what goes into and comes out of one step, as host data. It does not know messages:
the worker translates between the wire's form and this one.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from kernels.processors.base import LogitsProcessor

Ints = NDArray[np.int32]
Singles = NDArray[np.float32]


def no_ints() -> Ints:
    return np.empty(0, np.int32)


@dataclass(frozen=True, slots=True)
class Sampling:
    """How to choose tokens; the same fields and meanings as `messages.types.Sampling`."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    seed: int = 0
    choice: int = 0
    logprobs: int | None = None
    stop_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    min_tokens: int = 0
    max_tokens: int = 16
    allowed_ids: tuple[int, ...] = ()
    bad_sequences: tuple[tuple[int, ...], ...] = ()
    prompt_logprobs: int | None = None
    want_vector: bool = False
    label_ids: tuple[int, ...] = ()

    # What each of `messages.types.Sampling.processors` comes to.
    processors: tuple[LogitsProcessor, ...] = ()

    @property
    def reads(self) -> bool:
        """Whether the prompt's last token has more to tell than the next one."""
        return self.want_vector or bool(self.label_ids)


@dataclass(frozen=True, slots=True)
class Constraint:
    """What a sequence's text must be; the same fields and meanings as `messages.types.Grammar`."""

    kind: str
    text: str
    begin: str = ""
    end: str = ""


@dataclass(frozen=True, slots=True)
class SlotOpen:
    """A sequence that enters a slot: `tokens[:prompt_len]` are the prompt, the rest was generated
    before; the KV of the first `cached_len` is already in `pages`."""

    slot: int
    tokens: Ints
    prompt_len: int
    cached_len: int
    pages: Ints
    sampling: Sampling
    constraint: Constraint | None = None


@dataclass(frozen=True, slots=True)
class StepInput:
    """One forward; see `messages.worker.Step` for the order of application."""

    slots: Ints  # [rows]
    counts: Ints  # [rows] tokens to compute
    opened: list[SlotOpen] = field(default_factory=list)
    closed: Ints = field(default_factory=no_ints)
    grown_slots: Ints = field(default_factory=no_ints)
    grown_pages: Ints = field(default_factory=no_ints)


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    token_id: int
    logprob: float
    best: tuple[tuple[int, float], ...]


@dataclass(frozen=True, slots=True)
class PromptLogprobs:
    """Of prompt tokens [index, index + len(logprobs)) of a slot; token 0's says nothing."""

    slot: int
    index: int
    logprobs: list[TokenLogprobs]


@dataclass(frozen=True, slots=True, eq=False)
class PromptVector:
    """What a slot's prompt came to: see `messages.types.Sampling.want_vector`."""

    slot: int
    values: Singles


@dataclass(frozen=True, slots=True)
class StepOutput:
    """`tokens[i]` was sampled for `slots[i]`. `failed` are slots whose row alone went wrong (logits
    that are not numbers): they got no token, and `detail` says why. `refused` are those of them
    whose constraint was too much for its engine, `starved` those for which there was no memory."""

    slots: Ints
    tokens: Ints
    logprobs: list[TokenLogprobs | None] | None = None  # None: no row asked
    failed: Ints = field(default_factory=no_ints)
    detail: str = ""
    refused: Ints = field(default_factory=no_ints)
    prompts: list[PromptLogprobs] = field(default_factory=list)
    # Behind its sampled token, jumped_slots[i] got jumped_tokens[i]: the grammar forces it.
    jumped_slots: Ints = field(default_factory=no_ints)
    jumped_tokens: Ints = field(default_factory=no_ints)
    vectors: list[PromptVector] = field(default_factory=list)  # of some of `slots`
    starved: Ints = field(default_factory=no_ints)
