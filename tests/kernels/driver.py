"""This file drives a Runner as the scheduler would, in the plainest way, for tests.

Rows are opened while there is room, prompts are computed in chunks, pages are leased one at a time
from a shuffled list, and a row that is through is closed by the next step. It also records logits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import pytest
import torch

from kernels.batch import Ints, Sampling, Singles, SlotOpen, StepInput
from kernels.ops.base import OPS, OpsUnavailable
from kernels.runner import Runner, RunnerOptions
from kernels.slots import FlatBatch

GREEDY = Sampling(temperature=0.0)
FLAVOURS = {"reference": "torch", "cpu": "auto"}  # operators -> attention
WIDE = 10_000  # a chunk that no prompt exceeds


def load(path: object, flavour: str = "reference", **options: object) -> Runner:
    """A runner in float32; skips the test if the flavour can't run here."""
    try:
        OPS.get(flavour)(torch.device("cpu"))
    except OpsUnavailable as reason:
        pytest.skip(str(reason))
    # One thread: test runs share their machine, and threads that wait for each other crawl.
    settings: dict = {"dtype": "float32", "kv_tokens": 8192, "step_tokens_max": 8192, "threads": 1}
    settings.update(ops=flavour, attention=FLAVOURS[flavour], **options)
    runner = Runner.load(str(path), RunnerOptions(**settings))
    runner.kv.forget()
    return runner


def ints(values: Sequence[int]) -> Ints:
    return np.array(values, np.int32)


@dataclass
class Sequence_:
    """One prompt on its way."""

    tokens: list[int]  # prompt and what was generated
    prompt_len: int
    sampling: Sampling
    computed: int = 0
    pages: list[int] = field(default_factory=list)
    slot: int = -1
    opened: bool = False


class Driver:
    """Runs sequences; `logits[i][n]` are the bytes of those that chose token n of sequence i."""

    def __init__(self, runner: Runner, seed: int = 0, record: bool = False) -> None:
        self.runner = runner
        self.page_size = runner.facts.page_size
        rng = np.random.default_rng(seed)
        self.free_pages: list[int] = rng.permutation(runner.facts.page_count).tolist()
        self.free_slots = list(range(runner.options.slot_count))
        self.closing: list[int] = []
        self.logits: dict[int, list[bytes]] = {}
        self.vectors: dict[int, Singles] = {}  # of the last `generate`, by prompt
        self.record = record

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        new_len: int,
        *,
        chunk: int = WIDE,
        together: int = 64,
        sampling: Sequence[Sampling] | Sampling = GREEDY,
        prompt_lens: Sequence[int] | None = None,
        cached: dict[int, list[int]] | None = None,
    ) -> list[list[int]]:
        """The `new_len` tokens that follow each prompt. What a prompt holds beyond `prompt_lens`
        was generated before and counts. `cached`: pages that hold a prompt's beginning already."""
        each = [sampling] * len(prompts) if isinstance(sampling, Sampling) else sampling
        lens = prompt_lens or [len(prompt) for prompt in prompts]
        waiting = {
            index: Sequence_(list(prompt), prompt_len, own)
            for index, (prompt, prompt_len, own) in enumerate(zip(prompts, lens, each, strict=True))
        }
        for index, pages in (cached or {}).items():
            waiting[index].pages = list(pages)
            waiting[index].computed = len(pages) * self.page_size
        self.logits = {index: [] for index in waiting}
        self.vectors = {}
        running: dict[int, Sequence_] = {}
        done: dict[int, list[int]] = {}
        while waiting or running:
            while waiting and len(running) < together and self.free_slots:
                index = next(iter(waiting))
                running[index] = waiting.pop(index)
                running[index].slot = self.free_slots.pop()
            self.step(running, chunk)
            for index, sequence in list(running.items()):
                if len(sequence.tokens) - sequence.prompt_len >= new_len:
                    done[index] = running.pop(index).tokens[sequence.prompt_len :]
                    self.close(sequence)
        self.flush()
        return [done[index] for index in range(len(prompts))]

    def step(self, running: dict[int, Sequence_], chunk: int) -> None:
        slots, counts, opened, grown = [], [], [], []
        for sequence in running.values():
            count = min(len(sequence.tokens) - sequence.computed, chunk)
            missing = -(-(sequence.computed + count) // self.page_size) - len(sequence.pages)
            fresh = [self.free_pages.pop() for _ in range(missing)]
            if sequence.opened:
                grown += [(sequence.slot, page) for page in fresh]
            sequence.pages += fresh
            if not sequence.opened:
                sequence.opened = True
                opened.append(
                    SlotOpen(
                        sequence.slot,
                        ints(sequence.tokens),
                        sequence.prompt_len,
                        sequence.computed,
                        ints(sequence.pages),
                        sequence.sampling,
                    )
                )
            slots.append(sequence.slot)
            counts.append(count)
            sequence.computed += count
        closed, self.closing = self.closing, []
        step = StepInput(
            ints(slots),
            ints(counts),
            opened=opened,
            closed=ints(closed),
            grown_slots=ints([slot for slot, _ in grown]),
            grown_pages=ints([page for _, page in grown]),
        )
        by_slot = {sequence.slot: index for index, sequence in running.items()}
        self.execute(step, running, by_slot)

    def execute(
        self, step: StepInput, running: dict[int, Sequence_], by_slot: dict[int, int]
    ) -> None:
        seen: list[torch.Tensor] = []
        forward = self.runner.forward

        def recorded(batch: FlatBatch, hidden: torch.Tensor | None = None) -> torch.Tensor:
            seen.append(forward(batch, hidden))
            return seen[-1]

        with pytest.MonkeyPatch.context() as patch:
            if self.record:
                patch.setattr(self.runner, "forward", recorded)
            output = self.runner.execute(step)
        self.runner.slots.check()
        assert not len(output.failed), output.detail
        for vector in output.vectors:
            index = by_slot[vector.slot]
            assert index not in self.vectors, "a second vector"
            self.vectors[index] = vector.values
        for nth, (slot, token) in enumerate(zip(output.slots, output.tokens, strict=True)):
            index = by_slot[int(slot)]
            running[index].tokens.append(int(token))
            if self.record:
                self.logits.setdefault(index, []).append(seen[0][nth].numpy().tobytes())

    def close(self, sequence: Sequence_) -> None:
        self.closing.append(sequence.slot)
        self.free_slots.append(sequence.slot)
        self.free_pages = sequence.pages + self.free_pages

    def flush(self) -> None:
        """Closes what is through."""
        closed, self.closing = self.closing, []
        self.runner.execute(StepInput(ints([]), ints([]), closed=ints(closed)))
        self.runner.slots.check()

    def shared_prefix(self, tokens: Sequence[int], cached_len: int) -> list[int]:
        """Computes tokens[:cached_len] in a slot of its own; the pages that hold it stay leased."""
        assert cached_len % self.page_size == 0
        sequence = Sequence_(list(tokens[:cached_len]), cached_len, GREEDY, slot=0)
        self.step({0: sequence}, WIDE)
        self.closing.append(0)
        self.flush()
        return sequence.pages


def with_seed(sampling: Sampling, seed: int) -> Sampling:
    return replace(sampling, seed=seed)
