"""This file keeps the rows of steps to their grammars: it opens and closes their guides as a step's
deltas say, makes the masks of a step, moves the guides on by what came of it, and appends what they
force behind that.

`constrain.py` has the guides and knows no batch; this does not know models, or how a step is run or
sampled. All but `use_vocabulary` belongs to the thread that runs steps. Law: a row whose constraint
gives out fails alone, and is `refused`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from kernels.batch import Ints, StepInput, StepOutput, no_ints
from kernels.constrain import (
    BadGrammar,
    Constrainer,
    EngineUnavailable,
    Masks,
    TokenTable,
    load_engine,
)
from kernels.load.base import BadConfig
from kernels.ops.base import Ops
from kernels.registry import UnknownName
from kernels.slots import Slots

BESIDE_ROWS_MIN = 8  # a thread takes as long to wake as the masks of so many take


class GuidedRows:
    """The rows of one runner that grammars have a say in."""

    def __init__(self, slots: Slots, ops: Ops, device: torch.device, token_jump: bool) -> None:
        self.slots, self.ops, self.device = slots, ops, device
        self.token_jump = token_jump  # tokens that a grammar forces are appended without sampling
        self.constrainer: Constrainer | None = None  # until the first constraint asks for one
        self.masking: ThreadPoolExecutor | None = None  # likewise

    def use_vocabulary(self, table: TokenTable, engine: str) -> Constrainer:
        """See `Runner.use_vocabulary`."""
        try:
            self.constrainer = Constrainer(load_engine(engine, table), table)
        except (UnknownName, EngineUnavailable) as error:
            raise BadConfig(str(error)) from None
        return self.constrainer

    @property
    def work(self) -> int:
        """Rises while grammars are followed. For any thread."""
        return 0 if self.constrainer is None else self.constrainer.work

    def guide(self, step: StepInput) -> None:
        """Applies the step's deltas to the guides. A row that cannot be guided fails."""
        constrainer = self.constrainer
        if constrainer is None:
            assert not any(row.constraint for row in step.opened), "ids stand for nothing yet"
            return
        for slot in step.closed.tolist():
            constrainer.close(slot)
        for row in step.opened:
            if row.constraint is None:
                continue
            try:
                generated = row.tokens[row.prompt_len :].tolist()
                constrainer.open(row.slot, row.constraint, generated)
            except BadGrammar:
                constrainer.broken.add(row.slot)
                self.slots.failed[row.slot] = True

    def is_guided(self, slots: Ints) -> bool:
        """Whether a grammar has a say in any of the slots."""
        guides = {} if self.constrainer is None else self.constrainer.guides
        return bool(guides) and any(slot in guides for slot in slots.tolist())

    def masks(self, slots: Ints) -> Masks | None:
        """See `Constrainer.masks`."""
        return None if self.constrainer is None else self.constrainer.masks(slots)

    def masks_beside(self, slots: Ints) -> Callable[[], Masks | None]:
        """Of these slots, once they are asked for. On a CPU those of many rows are made in another
        thread while this one computes the logits; on a device this one has nothing else to do."""
        beside = self.device.type == "cpu" and len(slots) >= BESIDE_ROWS_MIN
        if not beside or not self.is_guided(slots):
            return functools.cache(lambda: self.masks(slots))
        if self.masking is None:
            self.masking = ThreadPoolExecutor(1, "masks")
        return self.masking.submit(self.masks, slots).result

    def bar(self, logits: Tensor, masks: Masks | None) -> None:
        """Takes out of logits [S, vocab] what grammars forbid, in place."""
        if masks is None:
            return
        if len(masks.rows):
            rows = torch.from_numpy(masks.rows).to(self.device)
            self.ops.bar(logits, rows, torch.from_numpy(masks.words).to(self.device))
        if len(masks.broken):
            logits[torch.from_numpy(masks.broken).to(self.device)] = torch.nan

    def take(self, slots: Ints, tokens: Ints) -> None:
        """Moves guides on by what was sampled for the slots."""
        if self.constrainer is not None:
            self.constrainer.take(slots, tokens)

    def jump(self, output: StepOutput) -> StepOutput:
        """Appends to what was sampled the tokens that grammars force behind it, as far as there are
        pages for them. They are known and not computed, like a prompt's."""
        if not self.token_jump or not self.is_guided(output.slots):
            return output
        assert self.constrainer is not None
        slots, tokens = self.constrainer.jump(output.slots, self.slots.room(output.slots))
        self.slots.extend(slots, tokens)
        return replace(output, jumped_slots=slots, jumped_tokens=tokens)

    def land(self, slots: Ints, tokens: Ints) -> tuple[Ints, Ints]:
        """Moves guides on by what a launched step has brought; what `jump` appends: slots, and for
        each a token."""
        if self.constrainer is None:
            return no_ints(), no_ints()
        self.constrainer.take(slots, tokens)
        output = self.jump(StepOutput(slots, tokens))
        return output.jumped_slots, output.jumped_tokens

    def refused(self, failed: Ints) -> Ints:
        """Those of the failed slots whose constraint is at fault."""
        if self.constrainer is None or not len(failed):
            return no_ints()
        broken = self.constrainer.broken
        return np.array([slot for slot in failed.tolist() if slot in broken], np.int32)

    def clear(self) -> None:
        """No slot is guided any more; grammars that are ready stay so."""
        if self.constrainer is not None:
            self.constrainer.clear()
