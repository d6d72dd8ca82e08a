"""This file turns each token id into what it adds to a text, as far as its tokenizer allows.

Tokenizers decode in three ways, told apart by their decoder: byte-level ones join bytes; the
SentencePiece kind joins texts, with runs of single-byte tokens in between; others add a text that
depends only on whether it is the first. Anything else cannot be taken apart, and is decoded whole.
It does not know streams (`actors/detokenizer/stream.py`). Pure: no tokenizer is called here.

Laws, tested against `Tokenizer.decode`: special tokens and unassigned ids are None where they are
left out; what a table says of an id never depends on the ids around it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol


@dataclass(frozen=True, slots=True)
class BytePieces:
    """Texts are the joined bytes, each maximal invalid part of them one U+FFFD."""

    shown: list[bytes | None]  # special tokens are None
    every: list[bytes | None]  # special tokens as their text


@dataclass(frozen=True, slots=True)
class TextPieces:
    """Texts are joined. An int is one byte: a run of bytes is UTF-8 as a whole, or is as many
    U+FFFD as it has bytes. `first_*`: what a token adds where no other precedes it."""

    shown: list[str | int | None]
    every: list[str | int | None]
    first_shown: list[str | int | None]
    first_every: list[str | int | None]
    strip: str = ""  # character that is dropped from the text's beginning …
    strip_count_max: int = 0  # … up to so many times


class Decode(Protocol):
    def __call__(self, ids: list[int], skip_special: bool, /) -> str: ...


@dataclass(frozen=True, slots=True)
class WholePieces:
    """No rule for single tokens is known: only the tokenizer itself can decode."""

    decode: Decode


Pieces = BytePieces | TextPieces | WholePieces


def byte_alphabet() -> dict[str, int]:
    """The characters that byte-level tokenizers write for the 256 bytes: printable Latin-1 stands
    for itself, the others are numbered from U+0100 on."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    alphabet = {chr(byte): byte for byte in plain}
    others = [byte for byte in range(256) if chr(byte) not in alphabet]
    return alphabet | {chr(0x100 + index): byte for index, byte in enumerate(others)}


ALPHABET = byte_alphabet()


def pieces_of(
    tokens: list[str | None],
    special: frozenset[int],
    decoder: Mapping[str, Any] | None,
    decode: Decode,
) -> Pieces:
    """`tokens` by id (None: unassigned); `decoder` as tokenizer.json writes it."""
    steps = steps_of(decoder)
    names = [step["type"] for step in steps]
    if [name for name in names if name != "Fuse"] == ["ByteLevel"]:
        every: list[bytes | None] = [None if t is None else bytes_of(t) for t in tokens]
        return BytePieces(shown=without(every, special), every=every)
    if names and set(names) <= {"Replace", "ByteFallback", "Fuse", "Strip"}:
        return pieces_of_sentences(tokens, special, steps) or WholePieces(decode)
    if names == ["Metaspace"]:
        return pieces_of_metaspace(tokens, special, steps[0])
    if names == []:
        later = [None if t is None else " " + t for t in tokens]
        return texts(later, list(tokens), special)
    return WholePieces(decode)


def steps_of(decoder: Mapping[str, Any] | None) -> list[Mapping[str, Any]]:
    if decoder is None:
        return []
    if decoder["type"] == "Sequence":
        return [step for inner in decoder["decoders"] for step in steps_of(inner)]
    return [decoder]


def bytes_of(token: str) -> bytes:
    """What a byte-level token stands for; one with a character outside the alphabet is itself."""
    try:
        return bytes([ALPHABET[character] for character in token])
    except KeyError:
        return token.encode("utf-8", "replace")


def byte_of(token: str) -> int | None:
    """0xE4 for `<0xE4>`."""
    if len(token) != 6 or not token.startswith("<0x") or not token.endswith(">"):
        return None
    digits = token[3:5]
    return int(digits, 16) if all(c in "0123456789abcdefABCDEF" for c in digits) else None


def pieces_of_sentences(
    tokens: list[str | None], special: frozenset[int], steps: list[Mapping[str, Any]]
) -> TextPieces | None:
    """Replacements token by token, then bytes, then perhaps a strip of the whole. Other orders (a
    strip of each token, say) are None."""
    names = [step["type"] for step in steps]
    fused = names.index("Fuse") if "Fuse" in names else len(names)
    replaced, ends = steps[:fused], steps[fused:]
    if "Strip" in names[:fused] or names.count("ByteFallback") > 1:
        return None
    if any(step["type"] not in ("Fuse", "Strip") for step in ends):
        return None
    strips = [step for step in ends if step["type"] == "Strip"]
    if len(strips) > 1 or any(strip["stop"] or len(strip["content"]) != 1 for strip in strips):
        return None
    if "ByteFallback" in names and names.index("ByteFallback") != len(replaced) - 1:
        return None
    if any("String" not in s["pattern"] for s in replaced if s["type"] == "Replace"):
        return None
    every: list[str | int | None] = []
    for token in tokens:
        piece: str | int | None = token
        for step in replaced:
            if isinstance(piece, str):
                if step["type"] == "Replace":
                    piece = piece.replace(step["pattern"]["String"], step["content"])
                else:
                    byte = byte_of(piece)
                    piece = piece if byte is None else byte
        every.append(piece)
    shown: list[str | int | None] = without(every, special)
    if not strips:
        return TextPieces(shown, every, shown, every)
    return TextPieces(shown, every, shown, every, strips[0]["content"], strips[0]["start"])


def pieces_of_metaspace(
    tokens: list[str | None], special: frozenset[int], step: Mapping[str, Any]
) -> TextPieces:
    mark = step["replacement"]
    at_first = " " if step.get("prepend_scheme", "always") == "never" else ""
    later = [None if t is None else t.replace(mark, " ") for t in tokens]
    first = [None if t is None else t.replace(mark, at_first) for t in tokens]
    return texts(later, first, special)


def texts(later: list[str | None], first: list[str | None], special: frozenset[int]) -> TextPieces:
    return TextPieces(
        shown=[*without(later, special)],
        every=[*later],
        first_shown=[*without(first, special)],
        first_every=[*first],
    )


def without(table: list[Any], special: frozenset[int]) -> list[Any]:
    return [None if index in special else piece for index, piece in enumerate(table)]
