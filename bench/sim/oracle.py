"""This file says what each client must get: a plain function of what it asks.

No batch, page, step, crash or message is in sight. Text comes from the vocabulary itself, and
constrained tokens from a matcher that sees the whole answer from its first token on.
"""

from __future__ import annotations

import codecs
import functools
import re
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from actors.vocab.vocab import Vocab
from bench.sim.bodies import grammar_of
from bench.sim.habit import FORMS, Habit
from bench.sim.scenario import CALLED, TOOLS, Ask
from bench.sim.shadow import CHOICE_STRIDE, ids_of, next_token
from bench.sim.text import END, VOCAB_SIZE
from kernels.batch import Constraint
from kernels.constrain import Constrainer, Engine, TokenTable
from kernels.grammar.llguidance import Llguidance
from messages.types import FinishReason


class Right(NamedTuple):
    """What one choice must come to."""

    tokens: list[int]
    text: str
    finish: FinishReason
    matched: str | int | None


class Oracle:
    """Of one vocabulary. Shared by all worlds of a process: nothing in it changes."""

    def __init__(self, vocab: Vocab) -> None:
        self.vocab = vocab
        self.table = TokenTable(
            pieces=vocab.token_bytes,
            special=vocab.special,
            eos_ids=(END,),
            vocab_size=VOCAB_SIZE,
        )
        # Not by its registry, which imports the other engines and with them torch.
        self.engine: Engine = Llguidance(self.table)
        self.habits: dict[str, Habit] = {}  # by format

    def habit(self, form: str) -> Habit | None:
        """What its model is inclined to, in a deployment of this format."""
        if form and form not in self.habits:
            self.habits[form] = Habit(self.vocab, form)
        return self.habits.get(form)

    def constrainer(self) -> Constrainer:
        """A worker's, with no slot taken."""
        return Constrainer(self.engine, self.table)

    def tokens(self, ask: Ask, choice: int) -> list[int]:
        """Up to the limit, or to a token that ends it."""
        ends = set(ask.stop_ids) | (set() if ask.ignore_eos else {END})
        seed = ask.seed + CHOICE_STRIDE * choice
        tokens = list(ask.prompt)
        prompt_len = len(tokens)
        habit = self.habit(ask.form)
        constrainer = self.constrainer()
        if ask.grammar:
            constrainer.open(0, Constraint(*ask.grammar), ())
        slot = np.array([0], np.int32)
        while len(tokens) - prompt_len < ask.max_tokens:
            cells = [(token, position, ask.namespace) for position, token in enumerate(tokens)]
            masks = constrainer.masks(slot)
            allowed = None if masks is None else ids_of(masks, VOCAB_SIZE)
            said = tokens[prompt_len:] if ask.penalised else None
            wish = None if habit is None else habit.wish(tokens, prompt_len)
            token = next_token(cells, seed, VOCAB_SIZE, said, allowed, wish)
            tokens.append(token)
            constrainer.take(slot, np.array([token], np.int32))
            if token in ends:
                break
        return tokens[prompt_len:]

    def right(self, ask: Ask, choice: int) -> Right:
        tokens = self.tokens(ask, choice)
        last = tokens[-1]
        ends = set(ask.stop_ids) | (set() if ask.ignore_eos else {END})
        spoken = tokens[:-1] if last in ends else tokens  # a stop id is no text
        is_shown = bool(ask.form) and FORMS[ask.form].shows_special
        decode = functools.partial(self.vocab.decode, skip_special=not is_shown)
        stop = ask.stop_pattern or re.escape(ask.stop)
        for count in range(1, len(spoken) + 1 if stop else 0):
            text = decode(spoken[:count])
            met = re.search(stop, text)
            if met is not None:
                matched = ask.stop_pattern or ask.stop
                return Right(tokens[:count], text[: met.start()], FinishReason.STOP, matched)
        if last in ends:
            return Right(tokens, decode(spoken), FinishReason.STOP, last)
        return Right(tokens, decode(tokens), FinishReason.LENGTH, None)

    def so_far(self, tokens: Sequence[int]) -> tuple[str, bool]:
        """The text of these tokens, and whether it ends within a character."""
        data = b"".join(self.vocab.token_bytes[token] for token in tokens)
        text, used = codecs.utf_8_decode(data, "replace", False)
        return text, used < len(data)

    def with_prompt(self, ask: Ask) -> Ask:
        """Gives it the ids of its text, as a completion's or as the only message of a chat; and
        what its tools hold it to."""
        if not ask.text:
            return ask
        text = ask.text
        if ask.reader == "http background" or ask.tools:
            text = f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n"
        if ask.tools:
            names = [tool["function"]["name"] for tool in TOOLS]
            if ask.tools == "allowed" and not FORMS[ask.form].is_held:
                names = [CALLED]  # the others cannot be barred
            text = " ".join(names) + text
            ask = ask._replace(grammar=grammar_of(ask.tools, ask.form))
        return ask._replace(prompt=tuple(self.vocab.encode(text, add_special=False)))

    def with_stop(self, ask: Ask, pick: float) -> Ask:
        """Gives it a stop string that its own text meets, perhaps across two tokens; or a pattern
        of as many characters."""
        tokens = self.tokens(ask, 0)
        is_shown = bool(ask.form) and FORMS[ask.form].shows_special
        text = self.vocab.decode(
            tokens[: 1 + int(pick * ask.max_tokens)], skip_special=not is_shown
        )
        end = len(text)
        stop = text[max(0, end - 1 - int(pick * 7) % 3) :]
        if not stop or "\ufffd" in stop:
            return ask
        if ask.meets != "pattern":
            return ask._replace(stop=stop)
        return ask._replace(stop_pattern="".join(f"[{spelled(char)}#]" for char in stop))


def spelled(char: str) -> str:
    """As one of a class of characters in an expression."""
    return "\\" + char if char in "\\]^-[" else char


@functools.cache
def oracle_of(path: str) -> Oracle:
    return Oracle(Vocab.load(Path(path)))
