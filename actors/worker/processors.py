"""This file makes the logits processors of a row: the one place that imports what does their work.

It does not know steps or logits. Law: what can't be made fails the row that asked for it, when it
comes to be used, and nobody else's.
"""

from __future__ import annotations

import pkgutil

import torch

from actors.processors.base import PROCESSORS
from kernels.batch import Ints
from kernels.processors.base import LogitsProcessor
from messages.types import ProcessorCall


def processors_of(calls: tuple[ProcessorCall, ...]) -> tuple[LogitsProcessor, ...]:
    return tuple(map(processor_of, calls))


def processor_of(call: ProcessorCall) -> LogitsProcessor:
    try:
        declaration = PROCESSORS.get(call.name)
        make = pkgutil.resolve_name(declaration.work)
        made: LogitsProcessor = make(declaration.again(call.params))
    except Exception as error:  # code of others: it may raise anything
        return broken(f"{call.name} can't be made: {error!r}")
    return made


def broken(why: str) -> LogitsProcessor:
    def fail(row: torch.Tensor, prompt: Ints, generated: Ints) -> None:
        raise RuntimeError(why)

    return fail
