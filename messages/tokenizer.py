"""This file is the tokenizer's mailbox."""

from __future__ import annotations

from messages.base import Address, Message, Part
from messages.types import Grammar, Int32s, Sampling, StopRules


class Chat(Part, frozen=True):
    """A conversation to be rendered by the model's template."""

    messages_json: bytes  # the array of messages, as the template sees it (parts already joined)
    tools_json: bytes = b""
    template_kwargs_json: bytes = b""
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    # When the request came (Unix time, set by the gateway): what the template's `strftime_now`
    # shows, so that a resumed attempt renders the same prompt. None: the template has no date.
    created_s: float | None = None
    template: str = ""  # in place of the model's; only where the operator lets requests bring one


class Encode(Message, frozen=True):
    """Turn a prompt into ids, check the context limit, and pass it on to the router.

    Exactly one of `chat`, `text`, `ids` is set. Refusals go to `reply_to` as `gateway.Failed`.
    `max_tokens` None in the request is given here as `sampling.max_tokens == 0`: the tokenizer
    fills in what is left of the context.
    """

    request: str
    attempt: int
    reply_to: Address
    sampling: Sampling
    stop: StopRules
    chat: Chat | None = None
    text: str | None = None
    ids: Int32s | None = None
    add_special: bool = True
    emitted: Int32s = b""  # tokens the client already has (a resumed attempt)
    namespace: str = ""  # prefixes are only shared within one (cache salt, adapter)
    want_prompt_ids: bool = False
    priority: int = 0
    want_prompt_text: bool = False  # `Encoded.prompt_text`: the prompt's ids decoded (for `echo`)
    # False: check and answer `Encoded` only, pass nothing on; `Encoded` is then terminal.
    forward: bool = True
    grammar: Grammar | None = None
    # Only look: a prompt that is empty or too long for the context is answered like any other, and
    # `prompt_text` is decoded as `stop.skip_special` says. Without `forward`.
    measure: bool = False
    bad_words: tuple[str, ...] = ()  # become `sampling.bad_sequences`
    # Keep the last tokens of the prompt only. 0: as many as leave room for `max_tokens`. None: all.
    truncate_len: int | None = None
    label_words: tuple[str, ...] = ()  # become `sampling.label_ids`: the token each begins with
    param: str = ""  # what the client calls the prompt, for refusals; "": as completions and chats


class Cancel(Message, frozen=True):
    """The client has gone. Walks the same way as its request, so that it cannot overtake it."""

    request: str
    attempt: int


class Defaults(Part, frozen=True):
    """What the model's own files recommend where a request says nothing. None: nothing either."""

    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None


class Dialect(Part, frozen=True):
    """The note of the tokenizer's `Ready`: which formats the model's chat template speaks of."""

    tool_parser: str = ""  # a name of the gateway's tool_parser seam; "": not known
    reasoning_parser: str = ""  # the same of its reasoning_parser seam; "": none
    defaults: Defaults = Defaults()


In = Encode | Cancel
