"""This file reads a stop expression and makes the automaton that the detokenizer runs.

It does not know bodies nor requests: a text in, a `StopPattern` out, or `BadPattern` with words for
the client. The language is the part of Python's that one pass over the text can decide, with no
going back: characters, classes, groups, `|` and repetitions. What looks around (anchors, `\\b`,
lookahead, backreferences) is refused by name. Lazy repetitions mean what greedy ones do, since the
first match that ends is taken.
The automaton is Glushkov's: a state for each character of the expression, repetitions written out,
no empty moves. Laws: it matches what `re.fullmatch` would; its size and the work to make it are
bounded by POSITIONS_MAX and the moves allowed, of which each state has one that leads to it.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple, NoReturn

from messages.types import StopPattern, pack

POSITIONS_MAX = 512
MOVES_MAX = 1024  # of all expressions of a request, those from the beginning included
DEPTH_MAX = 64  # of groups within groups
REPEAT_MAX = 1000
# A character of text costs some 0.25 us for each place of the expressions that it may stand at and
# each move from there (`python -m timeit` on one core): these keep the worst one below 50.
CROWD_MAX = 128
CROWD_MOVES_MAX = 224
COMPLEX = "it is too complex"

ANY, ANY_BUT_NEWLINE = r"[\s\S]", r"[^\n]"
CATEGORIES = frozenset("dDwWsS")
ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "f": "\f", "v": "\v", "a": "\a", "0": "\0"}
HEX_LENGTHS = {"x": 2, "u": 4, "U": 8}
LOOKS = "ABbZGzK"
BOUNDS = re.compile(r"\{(\d*)(,?)(\d*)\}", re.ASCII)
FLAGS = re.compile(r"\(\?([a-zA-Z]+)\)")
LETTER = re.compile(r"(?:\(\?i:)?\[\\U([0-9a-f]{8})\]\)?")  # a class of one character


class BadPattern(Exception):
    """Why an expression is refused."""


class Literal(NamedTuple):
    chars: str  # a class of one character, as `re` has it


class Chain(NamedTuple):
    parts: Sequence[Node]


class Choice(NamedTuple):
    parts: Sequence[Node]


class Repeat(NamedTuple):
    part: Node
    least: int
    most: int | None  # None: any number


Node = Literal | Chain | Choice | Repeat


class Moves(NamedTuple):
    """Of a part of the expression: where it can begin and end, and whether it can be empty."""

    first: frozenset[int]
    last: frozenset[int]
    is_empty: bool


def read_pattern(text: str, moves_max: int = MOVES_MAX) -> StopPattern:
    """Raises BadPattern. `moves_max` is what a request's other expressions have left."""
    node = Parser(text).read()
    if size_of(node) > POSITIONS_MAX:
        raise BadPattern(
            f"it has more than {POSITIONS_MAX} characters with repetitions written out"
        )
    builder = Builder(moves_max)
    moves = builder.add(node)
    builder.spend(len(moves.first))
    if moves.is_empty:
        raise BadPattern("it matches the empty text, which is everywhere")
    if not moves.last:
        raise BadPattern("nothing matches it")
    return StopPattern(
        text=text,
        classes=tuple(builder.classes),
        first=pack(sorted(moves.first)),
        last=pack(sorted(moves.last)),
        follows=tuple(pack(sorted(follows)) for follows in builder.follows),
    )


def move_count(pattern: StopPattern) -> int:
    return (len(pattern.first) + sum(map(len, pattern.follows))) // 4


class Crowd(NamedTuple):
    """What one character of text can cost."""

    places: int  # where it may stand, in all expressions together
    moves: int  # from these to others

    @property
    def is_too_large(self) -> bool:
        return self.places > CROWD_MAX or self.moves > CROWD_MOVES_MAX


def crowd_of(patterns: Sequence[StopPattern]) -> Crowd:
    """No character costs more. A class of several characters counts as one of all."""
    wide_places = wide_moves = 0
    letters: dict[str, tuple[int, int]] = {}
    for pattern in patterns:
        for chars, follows in zip(pattern.classes, pattern.follows, strict=True):
            move_count = len(follows) // 4
            found = LETTER.fullmatch(chars)
            if found is None:
                wide_places += 1
                wide_moves += move_count
            else:
                letter = chr(int(found[1], 16)).casefold()
                places, moves = letters.get(letter, (0, 0))
                letters[letter] = places + 1, moves + move_count
    return Crowd(
        wide_places + max((places for places, _ in letters.values()), default=0),
        wide_moves + max((moves for _, moves in letters.values()), default=0),
    )


class Parser:
    """From left to right, each character once."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.place = 0
        self.depth = 0
        self.ignores_case = False
        self.any = ANY_BUT_NEWLINE

    def read(self) -> Node:
        flags = FLAGS.match(self.text)
        if flags is not None:
            self.read_flags(flags[1])
            self.place = flags.end()
        node = self.read_choice()
        if self.place < len(self.text):
            self.refuse("has a `)` too many")
        return node

    def read_flags(self, flags: str) -> None:
        for flag in flags:
            if flag == "i":
                self.ignores_case = True
            elif flag == "s":
                self.any = ANY
            elif flag not in "mu":  # neither means anything here
                self.refuse(f"has the flag `{flag}`, which is not supported")

    def refuse(self, why: str) -> NoReturn:
        raise BadPattern(f"it {why} (at character {self.place})")

    def peek(self) -> str:
        return self.text[self.place : self.place + 1]

    def take(self) -> str:
        character = self.peek()
        if not character:
            self.refuse("breaks off")
        self.place += 1
        return character

    def read_choice(self) -> Node:
        parts = [self.read_chain()]
        while self.peek() == "|":
            self.place += 1
            parts.append(self.read_chain())
        return parts[0] if len(parts) == 1 else Choice(parts)

    def read_chain(self) -> Node:
        parts: list[Node] = []
        while self.peek() not in ("", "|", ")"):
            parts.append(self.read_repeats(self.read_atom()))
        return Chain(parts)

    def read_repeats(self, node: Node) -> Node:
        bounds = self.read_bounds()
        if bounds is None:
            return node
        if self.peek() == "?":  # where a match ends does not depend on it
            self.place += 1
        elif self.peek() == "+":
            self.refuse("has a possessive repetition, which is not supported")
        if self.read_bounds() is not None:
            self.refuse("repeats a repetition; put the inner one into a group")
        return Repeat(node, *bounds)

    def read_bounds(self) -> tuple[int, int | None] | None:
        character = self.peek()
        if character and character in "*+?":
            self.place += 1
            return {"*": (0, None), "+": (1, None), "?": (0, 1)}[character]
        found = BOUNDS.match(self.text, self.place)
        if found is None or not (found[1] or found[2]):
            return None  # a brace that is only a brace
        least = bound_of(found[1] or "0")
        most = least if not found[2] else bound_of(found[3]) if found[3] else None
        if max(least, most or 0) > REPEAT_MAX:
            self.refuse(f"repeats something more than {REPEAT_MAX} times")
        if most is not None and most < least:
            self.refuse("has a repetition whose bounds are the wrong way round")
        self.place = found.end()
        return least, most

    def read_atom(self) -> Node:
        character = self.take()
        if character == "(":
            return self.read_group()
        if character == "[":
            return Literal(self.read_class())
        if character == ".":
            return Literal(self.any)
        if character == "\\":
            return self.read_escape()
        if character in "^$":
            self.refuse(f"has the anchor `{character}`, which is not supported")
        if character in "*+?" or (character == "{" and BOUNDS.match(self.text, self.place - 1)):
            self.refuse("repeats nothing")
        return self.literal(character)

    def literal(self, character: str) -> Node:
        return Literal(self.cased(f"[{quoted(character)}]"))

    def cased(self, chars: str) -> str:
        return f"(?i:{chars})" if self.ignores_case else chars

    def read_group(self) -> Node:
        if self.peek() == "?":
            self.place += 1
            kind = self.take()
            if kind == "P" and self.peek() == "<":
                end = self.text.find(">", self.place)
                if end < 0:
                    self.refuse("breaks off")
                self.place = end + 1
            elif kind != ":":
                self.refuse("has a group that looks around or sets flags, which is not supported")
        self.depth += 1
        if self.depth > DEPTH_MAX:
            self.refuse(f"has more than {DEPTH_MAX} groups within one another")
        node = self.read_choice()
        if self.take() != ")":
            self.refuse("breaks off")
        self.depth -= 1
        return node

    def read_escape(self) -> Node:
        character = self.take()
        if character in CATEGORIES:
            return Literal(f"[\\{character}]")
        if character in LOOKS:
            self.refuse(f"has `\\{character}`, which looks around and is not supported")
        if character in "123456789":
            self.refuse("has a backreference, which is not supported")
        return self.literal(self.escaped(character))

    def escaped(self, character: str) -> str:
        """The character that an escape stands for."""
        if character in HEX_LENGTHS:
            digits = self.text[self.place : self.place + HEX_LENGTHS[character]]
            if not re.fullmatch(r"[0-9a-fA-F]+", digits) or len(digits) < HEX_LENGTHS[character]:
                self.refuse(f"has `\\{character}` without its digits")
            self.place += len(digits)
            if int(digits, 16) > 0x10FFFF:
                self.refuse("has an escape of no character")
            return chr(int(digits, 16))
        if character in ESCAPES:
            return ESCAPES[character]
        if character.isascii() and character.isalnum():
            self.refuse(f"has the unknown escape `\\{character}`")
        return character

    def read_class(self) -> str:
        """What is behind a `[`, written so that nothing of it can mean anything else."""
        negated = self.peek() == "^"
        self.place += negated
        items: list[str] = []
        while True:
            character = self.take()
            if character == "]" and items:
                break
            begin = self.class_item(character)
            following = self.text[self.place : self.place + 2]
            if following[:1] != "-" or following in ("-", "-]"):
                items.append(quoted(begin) if len(begin) == 1 else begin)
                continue
            self.place += 1
            end = self.class_item(self.take())
            if len(begin) > 1 or len(end) > 1:
                self.refuse("has a range with an end that is a class")
            if begin > end:
                self.refuse("has a range whose ends are the wrong way round")
            items.append(f"{quoted(begin)}-{quoted(end)}")
        return self.cased(f"[{'^' if negated else ''}{''.join(items)}]")

    def class_item(self, character: str) -> str:
        """A character, or a category with its backslash."""
        if character != "\\":
            return character
        character = self.take()
        if character in CATEGORIES:
            return f"\\{character}"
        return "\b" if character == "b" else self.escaped(character)


def quoted(character: str) -> str:
    return f"\\U{ord(character):08x}"


def bound_of(digits: str) -> int:
    return int(digits) if len(digits) < 8 else REPEAT_MAX + 1


def size_of(node: Node) -> int:
    """How many positions it has, repetitions written out."""
    if isinstance(node, Literal):
        return 1
    if isinstance(node, Repeat):
        return size_of(node.part) * max(node.least, 1 if node.most is None else node.most)
    return sum(size_of(part) for part in node.parts)


NOTHING: frozenset[int] = frozenset()


class Builder:
    def __init__(self, moves_max: int) -> None:
        self.moves_left = moves_max
        self.parts_left = moves_max  # so that those without a position are bounded as well
        self.classes: list[str] = []
        self.follows: list[set[int]] = []

    def add(self, node: Node) -> Moves:
        self.parts_left -= 1
        if self.parts_left < 0:
            raise BadPattern(COMPLEX)
        if isinstance(node, Literal):
            here = frozenset((len(self.classes),))
            self.classes.append(node.chars)
            self.follows.append(set())
            return Moves(here, here, False)
        if isinstance(node, Choice):
            parts = [self.add(part) for part in node.parts]
            return Moves(
                NOTHING.union(*(part.first for part in parts)),
                NOTHING.union(*(part.last for part in parts)),
                any(part.is_empty for part in parts),
            )
        return self.chain(node) if isinstance(node, Chain) else self.repeat(node)

    def chain(self, node: Chain) -> Moves:
        first, last, is_empty = NOTHING, NOTHING, True
        for part in map(self.add, node.parts):
            self.join(last, part.first)
            if is_empty:
                first |= part.first
            last = last | part.last if part.is_empty else part.last
            is_empty = is_empty and part.is_empty
        return Moves(first, last, is_empty)

    def repeat(self, node: Repeat) -> Moves:
        """Copies, each of which can only follow the one before it."""
        if not size_of(node):
            return Moves(NOTHING, NOTHING, True)
        count = max(node.least, 1) if node.most is None else node.most
        parts = [self.add(node.part) for _ in range(count)]
        least = 0 if parts[0].is_empty else node.least  # an empty copy may as well be left out
        for before, part in zip(parts, parts[1:], strict=False):
            self.join(before.last, part.first)
        if node.most is None:
            self.join(parts[-1].last, parts[-1].first)
        last = NOTHING.union(*(part.last for part in parts[max(least - 1, 0) :]))
        return Moves(parts[0].first, last, least == 0)

    def join(self, last: frozenset[int], first: frozenset[int]) -> None:
        self.spend(len(last) * len(first))
        for position in last:
            self.follows[position] |= first

    def spend(self, move_count: int) -> None:
        self.moves_left -= move_count
        if self.moves_left < 0:
            raise BadPattern(COMPLEX)
