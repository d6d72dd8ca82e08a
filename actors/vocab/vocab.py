"""This file is a model's vocabulary: text to ids, ids to text, and what each id stands for.

It is read from a folder with a tokenizer.json, or from a GGUF file's own metadata. It does not know
requests or limits, and it renders no chat: it only hands out the templates that the files hold.
Immutable after `load`. `encode` and `decode` release the GIL while they work, so that a long prompt
in a thread keeps nobody waiting.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from actors.vocab.build import build_tokenizer
from actors.vocab.metadata import ModelError, read_metadata
from actors.vocab.pieces import BytePieces, Pieces, TextPieces, pieces_of

# A text is encoded by the thread that asks. The library would hand it to threads of its own, which
# for ever have the niceness of whoever was first: in a process in reserve, of what is not urgent.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token")
# The GGUF's name for the id of each; and what chat templates call it.
GGUF_TOKENS = {
    "bos_token": "bos",
    "eos_token": "eos",
    "unk_token": "unknown",
    "pad_token": "padding",
    "sep_token": "seperator",  # spelt so in the format
}


@dataclass(frozen=True, slots=True, weakref_slot=True, eq=False)
class Vocab:
    """Use `Vocab.load`."""

    tokenizer: Tokenizer
    tokens: list[str | None]  # by id; None: unassigned
    special: frozenset[int]
    named: Mapping[str, str]  # bos_token, eos_token …: what chat templates may write
    templates: Mapping[str, str]  # by name; "default" is the one for plain chats
    pieces: Pieces
    bos_id: int | None
    eos_id: int | None
    adds_bos: bool  # encode(..., add_special=True) begins with BOS
    prepends_bos: bool = False  # … and the tokenizer itself does not see to it
    drops_bos: bool = False  # the tokenizer would add one that the model does not want
    token_bytes: list[bytes] = field(default_factory=list)  # what each id adds, in UTF-8

    @classmethod
    def load(cls, path: Path | str) -> Vocab:
        """From a folder, or from a .gguf file. Raises ModelError that names path and fault."""
        path = Path(path)
        if path.is_file():
            return load_gguf(path)
        if not path.is_dir():
            raise ModelError(f"{path}: no such file or folder")
        if (path / "tokenizer.json").is_file():
            return load_folder(path)
        files = sorted(path.glob("*.gguf"))
        if files:
            return load_gguf(files[0])
        raise ModelError(f"{path}: the tokenizer is missing (tokenizer.json, or a .gguf file)")

    @property
    def size(self) -> int:
        """One more than the largest id."""
        return len(self.tokens)

    def encode(self, text: str, *, add_special: bool = True) -> list[int]:
        """Ids of a text; special tokens that it spells out are recognised.

        With `add_special` it begins with BOS where the model wants one, but never with two: a chat
        template may have written it already.
        """
        # Of the tokenizer's methods only the batched ones release the GIL.
        (encoding,) = self.tokenizer.encode_batch_fast([text], add_special_tokens=add_special)
        ids: list[int] = encoding.ids
        bos = self.bos_id
        if bos is None or not add_special:
            return ids
        if self.prepends_bos and ids[:1] != [bos]:
            return [bos, *ids]
        if self.drops_bos and ids[:1] == [bos]:
            return ids[1:]
        if self.adds_bos and ids[:2] == [bos, bos]:
            return ids[1:]
        return ids

    def decode(self, ids: Sequence[int], *, skip_special: bool = True) -> str:
        """The text of ids; unassigned ones add nothing."""
        return str(self.tokenizer.decode(list(ids), skip_special_tokens=skip_special))


def load_gguf(path: Path) -> Vocab:
    metadata = read_metadata(path)
    try:
        tokenizer, add_bos = build_tokenizer(metadata)
    except ModelError as error:
        raise ModelError(f"{path}: {error}") from error
    tokens: list[str] = metadata["tokenizer.ggml.tokens"]
    named = {}
    for name, key in GGUF_TOKENS.items():
        index = metadata.get(f"tokenizer.ggml.{key}_token_id")
        if isinstance(index, int) and 0 <= index < len(tokens):
            named[name] = tokens[index]
    add_bos = bool(metadata.get("tokenizer.ggml.add_bos_token", add_bos))
    templates = {}
    if "tokenizer.chat_template" in metadata:
        templates["default"] = metadata["tokenizer.chat_template"]
    for name in metadata.get("tokenizer.chat_templates") or []:
        if f"tokenizer.chat_template.{name}" in metadata:
            templates[name] = metadata[f"tokenizer.chat_template.{name}"]
    return assemble(tokenizer, named, templates, add_bos)


def load_folder(path: Path) -> Vocab:
    file = path / "tokenizer.json"
    try:
        tokenizer = Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises bare Exception
        raise ModelError(f"{file}: not a tokenizer ({error})") from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    config = load_json(path / "tokenizer_config.json")
    named = {}
    for source in (load_json(path / "special_tokens_map.json"), config):
        for name in NAMED_TOKENS:
            token = source.get(name)
            text = token.get("content") if isinstance(token, dict) else token
            if isinstance(text, str):
                named[name] = text
    add_bos = config.get("add_bos_token")
    return assemble(
        tokenizer,
        named,
        load_templates(path, config),
        add_bos if isinstance(add_bos, bool) else None,
    )


def load_json(path: Path) -> dict[str, Any]:
    """The object in a file; {} where there is none. Raises ModelError if it is damaged."""
    if not path.is_file():
        return {}
    try:
        found = json.loads(path.read_text("utf-8"))
    except ValueError as error:
        raise ModelError(f"{path}: not JSON ({error})") from error
    return found if isinstance(found, dict) else {}


def load_templates(path: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """From tokenizer_config.json, replaced by what lies beside it in files of its own."""
    templates: dict[str, str] = {}
    held = config.get("chat_template")
    if isinstance(held, str):
        templates["default"] = held
    elif isinstance(held, list):
        for row in held:
            if isinstance(row, dict) and isinstance(row.get("template"), str):
                templates[str(row.get("name", "default"))] = row["template"]
    elif isinstance(held, dict):
        templates |= {str(k): v for k, v in held.items() if isinstance(v, str)}
    if (path / "chat_template.jinja").is_file():
        templates["default"] = (path / "chat_template.jinja").read_text("utf-8")
    for file in sorted((path / "additional_chat_templates").glob("*.jinja")):
        templates[file.stem] = file.read_text("utf-8")
    return templates


def assemble(
    tokenizer: Tokenizer,
    named: Mapping[str, str],
    templates: Mapping[str, str],
    add_bos: bool | None,
) -> Vocab:
    """`add_bos` None: as the tokenizer itself does."""
    by_token = tokenizer.get_vocab(with_added_tokens=True)
    tokens: list[str | None] = [None] * (max(by_token.values(), default=-1) + 1)
    for token, index in by_token.items():
        tokens[index] = token
    special = set()
    for index, added in tokenizer.get_added_tokens_decoder().items():
        tokens[index] = added.content
        if added.special:
            special.add(index)
    bos_id = tokenizer.token_to_id(named["bos_token"]) if "bos_token" in named else None
    eos_id = tokenizer.token_to_id(named["eos_token"]) if "eos_token" in named else None
    by_itself = bos_id is not None and tokenizer.encode("a").ids[:1] == [bos_id]
    adds = bos_id is not None and (by_itself if add_bos is None else add_bos)
    # `__getstate__` of a decoder is its part of tokenizer.json; writing out all of the tokenizer
    # to find it would take half a second.
    decoder = tokenizer.decoder
    pieces = pieces_of(
        tokens,
        frozenset(special),
        None if decoder is None else json.loads(decoder.__getstate__()),
        lambda ids, skip: str(tokenizer.decode(ids, skip_special_tokens=skip)),
    )
    return Vocab(
        tokenizer=tokenizer,
        tokens=tokens,
        special=frozenset(special),
        named=dict(named),
        templates=dict(templates),
        pieces=pieces,
        bos_id=bos_id,
        eos_id=eos_id,
        adds_bos=adds,
        prepends_bos=adds and not by_itself,
        drops_bos=by_itself and not adds,
        token_bytes=bytes_by_id(tokens, pieces),
    )


def bytes_by_id(tokens: list[str | None], pieces: Pieces) -> list[bytes]:
    """For log probabilities: each id's own bytes, special tokens as their text."""
    if isinstance(pieces, BytePieces):
        return [piece or b"" for piece in pieces.every]
    if isinstance(pieces, TextPieces):
        return [
            bytes([piece]) if isinstance(piece, int) else (piece or "").encode("utf-8", "replace")
            for piece in pieces.every
        ]
    return [
        (pieces.decode([index], False) if token is not None else "").encode("utf-8", "replace")
        for index, token in enumerate(tokens)
    ]
