"""What is held for clients that come back: marks, places, and who is dropped for room."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from actors.gateway.call import Row
from actors.gateway.held import (
    Held,
    Mark,
    Marks,
    Place,
    Shelf,
    StreamId,
    cut,
    event_id,
    read_event_id,
    read_stream_id,
)
from messages.gateway import Delta, TokenLogprob
from messages.types import FinishReason, Usage, pack

STREAM = StreamId("ab" * 12, 77, "0f" * 8)


def rows_of(texts: list[tuple[int, str]], choice_count: int) -> list[Row]:
    """These texts, then the end of each choice."""
    rows = [Row(choice, Delta("r", 1, 0, 1, text)) for choice, text in texts]
    ends = [Delta("r", 1, 0, 0, "", finish=FinishReason.STOP) for _ in range(choice_count)]
    return rows + [Row(choice, delta) for choice, delta in enumerate(ends)]


TEXTS = st.lists(st.tuples(st.integers(0, 2), st.text("abc", max_size=4)), max_size=20)


@given(TEXTS, st.lists(st.integers(0, 30), max_size=3), st.data())
def test_what_a_client_has_and_what_it_gets_is_the_whole(
    texts: list[tuple[int, str]],
    marks: list[int],
    data: st.DataObject,
) -> None:
    whole = ["".join(text for choice, text in texts if choice == i) for i in range(3)]
    marks = [min(mark, len(whole[i])) for i, mark in enumerate(marks)]
    targets = tuple(Mark(mark) for mark in marks)
    held = Held(3)
    place = Place(held, targets)
    got = [whole[i][: marks[i] if i < len(marks) else 0] for i in range(3)]
    known = ["", "", ""]
    ends = [0, 0, 0]
    rows = rows_of(texts, 3)
    while rows:
        count = data.draw(st.integers(1, len(rows)))
        held.add(rows[:count])
        del rows[:count]
        had, new = place.take()
        place.check()
        for choice, delta in had:
            known[choice] += delta.text
            assert delta.finish is None
        for choice, delta in new:
            got[choice] += delta.text
            place.send(Row(choice, delta), [b"data: x"], "s")
            ends[choice] += delta.finish is not None
    held.end()
    assert place.is_at_end
    assert got == whole
    assert known == [whole[i][: marks[i] if i < len(marks) else 0] for i in range(3)]
    assert ends == [1, 1, 1]
    assert place.sent == [Mark(len(text), True) for text in whole]


def pieces(tokens: list[str], cuts: set[int]) -> list[Row]:
    """One row for each run of tokens between two cuts, and the end."""
    at = [0, *sorted(cuts), len(tokens)]
    rows = [
        Row(
            0,
            Delta(
                "r",
                1,
                begin,
                end - begin,
                "".join(tokens[begin:end]),
                pack(range(begin, end)),
                tuple(TokenLogprob(b"", token, -1.0) for token in range(begin, end)),
            ),
        )
        for begin, end in zip(at, at[1:], strict=False)
        if begin < end
    ]
    return [*rows, Row(0, Delta("r", 1, len(tokens), 0, "", finish=FinishReason.STOP))]


@given(st.lists(st.text("ab", max_size=3), min_size=1, max_size=12), st.data())
def test_tokens_and_their_probabilities_come_once_however_the_text_is_cut_the_second_time(
    tokens: list[str], data: st.DataObject
) -> None:
    cuts = st.sets(st.integers(1, len(tokens)))
    first = pieces(tokens, data.draw(cuts))
    had = first[: data.draw(st.integers(0, len(first)))]
    before = Place(Held(1))
    for row in had:
        before.send(row, [b"data: x"], "s")
    held = Held(1)
    held.add(pieces(tokens, data.draw(cuts)))
    _, new = Place(held, tuple(before.sent)).take()
    rows = [*had, *new]
    assert b"".join(delta.token_ids for _, delta in rows) == pack(range(len(tokens)))
    told = [entry.token_id for _, delta in rows for entry in delta.logprobs]
    assert told == list(range(len(tokens)))
    assert sum(delta.token_count for _, delta in rows) == len(tokens)
    assert "".join(delta.text for _, delta in rows) == "".join(tokens)


def test_an_end_that_the_client_has_is_not_given_again() -> None:
    held = Held(1)
    held.add(rows_of([(0, "abc")], 1))
    held.end()
    place = Place(held, (Mark(3, True),))
    _, new = place.take()
    assert new == []
    assert place.is_at_end


@given(
    st.lists(
        st.builds(
            Mark, st.integers(0, 10**9), st.booleans(), st.integers(0, 9), st.integers(0, 10**9)
        ),
        min_size=1,
        max_size=5,
    ).map(tuple)
)
def test_an_event_id_is_read_as_it_was_written(marks: Marks) -> None:
    assert read_event_id(event_id(STREAM, marks)) == (STREAM, marks)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "x",
        "5",
        str(STREAM),
        f"{STREAM}.",
        f"{STREAM}.-1",
        f"{STREAM}.1,",
        f"{STREAM}.1ee",
        f"{STREAM}.1tt",
    ],
)
def test_what_is_no_event_id_is_none(text: str) -> None:
    assert read_event_id(text) is None


@given(st.text(max_size=80))
def test_any_text_is_read_or_refused(text: str) -> None:
    read_stream_id(text)
    read_event_id(text)


def test_each_event_has_its_id_and_none_comes_twice() -> None:
    row = Row(0, Delta("r", 1, 0, 1, "ab", finish=FinishReason.STOP))
    events = [b"data: role", b"data: ab", b"data: end"]
    held = Held(1)
    whole = Place(held).send(row, events, "s")
    assert whole == (b"id: s.0+1\ndata: role\n\nid: s.0+2\ndata: ab\n\nid: s.2e\ndata: end\n\n")
    for count in range(3):
        rest = Place(held, (Mark(0, False, count),)).send(row, events, "s")
        assert rest == b"\n\n".join(whole.split(b"\n\n")[count:])


def test_a_mark_counts_events_of_the_next_character_and_none_of_tokens_before_it() -> None:
    place = Place(Held(1), (Mark(3, False, 1, 2),))
    tokens = Row(0, Delta("r", 1, 2, 1, "", token_ids=pack([7])))
    letter = Row(0, Delta("r", 1, 3, 0, "a"))
    assert place.send(tokens, [b"data: odds"], "s") == b"id: s.3+1t3\ndata: odds\n\n"
    sent = place.send(letter, [b"data: call", b"data: a"], "s")
    assert sent == b"id: s.4t3\ndata: a\n\n"


def test_a_row_that_is_cut_has_each_token_with_its_span_once() -> None:
    usage = Usage(9, 3)
    delta = Delta("r", 1, 5, 3, "abcd", pack([1, 2, 3]), spans=pack([1, 3, 6]), usage=usage)
    for chars in range(5):
        for tokens in range(4):
            head, tail = cut(delta, chars, tokens)
            assert head.text + tail.text == "abcd" and len(head.text) == chars
            assert (head.token_count, tail.token_count) == (tokens, 3 - tokens)
            assert (head.spans, tail.spans) == (
                delta.spans[: 4 * tokens],
                delta.spans[4 * tokens :],
            )
            assert (head.usage, tail.usage) == (Usage(9), usage)


def test_the_oldest_that_nobody_reads_make_room() -> None:
    shelf = Shelf(2, 10**6)
    assert shelf.put("a", Held(1))
    assert shelf.put("b", Held(1))
    assert not shelf.put("c", Held(1))
    shelf.readers["a"] = 1
    assert shelf.excess(1) == ["b"]
    shelf.remove("b")
    assert shelf.excess(1) == []
    assert shelf.put("c", Held(1))
    shelf.check()


def test_more_bytes_than_may_be_held_drop_the_oldest() -> None:
    shelf = Shelf(9, 250)
    for name in "abc":
        held = Held(1)
        held.add([Row(0, Delta("r", 1, 0, 1, "text"))])
        shelf.put(name, held)
    assert shelf.excess() == ["a"]
