"""This file tests one request's output: text, ends, counts, and that a replay changes nothing."""

from __future__ import annotations

import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from actors.detokenizer.output import Output
from actors.detokenizer.stream import open_stream
from actors.gateway.pattern import read_pattern
from messages.base import Address
from messages.detokenizer import Open, Tail
from messages.gateway import Delta
from messages.types import FinishReason, Logprob, StopRules, Usage, pack, unpack
from tests.vocab import made

GATEWAY = Address("main", "gateway", 1)
VOCAB = made.vocab_of(made.byte_level())
SENTENCES = made.vocab_of(made.build_tokenizer_of(made.sentence_metadata()))
TEXT = "the quick brown 🦊 jumps\n\nover the lazy dog"
IDS = VOCAB.encode(TEXT)
EOS = 2


def output(vocab: Any = VOCAB, emitted: list[int] | None = None, **rules: Any) -> Output:
    opened = Open("r", 0, GATEWAY, StopRules(**rules), pack(emitted or []), Usage(prompt_tokens=5))
    return Output(opened, vocab.pieces, vocab.token_bytes)


def tail(index: int, ids: list[int], **fields: Any) -> Tail:
    return Tail("r", 0, index, pack(ids), **fields)


def play(out: Output, ids: list[int], sizes: list[int], start: int = 0, **end: Any) -> list[Delta]:
    """Feeds `ids` in groups; the last group carries the end."""
    deltas, at = [], start
    groups = [*sizes, len(ids)]
    while at < len(ids) and not out.ended:
        size = max(1, groups.pop(0) if len(groups) > 1 else groups[0])
        group = ids[at : at + size]
        last = at + len(group) == len(ids)
        delta = out.take(tail(at, group, **(end if last else {})))
        out.check()
        assert delta is not None
        deltas.append(delta)
        at += len(group)
    return deltas


LENGTH = {"finish": FinishReason.LENGTH, "usage": Usage(5, len(IDS))}


@settings(max_examples=200)
@given(sizes=st.lists(st.integers(1, 4), max_size=30), data=st.data())
def test_deltas_join_to_the_text_and_their_indexes_to_the_tokens(
    sizes: list[int], data: st.DataObject
) -> None:
    ids = IDS[: data.draw(st.integers(1, len(IDS)))]
    deltas = play(output(want_token_ids=True), ids, sizes, **LENGTH)
    assert "".join(delta.text for delta in deltas) == VOCAB.decode(ids)
    assert [i for delta in deltas for i in unpack(delta.token_ids)] == ids
    assert sum(delta.token_count for delta in deltas) == len(ids)
    assert [delta.finish for delta in deltas[:-1]] == [None] * (len(deltas) - 1)
    assert deltas[-1].finish is FinishReason.LENGTH


@settings(max_examples=200)
@given(
    stop=st.sampled_from(["\n\n", "fox", "🦊", "own 🦊", "over t", "zzz", "e"]),
    min_tokens=st.integers(0, 30),
    sizes=st.lists(st.integers(1, 5), max_size=30),
)
def test_a_stop_string_ends_the_text_at_its_first_match_that_counts(
    stop: str, min_tokens: int, sizes: list[int]
) -> None:
    out = output(strings=(stop,), min_tokens=min_tokens)
    deltas = play(out, IDS, sizes, **LENGTH)
    text = "".join(delta.text for delta in deltas)
    # What the first n tokens spell, for each n: the match is the first that ends after the exempt.
    spelt = [VOCAB.decode(IDS[:n]).rstrip("\ufffd") for n in range(len(IDS) + 1)]
    exempt = len(spelt[min(min_tokens, len(IDS))])
    places = [
        place
        for place in range(len(TEXT))
        if TEXT.startswith(stop, place) and place + len(stop) > exempt
    ]
    if not places:
        assert text == TEXT
        assert deltas[-1].finish is FinishReason.LENGTH
        return
    assert text == TEXT[: places[0]]
    assert (deltas[-1].finish, deltas[-1].matched) == (FinishReason.STOP, stop)
    completed = next(n for n, s in enumerate(spelt) if len(s) >= places[0] + len(stop))
    assert deltas[-1].usage == Usage(prompt_tokens=5, completion_tokens=completed)
    assert sum(delta.token_count for delta in deltas) == completed > min_tokens


@settings(max_examples=200)
@given(
    cut=st.integers(0, len(IDS)),
    sizes=st.lists(st.integers(1, 4), max_size=30),
    strings=st.sampled_from([(), ("lazy",), ("\n\nov", "brown 🦊 x")]),
)
def test_a_replay_of_what_was_emitted_goes_on_as_if_nothing_had_happened(
    cut: int, sizes: list[int], strings: tuple[str, ...]
) -> None:
    whole = play(output(strings=strings), IDS, [1] * len(IDS), **LENGTH)
    if cut >= len(whole):
        return
    resumed = play(output(emitted=IDS[:cut], strings=strings), IDS, sizes, cut, **LENGTH)
    before = "".join(delta.text for delta in whole[:cut])
    after = "".join(delta.text for delta in resumed)
    assert before + after == "".join(delta.text for delta in whole)
    assert resumed[0].index == cut
    assert (resumed[-1].finish, resumed[-1].usage) == (whole[-1].finish, whole[-1].usage)


@settings(max_examples=100)
@given(
    cut=st.integers(0, len(IDS)),
    sizes=st.lists(st.integers(1, 5), max_size=30),
    expression=st.sampled_from(["o[wv]", r"\n+o", "🦊.*\\.|l.z", "[a-z]{6}", "q.*k b", "zz+"]),
    keep=st.booleans(),
)
def test_a_stop_expression_ends_the_text_alike_however_tokens_come_and_after_a_replay(
    cut: int, sizes: list[int], expression: str, keep: bool
) -> None:
    rules: dict[str, Any] = {
        "patterns": (read_pattern(expression),),
        "keep_match": keep,
        "strings": ("jumps\n\nover t",),
    }
    ends = [
        (end, begin)
        for end in range(len(TEXT) + 1)
        for begin in range(end)
        if re.fullmatch(f"{expression}|jumps\n\nover t", TEXT[begin:end])
    ]
    expected = TEXT if not ends else TEXT[: ends[0][0] if keep else ends[0][1]]
    whole = play(output(**rules), IDS, [1] * len(IDS), **LENGTH)
    grouped = play(output(**rules), IDS, sizes, **LENGTH)
    resumed = []
    if cut < len(whole):
        resumed = play(output(emitted=IDS[:cut], **rules), IDS, sizes, cut, **LENGTH)
    text = "".join(delta.text for delta in whole)
    assert "".join(delta.text for delta in grouped) == text == expected
    assert whole[-1].finish is (FinishReason.STOP if ends else FinishReason.LENGTH)
    assert (grouped[-1].finish, grouped[-1].matched) == (whole[-1].finish, whole[-1].matched)
    assert grouped[-1].usage == whole[-1].usage
    if resumed:
        assert text.endswith("".join(delta.text for delta in resumed))
        assert (resumed[-1].matched, resumed[-1].usage) == (whole[-1].matched, whole[-1].usage)


@settings(max_examples=100)
@given(
    cut=st.integers(0, len(IDS)),
    sizes=st.lists(st.integers(1, 4), max_size=30),
    stop=st.sampled_from(["", "lazy", "zz", "\n\no"]),
)
def test_spans_say_where_each_token_ends_whatever_is_held_back(
    cut: int, sizes: list[int], stop: str
) -> None:
    stream = open_stream(VOCAB.pieces, skip_special=True)
    ends, length = [], 0
    for token_id in IDS:
        length += len(stream.push(token_id))
        ends.append(length)
    rules: dict[str, Any] = {"strings": (stop,) if stop else (), "want_spans": True}
    whole = play(output(**rules), IDS, sizes, **LENGTH)
    told = [end for delta in whole for end in unpack(delta.spans)]
    assert told == ends[: sum(delta.token_count for delta in whole)]
    assert all(len(delta.spans) == 4 * delta.token_count for delta in whole)
    if cut < len(told):
        resumed = play(output(emitted=IDS[:cut], **rules), IDS, sizes, cut, **LENGTH)
        assert [end for delta in resumed for end in unpack(delta.spans)] == told[cut:]
    assert not play(output(), IDS, sizes, **LENGTH)[0].spans


def test_the_id_that_ends_it_has_a_span_of_no_text() -> None:
    out = output(want_spans=True)
    ids = [*VOCAB.encode("the fox"), EOS]
    delta = out.take(tail(0, ids, finish=FinishReason.STOP, matched=EOS, usage=Usage(5, len(ids))))
    assert delta is not None
    assert unpack(delta.spans)[-2:].tolist() == [7, 7] and len(delta.spans) == 4 * len(ids)


def test_after_a_match_nothing_more_comes_until_the_scheduler_is_through() -> None:
    out = output(strings=("quick",))
    first = out.take(tail(0, IDS[:6]))
    assert first is not None and first.finish is FinishReason.STOP
    assert first.text == "the "
    assert out.take(tail(6, IDS[6:9])) is None
    assert out.take(tail(9, [], finish=FinishReason.ABORT, usage=Usage(5, 9))) is None


def test_the_id_that_ended_it_is_no_text_even_if_special_tokens_are_shown() -> None:
    for skip_special in (True, False):
        out = output(skip_special=skip_special)
        ids = [*VOCAB.encode("the fox"), EOS]
        delta = out.take(tail(0, ids, finish=FinishReason.STOP, matched=EOS, usage=Usage(5, 3)))
        assert delta is not None
        assert (delta.text, delta.matched) == ("the fox", EOS)
        assert delta.token_count == len(ids)


def test_special_tokens_are_shown_where_they_are_asked_for() -> None:
    ids = [1, *VOCAB.encode("fox")]
    shown = output(skip_special=False).take(tail(0, ids))
    hidden = output().take(tail(0, ids))
    assert shown is not None and hidden is not None
    assert (shown.text, hidden.text) == ("<s>fox", "fox")


def test_the_held_back_text_comes_out_at_the_end() -> None:
    out = output(strings=("fox jumps",))
    ids = VOCAB.encode("the fox")
    first = out.take(tail(0, ids))
    last = out.take(tail(len(ids), [], finish=FinishReason.STOP, usage=Usage(5, len(ids))))
    assert first is not None and last is not None
    assert (first.text, last.text) == ("the ", "fox")


def test_a_stop_string_that_completes_with_the_last_bytes_still_counts() -> None:
    """A run of single bytes is text only when it ends, here with the request."""
    out = output(SENTENCES, strings=("🦊",))
    ids = SENTENCES.encode("a🦊", add_special=False)
    delta = out.take(tail(0, ids, finish=FinishReason.LENGTH, usage=Usage(5, len(ids))))
    assert delta is not None
    assert (delta.text, delta.finish, delta.matched) == ("a", FinishReason.STOP, "🦊")


def test_log_probabilities_come_with_the_bytes_of_their_tokens() -> None:
    (the,) = VOCAB.encode(" the")
    row = Logprob(the, -0.5, ((the, -0.5), (EOS, -2.0), (10**6, -9.0)))
    delta = output().take(tail(0, [the], logprobs=(row,)))
    assert delta is not None
    (told,) = delta.logprobs
    assert (told.token, told.token_id, told.logprob) == (b" the", the, -0.5)
    assert told.best == ((b" the", the, -0.5), (b"</s>", EOS, -2.0), (b"", 10**6, -9.0))


def test_log_probabilities_end_with_the_token_that_completed_the_stop_string() -> None:
    ids = VOCAB.encode("the quick brown fox")
    rows = tuple(Logprob(token_id, -1.0) for token_id in ids)
    delta = output(strings=("quick",)).take(tail(0, ids, logprobs=rows))
    assert delta is not None
    assert len(delta.logprobs) == delta.token_count < len(ids)


def test_a_tail_without_tokens_or_end_is_nothing() -> None:
    assert output().take(tail(0, [])) is None


@pytest.mark.parametrize("reason", [FinishReason.ABORT, FinishReason.LENGTH])
def test_an_unfinished_character_is_one_replacement_at_the_end(reason: FinishReason) -> None:
    fox = SENTENCES.encode("🦊", add_special=False)
    out = output()
    ids = [VOCAB.tokens.index(letter) for letter in ("ð", "Ł")]
    delta = out.take(tail(0, ids, finish=reason, usage=Usage(5, 2)))
    assert delta is not None and delta.text == "\ufffd"
    assert len(fox) > 2


def test_the_first_delta_of_an_attempt_says_what_the_prompt_cost() -> None:
    for emitted in ([], IDS[:2]):
        deltas = play(output(emitted=emitted), IDS, [1, 1, 1], len(emitted), **LENGTH)
        assert deltas[0].usage == Usage(prompt_tokens=5)
        assert all(delta.usage is None for delta in deltas[1:-1])
        assert deltas[-1].usage == Usage(5, len(IDS))
    (only,) = play(output(), IDS[:1], [1], **LENGTH)
    assert only.usage == Usage(5, len(IDS)), "an end says all"


def test_a_vector_goes_on_with_the_end() -> None:
    out = output()
    ended = out.take(tail(0, IDS[:1], vector=b"\0\0\x80?", **LENGTH))
    assert ended is not None and ended.vector == b"\0\0\x80?"
    assert ended.finish is FinishReason.LENGTH
