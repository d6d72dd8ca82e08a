"""This file runs steps on a GPU without waiting for it: a step is launched while the one before
it computes, takes its input tokens from the device, and its tokens come back by pinned memory.

    launch(n) launch(n+1) .............. result(n) launch(n+2) result(n+1)
    GPU:      [step n][step n+1][step n+2]

A step in which every row decodes, or which is small, is the replay of a captured graph
(`graphs.py`); any other is launched operator by operator. Each row is picked for by
`ops.triton.picker`; behind it, `sampler.py` replaces the tokens of those that ask for more. Neither
waits: tokens that have not landed yet are counted on the device. The host waits for the steps
before in one case, rows with bad sequences of several tokens. Where rows are held to grammars, it
makes the masks while the device computes the logits, from the tokens of the step before; only the
choice waits for them.

It does not know requests or who launches. Laws: steps run in order on one stream; a staging buffer
is written again only after the step that used it has ended; `known_len` and the like advance at the
launch, tokens are filled in at the result.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kernels.attention.base import Attention, AttentionBatch, HostRows
from kernels.batch import Ints, StepInput, StepOutput, no_ints
from kernels.flight import FAILED_BEFORE, NOT_NUMBERS
from kernels.graphs import PACKED, WIDE_ROWS, ChunkGraph, DecodeGraph, Graphs, decode_rows
from kernels.guided import GuidedRows
from kernels.kv import KvPool
from kernels.layers.decoder import Decoder
from kernels.ops.sampling import Sampled
from kernels.ops.triton.picker import Picker
from kernels.sampler import DeviceSampler
from kernels.sharing import SHARING_ROWS_MIN, Sharing, find_sharing
from kernels.slots import FlatBatch, Pending, Slots
from kernels.special import Scores, needs_tokens
from kernels.staging import STAGES, pinned, upload


@dataclass(eq=False)
class DeviceFlight:
    """A launched step. `result` waits for it; flights are asked in the order of their launches, or
    not at all."""

    steps: DeviceSteps
    pending: Pending
    gone: Ints
    event: torch.cuda.Event
    landed: NDArray[np.int32]  # pinned [2, S or more]: tokens, failed
    scores: Scores | None
    columns: NDArray[np.int64]  # of `landed`: those of the slots of `pending`
    output: StepOutput | None = field(default=None)

    def wait(self) -> None:
        if self.output is None:
            self.event.synchronize()  # sleeps: it is a blocking event

    def result(self) -> StepOutput:
        self.steps.land(self)
        assert self.output is not None
        return self.output

    def settle(self) -> None:
        """Waits, and records what came."""
        self.event.synchronize()  # sleeps: it is a blocking event
        tokens, bad = self.landed[0][self.columns], self.landed[1][self.columns] != 0
        guided, table = self.steps.guided, self.steps.slots
        before = table.record(self.pending, tokens, bad)
        good = ~bad & ~before
        slots, scores = self.pending.slots, self.scores
        own = good & table.open[slots] & (table.tenancy[slots] == self.pending.tenancy)
        jumped = guided.land(slots[own], tokens[own])
        logprobs = None if scores is None else scores.told(self.columns[good], tokens[good])
        gone = np.concatenate((self.gone, slots[before]))
        fresh = slots[bad & ~before]
        detail = NOT_NUMBERS if len(fresh) else FAILED_BEFORE if len(gone) else ""
        failed = np.concatenate((fresh, gone))
        self.output = StepOutput(
            slots[good],
            tokens[good],
            logprobs,
            failed,
            detail,
            guided.refused(failed),
            jumped_slots=jumped[0],
            jumped_tokens=jumped[1],
        )


class DeviceSteps:
    """Launches steps for one model on one device."""

    def __init__(
        self,
        model: Decoder,
        kv: KvPool,
        slots: Slots,
        attention: Attention,
        eos_ids: tuple[int, ...],
        step_tokens_max: int,
        guided: GuidedRows,
        graph_bytes: int,  # of memory for graphs; 0: none are captured
    ) -> None:
        self.model, self.kv, self.slots, self.attention = model, kv, slots, attention
        self.device = kv.layers[0][0].device
        slot_count, pages_max = slots.page_table.shape
        ints: dict[str, Any] = {"dtype": torch.int32, "device": self.device}
        self.page_table = torch.zeros((slot_count, pages_max), **ints)
        self.last_token = torch.zeros(slot_count, **ints)
        self.picker = Picker(model.ops, model.config.vocab_size, self.last_token)
        self.sampler = DeviceSampler(model.ops, slots, guided, self.picker, eos_ids)
        stage_len = 5 * step_tokens_max + slot_count * (pages_max + 16) + 4096
        self.stages = [pinned(stage_len, self.device) for _ in range(STAGES)]
        landing_len = 2 * (slot_count + WIDE_ROWS)
        self.landings = [pinned(landing_len, self.device) for _ in range(STAGES)]
        self.events = [torch.cuda.Event(blocking=True) for _ in range(STAGES)]
        self.flights: deque[DeviceFlight] = deque()
        self.users: list[DeviceFlight | None] = [None] * STAGES  # of each stage, the last
        self.count = 0
        self.guided = guided
        self.sharing: tuple[bytes, int, Sharing | None] | None = None
        self.graphs: Graphs | None = None
        if graph_bytes and getattr(attention, "replayable", False):
            self.graphs = Graphs(
                model,
                kv,
                attention.replayer(),  # type: ignore[attr-defined]
                self.picker,
                self.page_table,
                slots.context_len,
                step_tokens_max,
                graph_bytes,
            )

    def launch(self, step: StepInput) -> DeviceFlight | StepOutput:
        """Applies the step's deltas and puts it on the stream. Raises MemoryError, the step not
        run. A step without rows is its own result."""
        slots = self.slots
        slots.apply(step)
        self.guided.guide(step)
        if needs_tokens(slots.columns, step.slots):
            self.drain()
        gone = step.slots[slots.failed[step.slots]]
        batch = slots.flatten(step)
        if not len(batch.slots):
            return StepOutput(
                no_ints(),
                no_ints(),
                failed=gone,
                detail=FAILED_BEFORE if len(gone) else "",
                refused=self.guided.refused(gone),
            )
        nth = self.count % STAGES
        user = self.users[nth]
        if user is not None:
            self.land(user)
        try:
            with torch.inference_mode():
                result, scores, columns = self.compute(batch, nth)
                # Both contiguous, padding included: any other copy would wait.
                landing = self.landings[nth][: result.numel()].view(2, -1)
                landing.copy_(result, non_blocking=True)
                self.events[nth].record()
        except torch.OutOfMemoryError as error:
            torch.cuda.synchronize(self.device)  # what was launched reads the stage
            torch.cuda.empty_cache()
            raise MemoryError(f"a step of {len(batch.ids)} tokens does not fit") from error
        batch = replace(
            batch, sampled=batch.sampled[columns], sampled_slots=batch.sampled_slots[columns]
        )
        flight = DeviceFlight(
            self, slots.advance(batch), gone, self.events[nth], landing.numpy(), scores, columns
        )
        self.flights.append(flight)
        self.users[nth] = flight
        self.count += 1
        return flight

    def land(self, flight: DeviceFlight) -> None:
        """Settles all flights up to this one, in order."""
        while flight.output is None:
            self.flights.popleft().settle()

    def drain(self) -> None:
        while self.flights:
            self.flights.popleft().settle()

    def catch_up(self, slots: Ints) -> None:
        """Takes over what a step that ran elsewhere has changed of `slots`."""
        rows = slots[self.slots.open[slots]]
        if not len(rows):
            return
        there = torch.from_numpy(rows.astype(np.int64)).to(self.device)
        tables = torch.from_numpy(self.slots.page_table[rows]).to(self.device)
        self.page_table.index_copy_(0, there, tables)
        last = self.slots.tokens[rows, self.slots.known_len[rows] - 1]
        self.last_token[there] = torch.from_numpy(last).to(self.device)

    def capture(self, progress: Any, seconds_max: float) -> int:
        """Captures what there is time for; returns how many graphs are left."""
        return 0 if self.graphs is None else self.graphs.capture(progress, seconds_max)

    def sample_here(self, logits: Tensor, rows: Ints) -> Sampled:
        """See `DeviceSampler.sample`."""
        return self.sampler.sample(logits, rows, self.count % STAGES)

    def reset(self) -> None:
        self.drain()
        self.last_token.zero_()

    def compute(
        self, batch: FlatBatch, nth: int
    ) -> tuple[Tensor, Scores | None, NDArray[np.int64]]:
        """Puts the batch on the stream: int32 [2, S or more] of tokens and failures, contiguous;
        log-probabilities if any row asked; and which of the sampled rows count."""
        rows, stage = batch.sampled_slots, self.stages[nth]
        counted = np.arange(len(rows))
        heat, noise = self.sampler.chances(rows)
        graph = self.graph_for(batch)
        if isinstance(graph, DecodeGraph):
            logits, result = self.replay(graph, batch, heat, noise, stage)
        elif graph is not None:
            logits, result = self.replay_chunk(graph, batch, heat, noise, stage)
        else:
            logits, result = self.run(batch, heat, noise, stage)
        if self.guided.is_guided(rows):
            # While the device computes the logits, the host waits for the tokens of the step
            # before, moves the grammars on and makes the masks.
            self.drain()
            counted, result = self.sampler.hold(logits, result, batch, heat, noise, nth)
        scores = self.sampler.choose(logits, result, rows, counted, heat, noise, nth)
        return result, scores, counted

    def graph_for(self, batch: FlatBatch) -> DecodeGraph | ChunkGraph | None:
        """What the batch can be a replay of."""
        graphs, count = self.graphs, len(batch.slots)
        if graphs is None:
            return None
        if not len(batch.ids) == count == len(batch.sampled):
            decodes = decode_rows(batch)
            keys = int(batch.kv_len[decodes:].max(initial=0))
            return graphs.chunk(decodes, count - decodes, len(batch.ids) - decodes, keys)
        graph = None
        cascades = getattr(graphs.attention, "cascades", False)
        if cascades and count >= SHARING_ROWS_MIN and self.shared(batch) is not None:
            graph = graphs.decode(count, sharing=True)
        return graph or graphs.decode(count)

    def replay(
        self,
        graph: DecodeGraph,
        batch: FlatBatch,
        heat: NDArray[Any],
        noise: NDArray[Any],
        stage: Tensor,
    ) -> tuple[Tensor, Tensor]:
        count = len(batch.slots)
        sharing = self.shared(batch) if graph.sharing else None
        width = graph.packed.shape[1]
        packed = stage.numpy()[: PACKED * width].reshape(PACKED, width)
        packed[:6, :count] = (
            batch.slots,
            batch.positions,
            batch.write_index // self.kv.page_size,
            batch.ids,
            heat.view(np.int32),
            noise.view(np.int32),
        )
        packed[0, count:] = -1
        packed[1:, count:] = 0
        packed[6:] = 0
        if sharing is not None:
            packed[6, sharing.rows] = sharing.length
            packed[7, :2] = batch.slots[sharing.rows[0]], sharing.length
        graph.packed.copy_(stage[: PACKED * width].view(PACKED, width), non_blocking=True)
        graph.replay()
        return graph.logits[:count], graph.result

    def shared(self, batch: FlatBatch) -> Sharing | None:
        """The longest start that the largest group of rows has in common; found again only when
        other rows decode."""
        key = batch.slots.tobytes(), int(self.slots.tenancy[batch.slots].sum())
        if self.sharing is None or self.sharing[:2] != key:
            found = find_sharing(batch.page_table, batch.positions, self.kv.page_size)
            self.sharing = (*key, found)
        return self.sharing[2]

    def replay_chunk(
        self,
        graph: ChunkGraph,
        batch: FlatBatch,
        heat: NDArray[Any],
        noise: NDArray[Any],
        stage: Tensor,
    ) -> tuple[Tensor, Tensor]:
        total, row_count = graph.packed.shape[0], len(batch.slots)
        graph.pack(batch, heat, noise, stage.numpy()[:total])
        width = batch.page_table.shape[1]
        tables = stage[total : total + row_count * (width + 1)]
        tables.numpy()[:row_count] = batch.slots
        tables.numpy()[row_count:] = batch.page_table.reshape(-1)
        graph.packed.copy_(stage[:total], non_blocking=True)
        there = tables.to(self.device, non_blocking=True)
        self.page_table[:, :width].index_copy_(
            0, there[:row_count].long(), there[row_count:].view(row_count, width)
        )
        graph.replay()
        return graph.logits[: len(batch.sampled)], graph.result

    def run(
        self, batch: FlatBatch, heat: NDArray[Any], noise: NDArray[Any], stage: Tensor
    ) -> tuple[Tensor, Tensor]:
        """The step operator by operator."""
        unknown = np.flatnonzero(batch.ids < 0)
        slot_of = np.repeat(batch.slots, batch.query_len)[unknown]
        width = batch.page_table.shape[1]
        up = upload(
            stage,
            self.device,
            np.maximum(batch.ids, 0),
            batch.positions,
            batch.write_index,
            batch.query_start,
            batch.query_len,
            batch.kv_len,
            batch.slots,
            batch.sampled,
            batch.sampled_slots,
            heat,
            noise,
            unknown,
            slot_of,
            batch.page_table.reshape(-1),
        )
        ids, positions, write_index, start, query_len, kv_len, rows = up[:7]
        sampled, sampled_slots, heat_there, noise_there, unknown_there, slot_there, table = up[7:]
        ids = ids.long()
        if len(unknown):
            ids[unknown_there.long()] = self.last_token[slot_there.long()].long()
        table = table.view(-1, width)
        self.page_table[:, :width].index_copy_(0, rows.long(), table)
        by_slot = getattr(self.attention, "by_slot", False)
        self.attention.plan(
            AttentionBatch(
                page_table=self.page_table if by_slot else table,
                query_start=start,
                query_len=query_len,
                kv_len=kv_len,
                page_size=self.kv.page_size,
                query_len_max=int(batch.query_len.max()),
                kv_len_max=int(batch.kv_len.max()),
                table_rows=rows if by_slot else None,
                host=HostRows(batch.query_len, batch.kv_len, batch.page_table),
            )
        )
        logits = self.model.forward(
            ids, positions, write_index.long(), self.kv, self.attention, sampled.long()
        )
        return logits, self.picker.pick(logits, heat_there, noise_there, sampled_slots)
