"""This file declares `thinking_budget`: reasoning ends after so many tokens."""

from __future__ import annotations

from typing import Annotated

import msgspec

from actors.processors.base import PROCESSORS, Declaration, Encode, ids_of

Marker = Annotated[str, msgspec.Meta(min_length=1, max_length=64)]


class ThinkingBudget(msgspec.Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    budget: Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]  # tokens between the markers
    begin: Marker = "<think>"  # also where it is the prompt that ends within reasoning
    end: Marker = "</think>"


class Span(msgspec.Struct, kw_only=True, frozen=True):
    """The same in ids."""

    budget: int
    begin_ids: tuple[int, ...]
    end_ids: tuple[int, ...]


def settle(params: ThinkingBudget, encode: Encode) -> Span:
    begin_ids, end_ids = ids_of((params.begin, params.end), encode)
    return Span(budget=params.budget, begin_ids=begin_ids, end_ids=end_ids)


PROCESSORS.register("thinking_budget")(
    Declaration(ThinkingBudget, "kernels.processors.thinking:thinking_budget", settle, Span)
)
