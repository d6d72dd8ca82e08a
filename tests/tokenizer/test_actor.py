"""This file tests the tokenizer as an actor, in a Cell; threads are made to wait by hand."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from actors.runtime.testkit import Cell
from actors.tokenizer.actor import QUICK_IDS_MAX, Tokenizer
from actors.tokenizer.chat import BadTemplate
from actors.vocab.vocab import Vocab
from messages.base import Address
from messages.config import ModelConfig, Paths, TokenizerConfig
from messages.gateway import Deltas, Encoded, Failed
from messages.scheduler import Cancel as SchedulerCancel
from messages.scheduler import Submit
from messages.system import Cause, Undelivered
from messages.tokenizer import Cancel, Chat, Encode
from messages.types import Fault, FinishReason, Problem, Sampling, StopRules, pack, unpack
from messages.worker import Facts
from tests.vocab import made

GATEWAY = Address("main", "gateway", 7)
CONTEXT_LEN = 64
TEMPLATE = "{{ bos_token }}{% for m in messages %}{{ m.content }}{% endfor %}"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    config = {"chat_template": TEMPLATE}
    return made.write_folder(tmp_path / "model", made.byte_level(), config, bos=True)


@pytest.fixture
def vocab(folder: Path) -> Vocab:
    return Vocab.load(folder)


def cell_of(folder: Path, vocab_size: int = 500, **config: Any) -> Cell:
    facts = Facts("m", vocab_size, CONTEXT_LEN, 16, 100, (2,), "float32", "cpu")
    actor = Tokenizer(ModelConfig(path=str(folder)), TokenizerConfig(**config), Paths())
    cell = Cell(actor, path="tokenizer", notes={Paths().worker: msgspec.msgpack.encode(facts)})
    cell.start()
    return cell


@pytest.fixture
def cell(folder: Path) -> Cell:
    return cell_of(folder)


def encode(request: str = "r", **fields: Any) -> Encode:
    fields = {"sampling": Sampling(max_tokens=4), "stop": StopRules(strings=("x",)), **fields}
    return Encode(request, fields.pop("attempt", 0), GATEWAY, **fields)


def hold(cell: Cell) -> list[Callable[[], None]]:
    """From now on offloaded work waits in the returned list, as in busy threads."""
    held: list[Callable[[], None]] = []
    offload = cell.context.offload

    def wait(work: Any, then: Any, *, lane: str = "default") -> None:
        held.append(lambda: offload(work, then, lane=lane))

    cell.context.offload = wait  # type: ignore[method-assign]
    return held


def release(cell: Cell, held: list[Callable[[], None]]) -> None:
    while held:
        held.pop(0)()
    cell._settle()


def problem_of(cell: Cell) -> Problem:
    ((to, failed),) = cell.take()
    assert to == str(GATEWAY)
    assert isinstance(failed, Failed)
    return failed.problem


def test_a_prompt_goes_on_to_the_router_and_the_gateway_is_told(cell: Cell, vocab: Vocab) -> None:
    cell.tell(encode(text="the fox", emitted=pack([5]), namespace="n", priority=3))
    (to_gateway, told), (to_router, submit) = cell.take()
    ids = vocab.encode("the fox")
    assert (to_gateway, to_router) == (str(GATEWAY), Paths().router)
    assert told == Encoded("r", 0, len(ids))
    assert submit == Submit(
        request="r",
        attempt=0,
        reply_to=GATEWAY,
        prompt=pack(ids),
        sampling=Sampling(max_tokens=4),
        stop=StopRules(strings=("x",)),
        emitted=pack([5]),
        namespace="n",
        priority=3,
    )
    assert ids[0] == vocab.bos_id


def test_a_chat_is_rendered_and_its_bos_is_not_doubled(cell: Cell, vocab: Vocab) -> None:
    """B087."""
    chat = Chat(b'[{"role": "user", "content": "the fox"}]')
    cell.tell(encode(chat=chat, want_prompt_ids=True))
    (_, told), (_, submit) = cell.take()
    assert isinstance(told, Encoded) and isinstance(submit, Submit)
    ids = list(unpack(submit.prompt))
    assert ids == vocab.encode("the fox") and ids[:2] != [1, 1]
    assert told.prompt_ids == submit.prompt and told.prompt_tokens == len(ids)


def test_open_max_tokens_are_what_is_left_of_the_context(cell: Cell, vocab: Vocab) -> None:
    cell.tell(encode(text="fox", sampling=Sampling(max_tokens=0)))
    _, (_, submit) = cell.take()
    assert isinstance(submit, Submit)
    assert submit.sampling.max_tokens == CONTEXT_LEN - len(vocab.encode("fox"))


def test_ids_go_on_as_they_are(cell: Cell) -> None:
    cell.tell(encode(ids=pack([5, 499])))
    _, (_, submit) = cell.take()
    assert isinstance(submit, Submit) and submit.prompt == pack([5, 499])


def test_ids_do_not_wait_for_a_thread_but_where_there_is_more_to_do(cell: Cell) -> None:
    held = hold(cell)
    cell.tell(encode("text", text="the fox"))
    cell.tell(encode("many", ids=pack([5]) * (QUICK_IDS_MAX + 1)))
    cell.tell(encode("told", ids=pack([5]), want_prompt_text=True))
    cell.tell(encode("wrong", ids=pack([5, 1 << 20])))
    cell.tell(encode("ids", ids=pack([5, 499])))
    assert len(held) == 3
    (_, failed), (_, told), (_, submit) = cell.take()
    assert isinstance(failed, Failed) and failed.request == "wrong"
    assert isinstance(told, Encoded) and isinstance(submit, Submit)
    assert told.request == submit.request == "ids"
    cell.tell(Cancel("ids", 0))
    ((to, cancel),) = cell.take()
    assert to == Paths().router and cancel == SchedulerCancel("ids", 0)
    release(cell, held)


def test_a_prompt_that_is_only_checked_goes_nowhere(cell: Cell, vocab: Vocab) -> None:
    asked = encode(text="Hi", forward=False, want_prompt_ids=True, want_prompt_text=True)
    cell.tell(asked)
    ((to, encoded),) = cell.take()
    ids = vocab.encode("Hi")
    assert to == str(GATEWAY)
    assert encoded == Encoded("r", 0, len(ids), pack(ids), vocab.decode(ids, skip_special=False))


@pytest.mark.parametrize(
    ("fields", "param", "code", "said"),
    [
        ({"ids": pack([5, 500])}, "prompt", None, "token id 500"),
        ({"ids": pack([-1])}, "prompt", None, "token id -1"),
        ({"ids": b""}, "prompt", None, "empty"),
        ({"text": "", "add_special": False}, "prompt", None, "empty"),
        ({"text": "猫 " * 100}, "prompt", "context_length_exceeded", "64 tokens"),
        ({"text": "a" * 1_000_000}, "prompt", "context_length_exceeded", "1000000 characters"),
        (
            {"text": "fox", "sampling": Sampling(max_tokens=64)},
            "prompt",
            "context_length_exceeded",
            "max_tokens of 64",
        ),
        (
            {"chat": Chat(b'[{"role": "user", "content": "' + b"qz" * 900 + b'"}]')},
            "messages",
            "context_length_exceeded",
            "64 tokens",
        ),
        (
            {"text": "fox", "sampling": Sampling(logit_bias=((500, 1.0),))},
            "logit_bias",
            None,
            "500",
        ),
    ],
)
def test_what_cannot_be_served_is_refused_with_its_field(
    cell: Cell, fields: dict[str, Any], param: str, code: str | None, said: str
) -> None:
    cell.tell(encode(**fields))
    problem = problem_of(cell)
    assert (problem.fault, problem.param, problem.code) == (Fault.INVALID, param, code)
    assert said in problem.message


def test_an_empty_prompt_is_one_bos_where_the_model_has_one(cell: Cell) -> None:
    """B071."""
    cell.tell(encode(text=""))
    (_, told), _ = cell.take()
    assert isinstance(told, Encoded) and told.prompt_tokens == 1


def test_a_special_token_that_the_model_has_no_row_for_is_refused(folder: Path) -> None:
    cell = cell_of(folder, vocab_size=300)
    cell.tell(encode(text="<é fox>"))
    assert "token id" in problem_of(cell).message


def test_more_prompts_than_may_wait_are_told_to_come_again(folder: Path) -> None:
    cell = cell_of(folder, queued_max=2)
    held = hold(cell)
    for name in ("a", "b", "c"):
        cell.tell(encode(name, text="fox"))
    problem = problem_of(cell)
    assert problem.fault is Fault.OVERLOADED and problem.retry_after_s is not None
    release(cell, held)
    assert [m.request for _, m in cell.take() if isinstance(m, Submit)] == ["a", "b"]
    cell.tell(encode("c", text="fox"))
    release(cell, held)
    assert len(cell.take()) == 2


def test_a_cancel_while_encoding_ends_the_request_once_and_nothing_goes_on(cell: Cell) -> None:
    held = hold(cell)
    cell.tell(encode(text="fox", emitted=pack([5, 6])))
    cell.tell(Cancel("r", 0))
    cell.tell(Cancel("r", 0))
    assert cell.take() == []
    release(cell, held)
    ((to, deltas),) = cell.take()
    assert to == str(GATEWAY) and isinstance(deltas, Deltas)
    (delta,) = deltas.rows
    assert (delta.finish, delta.index, delta.token_count) == (FinishReason.ABORT, 2, 0)


def test_the_work_of_a_cancelled_prompt_is_left_out(cell: Cell) -> None:
    held = hold(cell)
    cell.tell(encode(text="fox"))
    cell.tell(Cancel("r", 0))

    def never(message: Encode) -> Any:
        raise AssertionError("encoded for nobody")

    cell.actor.core.encode = never  # type: ignore[attr-defined]
    release(cell, held)
    assert len(cell.take()) == 1


def test_a_cancel_follows_its_request_to_the_router(cell: Cell) -> None:
    cell.tell(encode(text="fox"))
    cell.tell(Cancel("r", 0))
    sent = cell.take()
    assert [type(message) for _, message in sent] == [Encoded, Submit, SchedulerCancel]
    assert sent[-1][0] == Paths().router


def test_a_cancel_of_another_attempt_does_not_end_this_one(cell: Cell) -> None:
    held = hold(cell)
    cell.tell(encode(text="fox", attempt=2))
    cell.tell(Cancel("r", 1))
    release(cell, held)
    assert [type(m) for _, m in cell.take()] == [SchedulerCancel, Encoded, Submit]


@pytest.mark.parametrize(
    ("cause", "fault"), [(Cause.FULL, Fault.OVERLOADED), (Cause.NOBODY, Fault.UNAVAILABLE)]
)
def test_a_submit_that_comes_back_ends_the_request(cell: Cell, cause: Cause, fault: Fault) -> None:
    cell.tell(encode(text="fox"))
    cell.take()
    router = Address("main", Paths().router, 1)
    cell.undelivered(Undelivered(router, "Submit", cause, "r"))
    assert problem_of(cell).fault is fault
    cell.undelivered(Undelivered(router, "Submit", cause, "r"))
    assert cell.take() == []


def test_an_encoder_that_fails_costs_its_own_request_only(cell: Cell) -> None:
    def broken(message: Encode) -> Any:
        raise RuntimeError("inside")

    sound = cell.actor.core.encode  # type: ignore[attr-defined]
    cell.actor.core.encode = broken  # type: ignore[attr-defined]
    cell.tell(encode(text="fox"))
    problem = problem_of(cell)
    assert problem.fault is Fault.INTERNAL and "inside" not in problem.message
    cell.actor.core.encode = sound  # type: ignore[attr-defined]
    cell.tell(encode(text="fox"))
    assert len(cell.take()) == 2


def test_encoding_is_measured(cell: Cell) -> None:
    cell.tell(encode(text="fox"))
    assert [name for name, _ in cell.context.tally.histograms] == ["histrio_encode_seconds"]


def test_a_template_of_the_operators_replaces_the_models(folder: Path, tmp_path: Path) -> None:
    own = tmp_path / "own.jinja"
    own.write_text("OWN")
    cell = cell_of(folder, chat_template=str(own))
    cell.tell(encode(chat=Chat(b'[{"role": "user", "content": "x"}]'), want_prompt_ids=True))
    (_, told), _ = cell.take()
    assert isinstance(told, Encoded)
    assert Vocab.load(folder).decode(list(unpack(told.prompt_ids))) == "OWN"
    own.write_text("{% if %}")
    with pytest.raises(BadTemplate, match="line 1"):
        cell_of(folder, chat_template=str(own))
    with pytest.raises(BadTemplate, match=r"none\.jinja: .*cannot be read"):
        cell_of(folder, chat_template=str(tmp_path / "none.jinja"))


def test_bad_words_become_ids_and_prompts_are_cut_where_asked(cell: Cell, vocab: Vocab) -> None:
    cell.tell(encode(text="hello there world", bad_words=("the",), truncate_len=2))
    (submit,) = [message for _, message in cell.sent if isinstance(message, Submit)]
    ids = vocab.encode("hello there world")
    assert list(unpack(submit.prompt)) == ids[-2:]
    spelled = {tuple(vocab.encode(word, add_special=False)) for word in ("the", " the")}
    assert set(submit.sampling.bad_sequences) == spelled
    cell.sent.clear()
    long = "hello " * CONTEXT_LEN
    cell.tell(encode("q", text=long, truncate_len=0))
    (submit,) = [message for _, message in cell.sent if isinstance(message, Submit)]
    assert len(unpack(submit.prompt)) == CONTEXT_LEN - 4


def test_words_to_be_scored_become_ids(cell: Cell, vocab: Vocab) -> None:
    cell.tell(encode(text="hello", label_words=("fox", "the")))
    (submit,) = [message for _, message in cell.sent if isinstance(message, Submit)]
    first = [vocab.encode(word, add_special=False)[0] for word in ("fox", "the")]
    assert list(submit.sampling.label_ids) == first


def test_a_refusal_calls_the_prompt_what_the_client_calls_it(cell: Cell) -> None:
    cell.tell(encode(text="hello " * 2 * CONTEXT_LEN, param="input"))
    assert problem_of(cell).param == "input"


def test_a_prompt_that_is_measured_may_be_empty_or_too_long(cell: Cell, vocab: Vocab) -> None:
    long = "the fox " * CONTEXT_LEN
    fields: dict[str, Any] = {"forward": False, "measure": True, "want_prompt_ids": True}
    cell.tell(encode("long", text=long, **fields))
    cell.tell(encode("empty", text="", add_special=False, **fields))
    (_, measured), (_, empty) = cell.take()
    assert measured.prompt_tokens == len(vocab.encode(long)) > CONTEXT_LEN
    assert (empty.prompt_tokens, empty.prompt_ids) == (0, b"")
    # Ids outside of the vocabulary are wrong all the same.
    cell.tell(encode(ids=pack([500]), **fields))
    assert problem_of(cell).fault is Fault.INVALID


def test_the_text_of_measured_ids_has_special_tokens_where_they_are_wanted(
    cell: Cell, vocab: Vocab
) -> None:
    ids = vocab.encode("the fox")
    assert ids[0] == vocab.bos_id
    for skip_special, text in ((True, "the fox"), (False, vocab.decode(ids, skip_special=False))):
        cell.tell(
            encode(
                ids=pack(ids),
                forward=False,
                measure=True,
                want_prompt_text=True,
                stop=StopRules(skip_special=skip_special),
            )
        )
        ((_, told),) = cell.take()
        assert told.prompt_text == text
