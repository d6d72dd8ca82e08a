"""This file tests tokenizers that are built from a GGUF's metadata: how text is split by each name,
and SentencePiece's merging against a plain model of it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from actors.vocab.build import build_tokenizer
from actors.vocab.metadata import ModelError, read_metadata
from actors.vocab.pretokenize import PRETOKENIZERS
from actors.vocab.vocab import Vocab
from tests.vocab.made import digits_metadata, sentence_metadata

TEXTS = [
    "\n\n   1. first\n   2. second",
    "It's 12,345.67 in 2024!",
    "  two spaces,\ttab\r\nand lines\n\n\n",
    "naïve Ωmega 猫 🦊👩‍🚀",
    "x=10;y[3]+=4",
]


def split(pre: str, text: str) -> list[str]:
    """The words that a split makes, in plain characters."""
    tokenizer, _ = build_tokenizer(digits_metadata(pre))
    spans = tokenizer.pre_tokenizer.pre_tokenize_str(text)
    return [text[start:end] for _, (start, end) in spans]


@pytest.mark.parametrize(
    ("pre", "text", "words"),
    [
        ("smollm", "in 2024 a", ["in", " ", "2", "0", "2", "4", " a"]),
        ("starcoder", "x12", ["x", "1", "2"]),
        ("gpt-2", "in 2024 a", ["in", " 2024", " a"]),
        ("llama-bpe", "in 20245 a", ["in", " ", "202", "45", " a"]),
        ("llama-bpe", "I'LL go", ["I", "'LL", " go"]),
        ("qwen2", "in 2024 a", ["in", " ", "2", "0", "2", "4", " a"]),
        ("qwen2", "a\n\n b", ["a", "\n\n", " b"]),
        ("tekken", "camelCase 12", ["camel", "Case", " ", "1", "2"]),
        ("gpt-4o", "It's 1234", ["It's", " ", "123", "4"]),
        ("deepseek-v3", "a1234猫", ["a", "123", "4", "猫"]),
        ("deepseek-coder", "if x1", ["if", " x", "1"]),
        ("falcon", "a12345", ["a", "123", "45"]),
        ("default", "a1234,b", ["a", "123", "4", ",", "b"]),
    ],
)
def test_text_is_split_as_the_models_makers_did(pre: str, text: str, words: list[str]) -> None:
    assert split(pre, text) == words


@pytest.mark.parametrize("pre", PRETOKENIZERS.names())
@pytest.mark.parametrize("text", TEXTS)
def test_every_known_split_gives_back_its_text(pre: str, text: str) -> None:
    tokenizer, _ = build_tokenizer(digits_metadata(pre))
    assert tokenizer.decode(tokenizer.encode(text).ids) == text


def test_digits_are_single_tokens_though_merges_would_join_them() -> None:
    smollm, _ = build_tokenizer(digits_metadata("smollm"))
    gpt2, _ = build_tokenizer(digits_metadata("gpt-2"))
    assert smollm.encode("123").tokens == ["1", "2", "3"]
    assert gpt2.encode("123").tokens == ["123"]


def test_an_unknown_split_is_an_error_that_names_it_and_the_known_ones() -> None:
    with pytest.raises(ModelError, match="'martian'.*llama-bpe.*smollm"):
        build_tokenizer(digits_metadata("martian"))


def test_an_unknown_model_of_tokenizer_is_an_error_that_names_it() -> None:
    with pytest.raises(ModelError, match="'rwkv'.*gpt2, llama"):
        build_tokenizer({**digits_metadata(), "tokenizer.ggml.model": "rwkv"})


@pytest.mark.parametrize("missing", ["tokens", "merges"])
def test_metadata_without_its_lists_says_what_is_missing(missing: str) -> None:
    metadata = digits_metadata()
    del metadata[f"tokenizer.ggml.{missing}"]
    with pytest.raises(ModelError, match=f"tokenizer.ggml.{missing}"):
        build_tokenizer(metadata)


def test_scores_of_another_length_than_the_vocabulary_are_refused() -> None:
    metadata = sentence_metadata()
    metadata["tokenizer.ggml.scores"] = metadata["tokenizer.ggml.scores"][:-1]
    with pytest.raises(ModelError, match="scores"):
        build_tokenizer(metadata)


def merge_plainly(metadata: dict[str, Any], text: str) -> list[str]:
    """SentencePiece said slowly: the best-scored pair first, the leftmost of equals."""
    scores = {
        token: score
        for token, score, kind in zip(
            metadata["tokenizer.ggml.tokens"],
            metadata["tokenizer.ggml.scores"],
            metadata["tokenizer.ggml.token_type"],
            strict=True,
        )
        if kind == 1
    }
    parts = list("▁" + text.replace(" ", "▁"))
    while True:
        pairs = [
            (scores[left + right], -place)
            for place, (left, right) in enumerate(zip(parts, parts[1:], strict=False))
            if left + right in scores
        ]
        if not pairs:
            break
        place = -max(pairs)[1]
        parts[place : place + 2] = [parts[place] + parts[place + 1]]
    tokens: list[str] = []
    for part in parts:
        tokens += [part] if part in scores else [f"<0x{byte:02X}>" for byte in part.encode()]
    return tokens


SENTENCES, _ = build_tokenizer(sentence_metadata())


@given(st.text(alphabet="abcthefoxing .,1猫🦊é\n", min_size=1, max_size=40))
def test_merging_by_score_is_what_sentencepiece_does(text: str) -> None:
    assert SENTENCES.encode(text).tokens == merge_plainly(sentence_metadata(), text)


def test_the_space_prefix_comes_after_each_special_token_and_can_be_off() -> None:
    assert SENTENCES.encode("the</s>fox").tokens == ["▁the", "</s>", "▁fox"]
    bare, _ = build_tokenizer(sentence_metadata(prefix=False))
    assert bare.encode("fox the").tokens == ["fox", "▁the"]


def test_tokens_that_the_makers_defined_are_text_and_control_tokens_are_not() -> None:
    ids = SENTENCES.encode("a<tool></s>").ids
    assert SENTENCES.decode(ids) == "a<tool>"


@pytest.mark.real
def test_the_real_vocabulary_encodes_as_the_models_original_tokenizer(smollm2: Path) -> None:
    metadata = read_metadata(smollm2)
    tokens = metadata["tokenizer.ggml.tokens"]
    # The original tokenizer.json, put together by hand from its parts.
    original = Tokenizer(
        models.BPE(
            vocab={token: index for index, token in enumerate(tokens)},
            merges=[tuple(merge.split(" ")) for merge in metadata["tokenizer.ggml.merges"]],
        )
    )
    original.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, trim_offsets=True, use_regex=True),
        ]
    )
    original.decoder = decoders.ByteLevel()
    original.add_special_tokens(tokens[:17])
    ours = Vocab.load(smollm2)
    for text in [*TEXTS, *(text * 3 for text in TEXTS), "<|im_start|>user\n7 + 35?<|im_end|>\n"]:
        assert ours.encode(text) == original.encode(text).ids
        assert ours.decode(ours.encode(text), skip_special=False) == text
    digits = ours.encode("1234567890")
    assert [ours.tokens[i] for i in digits] == list("1234567890")
