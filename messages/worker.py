"""This file is the worker's mailbox: the step protocol.

A `Step` is a delta. The worker keeps, for each slot, the token table, page table, lengths and
sampling state; the scheduler says only what changes. The worker grants `credits` steps in flight;
the scheduler sends step n+1 before the result of n is here, and a decode row's input token is taken
from the worker's own table. Steps are executed in order; each is answered by exactly one `StepDone`
or `StepFailed` to its sender.
"""

from __future__ import annotations

from messages.base import Message, Part
from messages.types import Float32s, Grammar, Int32s, Logprob, Sampling


class Row(Part, frozen=True):
    """A sequence that enters a slot. Nothing of the slot's earlier tenant remains."""

    slot: int
    request: str
    tokens: Int32s  # prompt + emitted
    prompt_len: int  # tokens[prompt_len:] count as generated (penalties, positions of noise)
    cached_len: int  # tokens whose KV the pages already hold
    pages: Int32s
    sampling: Sampling
    grammar: Grammar | None = None  # replayed over tokens[prompt_len:]


class Step(Message, frozen=True):
    """One forward.

    Order of application: `closed` slots are emptied, `opened` filled, `grown` pages appended, then
    row i computes `counts[i]` further tokens of `slots[i]`. A row that reaches the end of its
    slot's known tokens samples one token, which is appended to the table; so are the tokens that a
    grammar forces behind it, as far as the slot has pages for them.
    """

    epoch: int  # which life of the scheduler this is; the worker starts afresh when it changes
    step: int
    slots: Int32s
    counts: Int32s
    opened: tuple[Row, ...] = ()
    closed: Int32s = b""  # slots
    grown_slots: Int32s = b""
    grown_pages: Int32s = b""


class PromptPart(Part, frozen=True):
    """Log probabilities of prompt tokens [`index`, `index + len(logprobs)`) of one slot. That of
    token 0, which nothing comes before, says nothing."""

    slot: int
    index: int
    logprobs: tuple[Logprob, ...]


class Vector(Part, frozen=True):
    """What a row has made of its prompt, where it asked: see `Sampling.want_vector`."""

    slot: int
    values: Float32s


class StepDone(Message, frozen=True):
    """`tokens[i]` was sampled for `slots[i]`; rows of the step that sampled nothing are left out.

    `failed` are slots whose row alone went wrong (logits that are not numbers): they got no token,
    and their requests end with an error; `detail` says why. `starved` are those of them for which
    there was no memory, not even in a step of few tokens.
    """

    epoch: int
    step: int
    slots: Int32s
    tokens: Int32s
    logprobs: tuple[Logprob | None, ...] = ()  # empty, or one for each of `slots`
    elapsed_us: int = 0
    failed: Int32s = b""
    detail: str = ""
    refused: Int32s = b""  # those of `failed` whose constraint is at fault
    prompts: tuple[PromptPart, ...] = ()  # of rows that asked, for what this step has computed
    vectors: tuple[Vector, ...] = ()  # of those of `slots` that asked, with their first token
    # Behind its sampled token, the table of jumped_slots[i] got jumped_tokens[i], which its grammar
    # forces. They are known and not computed; a slot comes as often as it got tokens, in order.
    jumped_slots: Int32s = b""
    jumped_tokens: Int32s = b""
    starved: Int32s = b""


class StepFailed(Message, frozen=True):
    """The step did not run. `slots` are the rows at fault, or all of the step's."""

    epoch: int
    step: int
    slots: Int32s
    detail: str


class Compile(Message, frozen=True):
    """Make a grammar ready, beside the steps. Answered by one `Compiled` to its sender."""

    number: int
    grammar: Grammar


class Facts(Part, frozen=True):
    """What the other rooms learn from the loaded model: the note of the worker's `Ready`."""

    model: str
    vocab_size: int
    context_len: int
    page_size: int
    page_count: int
    eos_ids: tuple[int, ...]
    dtype: str
    device: str
    credits: int = 2
    parameter_count: int = 0
    hidden_len: int = 0  # of the vectors
    # To what a vector may be cut (Matryoshka): None: not at all; (): to any length.
    vector_lens: tuple[int, ...] | None = None


In = Step | Compile
