"""Which way of the library is taken, and what the next process knows of it; no device is asked."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from kernels.ops import tuning
from kernels.ops.tuning import DEFAULT, Key, Tuning

KEY = Key(8, 64, 32, torch.bfloat16, torch.bfloat16)


class FakeProduct:
    """Its ways are numbers."""

    made: list[tuple[Any, ...]]

    def __init__(self, lt: object, *what: Any) -> None:
        self.made.append(what)

    def ways(self, count: int) -> list[int]:
        return [0, 1, 2][:count]

    def run(self, weight: torch.Tensor, x: torch.Tensor, out: torch.Tensor, way: int) -> Any:
        return out.fill_(way)


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    FakeProduct.made = []
    monkeypatch.setattr(tuning, "Product", FakeProduct)
    monkeypatch.setattr(tuning, "CublasLt", lambda device: object())
    monkeypatch.setattr(tuning, "identity", lambda device: "here")
    return FakeProduct.made


def tuning_of(path: Path, times: list[float]) -> Tuning:
    """`times`: of the ways, then of torch's own."""
    made = Tuning(torch.device("cpu"), path)
    left = iter(times)
    made.seconds = lambda call, weights: next(left)  # type: ignore[method-assign]
    return made


def run(made: Tuning, rows: int = 8, dtype: torch.dtype = torch.bfloat16) -> int | None:
    out = made.run(torch.zeros(64, 32, dtype=dtype), torch.zeros(rows, 32, dtype=dtype), dtype)
    return None if out is None else int(out[0, 0])


@pytest.mark.parametrize(
    ("times", "taken"),
    [([3.0, 1.0, 2.0, 3.0], 1), ([3.0, 0.98, 2.0, 1.0], None), ([1.0, 1.0, 1.0, 5.0], 0)],
)
def test_a_way_is_taken_only_if_it_is_clearly_faster(
    made: list[tuple[Any, ...]], tmp_path: Path, times: list[float], taken: int | None
) -> None:
    path = tmp_path / "choices.json"
    first = tuning_of(path, times)
    assert run(first) is None, "nothing is measured before it may be"
    with first.opened():
        assert run(first) == taken
        assert run(first) == taken, "measured once"
    assert run(first) == taken
    second = tuning_of(path, [])  # another process: would end with StopIteration if it measured
    assert run(second) == taken
    with second.opened():
        assert run(second) == taken


def test_what_is_not_worth_it_is_not_measured(made: list[tuple[Any, ...]], tmp_path: Path) -> None:
    there = tuning_of(tmp_path / "choices.json", [])
    with there.opened():
        assert run(there, rows=1) is None
        assert run(there, rows=tuning.ROWS_MAX + 1) is None
        assert run(there, dtype=torch.float32) is None
    assert not made and not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "content",
    [
        "",
        "[]",
        "{",
        json.dumps({KEY.text: 99}),
        json.dumps({KEY.text: "1"}),
        json.dumps({"8 64 32 int8 bfloat16": 1}),
        json.dumps({"8 64": 1}),
    ],
)
def test_a_file_that_says_nothing_is_written_anew(
    made: list[tuple[Any, ...]], tmp_path: Path, content: str
) -> None:
    path = tmp_path / "choices.json"
    path.write_text(content, "utf-8")
    there = tuning_of(path, [3.0, 2.0, 1.0, 9.0])
    with there.opened():
        assert run(there) == 2
    assert json.loads(path.read_text("utf-8")) == {KEY.text: 2}
    assert not [each for each in tmp_path.iterdir() if each != path]


def test_a_choice_that_the_library_no_longer_offers_is_forgotten(
    made: list[tuple[Any, ...]], tmp_path: Path
) -> None:
    path = tmp_path / "choices.json"
    path.write_text(json.dumps({KEY.text: 7}), "utf-8")
    there = tuning_of(path, [])
    assert run(there) is None and there.choices == {KEY: DEFAULT}


def test_what_another_process_found_meanwhile_is_kept(
    made: list[tuple[Any, ...]], tmp_path: Path
) -> None:
    path = tmp_path / "choices.json"
    there = tuning_of(path, [1.0, 2.0, 3.0, 9.0])
    with there.opened():
        run(there)
        other = KEY._replace(rows=16)
        path.write_text(json.dumps({other.text: 2}), "utf-8")
    assert json.loads(path.read_text("utf-8")) == {KEY.text: 0, other.text: 2}


def test_without_the_library_all_goes_on(tmp_path: Path) -> None:
    """The real one: there is no CUDA here, or it is used as it is."""
    there = Tuning(torch.device("cpu"), tmp_path / "choices.json")
    if torch.version.cuda is None:
        assert there.lt is None
        with there.opened():
            assert run(there) is None
