"""This file constrains text by the library xgrammar, an engine for those who have it installed.

It compiles whole automata ahead, in C++ that can't be interrupted: a slow grammar keeps its thread.
It takes some keywords of schemas without keeping to them (`multipleOf`, `oneOf` as `anyOf`), and
lets strings of bounded length hold control characters, which JSON does not (seen with 0.2.9).
Imported when it is asked for: it brings torch's and transformers' import time with it.
"""

from __future__ import annotations

import importlib.util
import json
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from kernels.constrain import GRAMMARS, BadGrammar, EngineUnavailable, TokenTable

WHITESPACE_MAX = 8
MESSAGE_CHARS_MAX = 300
COMPILE_THREADS = 1  # beside the steps


class Xgrammar:
    def __init__(self, table: TokenTable) -> None:
        if importlib.util.find_spec("xgrammar") is None:
            raise EngineUnavailable("the engine 'xgrammar' needs the package of that name")
        import xgrammar

        self.library = xgrammar
        pieces = [
            b"" if token in table.special else piece for token, piece in enumerate(table.pieces)
        ]
        info = xgrammar.TokenizerInfo(
            pieces,
            vocab_type=xgrammar.VocabType.RAW,
            vocab_size=table.vocab_size,
            stop_token_ids=list(table.eos_ids),
        )
        self.vocab_size = table.vocab_size
        self.specials = frozenset(
            table.pieces[token].decode("utf-8", "replace")
            for token in table.special
            if token < len(table.pieces) and table.pieces[token]
        )
        self.compiler = xgrammar.GrammarCompiler(
            info, max_threads=COMPILE_THREADS, cache_enabled=False
        )

    def compile(self, kind: str, text: str, *, alone: bool = False) -> Root:
        """Raises BadGrammar."""
        try:
            root = Root(self.library.GrammarMatcher, self.compile_kind(kind, text))
            matcher = root.new()
        except BadGrammar:
            raise
        except Exception as error:  # whatever it raises is about this text
            raise BadGrammar(f"The constraint is not valid: {words_of(str(error))}") from None
        mask = np.zeros((1, -(-self.vocab_size // 32)), np.int32)
        self.fill([(matcher, 0)], mask)
        if not mask.any():
            raise BadGrammar("The constraint cannot be satisfied: no text matches it.")
        return root

    def compile_kind(self, kind: str, text: str) -> Any:
        compiler = self.compiler
        if kind == "json_schema":
            return compiler.compile_json_schema(text, max_whitespace_cnt=WHITESPACE_MAX)
        if kind == "regex":
            return compiler.compile_regex(text)
        if kind == "choice":
            options = " | ".join(map(literal, json.loads(text)))
            return compiler.compile_grammar(f"root ::= {options}")
        if kind == "ebnf":
            return compiler.compile_grammar(text)
        if kind == "structural_tag":
            return compiler.compile_structural_tag(tags_of(json.loads(text), self.specials))
        raise BadGrammar(f"Constraints of the kind {kind!r} are not known.")

    def fill(self, matchers: list[tuple[Matcher, int]], mask: NDArray[np.int32]) -> None:
        """mask[index] for each matcher; [rows, words] int32, a bit for each token."""
        rows = torch.from_numpy(mask)
        for matcher, index in matchers:
            if not matcher.state.fill_next_token_bitmask(rows, index):
                mask[index] = -1  # nothing is barred

    def replay(self, matcher: Matcher, token: int) -> None:
        matcher.take(token)


class Root:
    """A compiled grammar. Its matchers change nothing of it."""

    is_worn = False

    def __init__(self, make: Any, compiled: Any) -> None:
        self.make = make
        self.compiled = compiled

    def new(self) -> Matcher:
        return Matcher(self.make(self.compiled))


class Matcher:
    """One sequence's place in its grammar."""

    __slots__ = ("is_broken", "state")

    def __init__(self, state: Any) -> None:
        self.state = state
        self.is_broken = False

    def take(self, token: int) -> bool:
        self.is_broken = self.is_broken or not self.state.accept_token(token)
        return not self.is_broken

    def forced(self) -> None:
        """It leaves open how forced text is cut into tokens."""
        return None


def literal(text: str) -> str:
    """A text as a terminal of the grammar, where a character is spelt in one piece."""
    return json.dumps(text, ensure_ascii=False)


def tags_of(rows: Any, specials: frozenset[str] = frozenset()) -> dict[str, Any]:
    """Raises BadGrammar for tags that need special tokens, or stand at the beginning."""
    if isinstance(rows, dict) or any(
        row["schema"] is None or any(text in row["begin"] + row["end"] for text in specials)
        for row in rows
    ):
        raise BadGrammar("The engine 'xgrammar' cannot hold calls to this model's format.")
    tags = [
        {
            "begin": row["begin"],
            "content": {"type": "json_schema", "json_schema": row["schema"]},
            "end": row["end"],
        }
        for row in rows
    ]
    triggers = list(dict.fromkeys(row["trigger"] for row in rows))
    form = {"type": "triggered_tags", "triggers": triggers, "tags": tags}
    return {"type": "structural_tag", "format": form}


def words_of(error: str) -> str:
    """The library's own words, without the place in its source."""
    text = " ".join(error.split())
    _, mark, rest = text.partition(": ")
    return (rest if mark and text.startswith("[") else text)[:MESSAGE_CHARS_MAX]


GRAMMARS.register("xgrammar")(Xgrammar)
