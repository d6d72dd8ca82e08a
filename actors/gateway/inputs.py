"""This file holds what the readers of every dialect share: bytes to a typed body, what bounds it
besides its types, and prompts and ids of tokens in it.

It does not know what a body asks for. Laws: whatever the bytes, the result is a value or `Refused`,
which names the field; the cost is linear in the length of the body.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple, NoReturn, TypeVar

import msgspec

from actors.gateway.call import Prompt
from actors.gateway.errors import Refused, invalid, respelled
from actors.gateway.shape import Parsers
from messages.config import GatewayConfig
from messages.tokenizer import Defaults
from messages.types import Fault, Problem, pack

# Values of a field that we don't have, which ask for nothing.
NEUTRAL = frozenset({b"null", b"false", b"[]"})
B = TypeVar("B")


@contextmanager
def worded(spelling: Mapping[str, str]) -> Iterator[None]:
    """What is refused within is refused as a dialect with this spelling says it."""
    try:
        yield
    except Refused as refused:
        raise Refused(respelled(refused.problem, spelling)) from None


class Limits(NamedTuple):
    """What bounds a body besides its types: the settings, and the model's facts."""

    config: GatewayConfig
    model: str
    vocab_size: int
    parsers: Parsers = Parsers()
    defaults: Defaults = Defaults()
    context_len: int = 0
    hidden_len: int = 0
    vector_lens: tuple[int, ...] | None = None  # see `messages.worker.Facts`


def decode(body: bytes, decoder: msgspec.json.Decoder[B]) -> B:
    """The typed body. Raises Refused for bad JSON, bad types and nesting bombs."""
    try:
        return decoder.decode(body)
    except msgspec.ValidationError as error:
        decode_refuse(str(error))
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        reason = str(error).removeprefix("JSON is malformed: ")
        raise invalid(f"The body is not valid JSON: {reason}.", None) from None
    except RecursionError:
        raise invalid("The body is nested too deeply.", None) from None


MISSING = re.compile(r"^Object missing required field `(?P<name>[^`]*)`")
WHERE = re.compile(r" - at `(?:key in )?\$\.?(?P<path>[^`]*)`$")


def decode_refuse(text: str) -> NoReturn:
    """msgspec puts the place at the end of its message: that is the error's `param`."""
    where = WHERE.search(text)
    path = where["path"].replace("[...]", "") if where else ""
    reason = text[: where.start()] if where else text
    missing = MISSING.match(reason)
    if missing:
        path = f"{path}.{missing['name']}" if path else missing["name"]
        raise invalid(f"The required field `{path}` is missing.", path)
    reason = reason.replace("`", "").replace(" | null", "")
    if not path:
        raise invalid(f"The body is wrong: {reason}.", None)
    raise invalid(f"`{path}` is wrong: {reason}.", path)


def check_model(model: str | None, limits: Limits) -> None:
    if model is not None and model != limits.model:
        raise Refused(
            Problem(
                fault=Fault.NOT_FOUND,
                message=f"The model `{model[:200]}` does not exist here.",
                param="model",
                code="model_not_found",
            )
        )


def check_ids(
    ids: list[int] | None, param: str, limits: Limits, count_max: int | None = None
) -> None:
    """Every id must be in the vocabulary: ids are used as indices of tables."""
    if not ids:
        return
    if count_max is not None and len(ids) > count_max:
        raise invalid(f"`{param}` may have at most {count_max} entries.", param)
    if min(ids) < 0 or max(ids) >= limits.vocab_size:
        raise invalid(
            f"`{param}` must hold token ids between 0 and {limits.vocab_size - 1}.", param
        )


def read_inputs(
    given: str | list[str | int | list[int]], param: str, limits: Limits
) -> tuple[Prompt, ...]:
    """One prompt for a string or a list of ids; several for a list of either."""
    if isinstance(given, str):
        return (Prompt(text=given),)
    if not given:
        raise invalid(f"`{param}` cannot be an empty list.", param)
    first = type(given[0])
    if any(type(item) is not first for item in given):
        raise invalid(f"`{param}` mixes strings, ids and lists of ids.", param)
    if first is int:
        return (read_ids(given, param, limits),)
    check_count(len(given), param, limits)
    if first is str:
        return tuple(Prompt(text=text) for text in given if isinstance(text, str))
    return tuple(read_ids(ids, f"{param}[{i}]", limits) for i, ids in enumerate(given))


def check_count(count: int, param: str, limits: Limits) -> None:
    if count > limits.config.prompts_max:
        raise invalid(f"At most {limits.config.prompts_max} prompts in one call.", param)


def read_ids(ids: Any, param: str, limits: Limits) -> Prompt:
    if not ids:
        raise invalid(f"`{param}` has no tokens.", param)
    check_ids(ids, param, limits)
    return Prompt(ids=pack(ids))
