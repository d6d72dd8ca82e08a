"""This file decides whether a prompt can be served: its length against the context, its ids against
the vocabulary. Pure arithmetic; it does not know how text became ids.

Laws: no number in a message is negative; a prompt is never shortened to fit, whatever `max_tokens`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from messages.types import Fault, Problem, Sampling

TOO_LONG = "context_length_exceeded"


class Refused(Exception):
    """The caller's request cannot be served; `problem` is what the caller reads."""

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem.message)
        self.problem = problem


def refuse(message: str, param: str | None = None, code: str | None = None) -> Refused:
    return Refused(Problem(Fault.INVALID, message, param=param, code=code))


def check_chars(char_count: int, chars_max: int, context_len: int, param: str) -> None:
    """Refuses a prompt that cannot fit, before the work of encoding it."""
    if char_count > chars_max:
        raise refuse(
            f"The context length of this model is {context_len} tokens; the prompt has "
            f"{char_count} characters, which is more than fits. Shorten the prompt.",
            param,
            TOO_LONG,
        )


def check_ids(ids: Sequence[int], vocab_size: int, param: str) -> None:
    """Refuses an empty prompt, and ids that the model has no row for."""
    if not ids:
        raise refuse("The prompt is empty: it has no tokens.", param)
    if min(ids) < 0 or max(ids) >= vocab_size:
        wrong = next(i for i in ids if not 0 <= i < vocab_size)
        raise refuse(
            f"The prompt has the token id {wrong}, but the vocabulary of this model ends at "
            f"{vocab_size - 1}.",
            param,
        )


def check_sampling(sampling: Sampling, vocab_size: int) -> None:
    """Refuses ids in `logit_bias`, `stop_token_ids` and the like that the model has no row for."""
    biased = [token_id for token_id, _ in sampling.logit_bias]
    for ids, param in (
        (biased, "logit_bias"),
        (sampling.stop_ids, "stop_token_ids"),
        (sampling.allowed_ids, "allowed_token_ids"),
        (sampling.label_ids, "label_token_ids"),
    ):
        for wrong in ids:
            if not 0 <= wrong < vocab_size:
                raise refuse(
                    f"{param} has the token id {wrong}, but the vocabulary of this model ends at "
                    f"{vocab_size - 1}.",
                    param,
                )


def cut(ids: list[int], truncate_len: int, sampling: Sampling, context_len: int) -> list[int]:
    """The last `truncate_len` ids; 0: as many as leave room for what is to be generated."""
    wanted = sampling.max_tokens or max(1, sampling.min_tokens)
    count = truncate_len or max(1, context_len - wanted)
    return ids[-count:]


def spellings(
    words: Sequence[str], encode: Callable[..., list[int]]
) -> tuple[tuple[int, ...], ...]:
    """The ids of each word, as it is and behind a blank."""
    found: dict[tuple[int, ...], None] = {}
    for word in words:
        for text in (word, f" {word.lstrip()}"):
            ids = tuple(encode(text, add_special=False))
            if ids:
                found[ids] = None
    return tuple(found)


def labels(words: Sequence[str], encode: Callable[..., list[int]]) -> tuple[int, ...]:
    """The id that each word begins with. Raises Refused where that does not tell them apart."""
    found = tuple(next(iter(encode(word, add_special=False)), -1) for word in words)
    if -1 in found or len(set(found)) < len(found):
        told = " and ".join(repr(word) for word in words)
        raise refuse(f"The tokens of this model do not tell {told} apart.")
    return found


def settle(sampling: Sampling, prompt_len: int, context_len: int, param: str) -> Sampling:
    """The sampling with its `max_tokens` filled in where it was open (0).

    Raises Refused where prompt and asked-for tokens do not fit the context together.
    """
    room = context_len - prompt_len
    wanted = sampling.max_tokens or max(1, sampling.min_tokens)
    if wanted <= room:
        if sampling.max_tokens:
            return sampling
        return msgspec.structs.replace(sampling, max_tokens=room)
    if room < 1:
        message = (
            f"The context length of this model is {context_len} tokens, but the prompt has "
            f"{prompt_len} tokens and leaves no room for an answer. Shorten the prompt."
        )
    else:
        name = "max_tokens" if sampling.max_tokens else "min_tokens"
        message = (
            f"The context length of this model is {context_len} tokens, but {prompt_len} tokens "
            f"of the prompt and {name} of {wanted} are {prompt_len + wanted} together. Shorten "
            f"the prompt or lower {name}."
        )
    raise refuse(message, param, TOO_LONG)
