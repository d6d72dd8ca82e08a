"""This file tests the text streams against the tokenizers' own `decode`, for every kind of decoder
and for ids that no model would produce.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders

from actors.detokenizer.stream import MISSING, WindowStream, open_stream
from actors.vocab.pieces import BytePieces, TextPieces, WholePieces
from actors.vocab.vocab import Vocab
from tests.vocab import made


def sentences(**options: bool) -> Vocab:
    return made.vocab_of(made.build_tokenizer_of(made.sentence_metadata(**options)))


def marked_specials() -> Tokenizer:
    """Control tokens with characters outside and inside the byte alphabet, as some models have."""
    tokenizer = made.byte_level()
    tokenizer.add_special_tokens(
        [AddedToken("<｜end▁of｜>", special=True), AddedToken("<é>!", special=True)]
    )
    return tokenizer


def replaced() -> Tokenizer:
    """Bytes and replacements, without a strip."""
    tokenizer = made.build_tokenizer_of(made.sentence_metadata())
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    return tokenizer


VOCABS = {
    "bytes": made.vocab_of(made.byte_level()),
    "bytes with odd specials": made.vocab_of(marked_specials()),
    "sentences": sentences(),
    "sentences without a prefix": sentences(prefix=False),
    "replacements": made.vocab_of(replaced()),
    "metaspace": made.vocab_of(made.metaspace()),
    "metaspace without a prefix": made.vocab_of(made.metaspace("never")),
    "word pieces": made.vocab_of(made.word_piece()),
    "words": made.vocab_of(made.words()),
    "words with a suffix": made.vocab_of(made.suffixed()),
}
KINDS = {
    "bytes": BytePieces,
    "bytes with odd specials": BytePieces,
    "word pieces": WholePieces,
    "words with a suffix": WholePieces,
}


def joined(vocab: Vocab, ids: list[int], *, skip_special: bool) -> str:
    stream = open_stream(vocab.pieces, skip_special=skip_special)
    return "".join([*(stream.push(token_id) for token_id in ids), stream.finish()])


@pytest.mark.parametrize("name", VOCABS)
def test_generative_models_kinds_are_taken_apart_and_others_left_whole(name: str) -> None:
    assert isinstance(VOCABS[name].pieces, KINDS.get(name, TextPieces))


@pytest.mark.parametrize("name", VOCABS)
@settings(max_examples=150)
@given(data=st.data())
def test_the_joined_stream_is_what_the_tokenizer_decodes(name: str, data: st.DataObject) -> None:
    vocab = VOCABS[name]
    # Ids beyond the vocabulary too: models have more rows than their tokenizers have tokens.
    ids = data.draw(st.lists(st.integers(0, vocab.size + 3), max_size=24))
    skip_special = data.draw(st.booleans())
    assert joined(vocab, ids, skip_special=skip_special) == vocab.decode(
        ids, skip_special=skip_special
    )


@settings(max_examples=300)
@given(
    ids=st.lists(
        st.one_of(st.integers(3, 258), st.sampled_from([0, 1, 2, 259, 262, 280, 300])), max_size=12
    )
)
def test_runs_of_single_bytes_are_characters_or_as_many_replacements(ids: list[int]) -> None:
    vocab = VOCABS["sentences"]
    assert joined(vocab, ids, skip_special=True) == vocab.decode(ids)


@settings(max_examples=200)
@given(st.text(max_size=30))
def test_no_part_of_a_character_is_ever_shown(text: str) -> None:
    for name in ("bytes", "sentences without a prefix", "replacements"):
        vocab = VOCABS[name]
        stream = open_stream(vocab.pieces, skip_special=False)
        shown = [stream.push(token_id) for token_id in vocab.encode(text, add_special=False)]
        if MISSING not in text:
            assert not any(MISSING in piece for piece in shown)
        for piece in shown:
            piece.encode("utf-8")  # raises for half of a surrogate pair


@pytest.mark.parametrize("cut", range(1, 13))
def test_a_limit_inside_a_character_leaves_one_replacement(cut: int) -> None:
    """B003: three foxes of four bytes each, cut after `cut` bytes."""
    vocab = VOCABS["bytes"]
    ids = [vocab.tokens.index(letter) for letter in letters("🦊🦊🦊")][:cut]
    text = joined(vocab, ids, skip_special=True)
    assert text == "🦊" * (cut // 4) + MISSING * bool(cut % 4) == vocab.decode(ids)


def letters(text: str) -> list[str]:
    """The byte-level letters of a text."""
    ((word, _),) = made.pre_tokenizers.ByteLevel(
        add_prefix_space=False, use_regex=False
    ).pre_tokenize_str(text)
    return list(word)


@pytest.mark.parametrize("group", [1, 2, 3])
def test_many_scripts_survive_token_by_token(group: int) -> None:
    """B001."""
    text = "猫 🦊👩\u200d🚀 naïve Ωmega"
    vocab = VOCABS["bytes"]
    ids = vocab.encode(text)
    stream = open_stream(vocab.pieces, skip_special=True)
    shown = [
        "".join(stream.push(token_id) for token_id in ids[at : at + group])
        for at in range(0, len(ids), group)
    ]
    assert "".join(shown) == text
    assert stream.finish() == ""


def test_a_space_before_the_first_word_stays_where_a_prompt_is_continued() -> None:
    for name in ("sentences", "metaspace"):
        vocab = VOCABS[name]
        the = vocab.encode("the fox", add_special=False)
        first = open_stream(vocab.pieces, skip_special=True)
        later = open_stream(vocab.pieces, skip_special=True, continues=True)
        assert "".join([*map(first.push, the), first.finish()]) == "the fox"
        assert "".join([*map(later.push, the), later.finish()]) == " the fox"


def test_an_unknown_decoder_is_left_to_the_tokenizer() -> None:
    vocab = made.vocab_of(made.suffixed())
    assert isinstance(vocab.pieces, WholePieces)
    text = "the quick brown fox jumps over the lazy dog"
    ids = vocab.encode(text)
    stream = open_stream(vocab.pieces, skip_special=True)
    assert isinstance(stream, WindowStream)
    shown = [stream.push(token_id) for token_id in ids]
    assert "".join(shown) + stream.finish() == vocab.decode(ids) == text
    assert sum(map(bool, shown)) > len(ids) // 2  # it streams, and does not wait for the end


def test_a_window_waits_for_the_rest_of_a_character() -> None:
    vocab = VOCABS["bytes"]
    window = open_stream(WholePieces(lambda ids, skip: vocab.decode(ids)), skip_special=True)
    text = "naïve 猫🦊 fox"
    shown = [window.push(token_id) for token_id in vocab.encode(text)]
    assert "".join(shown) + window.finish() == text
    assert not any(MISSING in piece for piece in shown)


@pytest.mark.real
@settings(max_examples=300)
@given(data=st.data())
def test_the_real_vocabulary_streams_what_it_decodes(smollm2: Path, data: st.DataObject) -> None:
    vocab = real(smollm2)
    ids = data.draw(
        st.lists(
            st.one_of(st.integers(0, 300), st.integers(0, vocab.size + 60)),
            max_size=24,
        )
    )
    for skip_special in (True, False):
        assert joined(vocab, ids, skip_special=skip_special) == vocab.decode(
            ids, skip_special=skip_special
        )


@functools.cache
def real(path: Path) -> Vocab:
    return Vocab.load(path)


def test_a_window_does_not_grow_by_what_is_no_text(tmp_path: Path) -> None:
    """A model that says special tokens and nothing else must not cost more with each."""
    vocab = Vocab.load(made.write_folder(tmp_path / "m", made.word_piece()))
    lens: list[int] = []

    def decode(ids: Sequence[int], skip_special: bool) -> str:
        lens.append(len(ids))
        return vocab.decode(ids, skip_special=skip_special)

    special = min(vocab.special)
    words = vocab.encode("the fox", add_special=False)
    ids = [words[0], *[special] * 300, *words[1:], special, *words]
    stream = open_stream(WholePieces(decode), skip_special=True)
    text = "".join(stream.push(token) for token in ids) + stream.finish()
    assert text == vocab.decode(ids)
    assert max(lens) < 20
