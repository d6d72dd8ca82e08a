"""This file is the door to the kernels: load a model, execute steps.

It does not know requests, actors or text: tokens in, tokens out. A person can use it alone:

    >>> import numpy as np
    >>> from kernels.batch import Ints, Sampling, SlotOpen, StepInput
    >>> from kernels.runner import Runner, RunnerOptions
    >>> runner = Runner.load("SmolLM2-135M-Instruct.Q4_1.gguf", RunnerOptions(kv_tokens=1024))
    >>> prompt = np.array([504, 3575, 282, 4649, 314], np.int32)  # "The capital of France is"
    >>> pages = np.arange(2, dtype=np.int32)  # 32 tokens of room
    >>> begin = SlotOpen(0, prompt, len(prompt), 0, pages, Sampling(temperature=0))
    >>> slot, one = np.array([0], np.int32), np.array([1], np.int32)
    >>> step = StepInput(slot, np.array([len(prompt)], np.int32), opened=[begin])
    >>> tokens = [int(runner.execute(step).tokens[0])]
    >>> tokens += [int(runner.execute(StepInput(slot, one)).tokens[0]) for _ in range(5)]

Laws: steps run in order and one at a time, always from the same thread; what a slot yields depends
on its own tokens, sampling parameters and (in float32 on a CPU, to the bit) on nothing else.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from kernels.attention.base import Attention, AttentionBatch
from kernels.batch import (
    Ints,
    PromptVector,
    Sampling,
    SlotOpen,
    StepInput,
    StepOutput,
    no_ints,
)
from kernels.constrain import Constrainer, TokenTable
from kernels.cores import usable_cores
from kernels.fit import largest_step
from kernels.flight import FAILED_BEFORE, NOT_NUMBERS
from kernels.flight import Flight as Flight  # part of this door
from kernels.flight import Landed as Landed  # likewise
from kernels.guided import GuidedRows
from kernels.health import check_device
from kernels.kv import KvPool
from kernels.layers.decoder import Decoder
from kernels.memory import release_freed
from kernels.ops.sampling import Sampled, prompt_logprobs, sample
from kernels.ops.vectors import read_vectors, reading_rows
from kernels.parts import run_in_parts
from kernels.processors.base import process
from kernels.settle import RunnerOptions as RunnerOptions  # part of this door
from kernels.slots import FlatBatch, Slots

if TYPE_CHECKING:
    from kernels.device import DeviceSteps

Progress = Callable[[str, int, int], None]  # what, done, total


@dataclass(frozen=True, slots=True)
class ModelFacts:
    name: str
    vocab_size: int
    context_len: int
    eos_ids: tuple[int, ...]
    page_size: int
    page_count: int
    dtype: str
    device: str
    parameter_count: int
    hidden_len: int
    vector_lens: tuple[int, ...] | None  # see `messages.worker.Facts`
    notes: tuple[str, ...] = ()  # what "auto" was settled to, and why, for a log
    largest_step_s: float = 0.0  # how long it took, where it was tried


class Runner:
    """A loaded model with its KV pool and batch state."""

    def __init__(
        self,
        model: Decoder,
        kv: KvPool,
        slots: Slots,
        attention: Attention,
        facts: ModelFacts,
        options: RunnerOptions,
    ) -> None:
        self.model, self.kv, self.slots, self.attention = model, kv, slots, attention
        self.facts, self.options = facts, options
        self.device = kv.layers[0][0].device
        self.guided = GuidedRows(slots, model.ops, self.device, options.token_jump)
        self.graphs_left = 0  # that `warm_up` had no time or memory for
        self.steps = device_steps(self)

    @staticmethod
    def load(
        path: str | Path, options: RunnerOptions | None = None, progress: Progress | None = None
    ) -> Runner:
        """Reads the model at `path` (a directory or a .gguf file) and makes its pool. Raises
        LoadError (the file's or the operator's fault), MemoryError if it doesn't fit."""
        from kernels.assemble import load_runner  # it makes a Runner

        return load_runner(Path(path), options or RunnerOptions(), progress)

    def set_threads(self, count: int) -> None:
        """Of the host, from now on; 0: as many as cores that this process may use. Call it from the
        thread that launches."""
        self.model.ops.set_threads(count or usable_cores())

    def launch(self, step: StepInput) -> Flight:
        """Starts a step; where the device can, without waiting for it or for the one before.
        Results are asked for in the order of the launches. A step for which there is no memory is
        computed in parts; rows that don't fit even so are `starved`. Anything raised is our bug,
        or the device's end."""
        try:
            return self.launch_whole(step)
        except MemoryError as error:
            self.release()
            return Landed(self.in_parts(step, str(error)))

    def launch_whole(self, step: StepInput) -> Flight:
        """Raises MemoryError: the step's deltas are applied, nothing is computed."""
        steps = self.steps
        if steps is None:
            return Landed(self.guided.jump(self.execute_here(step)))
        slots = self.slots
        is_prompt = slots.computed_len[step.slots] < slots.prompt_len[step.slots]
        asks = slots.columns.tells[step.slots] | slots.columns.reads[step.slots]
        tells = (asks & is_prompt).any() or any(
            row.sampling.prompt_logprobs is not None or row.sampling.reads for row in step.opened
        )
        processed = slots.columns.processed[step.slots].any() or any(
            row.sampling.processors for row in step.opened
        )
        if tells or processed:
            # More comes of a row than the graphs give, or its tokens must be read before.
            steps.drain()
            output = self.guided.jump(self.execute_here(step))
            steps.catch_up(step.slots)
            return Landed(output)
        flight = steps.launch(step)
        return Landed(flight) if isinstance(flight, StepOutput) else flight

    def release(self) -> None:
        """Gives back what memory can be: of steps on their way, of what is kept for later ones."""
        if self.steps is not None:
            self.steps.drain()
        release_freed(self.device)

    def in_parts(self, step: StepInput, detail: str) -> StepOutput:
        """A step that did not fit, its deltas applied."""

        def run(part: StepInput) -> StepOutput:
            try:
                return self.launch_whole(part).result()
            except MemoryError:
                self.release()
                raise

        output = run_in_parts(step, run, detail)
        self.slots.failed[output.starved] = True
        return output

    def check_device(self, error: BaseException) -> None:
        """Call it when a step has raised. Raises DeviceLost if no other can be run any more."""
        check_device(self.device, error)

    def progress(self) -> int | None:
        """Changes while a step computes, see `Ops.progress`. From any thread."""
        counted = self.model.ops.progress()
        return None if counted is None else counted + self.guided.work

    def when_computing(self, call: Callable[[], None]) -> None:
        """Where steps are not asynchronous: `call` is called in each, from its thread, when nothing
        is left but to compute it. Fused models leave the interpreter to others from then on."""
        self.model.before = call

    @property
    def graph_bytes(self) -> int:
        """Of the device's memory, what captured steps take."""
        graphs = None if self.steps is None else self.steps.graphs
        return 0 if graphs is None else graphs.byte_count

    @property
    def is_asynchronous(self) -> bool:
        """Whether `launch` returns before the step has run."""
        return self.steps is not None

    def execute(self, step: StepInput) -> StepOutput:
        """Runs one step: applies its deltas, computes its rows, appends what was sampled."""
        return self.launch(step).result()

    def execute_here(self, step: StepInput) -> StepOutput:
        """`launch_whole`, the host waiting for each step."""
        self.slots.apply(step)
        self.guided.guide(step)
        batch = self.slots.flatten(step)
        gone = step.slots[self.slots.failed[step.slots]]
        if not len(batch.slots):
            refused = self.guided.refused(gone)
            return StepOutput(
                no_ints(), no_ints(), failed=gone, detail=FAILED_BEFORE, refused=refused
            )
        masks = self.guided.masks_beside(batch.sampled_slots)
        try:
            with torch.inference_mode():
                reading = reading_rows(self.slots, batch.sampled_slots)
                logits, told_logits, hidden = self.forward_told(batch, len(reading) > 0)
                prompts = [
                    prompt_logprobs(part, told, int(self.slots.tokens[told.slot, 0]))
                    for told, part in zip(batch.told, told_logits, strict=True)
                ]
                vectors = read_vectors(logits, hidden, self.slots, batch.sampled_slots, reading)
                self.guided.bar(logits, masks())
                problem = process(logits, self.slots, batch.sampled_slots)
                sampled = self.sample(logits, batch.sampled_slots)
        except RuntimeError as error:
            masks()  # another try must not find them still in the making
            if isinstance(error, torch.OutOfMemoryError) or "can't allocate" in str(error):
                raise MemoryError(f"a step of {len(batch.ids)} tokens does not fit") from error
            raise
        for index, values in vectors.items():
            sampled.failed[index] |= not np.isfinite(values).all()
        good = ~sampled.failed
        slots, tokens = batch.sampled_slots[good], sampled.tokens[good]
        failed = batch.sampled_slots[sampled.failed]
        self.slots.settle(batch, slots, tokens, failed)
        self.guided.take(slots, tokens)
        logprobs = sampled.logprobs
        if logprobs is not None:
            logprobs = [entry for entry, ok in zip(logprobs, good.tolist(), strict=True) if ok]
        detail = problem or NOT_NUMBERS if len(failed) else FAILED_BEFORE if len(gone) else ""
        failed = np.concatenate((failed, gone))
        refused = self.guided.refused(failed)
        told = [
            PromptVector(int(batch.sampled_slots[index]), values)
            for index, values in vectors.items()
            if good[index]
        ]
        return StepOutput(slots, tokens, logprobs, failed, detail, refused, prompts, vectors=told)

    def sample(self, logits: Tensor, slots: Ints) -> Sampled:
        """As steps that are launched ahead are sampled, if there are such here: a token must not
        depend on who is in the same batch."""
        if self.steps is not None:
            return self.steps.sample_here(logits, slots)
        return sample(logits, self.slots, slots, self.facts.eos_ids, self.model.ops)

    def forward_told(
        self, batch: FlatBatch, want_hidden: bool
    ) -> tuple[Tensor, list[Tensor], Tensor | None]:
        """`forward`; for each of `batch.told` the logits [P, vocab] that it asks for; the final
        hidden states float32 [S, H] of the sampled rows, where they are wanted."""

        def room(row_count: int) -> Tensor | None:
            shape = (row_count, self.facts.hidden_len)
            return torch.empty(shape, device=self.device) if want_hidden else None

        if not batch.told:
            hidden = room(len(batch.sampled))
            return self.forward(batch, hidden), [], hidden
        asked = [told.first + np.arange(len(told.tokens)) for told in batch.told]
        every = np.unique(np.concatenate((batch.sampled, *asked)).astype(np.int64))  # ascending
        hidden = room(len(every))
        logits = self.forward(replace(batch, sampled=every), hidden)
        wanted, *parts = (
            logits.index_select(0, self.to_device(np.searchsorted(every, rows)))
            for rows in (batch.sampled, *asked)
        )
        if hidden is not None:
            at = np.searchsorted(every, batch.sampled)
            hidden = hidden.index_select(0, self.to_device(at))
        return wanted, parts, hidden

    def forward(self, batch: FlatBatch, hidden: Tensor | None = None) -> Tensor:
        """Writes the batch's keys and values; logits float32 [S, vocab] of its sampled rows, and
        into `hidden` [S, H] their final hidden states."""
        self.attention.plan(
            AttentionBatch(
                page_table=self.to_device(batch.page_table),
                query_start=self.to_device(batch.query_start),
                query_len=self.to_device(batch.query_len),
                kv_len=self.to_device(batch.kv_len),
                page_size=self.kv.page_size,
                query_len_max=int(batch.query_len.max()),
                kv_len_max=int(batch.kv_len.max()),
            )
        )
        return self.model.forward(
            self.to_device(batch.ids),
            self.to_device(batch.positions),
            self.to_device(batch.write_index),
            self.kv,
            self.attention,
            self.to_device(batch.sampled),
            hidden,
        )

    def use_vocabulary(self, table: TokenTable, engine: str = "") -> Constrainer:
        """What ids stand for, which constraints need; `engine` goes before the options'. May be
        called by another thread than that of the steps. Raises BadConfig for an unknown engine."""
        return self.guided.use_vocabulary(table, engine or self.options.grammar)

    @property
    def constrainer(self) -> Constrainer | None:
        """None before `use_vocabulary`."""
        return self.guided.constrainer

    def to_device(self, array: np.ndarray) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(self.device)

    def warm_up(self, progress: Progress | None = None) -> None:
        """Runs a prefill and a decode step, so that what is made at the first use is made now, and
        captures graphs. Call it before the first step: it writes over the pool and empties the
        slots."""
        room = self.kv.page_count * self.kv.page_size
        length = min(self.options.step_tokens_max, room, self.slots.context_len, 512) - 1
        if length < 1:
            return
        tokens = np.arange(length, dtype=np.int32) % self.facts.vocab_size
        pages = np.arange(-(-(length + 1) // self.kv.page_size), dtype=np.int32)
        opened = SlotOpen(0, tokens, length, 0, pages, Sampling())
        slot = np.zeros(1, np.int32)
        self.execute(StepInput(slot, np.array([length], np.int32), opened=[opened]))
        self.execute(StepInput(slot, np.ones(1, np.int32)))
        self.reset()
        if self.steps is not None and not self.options.lazy_graphs:
            self.graphs_left = self.steps.capture(progress, self.options.graph_seconds)
            self.take_memory()

    def take_memory(self) -> None:
        """Runs the largest step as one that is not captured: torch takes the memory for such steps
        now and keeps it. A capture gives back to the device what was kept before it."""
        assert self.steps is not None
        options = self.options
        step, page_count = largest_step(
            self.kv.page_size, self.slots.context_len, options.slot_count, options.step_tokens_max
        )
        if page_count > self.kv.page_count:
            return  # no step will be so large
        for pool in (pool for pair in self.kv.layers for pool in pair):
            pool[: page_count * self.kv.page_size].zero_()  # what is no number is not sampled
        graphs, self.steps.graphs = self.steps.graphs, None
        try:
            self.launch_whole(step).result()
        except MemoryError:
            self.release()  # then those will be cut
        finally:
            self.steps.graphs = graphs
        self.reset()

    def reset(self, keep_kv: bool = False) -> None:
        """Empties every slot. With `keep_kv` later steps may name pages from before as cached;
        without it nothing of the pool may be read before it is written."""
        if self.steps is not None:
            self.steps.reset()
        self.slots.clear()
        self.guided.clear()
        if not keep_kv:
            self.kv.forget()


def device_steps(runner: Runner) -> DeviceSteps | None:
    """What runs steps without waiting for them, where the operators can."""
    if not getattr(runner.model.ops, "asynchronous", False):
        return None
    from kernels.device import DeviceSteps  # only now: it needs Triton

    return DeviceSteps(
        runner.model,
        runner.kv,
        runner.slots,
        runner.attention,
        runner.facts.eos_ids,
        runner.options.step_tokens_max,
        runner.guided,
        runner.options.graph_bytes if runner.options.graphs else 0,
    )
