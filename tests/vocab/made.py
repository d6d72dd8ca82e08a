"""This file makes small tokenizers of every kind that the project meets, and the model files that
hold them. It knows nothing of rooms.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import gguf
from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

from actors.vocab.build import build_tokenizer
from actors.vocab.vocab import Vocab, assemble

CORPUS = [
    "the quick brown fox jumps over the lazy dog and over the fence",
    "naïve Ωmega café, 猫 and 🦊 — 12 times 34 is 408; it's 2024.",
    "    indented\n\n\tlines\r\n of code: if (x >= 10) { return y[3]; }",
] * 4

SPECIAL = ["<unk>", "<s>", "</s>"]


def byte_level() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_tokens([AddedToken("<é fox>", normalized=False), AddedToken("<é>")])
    return tokenizer


def sentence_metadata(*, prefix: bool = True) -> dict[str, Any]:
    """A SentencePiece BPE as a GGUF holds it: scores, single bytes, a space written as ▁."""
    pieces = ["▁", *"abcdefghimnortuwxy.,é1猫", "▁t", "he", "▁the", "an", "▁an", "and", "▁and"]
    pieces += ["▁▁", "in", "ing", "fo", "fox", "▁fox", "▁f", "ou", "▁fo", "ab", "abc", "bc", "aa"]
    pieces += ["aaaa", "aaa", "ox", "xi"]
    tokens = [*SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256)), *pieces, "<tool>"]
    kinds = [2, 3, 3, *[6] * 256, *[1] * len(pieces), 4]
    # Not in the order of ids: of "ox" and "xi" the later one merges first.
    scores = [0.0] * 259 + [float(index - len(pieces)) for index in range(len(pieces))] + [0.0]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.scores": scores,
        "tokenizer.ggml.add_space_prefix": prefix,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
    }


def digits_metadata(pre: str = "smollm") -> dict[str, Any]:
    """A byte-level BPE as a GGUF holds it, with merges that join digits."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = ["1 2", "12 3", "2 0", "20 2", "Ġ 1", "a b", "Ċ Ċ", "Ġ Ġ", "c a", "ca b", "Ġ cab"]
    merged = [merge.replace(" ", "") for merge in merges]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": [*SPECIAL, *alphabet, *merged],
        "tokenizer.ggml.token_type": [3, 3, 3, *[1] * (len(alphabet) + len(merged))],
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
    }


def metaspace(scheme: str = "always") -> Tokenizer:
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme)
    tokenizer.decoder = decoders.Metaspace(prepend_scheme=scheme)
    trainer = trainers.BpeTrainer(vocab_size=200, special_tokens=SPECIAL, show_progress=False)
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


def word_piece() -> Tokenizer:
    tokenizer = Tokenizer(models.WordPiece(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.decoder = decoders.WordPiece()
    trainer = trainers.WordPieceTrainer(vocab_size=200, special_tokens=SPECIAL, show_progress=False)
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


def suffixed() -> Tokenizer:
    """Its decoder has no rule for single tokens that we know."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", end_of_word_suffix="</w>"))
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.decoder = decoders.BPEDecoder(suffix="</w>")
    trainer = trainers.BpeTrainer(
        vocab_size=200,
        special_tokens=SPECIAL,
        end_of_word_suffix="</w>",
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


def words() -> Tokenizer:
    """Without a decoder: tokens are joined by spaces."""
    tokenizer = Tokenizer(models.WordLevel(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    trainer = trainers.WordLevelTrainer(special_tokens=SPECIAL, show_progress=False)
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


NAMED = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"}


def vocab_of(tokenizer: Tokenizer, templates: Mapping[str, str] | None = None) -> Vocab:
    return assemble(tokenizer, NAMED, templates or {}, None)


def write_folder(
    path: Path, tokenizer: Tokenizer, config: Mapping[str, Any] | None = None, *, bos: bool = False
) -> Path:
    """A model folder's tokenizer part."""
    path.mkdir(parents=True, exist_ok=True)
    if bos:
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", tokenizer.token_to_id("<s>"))]
        )
    tokenizer.save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text(json.dumps({**NAMED, **(config or {})}))
    return path


def write_gguf(path: Path, metadata: Mapping[str, Any]) -> Path:
    """A GGUF file without tensors, written by the format's own library."""
    writer = gguf.GGUFWriter(path, "llama")
    for name, value in metadata.items():
        if isinstance(value, bool):
            writer.add_bool(name, value)
        elif isinstance(value, int):
            writer.add_uint32(name, value)
        elif isinstance(value, float):
            writer.add_float32(name, value)
        elif isinstance(value, str):
            writer.add_string(name, value)
        else:
            assert isinstance(value, Sequence)
            writer.add_array(name, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def build_tokenizer_of(metadata: dict[str, Any]) -> Tokenizer:
    return build_tokenizer(metadata)[0]
