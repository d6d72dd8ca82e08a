"""This file builds a tokenizer from a GGUF's metadata: the vocabulary, merges, scores and kinds of
tokens that the file carries under `tokenizer.ggml.*`.

It does not know paths of requests, templates or chats. Three models of tokenizer are known: `gpt2`
(byte-level BPE, split as `pretokenize` says), `llama` (SentencePiece BPE: merges follow from the
scores, unknown characters fall back to bytes) and `gemma4` (the same with merges in the file).
"""

from __future__ import annotations

from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers

from actors.vocab.metadata import ModelError
from actors.vocab.pretokenize import PRETOKENIZERS
from kernels.registry import UnknownName

# Kinds of tokens in `tokenizer.ggml.token_type`.
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
SPACE = "▁"  # SentencePiece writes a space so


def build_tokenizer(metadata: dict[str, Any]) -> tuple[Tokenizer, bool]:
    """The tokenizer, and whether its prompts begin with BOS unless the file says otherwise.

    Raises ModelError if the metadata has no vocabulary or names a model that is not known.
    """
    tokens: list[str] = metadata.get("tokenizer.ggml.tokens") or []
    if not tokens:
        raise ModelError("its metadata has no vocabulary (tokenizer.ggml.tokens)")
    kinds: list[int] = metadata.get("tokenizer.ggml.token_type") or [NORMAL] * len(tokens)
    model = metadata.get("tokenizer.ggml.model", "")
    if model == "gpt2":
        tokenizer, add_bos = build_byte_level(metadata, tokens)
    elif model == "llama":
        tokenizer, add_bos = build_sentencepiece(metadata, tokens, kinds), True
    elif model == "gemma4":
        tokenizer, add_bos = build_merged_pieces(metadata, tokens), True
    else:
        raise ModelError(
            f"its tokenizer model {model!r} (tokenizer.ggml.model) is not supported; "
            "known are: gpt2, llama, gemma4"
        )
    build_added(tokenizer, tokens, kinds)
    return tokenizer, add_bos


def build_byte_level(metadata: dict[str, Any], tokens: list[str]) -> tuple[Tokenizer, bool]:
    name = metadata.get("tokenizer.ggml.pre") or "default"
    try:
        split = PRETOKENIZERS.get(name)()
    except UnknownName as error:
        raise ModelError(f"its pre-tokenizer (tokenizer.ggml.pre): {error}") from error
    vocab = ids_of(tokens)
    merges = merges_of(metadata, vocab)
    tokenizer = Tokenizer(models.BPE(vocab, merges, ignore_merges=split.ignore_merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(list(split.steps))
    if split.normalizer is not None:
        tokenizer.normalizer = split.normalizer
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer, split.add_bos


def build_sentencepiece(metadata: dict[str, Any], tokens: list[str], kinds: list[int]) -> Tokenizer:
    scores: list[float] = metadata.get("tokenizer.ggml.scores") or []
    if len(scores) != len(tokens):
        raise ModelError(
            f"its vocabulary has {len(tokens)} tokens but {len(scores)} scores "
            "(tokenizer.ggml.scores)"
        )
    vocab = ids_of(tokens)
    prefix = bool(metadata.get("tokenizer.ggml.add_space_prefix", True))
    tokenizer = Tokenizer(
        models.BPE(
            vocab,
            merges_by_score(tokens, scores, kinds),
            unk_token=build_unknown(metadata, tokens, kinds),
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    spaces = normalizers.Replace(" ", SPACE)
    # The prefix goes before the text and after each special token, as in the models' training.
    tokenizer.normalizer = (
        normalizers.Sequence([normalizers.Prepend(SPACE), spaces]) if prefix else spaces
    )
    tokenizer.decoder = build_piece_decoder(strip=prefix)
    return tokenizer


def build_merged_pieces(metadata: dict[str, Any], tokens: list[str]) -> Tokenizer:
    vocab = ids_of(tokens)
    tokenizer = Tokenizer(
        models.BPE(vocab, merges_of(metadata, vocab), fuse_unk=True, byte_fallback=True)
    )
    tokenizer.normalizer = normalizers.Replace(" ", SPACE)
    tokenizer.decoder = build_piece_decoder(strip=False)
    return tokenizer


def build_piece_decoder(*, strip: bool) -> decoders.Decoder:
    steps = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    return decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if strip else steps)


def build_unknown(metadata: dict[str, Any], tokens: list[str], kinds: list[int]) -> str | None:
    index = metadata.get("tokenizer.ggml.unknown_token_id")
    if index is None and UNKNOWN in kinds:
        index = kinds.index(UNKNOWN)
    return tokens[index] if isinstance(index, int) and 0 <= index < len(tokens) else None


def build_added(tokenizer: Tokenizer, tokens: list[str], kinds: list[int]) -> None:
    """Tokens that are found in the text before any merging: control tokens (special: left out of
    the text) and the ones that the model's makers defined (part of the text)."""
    special = [
        AddedToken(token, special=True, normalized=False)
        for token, kind in zip(tokens, kinds, strict=True)
        if kind in (CONTROL, UNKNOWN)
    ]
    defined = [
        AddedToken(token, special=False, normalized=False)
        for token, kind in zip(tokens, kinds, strict=True)
        if kind == USER_DEFINED
    ]
    tokenizer.add_special_tokens(special)
    tokenizer.add_tokens(defined)


def ids_of(tokens: list[str]) -> dict[str, int]:
    """Text to id; of two tokens with one text the first counts."""
    ids: dict[str, int] = {}
    for index, token in enumerate(tokens):
        ids.setdefault(token, index)
    return ids


def merges_of(metadata: dict[str, Any], vocab: dict[str, int]) -> list[tuple[str, str]]:
    """The file's merges. Ones that the vocabulary has no token for can never apply: left out."""
    merges = []
    for line in metadata.get("tokenizer.ggml.merges") or []:
        middle = line.find(" ", 1)
        left, right = line[:middle], line[middle + 1 :]
        if middle > 0 and left in vocab and right in vocab and left + right in vocab:
            merges.append((left, right))
    if not merges:
        raise ModelError("its metadata has no merges (tokenizer.ggml.merges)")
    return merges


def merges_by_score(
    tokens: list[str], scores: list[float], kinds: list[int]
) -> list[tuple[str, str]]:
    """SentencePiece merges the pair whose result has the highest score: every way to cut a piece
    into two pieces is a merge, ordered by the score of the whole."""
    pieces = {
        token: score
        for token, score, kind in zip(tokens, scores, kinds, strict=True)
        if kind in (NORMAL, UNUSED)
    }
    ranked: list[tuple[float, int, str, str]] = []
    for index, (piece, score) in enumerate(pieces.items()):
        for middle in range(1, len(piece)):
            left, right = piece[:middle], piece[middle:]
            if left in pieces and right in pieces:
                ranked.append((-score, index, left, right))
    ranked.sort(key=lambda row: row[:2])
    return [(left, right) for _, _, left, right in ranked]
