"""This file tests the reading of a GGUF's metadata, against files of the format's own library."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import pytest

from actors.vocab.metadata import ModelError, read_metadata
from tests.vocab.made import sentence_metadata, write_gguf

PLAIN = {
    "a.text": "naïve 猫",
    "a.number": 7,
    "a.float": 0.5,
    "a.true": True,
    "a.texts": ["", "x", "▁é\n"],
    "a.numbers": [1, 2, 3],
    "a.floats": [0.25, -1.5],
}


def test_all_kinds_of_values_are_read_back(tmp_path: Path) -> None:
    found = read_metadata(write_gguf(tmp_path / "m.gguf", PLAIN))
    assert {name: found[name] for name in PLAIN} == PLAIN


def test_a_file_cut_anywhere_in_its_metadata_is_an_error_that_names_it(tmp_path: Path) -> None:
    whole = write_gguf(tmp_path / "m.gguf", PLAIN).read_bytes()
    end = whole.rindex(b"a.floats")
    cut = tmp_path / "cut.gguf"
    for length in range(0, end, 7):
        cut.write_bytes(whole[:length])
        with pytest.raises(ModelError, match=r"cut\.gguf"):
            read_metadata(cut)


def test_a_count_beyond_the_file_is_damage_and_no_long_loop(tmp_path: Path) -> None:
    whole = write_gguf(tmp_path / "m.gguf", {"a.texts": ["x"]}).read_bytes()
    place = whole.index(b"a.texts") + len(b"a.texts") + 8
    damaged = whole[:place] + (2**62).to_bytes(8, "little") + whole[place + 8 :]
    (tmp_path / "m.gguf").write_bytes(damaged)
    with pytest.raises(ModelError, match="cut short"):
        read_metadata(tmp_path / "m.gguf")


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "not a GGUF file"),
        (b"PK\x03\x04 a zip", "not a GGUF file"),
        (b"GGUF\x09\x00\x00\x00" + b"\0" * 16, "version 9"),
    ],
)
def test_what_is_no_gguf_is_named(tmp_path: Path, content: bytes, said: str) -> None:
    path = tmp_path / "other.gguf"
    path.write_bytes(content)
    with pytest.raises(ModelError, match=rf"other\.gguf.*{said}"):
        read_metadata(path)


@pytest.mark.real
def test_the_real_file_reads_as_by_the_formats_own_library(smollm2: Path) -> None:
    found: dict[str, Any] = read_metadata(smollm2)
    reader = gguf.GGUFReader(smollm2)
    for name, field in reader.fields.items():
        if not name.startswith("GGUF."):
            assert found[name] == field.contents(), name


def test_scores_and_kinds_keep_their_order(tmp_path: Path) -> None:
    metadata = sentence_metadata()
    found = read_metadata(write_gguf(tmp_path / "m.gguf", metadata))
    assert found["tokenizer.ggml.tokens"] == metadata["tokenizer.ggml.tokens"]
    assert found["tokenizer.ggml.scores"] == metadata["tokenizer.ggml.scores"]
    assert found["tokenizer.ggml.token_type"] == metadata["tokenizer.ggml.token_type"]
