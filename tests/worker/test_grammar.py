"""When the worker reads the vocabulary that constraints need."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from actors.worker.grammar import LARGE_VOCAB, Grammars
from messages.types import Grammar
from tests.vocab.made import byte_level, write_folder


class FakeRunner:
    """Keeps what it is told that ids stand for."""

    def __init__(self, vocab_size: int, eos_ids: tuple[int, ...] = (2,)) -> None:
        self.facts = SimpleNamespace(vocab_size=vocab_size, eos_ids=eos_ids)
        self.constrainer: Any = None
        self.tables: list[Any] = []

    def use_vocabulary(self, table: Any) -> Any:
        self.tables.append(table)
        self.constrainer = SimpleNamespace(prepare=lambda constraint: None)
        return self.constrainer


def folder(path: Path) -> str:
    write_folder(path, byte_level())
    return str(path)


def test_a_large_vocabulary_is_read_at_the_start_and_once(tmp_path: Path) -> None:
    runner = FakeRunner(LARGE_VOCAB)
    path = folder(tmp_path / "model")
    Grammars(runner, path).start()  # type: ignore[arg-type]
    assert len(runner.tables) == 1 and runner.tables[0].vocab_size == LARGE_VOCAB
    assert not Grammars(runner, path).compile(Grammar("regex", "a"))  # type: ignore[arg-type]
    assert len(runner.tables) == 1


def test_a_small_one_is_read_when_it_is_needed(tmp_path: Path) -> None:
    runner = FakeRunner(LARGE_VOCAB - 1)
    grammars = Grammars(runner, folder(tmp_path / "model"))  # type: ignore[arg-type]
    grammars.start()
    assert not runner.tables
    assert not grammars.compile(Grammar("regex", "a"))
    assert len(runner.tables) == 1


@pytest.mark.parametrize("has_vocabulary", [True, False])
def test_a_model_that_takes_no_constraints_starts_all_the_same(
    tmp_path: Path, has_vocabulary: bool
) -> None:
    if has_vocabulary:
        write_folder(tmp_path, byte_level(), {"eos_token": None})
    runner = FakeRunner(LARGE_VOCAB, eos_ids=())
    Grammars(runner, str(tmp_path)).start()  # type: ignore[arg-type]
    assert not runner.tables
