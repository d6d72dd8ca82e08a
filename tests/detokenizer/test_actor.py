"""This file tests the detokenizer as an actor, in a Cell."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from actors.detokenizer.actor import Detokenizer
from actors.runtime.testkit import Cell
from actors.vocab.vocab import Vocab
from messages.base import Address
from messages.config import ModelConfig, Paths
from messages.detokenizer import Open, Tail, Tokens
from messages.gateway import Deltas, Failed
from messages.scheduler import StopMet
from messages.types import Fault, FinishReason, StopRules, Usage, pack
from tests.vocab import made

ONE, TWO = Address("main", "gateway", 1), Address("two", "gateway", 1)


@pytest.fixture
def vocab(tmp_path: Path) -> Vocab:
    return Vocab.load(made.write_folder(tmp_path / "model", made.byte_level()))


@pytest.fixture
def cell(tmp_path: Path, vocab: Vocab) -> Cell:
    actor = Detokenizer(ModelConfig(path=str(tmp_path / "model")), Paths())
    cell = Cell(actor, path="detokenizer")
    assert cell.start() == b""
    return cell


def opened(request: str, to: Address = ONE, attempt: int = 0, **rules: Any) -> Open:
    return Open(request, attempt, to, StopRules(**rules), usage=Usage(3, cached_tokens=2))


def row(request: str, index: int, ids: list[int], attempt: int = 0, **fields: Any) -> Tail:
    return Tail(request, attempt, index, pack(ids), **fields)


END = {"finish": FinishReason.LENGTH, "usage": Usage(3, 9)}


def test_one_message_for_each_gateway_and_step(cell: Cell, vocab: Vocab) -> None:
    ids = vocab.encode("fox")
    cell.tell(
        Tokens(
            opened=(opened("a"), opened("b", TWO), opened("c")),
            rows=(row("a", 0, ids), row("b", 0, ids), row("c", 0, ids)),
        )
    )
    sent = cell.take()
    assert [to for to, _ in sent] == [str(ONE), str(TWO)]
    assert [[d.request for d in m.rows] for _, m in sent if isinstance(m, Deltas)] == [
        ["a", "c"],
        ["b"],
    ]


def test_a_stop_string_tells_the_client_at_once_and_the_scheduler(cell: Cell, vocab: Vocab) -> None:
    ids = vocab.encode("the quick brown fox")
    cell.tell(Tokens(opened=(opened("a", strings=("quick",)),), rows=(row("a", 0, ids[:-1]),)))
    (to_scheduler, met), (_, deltas) = cell.take()
    assert to_scheduler == Paths().scheduler
    assert isinstance(met, StopMet) and isinstance(deltas, Deltas)
    (delta,) = deltas.rows
    assert (delta.text, delta.finish, delta.matched) == ("the ", FinishReason.STOP, "quick")
    assert met.token_count == delta.token_count
    assert delta.usage == Usage(3, delta.token_count, 2)
    # What was computed meanwhile goes nowhere, and the entry ends with the scheduler's own end.
    cell.tell(Tokens(rows=(row("a", len(ids) - 1, ids[-1:]),)))
    cell.tell(Tokens(rows=(row("a", len(ids), [], **END),)))
    assert cell.take() == []
    assert cell.actor.outputs == {}  # type: ignore[attr-defined]


def test_a_match_in_the_last_step_needs_no_word_to_the_scheduler(cell: Cell, vocab: Vocab) -> None:
    ids = vocab.encode("the fox")
    cell.tell(Tokens(opened=(opened("a", strings=("fox",)),), rows=(row("a", 0, ids, **END),)))
    ((_, deltas),) = cell.take()
    assert isinstance(deltas, Deltas) and deltas.rows[0].finish is FinishReason.STOP


def test_a_tail_of_an_unknown_request_is_dropped_and_counted(cell: Cell) -> None:
    cell.tell(Tokens(rows=(row("ghost", 0, [5]),)))
    assert cell.take() == []
    assert cell.counters["histrio_detokenizer_dropped_total"] == 1


def test_a_new_attempt_takes_the_place_of_an_older_one(cell: Cell, vocab: Vocab) -> None:
    ids = vocab.encode("fox")
    cell.tell(Tokens(opened=(opened("a", attempt=1),)))
    cell.tell(Tokens(opened=(opened("a", attempt=0),), rows=(row("a", 0, ids, attempt=0),)))
    assert cell.take() == []
    cell.tell(Tokens(rows=(row("a", 0, ids, attempt=1),)))
    ((_, deltas),) = cell.take()
    assert isinstance(deltas, Deltas) and deltas.rows[0].attempt == 1


def test_a_gap_is_handed_back_for_a_new_attempt_instead_of_wrong_text(cell: Cell) -> None:
    cell.tell(Tokens(opened=(opened("a"),), rows=(row("a", 4, [5]),)))
    ((to, failed),) = cell.take()
    assert to == str(ONE)
    assert isinstance(failed, Failed) and failed.problem.fault is Fault.UNAVAILABLE
    cell.tell(Tokens(rows=(row("a", 5, [5], **END),)))
    assert cell.take() == []


def test_the_end_of_a_request_frees_its_entry(cell: Cell, vocab: Vocab) -> None:
    cell.tell(Tokens(opened=(opened("a"),), rows=(row("a", 0, vocab.encode("fox"), **END),)))
    ((_, deltas),) = cell.take()
    assert isinstance(deltas, Deltas) and deltas.rows[0].usage == Usage(3, 9)
    assert cell.actor.outputs == {}  # type: ignore[attr-defined]


def test_the_death_of_the_scheduler_clears_what_it_was_running(cell: Cell) -> None:
    cell.tell(Tokens(opened=(opened("a"), opened("b"))))
    cell.down(Paths().scheduler)
    assert cell.actor.outputs == {}  # type: ignore[attr-defined]


def test_what_a_dead_scheduler_said_comes_too_late(cell: Cell, vocab: Vocab) -> None:
    path = Paths().scheduler
    first = cell.target(path).incarnation
    cell.down(path)
    late = Tokens(opened=(opened("a", attempt=1),), rows=(row("a", 0, vocab.encode("fox"), 1),))
    cell.tell(late, Address("engine", path, first))
    assert cell.take() == []
    assert cell.actor.outputs == {}  # type: ignore[attr-defined]
    assert cell.counters["histrio_detokenizer_dropped_total"] == 1
    cell.tell(late, Address("engine", path, first + 1))
    ((_, deltas),) = cell.take()
    assert isinstance(deltas, Deltas) and deltas.rows[0].request == "a"


def test_the_news_of_a_death_that_comes_late_takes_nothing_from_the_next(
    cell: Cell, vocab: Vocab
) -> None:
    path = Paths().scheduler
    first = cell.target(path).incarnation
    dead, living = (Address("engine", path, life) for life in (first, first + 1))
    ids = vocab.encode("the fox")
    cell.tell(Tokens(opened=(opened("a"), opened("b"))), dead)
    cell.tell(Tokens(opened=(opened("a", attempt=1),), rows=(row("a", 0, ids[:1], 1),)), living)
    cell.take()
    cell.down(path)
    assert list(cell.actor.outputs) == ["a"]  # type: ignore[attr-defined]
    cell.tell(Tokens(rows=(row("a", 1, ids[1:], 1),)), living)
    ((_, deltas),) = cell.take()
    assert isinstance(deltas, Deltas) and deltas.rows[0].attempt == 1


def test_what_was_emitted_is_replayed_and_not_sent_again(cell: Cell, vocab: Vocab) -> None:
    ids = vocab.encode("naïve 🦊 fox xyz 🚀🚀")
    assert len(ids) > 6
    resumed = Open("a", 1, ONE, StopRules(), emitted=pack(ids[:5]))
    cell.tell(Tokens(opened=(resumed,), rows=(row("a", 5, ids[5:], attempt=1),)))
    ((_, deltas),) = cell.take()
    assert isinstance(deltas, Deltas)
    whole = vocab.decode(ids)
    assert deltas.rows[0].text and whole.endswith(deltas.rows[0].text)
    assert vocab.decode(ids[:5]).rstrip("\ufffd") + deltas.rows[0].text == whole
