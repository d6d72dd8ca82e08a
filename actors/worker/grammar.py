"""This file makes what constraints need of the model's vocabulary, and compiles grammars.

It does not know steps or the engines: `kernels/constrain.py` does. All of it may run in a thread.
Law: what is wrong with a grammar comes back as words for the client; anything else is our bug.
"""

from __future__ import annotations

import contextlib
import threading

from actors.vocab.metadata import ModelError
from actors.vocab.shared import vocab_of
from actors.worker import translate
from kernels.constrain import BadGrammar, Constrainer, TokenTable
from kernels.runner import Runner
from messages.types import Grammar
from messages.worker import Row

# From so many tokens on the vocabulary is read at the start. The engines take it in one go, with
# the interpreter held: 0.1 s for 49,000 tokens, 0.9 s for 256,000, and as many times that on a slow
# or shared processor. A running worker that is silent for so long is taken for hung, and killed.
LARGE_VOCAB = 100_000
NO_END = "This model has no end-of-sequence token, so it takes no constraints."


class Grammars:
    """The vocabulary is read when the first constraint comes; a large one at the start."""

    def __init__(self, runner: Runner, path: str) -> None:
        self.runner = runner
        self.path = path
        self._lock = threading.Lock()

    def start(self) -> None:
        """While the worker starts, and may be silent."""
        if self.runner.facts.vocab_size >= LARGE_VOCAB:
            # What is wrong with it is told to those who need it.
            with contextlib.suppress(BadGrammar, ModelError):
                self.constrainer()

    def compile(self, grammar: Grammar) -> str:
        """Makes the grammar ready, or says why it is wrong."""
        try:
            self.constrainer().prepare(translate.constraint(grammar))
        except BadGrammar as error:
            return str(error)
        return ""

    def make_ready(self, rows: tuple[Row, ...]) -> None:
        """Rows with a grammar may open, though nobody has asked to compile one here."""
        if self.runner.constrainer is None and any(row.grammar is not None for row in rows):
            self.constrainer()

    def constrainer(self) -> Constrainer:
        """Raises BadGrammar where the model cannot end an answer."""
        with self._lock:
            if self.runner.constrainer is not None:
                return self.runner.constrainer
            vocab = vocab_of(self.path)
            facts = self.runner.facts
            eos_ids = facts.eos_ids or (() if vocab.eos_id is None else (vocab.eos_id,))
            if not eos_ids:
                raise BadGrammar(NO_END)
            table = TokenTable(
                pieces=vocab.token_bytes,
                special=vocab.special,
                eos_ids=eos_ids,
                vocab_size=facts.vocab_size,
                encode=lambda text: vocab.encode(text, add_special=False),
            )
            return self.runner.use_vocabulary(table)
