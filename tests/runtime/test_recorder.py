"""This file tests the flight recorder: what is read is what was written last, also when torn."""

from __future__ import annotations

from collections import deque

from hypothesis import given, settings
from hypothesis import strategies as st

from actors.runtime import recorder
from actors.runtime.recorder import RECORD, Event, Flight, Recorder, read, size_of

CAPACITY = 8
FIRST_AT = size_of(0)  # where the records begin

names = st.sampled_from(["", "gateway", "replica/worker", "ö" * 70, "Step"])
headers = st.tuples(
    st.sampled_from(Event),
    st.integers(0, 3),
    st.floats(0, 1e6),
    names,
    names,
    names,
    st.none() | st.text("abcdef0123456789", max_size=28),
)
endings = st.tuples(st.integers(1, 12), st.floats(0, 10), st.integers(1, 64))


def empty() -> bytearray:
    return bytearray(size_of(CAPACITY))


def cut(name: str) -> str:
    return name.encode()[: recorder.NAME_BYTES_MAX].decode(errors="replace")


@settings(deadline=None)
@given(st.lists(headers | endings))
def test_the_last_records_are_read_as_they_were_written(steps: list[tuple[object, ...]]) -> None:
    memory = empty()
    writer = Recorder(memory, CAPACITY)
    model: deque[Flight] = deque(maxlen=CAPACITY)
    for step in steps:
        if len(step) == 3:
            back, took_s, count = step
            number = (model[-1].number if model else 0) + 1 - back  # type: ignore[operator]
            writer.ended(number, took_s, count) if number > 0 else None  # type: ignore[arg-type]
            for place, one in enumerate(model):
                if one.number == number:
                    model[place] = one._replace(took_s=took_s, times=count)  # type: ignore[arg-type]
            continue
        event, lane, at_s, receiver, sender, kind, request = step
        number = writer.note(event, lane, at_s, receiver, sender, kind, request)  # type: ignore[arg-type]
        texts = (cut(receiver), cut(sender), cut(kind), request or "")  # type: ignore[arg-type]
        model.append(Flight(number, at_s, None, 0, event, lane, *texts))  # type: ignore[arg-type]
    assert read(memory, CAPACITY) == list(model)


@settings(deadline=None)
@given(st.integers(1, 20), st.data())
def test_a_record_that_was_being_written_is_left_out(count: int, data: st.DataObject) -> None:
    memory = empty()
    writer = Recorder(memory, CAPACITY)
    for number in range(count):
        writer.note(Event.CAME, 3, float(number), "a", "b", "Step", "r")
    before = bytes(memory)
    expected = read(before, CAPACITY)
    writer.note(Event.WENT, 1, 99.0, "c", "b", "Other", "another request")
    at = FIRST_AT + (count + 1) % CAPACITY * RECORD.size
    done = data.draw(st.sampled_from([0, 8, 16, 24, 28, 36, RECORD.size - 8]))  # whole fields
    torn = bytearray(before)
    torn[at : at + done] = memory[at : at + done]
    found = read(torn, CAPACITY)
    if done:
        expected = [one for one in expected if one.number % CAPACITY != (count + 1) % CAPACITY]
    assert found == expected


@settings(deadline=None)
@given(st.binary(max_size=size_of(2)), st.integers(0, size_of(2)))
def test_whatever_the_bytes_are_reading_raises_nothing(data: bytes, at: int) -> None:
    memory = bytearray(size_of(2))
    writer = Recorder(memory, 2)
    writer.note(Event.HANDLED, 3, 1.0, "a", "b", "Step", None)
    read((memory[:at] + data + memory[at + len(data) :])[: size_of(2)], 2)
    read(data, 2)


def test_names_past_the_room_for_them_are_unknown_and_those_before_stay() -> None:
    memory = empty()
    writer = Recorder(memory, CAPACITY)
    for number in range(2 * recorder.NAMES_BYTES // 100):
        writer.note(Event.HANDLED, 3, 0.0, f"{number:0100d}", "", "Step", None)
    writer.note(Event.HANDLED, 3, 0.0, f"{5:0100d}", "", "Step", None)
    *_, before, last = read(memory, CAPACITY)
    assert (before.receiver, before.kind) == (recorder.UNKNOWN, "Step")
    assert last.receiver == f"{5:0100d}"


def test_what_has_not_ended_is_open_and_what_only_passed_is_not() -> None:
    memory = empty()
    writer = Recorder(memory, CAPACITY)
    numbers = [writer.note(event, 3, 0.0, "a", "", "x", "r" * 99) for event in Event]
    writer.ended(numbers[0], 0.5, 3)
    handled, *others = read(memory, CAPACITY)
    assert (handled.took_s, handled.times, handled.is_open) == (0.5, 3, False)
    assert [one.is_open for one in others] == [False, False, True]
    assert handled.request == "r" * recorder.REQUEST_BYTES
