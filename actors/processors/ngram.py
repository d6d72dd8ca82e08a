"""This file declares `no_repeat_ngram`: no run of `size` generated tokens comes a second time."""

from __future__ import annotations

from typing import Annotated

import msgspec

from actors.processors.base import PROCESSORS, Declaration

TokenId = Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]


class NoRepeatNgram(msgspec.Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    size: Annotated[int, msgspec.Meta(ge=1, le=256)]
    window: Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)] = 0  # look at the last so many; 0: all
    # May come again at any place: line ends, table borders.
    allowed_ids: Annotated[tuple[TokenId, ...], msgspec.Meta(max_length=1024)] = ()


PROCESSORS.register("no_repeat_ngram")(
    Declaration(NoRepeatNgram, "kernels.processors.ngram:no_repeat_ngram")
)
