"""This file turns the wire's form of a step into the kernels' form and back.

It does not know actors, time or threads. It copies nothing that it can view: the int32 buffers of a
message become read-only numpy arrays over the same bytes.
"""

from __future__ import annotations

import numpy as np

from actors.worker.processors import processors_of
from kernels.batch import (
    Constraint,
    Ints,
    PromptLogprobs,
    Sampling,
    SlotOpen,
    StepInput,
    StepOutput,
    TokenLogprobs,
)
from messages import types, worker


def step_input(step: worker.Step) -> StepInput:
    """The kernels' form of `step`."""
    return StepInput(
        slots=ints(step.slots),
        counts=ints(step.counts),
        opened=[slot_open(row) for row in step.opened],
        closed=ints(step.closed),
        grown_slots=ints(step.grown_slots),
        grown_pages=ints(step.grown_pages),
    )


def step_done(step: worker.Step, output: StepOutput, elapsed_us: int) -> worker.StepDone:
    """The wire's form of what `step` brought."""
    return worker.StepDone(
        epoch=step.epoch,
        step=step.step,
        slots=output.slots.astype(np.int32, copy=False).tobytes(),
        tokens=output.tokens.astype(np.int32, copy=False).tobytes(),
        logprobs=() if output.logprobs is None else tuple(map(logprob, output.logprobs)),
        elapsed_us=elapsed_us,
        failed=output.failed.astype(np.int32, copy=False).tobytes(),
        detail=output.detail,
        refused=output.refused.astype(np.int32, copy=False).tobytes(),
        prompts=tuple(map(prompt_part, output.prompts)),
        jumped_slots=output.jumped_slots.astype(np.int32, copy=False).tobytes(),
        jumped_tokens=output.jumped_tokens.astype(np.int32, copy=False).tobytes(),
        vectors=tuple(
            worker.Vector(slot=vector.slot, values=vector.values.tobytes())
            for vector in output.vectors
        ),
        starved=output.starved.astype(np.int32, copy=False).tobytes(),
    )


def prompt_part(host: PromptLogprobs) -> worker.PromptPart:
    rows = (
        types.Logprob(token_id=row.token_id, logprob=row.logprob, best=row.best)
        for row in host.logprobs
    )
    return worker.PromptPart(slot=host.slot, index=host.index, logprobs=tuple(rows))


def slot_open(row: worker.Row) -> SlotOpen:
    return SlotOpen(
        slot=row.slot,
        tokens=ints(row.tokens),
        prompt_len=row.prompt_len,
        cached_len=row.cached_len,
        pages=ints(row.pages),
        sampling=sampling(row.sampling),
        constraint=None if row.grammar is None else constraint(row.grammar),
    )


def constraint(wire: types.Grammar) -> Constraint:
    return Constraint(kind=wire.kind, text=wire.text, begin=wire.begin, end=wire.end)


def sampling(wire: types.Sampling) -> Sampling:
    return Sampling(
        temperature=wire.temperature,
        top_k=wire.top_k,
        top_p=wire.top_p,
        min_p=wire.min_p,
        presence_penalty=wire.presence_penalty,
        frequency_penalty=wire.frequency_penalty,
        repetition_penalty=wire.repetition_penalty,
        logit_bias=wire.logit_bias,
        seed=wire.seed,
        choice=wire.choice,
        logprobs=wire.logprobs,
        stop_ids=wire.stop_ids,
        ignore_eos=wire.ignore_eos,
        min_tokens=wire.min_tokens,
        max_tokens=wire.max_tokens,
        allowed_ids=wire.allowed_ids,
        bad_sequences=wire.bad_sequences,
        prompt_logprobs=wire.prompt_logprobs,
        processors=processors_of(wire.processors),
        want_vector=wire.want_vector,
        label_ids=wire.label_ids,
    )


def logprob(host: TokenLogprobs | None) -> types.Logprob | None:
    if host is None:
        return None
    return types.Logprob(token_id=host.token_id, logprob=host.logprob, best=host.best)


def ints(buffer: types.Int32s) -> Ints:
    """A read-only view `[len(buffer) / 4]` int32."""
    return np.frombuffer(buffer, np.int32)
