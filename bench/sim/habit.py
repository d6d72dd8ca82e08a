"""This file is what the model of a simulated world is inclined to say: where a prompt asks for it,
it begins calls of tools in the format of its deployment, and mostly goes on as it began.

It does not know chance, pages or grammars: `next_token` follows a wish or not, as its hash has it,
and never against a mask. Law: a wish is a function of the tokens that are read, so that a page or a
token that is wrong shows in calls as well.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from actors.vocab.vocab import Vocab
from bench.sim.scenario import CALLED, PLEASE, TOOLS
from bench.sim.shadow import Wish
from bench.sim.text import END

BEGINS_FIRST, BEGINS_LATER, GOES_ON, ENDS = 128, 2, 252, 128  # of 256


class Form(NamedTuple):
    """How a format writes calls, as the model has learned it."""

    scripts: tuple[str, ...]  # whole calls: they begin the same
    closer: str  # what ends any call
    trigger: str  # what each call begins with
    is_first: bool = False  # an answer is calls from its beginning, or it has none
    is_held: bool = True  # strict tools are kept to
    shows_special: bool = False  # its text has the special tokens


AT, DAYS = '{"at": "the house"}', '{"days": [1, 20], "is_small": true}'
ARGUMENTS = (("look", AT), (CALLED, DAYS))  # of the scripts
CALL, SEP, CALL_END = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
FORMS = {
    "hermes": Form(
        tuple(
            f'<tool_call>\n{{"name": "{name}", "arguments": {words}}}\n</tool_call>'
            for name, words in ARGUMENTS
        ),
        "</tool_call>",
        "<tool_call>",
    ),
    "deepseek": Form(
        tuple(f"{CALL}{name}{SEP}{words}{CALL_END}" for name, words in ARGUMENTS),
        CALL_END,
        CALL,
        shows_special=True,
    ),
    "mistral": Form(
        tuple(f"[TOOL_CALLS]{name}[ARGS]{words}" for name, words in ARGUMENTS),
        "}",
        "[TOOL_CALLS]",
        shows_special=True,
    ),
    "json": Form(
        tuple(f'[{{"name": "{name}", "arguments": {words}}}]' for name, words in ARGUMENTS),
        "}]",
        "[",
        is_first=True,
    ),
    "llama3": Form(
        tuple(f'{{"name": "{name}", "parameters": {words}}}' for name, words in ARGUMENTS),
        "}}",
        "{",
        is_first=True,
    ),
    "pythonic": Form(
        ('[look(at="the house")]', f"[{CALLED}(days=[1, 20], is_small=True)]"),
        ")]",
        "[",
        is_first=True,
        is_held=False,
    ),
}


class Habit:
    """Of one vocabulary and format."""

    def __init__(self, vocab: Vocab, name: str) -> None:
        self.form = form = FORMS[name]
        self.pieces = vocab.token_bytes
        self.scripts = [script.encode() for script in form.scripts]
        self.closer, self.trigger = form.closer.encode(), form.trigger.encode()
        self.by_piece = {
            piece: token
            for token, piece in enumerate(self.pieces)
            if piece and token not in vocab.special
        }
        shown = (" ".join(tool["function"]["name"] for tool in TOOLS), CALLED)
        self.openings = [
            vocab.encode(f"{names}<|im_start|>user\n{PLEASE}", add_special=False) for names in shown
        ]

    def said(self, tokens: Sequence[int]) -> bytes:
        return b"".join([self.pieces[token] for token in tokens])

    def wish(self, tokens: Sequence[int], prompt_len: int) -> Wish | None:
        """What it would like to say after `tokens`, an answer and its prompt."""
        if not self.is_asked(tokens):
            return None
        text = self.said(tokens[prompt_len:])
        begun, rests = 0, []
        for script in self.scripts:
            count = begun_of(text, script)
            if count > begun:
                begun, rests = count, []
            if count == begun:
                rests.append(script[count:])
        rest = rests[len(text) % len(rests)]
        if begun:
            return Wish(self.first_of(rest), GOES_ON)
        if text.endswith(self.closer):
            return Wish(END, ENDS)
        if not text:
            return Wish(self.first_of(rest), BEGINS_FIRST)
        return None if self.form.is_first else Wish(self.first_of(rest), BEGINS_LATER)

    def first_of(self, text: bytes) -> int:
        """The longest token that begins it."""
        ends = range(len(text), 0, -1)
        return next(self.by_piece[text[:end]] for end in ends if text[:end] in self.by_piece)

    def is_asked(self, tokens: Sequence[int]) -> bool:
        """Whether it is to think of its tools."""
        return any(list(tokens[: len(each)]) == each for each in self.openings)

    def is_within(self, tokens: Sequence[int], prompt_len: int) -> bool:
        """Whether its answer has begun a call and not ended it."""
        text = self.said(tokens[prompt_len:])
        if not self.is_asked(tokens):
            return False
        if self.form.is_first and not text.startswith(self.trigger):
            return False
        return text.rfind(self.trigger) > text.rfind(self.closer)


def begun_of(text: bytes, script: bytes) -> int:
    """How much of the script stands at the end of the text, where not all of it does."""
    for count in range(min(len(script) - 1, len(text)), 0, -1):
        if text.endswith(script[:count]):
            return count
    return 0
