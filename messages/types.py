"""This file holds the vocabulary that more than one room needs. No behaviour beyond validation.

Buffers: token ids, page ids, slots and counts travel as raw little-endian int32 (`Int32s`), made by
`pack` and read by `unpack`; vectors as raw float32 (`Float32s`), `pack_floats`, `unpack_floats`.
"""

from __future__ import annotations

import enum
from array import array
from collections.abc import Iterable

from messages.base import Part

Int32s = bytes
Float32s = bytes


def pack(values: Iterable[int]) -> Int32s:
    """Encodes ints in [-2**31, 2**31) as little-endian int32."""
    return array("i", values).tobytes()


def unpack(buffer: Int32s) -> array[int]:
    """Decodes what `pack` made."""
    values: array[int] = array("i")
    values.frombytes(buffer)
    return values


def pack_floats(values: Iterable[float]) -> Float32s:
    """Encodes numbers as little-endian float32."""
    return array("f", values).tobytes()


def unpack_floats(buffer: Float32s) -> array[float]:
    """Decodes what `pack_floats` made."""
    values: array[float] = array("f")
    values.frombytes(buffer)
    return values


class FinishReason(enum.StrEnum):
    STOP = "stop"  # an end-of-sequence id, a stop id or a stop string
    LENGTH = "length"  # the token limit or the context length
    ABORT = "abort"  # cancelled by the client or the operator
    ERROR = "error"


class ProcessorCall(Part, frozen=True):
    """One of the logits processors that the operator allows. `params`: JSON, checked by the
    tokenizer (`actors/processors`)."""

    name: str
    params: bytes = b""


class Sampling(Part, frozen=True):
    """How to choose the tokens of one sequence. Validated at the gateway (`messages/openai.py`)."""

    temperature: float = 1.0  # 0 is greedy
    top_k: int = 0  # 0: off
    top_p: float = 1.0
    min_p: float = 0.0
    presence_penalty: float = 0.0  # over generated tokens
    frequency_penalty: float = 0.0  # over generated tokens
    repetition_penalty: float = 1.0  # over prompt and generated tokens
    logit_bias: tuple[tuple[int, float], ...] = ()
    seed: int = 0  # always set: the gateway draws one where the client gave none
    choice: int = 0  # noise is a function of (seed, position, choice)
    logprobs: int | None = None  # None: none; k: the chosen token's and the k best
    stop_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    min_tokens: int = 0
    max_tokens: int = 16
    allowed_ids: tuple[int, ...] = ()  # no others; (): all
    # A token is barred that would complete one of them, of generated tokens.
    bad_sequences: tuple[tuple[int, ...], ...] = ()
    prompt_logprobs: int | None = None  # as `logprobs`, of the prompt's own tokens
    # What the model makes of the prompt's last token comes with the first token, as `Tail.vector`:
    # its final hidden state, scaled to length 1; or the log probabilities of these ids behind it,
    # of the bare logits. At most one of the two, and `max_tokens` is 1.
    want_vector: bool = False
    label_ids: tuple[int, ...] = ()
    processors: tuple[ProcessorCall, ...] = ()  # in this order


class Grammar(Part, frozen=True):
    """What the text of an answer must be. Checked by the tokenizer, compiled by the worker."""

    kind: str  # json_schema | regex | ebnf | choice | structural_tag
    # The schema as JSON, the expression, the grammar, a JSON array of strings; for tags a JSON
    # array of {trigger, begin, schema, end}: text is free until a trigger, and goes on as one that
    # begins with it; a schema of null: nothing is between begin and end. Or {first, prefixes,
    # between}: the text is of tags, `first`, from its beginning, or begins with no trigger.
    text: str
    # Reasoning is free: with `begin` and `end` an answer that begins with `begin` is constrained
    # after the first `end`; with `end` alone every answer is constrained after it only.
    begin: str = ""
    end: str = ""
    param: str = ""  # the field of the body that asked for it


class StopPattern(Part, frozen=True):
    """A stop expression as an automaton: a state for each character of it, no empty moves."""

    text: str  # as the client has it; what `matched` says
    classes: tuple[str, ...]  # by state: what leads there, a class of one character for `re`
    first: Int32s  # states where a match begins
    last: Int32s  # where it may end
    follows: tuple[Int32s, ...]  # by state: where it may go on


class StopRules(Part, frozen=True):
    """What ends the text, beside tokens. Read by the detokenizer."""

    strings: tuple[str, ...] = ()
    keep_match: bool = False  # leave the matched stop string in the text
    min_tokens: int = 0  # a match completed within the first `min_tokens` does not count
    skip_special: bool = True
    want_token_ids: bool = False
    continues_prompt: bool = False  # a completion: SentencePiece's first space is kept
    patterns: tuple[StopPattern, ...] = ()
    pattern_chars_max: int = 1024  # a longer match of a pattern is none
    want_spans: bool = False


class Logprob(Part, frozen=True):
    """One generated token's probability. `best` are (id, logprob), most likely first."""

    token_id: int
    logprob: float
    best: tuple[tuple[int, float], ...] = ()


class Usage(Part, frozen=True):
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0


class Fault(enum.StrEnum):
    """Whose fault a failure is, and so which HTTP status it gets."""

    INVALID = "invalid"  # 400: the request is wrong
    NOT_FOUND = "not_found"  # 404
    TOO_LARGE = "too_large"  # 413
    OVERLOADED = "overloaded"  # 503 with Retry-After
    UNAVAILABLE = "unavailable"  # 503: a part is down
    INTERNAL = "internal"  # 500


class Problem(Part, frozen=True):
    """A failure as the client will read it: no path, class name or traceback in `message`."""

    fault: Fault
    message: str
    param: str | None = None
    code: str | None = None
    retry_after_s: float | None = None
