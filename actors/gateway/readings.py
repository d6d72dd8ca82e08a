"""This file is what embeddings, scores and rankings have in common: calls that want a vector of
each prompt and no text, and the rows that bring it.

It does not know HTTP or a dialect. Laws: a call has one answer for each of its prompts, in their
order, or none; what the client may not ask is refused by name.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from actors.gateway.call import Call, Checked, Prompt, Row
from actors.gateway.dialect import Head
from actors.gateway.errors import Refused, invalid, unavailable
from actors.gateway.inputs import NEUTRAL
from messages.openai import NOT_GIVEN
from messages.types import Sampling, Usage, unpack_floats
from messages.vectors import Inputs, PromptUsage, VectorsUnsupported


class Wish(NamedTuple):
    """A body, read. `stream` is never true: there is nothing to stream."""

    call: Call
    given: Any  # the body
    rid: str = ""
    stream: bool = False


def wish_of(given: Inputs, prompts: Sequence[Prompt], param: str, **call: Any) -> Wish:
    """A call for the vectors of the prompts, which the client calls `param`."""
    made = Call(
        prompts=tuple(prompts),
        namespace="" if given.cache_salt is None else f"salt:{given.cache_salt}",
        priority=given.priority or 0,
        param=param,
        spelling={"prompt": param},
        **call,
    )
    return Wish(made, given, given.rid or "")


def reading(want_vector: bool = False, label_ids: Sequence[int] = ()) -> Sampling:
    """The request ends with its first token, which nobody reads."""
    return Sampling(
        temperature=0.0,
        max_tokens=1,
        ignore_eos=True,
        want_vector=want_vector,
        label_ids=tuple(label_ids),
    )


def names(wish: Wish) -> tuple[str, ...]:
    return (wish.rid,) * len(wish.call.prompts) if wish.rid else ()


def check_lacking(body: VectorsUnsupported) -> None:
    for name in VectorsUnsupported.__struct_fields__:
        raw = getattr(body, name)
        if raw is not NOT_GIVEN and bytes(raw) not in NEUTRAL:
            raise invalid(f"`{name}` is not supported.", name)


class VectorWriter:
    """Gathers the vectors; who writes them is a subclass."""

    def __init__(self, wish: Wish, head: Head, checked: Sequence[Checked]) -> None:
        self.wish = wish
        self.head = head
        count = len(wish.call.prompts)
        self.found: list[Any] = [None] * count
        self.usages = [Usage()] * count

    def add(self, rows: Iterable[Row]) -> None:
        for index, delta in rows:
            if delta.vector:
                self.found[index] = self.one(index, unpack_floats(delta.vector))
            if delta.usage is not None:
                self.usages[index] = delta.usage

    def body(self, checked: Sequence[Checked]) -> bytes:
        if any(each is None for each in self.found):
            raise Refused(unavailable("The request was aborted.", code="aborted"))
        return self.write(self.found)

    def one(self, index: int, vector: array[float]) -> Any:
        """What `write` shall get of one prompt: what takes long is done here, as vectors come, and
        not at the end for all of a large call."""
        return vector

    def write(self, found: list[Any]) -> bytes:
        raise NotImplementedError

    def usage(self) -> PromptUsage:
        count = sum(usage.prompt_tokens for usage in self.usages)
        return PromptUsage(prompt_tokens=count, total_tokens=count)
