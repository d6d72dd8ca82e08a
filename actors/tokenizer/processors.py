"""This file checks which logits processors a request names, and with what parameters.

It does not know what they do. Law: a name passes only where the operator allows it, parameters only
where they are of the entry's own type; what passes is in a form of the entry's, not the client's.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

import msgspec

from actors.processors.base import PROCESSORS, BadParams
from actors.tokenizer.prompt import refuse
from messages.types import ProcessorCall

PARAM = "logits_processors"
REASON_CHARS_MAX = 300


def check_processors(
    calls: tuple[ProcessorCall, ...], allowed: Collection[str], encode: Callable[[str], list[int]]
) -> tuple[ProcessorCall, ...]:
    """The calls with the parameters that the worker gets. Raises Refused."""
    checked = []
    for nth, call in enumerate(calls):
        if call.name not in allowed:
            known = ", ".join(sorted(allowed)) or "none"
            raise refuse(
                f"There is no logits processor {call.name!r} here; known are: {known}.",
                f"{PARAM}[{nth}].name",
            )
        try:
            params = PROCESSORS.get(call.name).read(call.params, encode)
        except (msgspec.DecodeError, BadParams, RecursionError) as error:
            reason = str(error)[:REASON_CHARS_MAX]
            raise refuse(
                f"The parameters of {call.name!r} are not valid: {reason}.",
                f"{PARAM}[{nth}].params",
            ) from None
        checked.append(ProcessorCall(call.name, params))
    return tuple(checked)
