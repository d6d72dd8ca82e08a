"""The worker makes processors of what the tokenizer has let pass."""

from __future__ import annotations

import pytest
import torch

from actors.processors.base import PROCESSORS, Declaration
from actors.processors.ngram import NoRepeatNgram
from actors.worker.processors import processors_of
from messages.types import ProcessorCall
from tests.kernels.driver import ints

GIVEN = {"no_repeat_ngram": b'{"size": 1}', "thinking_budget": b'{"budget": 1}'}


def test_every_built_in_one_can_be_made_and_used() -> None:
    calls = tuple(
        ProcessorCall(name, PROCESSORS.get(name).read(given, lambda text: [len(text)]))
        for name, given in GIVEN.items()
    )
    ngram, thinking = processors_of(calls)
    row = torch.zeros(9)
    ngram(row, ints([1]), ints([2, 5]))
    assert row.isinf().nonzero().flatten().tolist() == [2, 5]
    row = torch.zeros(9)
    thinking(row, ints([7, 1]), ints([]))  # "<think>" and one more
    assert row.isfinite().nonzero().flatten().tolist() == [8]


def test_what_cannot_be_made_fails_when_it_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    lost = Declaration(NoRepeatNgram, "no.such.module:thing")
    monkeypatch.setitem(PROCESSORS._built_in, "lost", lost)
    for call in (ProcessorCall("lost", b'{"size": 1}'), ProcessorCall("nobody")):
        (processor,) = processors_of((call,))
        with pytest.raises(RuntimeError, match=call.name):
            processor(torch.zeros(9), ints([1]), ints([2]))
