"""This file tests a vocabulary as it is loaded from folders and files."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from actors.vocab.metadata import ModelError
from actors.vocab.vocab import Vocab
from tests.vocab import made

ROOT = Path(__file__).resolve().parents[2]


def test_a_folder_and_a_file_know_their_special_tokens(tmp_path: Path) -> None:
    folder = Vocab.load(made.write_folder(tmp_path / "m", made.byte_level()))
    file = Vocab.load(made.write_gguf(tmp_path / "m.gguf", made.sentence_metadata()))
    for vocab in (folder, file):
        assert (vocab.bos_id, vocab.eos_id) == (1, 2)
        assert vocab.named["eos_token"] == "</s>"
        assert vocab.special == {0, 1, 2}


def test_a_folder_with_only_a_gguf_in_it_serves_as_well(tmp_path: Path) -> None:
    made.write_gguf(tmp_path / "m.gguf", made.sentence_metadata())
    assert Vocab.load(tmp_path).eos_id == 2


@pytest.mark.parametrize("declared", [True, None])
def test_bos_is_added_by_the_tokenizer_itself_and_never_twice(
    tmp_path: Path, declared: bool | None
) -> None:
    config = {} if declared is None else {"add_bos_token": declared}
    vocab = Vocab.load(made.write_folder(tmp_path, made.byte_level(), config, bos=True))
    assert vocab.adds_bos
    assert vocab.encode("the fox")[0] == 1
    assert vocab.encode("<s>the fox") == vocab.encode("the fox")
    assert vocab.encode("") == [1]
    assert vocab.encode("<s>the", add_special=False)[:2] == [1, vocab.encode("the")[1]]


def test_bos_is_added_where_only_the_config_asks_for_it(tmp_path: Path) -> None:
    vocab = Vocab.load(made.write_folder(tmp_path, made.byte_level(), {"add_bos_token": True}))
    assert vocab.encode("fox")[0] == 1
    assert vocab.encode("<s>fox") == vocab.encode("fox")
    assert vocab.encode("fox", add_special=False)[0] != 1


def test_bos_is_left_out_where_the_config_does_not_want_it(tmp_path: Path) -> None:
    folder = made.write_folder(tmp_path, made.byte_level(), {"add_bos_token": False}, bos=True)
    assert Vocab.load(folder).encode("fox")[0] != 1


def test_the_file_says_whether_bos_is_added(tmp_path: Path) -> None:
    metadata = made.sentence_metadata()
    by_default = Vocab.load(made.write_gguf(tmp_path / "a.gguf", metadata))
    metadata["tokenizer.ggml.add_bos_token"] = False
    without = Vocab.load(made.write_gguf(tmp_path / "b.gguf", metadata))
    assert by_default.encode("the") == [1, *without.encode("the")]


def test_templates_come_from_config_file_and_metadata(tmp_path: Path) -> None:
    named = [{"name": "default", "template": "A"}, {"name": "tool_use", "template": "B"}]
    folder = made.write_folder(tmp_path / "m", made.byte_level(), {"chat_template": named})
    assert Vocab.load(folder).templates == {"default": "A", "tool_use": "B"}
    (folder / "chat_template.jinja").write_text("C")
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "rag.jinja").write_text("D")
    assert Vocab.load(folder).templates == {"default": "C", "tool_use": "B", "rag": "D"}
    metadata = made.digits_metadata() | {
        "tokenizer.chat_template": "E",
        "tokenizer.chat_templates": ["tool_use"],
        "tokenizer.chat_template.tool_use": "F",
    }
    file = Vocab.load(made.write_gguf(tmp_path / "m.gguf", metadata))
    assert file.templates == {"default": "E", "tool_use": "F"}


def test_what_is_missing_is_named_with_its_path(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="nowhere: no such file or folder"):
        Vocab.load(tmp_path / "nowhere")
    with pytest.raises(ModelError, match=rf"{tmp_path.name}.*tokenizer is missing"):
        Vocab.load(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ModelError, match=r"tokenizer\.json: not a tokenizer"):
        Vocab.load(tmp_path)
    made.byte_level().save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text("{")
    with pytest.raises(ModelError, match=r"tokenizer_config\.json: not JSON"):
        Vocab.load(tmp_path)


def test_a_truncation_in_the_file_does_not_shorten_prompts(tmp_path: Path) -> None:
    tokenizer = made.byte_level()
    tokenizer.enable_truncation(max_length=4)
    tokenizer.enable_padding(length=8)
    vocab = Vocab.load(made.write_folder(tmp_path, tokenizer))
    assert vocab.decode(vocab.encode("the quick brown fox " * 9)) == "the quick brown fox " * 9
    assert len(vocab.encode("a")) == 1


def test_odd_characters_stay_in_the_text() -> None:
    vocab = made.vocab_of(made.byte_level())
    for odd in ("\0", "\x01", "\u200b", "\ufeff"):
        text = f"alpha{odd} omega"
        assert vocab.decode(vocab.encode(text)) == text


def test_token_bytes_are_what_a_reader_sees() -> None:
    smollm = made.vocab_of(made.byte_level())
    the = smollm.encode(" the")
    assert b"".join(smollm.token_bytes[i] for i in the) == b" the"
    assert smollm.token_bytes[1] == b"<s>"
    sentences = made.vocab_of(made.build_tokenizer_of(made.sentence_metadata()))
    assert sentences.token_bytes[sentences.tokens.index("▁the")] == b" the"
    assert sentences.token_bytes[sentences.tokens.index("<0xF0>")] == b"\xf0"


@pytest.fixture
def long_turns() -> Iterator[None]:
    """A thread keeps the GIL for long, unless it lets it go by itself."""
    before_s = sys.getswitchinterval()
    sys.setswitchinterval(1.0)
    yield
    sys.setswitchinterval(before_s)


@pytest.mark.usefixtures("long_turns")
def test_encoding_leaves_other_threads_running() -> None:
    vocab = made.vocab_of(made.byte_level())
    text = "猫" * 60_000
    done = threading.Event()
    turns = [0]
    seen: list[int] = []

    def encode() -> None:
        seen.append(turns[0])
        vocab.encode(text)
        seen.append(turns[0])
        done.set()

    thread = threading.Thread(target=encode)
    thread.start()
    while not done.is_set():
        turns[0] += 1
    thread.join()
    assert seen[1] > seen[0]


def test_config_may_name_tokens_as_objects(tmp_path: Path) -> None:
    config = {"eos_token": {"content": "</s>", "special": True}, "bos_token": None}
    folder = made.write_folder(tmp_path, made.byte_level(), config)
    (folder / "special_tokens_map.json").write_text(json.dumps({"bos_token": "<s>"}))
    vocab = Vocab.load(folder)
    assert (vocab.bos_id, vocab.eos_id) == (1, 2)


def test_encoding_starts_no_threads(tmp_path: Path) -> None:
    """Those of the library keep the niceness of whoever is first to encode."""
    made.write_folder(tmp_path / "m", made.byte_level())
    program = (
        "import os, sys; from actors.vocab.vocab import Vocab; vocab = Vocab.load(sys.argv[1]);"
        " vocab.encode('the fox'); print(len(os.listdir('/proc/self/task')))"
    )
    words = [sys.executable, "-c", program, str(tmp_path / "m")]
    environment = {k: v for k, v in os.environ.items() if k != "TOKENIZERS_PARALLELISM"}
    found = subprocess.run(words, cwd=ROOT, env=environment, capture_output=True, check=True)
    assert found.stdout.strip() == b"1"
