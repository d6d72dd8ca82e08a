"""Rooms of one process have one vocabulary together, as long as it is that of the files."""

from __future__ import annotations

import gc
import os
import threading
from pathlib import Path

import pytest

from actors.vocab.metadata import ModelError
from actors.vocab.shared import vocab_of
from actors.vocab.vocab import Vocab
from tests.vocab import made


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return made.write_folder(tmp_path / "model", made.byte_level())


def count_loads(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    loads: list[Path] = []
    load = Vocab.load

    def counted(path: Path | str) -> Vocab:
        loads.append(Path(path))
        return load(path)

    monkeypatch.setattr(Vocab, "load", counted)
    return loads


def test_it_is_loaded_once_also_by_threads(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loads = count_loads(monkeypatch)
    found: list[Vocab] = []
    threads = [
        threading.Thread(target=lambda: found.append(vocab_of(str(folder)))) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 4 and len({id(vocab) for vocab in found}) == 1
    assert loads == [folder]
    assert found[0].encode("the fox") == Vocab.load(folder).encode("the fox")


def test_files_that_have_changed_are_read_anew(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loads = count_loads(monkeypatch)
    first = vocab_of(folder)
    os.utime(folder / "tokenizer.json", ns=(1, 1))
    assert vocab_of(folder) is not first
    assert len(loads) == 2


def test_nobody_keeps_it_for_those_who_are_gone(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loads = count_loads(monkeypatch)
    vocab_of(folder)
    gc.collect()
    vocab_of(folder)
    assert len(loads) == 2


def test_what_is_no_model_is_told_to_each(tmp_path: Path) -> None:
    for _ in range(2):
        with pytest.raises(ModelError, match="the tokenizer is missing"):
            vocab_of(tmp_path)
