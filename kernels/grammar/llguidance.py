"""This file constrains text by the library llguidance, the default engine.

A grammar is compiled in milliseconds and its automata are made as the text needs them; every step
of it has a budget (`LIMITS`), so that no schema can hold up others for long. Needs no device.
JSON: WHITESPACE_MAX blanks at each place for them, and so at most twice as many between two of its
tokens, so that a model that likes blanks
comes to an end. `ebnf` takes the GBNF form (`root ::= …`) and the library's own Lark form.
"""

from __future__ import annotations

import json
import re

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper
from llguidance.gbnf_to_lark import gbnf_to_lark
from numpy.typing import NDArray

from kernels.constrain import GRAMMARS, BadGrammar, TokenTable
from kernels.grammar.lark import Writer
from kernels.grammar.schema import settled

WHITESPACE_MAX = 8
MESSAGE_CHARS_MAX = 300
PROBES = 2  # masks tried when a grammar is compiled
# What one mask may cost. Beyond it the constraint is refused: about 500 optional properties of one
# object, a few milliseconds; where a grammar is ambiguous it can be half a second. And how many
# states the automaton of a grammar may have, which all its matchers make together: some 0.5 KB
# each. With more of them all its matchers break.
LIMITS = {
    "verbose_errors": False,
    "max_items_in_row": 2000,
    "step_max_items": 50_000,
    "max_lexer_states": 50_000,
}
STATES_ALONE = 250_000  # for a text of one row that needs more than all have together: a long one
FORCED_BYTES = 512  # cut into tokens at once, of a text that is forced
CLASSES = {
    r"\d": "[0-9]",
    r"\D": "[^0-9]",
    r"\w": "[A-Za-z0-9_]",
    r"\W": "[^A-Za-z0-9_]",
    r"\s": r"[ \t\n\r\x0B\x0C]",
    r"\S": r"[^ \t\n\r\x0B\x0C]",
}
ESCAPED = re.compile(r"\\.", re.DOTALL)
# What a Lark grammar may have a slash in: a text, a comment, an expression.
TERMINAL = re.compile(
    r'"(?:\\.|[^"\\])*"|//[^\n]*|(?P<expression>/(?:\\.|\[(?:\\.|[^\]\\])*\]|[^/\\\n])+/)'
)
MARK = "\x02"  # a character that joins no other
BLANKS = r"[\x20\x0A\x0D\x09]"
JSON_OPTIONS = {"whitespace_pattern": f"{BLANKS}{{0,{WHITESPACE_MAX}}}"}


class Vocabulary:
    """The model's tokens as the library wants them, and how forced text is cut into them: the
    library bars all other ways to spell it."""

    def __init__(self, table: TokenTable) -> None:
        # One for each column of the logits: the library takes the vocabulary's size from here.
        tokens = [
            b"\xff" + (piece or b"<%d>" % token) if token in table.special else piece
            for token, piece in enumerate(table.pieces)
        ]
        self.tokens = (tokens + [b""] * table.vocab_size)[: table.vocab_size]
        self.eos_token_id = table.eos_ids[0]
        self.bos_token_id = None
        self.special_token_ids: list[int] = []
        self.encode = table.encode
        self.mark_ids = [] if self.encode is None else self.encode(MARK)
        self.by_piece = {
            piece: token
            for token, piece in enumerate(self.tokens)
            if piece and token not in table.special
        }
        self.piece_len_max = max(map(len, self.by_piece), default=1)

    def __call__(self, text: bytes) -> list[int]:
        """Ids that spell the beginning of `text` (UTF-8), as the model's tokenizer does it. The
        library takes the first of them, and asks again behind it."""
        text = beginning(text, FORCED_BYTES)
        if self.encode is not None:
            words = text.decode()
            ids = self.encode(words)
            if self.spells(ids, text):
                return ids
            # It may put a blank before a text, or know a special token in it.
            ids = self.encode(MARK + words)
            count = len(self.mark_ids)
            if ids[:count] == self.mark_ids and self.spells(ids[count:], text):
                return ids[count:]
        return self.longest(text)

    def spells(self, ids: list[int], text: bytes) -> bool:
        return b"".join([self.tokens[token] for token in ids]) == text

    def longest(self, text: bytes) -> list[int]:
        """Always the longest token that fits; a byte that no token has is left out."""
        ids, at = [], 0
        while at < len(text):
            for end in range(min(at + self.piece_len_max, len(text)), at, -1):
                token = self.by_piece.get(text[at:end])
                if token is not None:
                    ids.append(token)
                    break
            at = end
        return ids


class Llguidance:
    def __init__(self, table: TokenTable) -> None:
        self.tokenizer = LLTokenizer(
            TokenizerWrapper(Vocabulary(table)),
            eos_token=list(table.eos_ids),
        )
        self.eos_ids = frozenset(table.eos_ids)
        self.specials = {
            table.pieces[token].decode("utf-8", "replace"): token
            for token in table.special
            if token < len(table.pieces) and table.pieces[token] and token not in table.eos_ids
        }

    def compile(self, kind: str, text: str, *, alone: bool = False) -> Root:
        """Raises BadGrammar."""
        if kind == "structural_tag":
            lark = Writer(self.specials, JSON_OPTIONS).write(json.loads(text))
            grammar = str(LLMatcher.grammar_from_lark(lark))
        else:
            grammar = source_of(kind, text)
        limits = {**LIMITS, "max_lexer_states": STATES_ALONE} if alone else LIMITS
        matcher = LLMatcher(self.tokenizer, grammar, log_level=0, limits=LLParserLimits(**limits))
        self.check(matcher)
        return Root(matcher, self.probe(matcher.deep_copy()))

    def probe(self, matcher: LLMatcher) -> int:
        """The first masks show whether any text matches, and what a mask costs. Gives a token that
        may come first, if possible one that does not end the text."""
        first = -1
        for nth in range(PROBES):
            mask = np.frombuffer(matcher.compute_bitmask(), np.uint8)
            if matcher.is_error() and "NoExtension" not in matcher.get_error():
                self.check(matcher)
            if matcher.is_error() or not mask.any():
                if nth and matcher.is_accepting():
                    return first
                raise BadGrammar("The constraint cannot be satisfied: no text matches it.")
            allowed = np.flatnonzero(np.unpackbits(mask, bitorder="little")).tolist()
            token = next((token for token in allowed if token not in self.eos_ids), allowed[0])
            first = token if nth == 0 else first
            matcher.consume_token(token)
            if matcher.is_stopped() and not matcher.is_error():
                break
        return first

    def check(self, matcher: LLMatcher) -> None:
        if matcher.is_error():
            raise BadGrammar(f"The constraint is not valid: {words_of(matcher.get_error())}")

    def fill(self, matchers: list[tuple[Matcher, int]], mask: NDArray[np.int32]) -> None:
        """mask[index] for each matcher; [rows, words] int32, a bit for each token. One after the
        other: most masks take 5 us, less than it takes to wake a thread."""
        assert mask.flags.c_contiguous
        row_bytes = mask.shape[1] * mask.itemsize
        for matcher, index in matchers:
            matcher.state.unsafe_compute_mask_ptr(mask.ctypes.data + index * row_bytes, row_bytes)

    def replay(self, matcher: Matcher, token: int) -> None:
        """With a mask before it, as it came. The library counts what it makes of the automaton
        from one mask to the next, and takes a row of tokens without any for a text that breaks
        it."""
        matcher.state.compute_bitmask()
        matcher.take(token)


class Root:
    """A compiled grammar. Its matchers are copies that share its automaton, which they make as
    their texts need it; what is too much for one of them breaks it for all."""

    def __init__(self, matcher: LLMatcher, first: int) -> None:
        self.matcher = matcher
        self.first = first

    def new(self) -> Matcher:
        return Matcher(self.matcher.deep_copy())

    @property
    def is_worn(self) -> bool:
        """It took its first token when it was compiled. (An end is taken whatever is broken.)"""
        return not self.matcher.deep_copy().consume_token(self.first)


class Matcher:
    """One sequence's place in its grammar."""

    __slots__ = ("state",)

    def __init__(self, state: LLMatcher) -> None:
        self.state = state

    def take(self, token: int) -> bool:
        return bool(self.state.consume_token(token))

    def forced(self) -> int | None:
        """The first of the tokens that the library would force one after the other: those behind
        it are asked for again, as masks would."""
        tokens = self.state.compute_ff_tokens()
        return tokens[0] if tokens else None

    @property
    def is_broken(self) -> bool:
        return bool(self.state.is_error())


def source_of(kind: str, text: str) -> str:
    """The library's form of a constraint. Raises BadGrammar."""
    if kind == "json_schema":
        try:
            schema = settled(json.loads(text))
            schema = json.dumps({} if schema is True else schema)
            return str(LLMatcher.grammar_from_json_schema(schema, overrides=JSON_OPTIONS))
        except BadGrammar:
            raise
        except ValueError as error:
            raise BadGrammar(f"The schema is not valid: {words_of(str(error))}") from None
    if kind == "regex":
        return str(LLMatcher.grammar_from_regex(ascii_classes(text)))
    if kind == "choice":
        # As one expression: of a grammar's alternatives the library takes 2,000 at most.
        options = "|".join(map(re.escape, json.loads(text)))
        return str(LLMatcher.grammar_from_regex(options))
    if kind == "ebnf":
        try:
            lark = gbnf_to_lark(text) if "::=" in text else text
            return str(LLMatcher.grammar_from_lark(TERMINAL.sub(ascii_terminal, lark)))
        except Exception as error:  # bare ones too: whatever it raises is about this text
            raise BadGrammar(f"The grammar is not valid: {words_of(str(error))}") from None
    raise BadGrammar(f"Constraints of the kind {kind!r} are not known.")


def ascii_classes(expression: str) -> str:
    """With \\d, \\w and \\s as they are in JSON Schema and in the other engine. The library's own
    have digits and letters of all scripts: a model that begins an emoji ends with one of those."""
    return ESCAPED.sub(lambda found: CLASSES.get(found[0], found[0]), expression)


def ascii_terminal(found: re.Match[str]) -> str:
    return ascii_classes(found[0]) if found["expression"] else found[0]


def beginning(text: bytes, len_max: int) -> bytes:
    """Of a text in UTF-8, without a part of a character at its end."""
    end = len_max
    while end < len(text) and text[end] & 0xC0 == 0x80:
        end -= 1
    return text[:end]


def words_of(error: str) -> str:
    """The library's own words, on one line."""
    text = " ".join(error.split("<state>")[0].split())
    return text[:MESSAGE_CHARS_MAX]


GRAMMARS.register("llguidance", "auto")(Llguidance)
