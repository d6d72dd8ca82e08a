"""This file tests that the logs of many processes read as one, also while they are written."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from actors.runtime.log import LogFile
from actors.runtime.merge import Choice, Line, Merge, Splitter, is_part
from actors.runtime.tail import Source, find_run, tail


def line_bytes(time: int, event: str = "e", **fields: str) -> bytes:
    return json.dumps(
        {"timestamp": stamp(time), "level": "info", "event": event, **fields}
    ).encode()


def stamp(time: int) -> str:
    return f"2026-11-29T18:46:00.{time:06d}Z"


def events(lines: list[Line] | Iterator[Line]) -> list[str]:
    return [line.fields["event"] for line in lines]


class Writing:
    """The rounds of a follower: before each, something is written. Then the following ends."""

    def __init__(self, *steps: Callable[[], object]) -> None:
        self.steps = list(steps)

    def __call__(self) -> bool:
        if not self.steps:
            return False
        self.steps.pop(0)()
        return True


def follow(directory: Path, *steps: Callable[[], object], now: str = "9") -> list[str]:
    return events(tail(directory, follow=True, wait=Writing(*steps), now=lambda: now))


def test_lines_of_all_processes_come_by_time(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(
        b"\n".join([line_bytes(1, "a1"), line_bytes(4, "a4"), line_bytes(5, "a5"), b""])
    )
    (tmp_path / "b.jsonl").write_bytes(b"\n".join([line_bytes(2, "b2"), line_bytes(3, "b3"), b""]))
    (tmp_path / "other.txt").write_bytes(b"not a log")
    assert events(tail(tmp_path)) == ["a1", "b2", "b3", "a4", "a5"]


def test_put_aside_files_are_read_first(tmp_path: Path) -> None:
    file = LogFile(tmp_path / "a.jsonl", bytes_max=300, files_max=10)
    for number in range(20):
        file.write(line_bytes(number, f"{number}") + b"\n")
    file.close()
    assert len(list(tmp_path.iterdir())) > 3
    assert events(tail(tmp_path)) == [str(number) for number in range(20)]


def test_a_half_written_line_is_not_shown_until_it_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    whole = line_bytes(2, "late")
    path.write_bytes(line_bytes(1, "early") + b"\n" + whole[:20])
    shown = tail(
        tmp_path,
        follow=True,
        wait=Writing(lambda: None, lambda: append(path, whole[20:]), lambda: append(path, b"\n")),
        now=lambda: "9",
    )
    assert next(shown).fields["event"] == "early"
    assert events(shown) == ["late"]
    assert events(tail(tmp_path)) == ["early", "late"]


def append(path: Path, data: bytes) -> None:
    with path.open("ab") as file:
        file.write(data)


def test_following_goes_on_across_any_number_of_rotations(tmp_path: Path) -> None:
    file = LogFile(tmp_path / "a.jsonl", bytes_max=300, files_max=20)
    numbers = iter(range(1000))

    def write(count: int) -> Callable[[], None]:
        def step() -> None:
            for _ in range(count):
                number = next(numbers)
                file.write(line_bytes(number, f"{number}") + b"\n")

        return step

    write(3)()
    shown = follow(tmp_path, write(1), write(10), write(2), lambda: None, write(25), write(1))
    file.close()
    assert shown == [str(number) for number in range(42)]


def test_following_goes_on_when_files_are_removed_unread(tmp_path: Path) -> None:
    file = LogFile(tmp_path / "a.jsonl", bytes_max=150, files_max=2)
    file.write(line_bytes(0, "0") + b"\n")

    def many() -> None:
        for number in range(1, 30):
            file.write(line_bytes(number, f"{number}") + b"\n")

    shown = follow(tmp_path, many, lambda: file.write(line_bytes(30, "30") + b"\n"))
    file.close()
    assert shown[0] == "0" and shown[-2:] == ["29", "30"]
    assert len(shown) == len(set(shown))


def test_following_finds_nodes_that_start_later(tmp_path: Path) -> None:
    late = tmp_path / "b.jsonl"
    shown = follow(tmp_path, lambda: append(late, line_bytes(1, "b1") + b"\n"))
    assert shown == ["b1"]


def test_a_line_newer_than_the_round_waits_for_the_older_ones_of_others(tmp_path: Path) -> None:
    # a was read before b wrote; what both wrote must still come by time.
    a, b = tmp_path / "a.jsonl", tmp_path / "b.jsonl"
    steps = Writing(
        lambda: append(b, line_bytes(7, "b7") + b"\n"),
        lambda: append(a, line_bytes(5, "a5") + b"\n"),
    )
    clock = iter([stamp(1), stamp(4), stamp(8)])
    shown = tail(tmp_path, follow=True, wait=steps, now=lambda: next(clock))
    assert events(shown) == ["a5", "b7"]


def test_a_line_newer_than_the_beginning_waits_too(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(line_bytes(5, "a5") + b"\n")
    late = Writing(lambda: append(tmp_path / "b.jsonl", line_bytes(3, "b3") + b"\n"))
    clock = iter([stamp(1), stamp(9)])
    assert events(tail(tmp_path, follow=True, wait=late, now=lambda: next(clock))) == ["b3", "a5"]


def test_what_is_written_just_before_a_rotation_is_not_missed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Between the end of the file and the look for the next one.
    path = tmp_path / "a.jsonl"
    path.write_bytes(line_bytes(1, "1") + b"\n")
    look = Source._open_following
    rotations = iter([True])

    def rotate_first(source: Source) -> int | None:
        if next(rotations, False):
            append(path, line_bytes(2, "2") + b"\n")
            path.rename(tmp_path / "a.jsonl.1")
            append(path, line_bytes(3, "3") + b"\n")
        return look(source)

    monkeypatch.setattr(Source, "_open_following", rotate_first)
    assert events(tail(tmp_path)) == ["1", "2", "3"]


def test_a_file_that_was_emptied_is_read_anew(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(line_bytes(1, "one " * 20) + b"\n")
    shown = follow(tmp_path, lambda: path.write_bytes(line_bytes(2, "two") + b"\n"))
    assert shown[-1] == "two"


def test_what_is_no_line_of_a_log_is_shown_where_it_stood(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(
        b"\n".join(
            [line_bytes(1, "a1"), b"Fatal \xff", b"[1]", b"[" * 100_000, line_bytes(3, "a3")]
        )
        + b"\n"
    )
    (tmp_path / "b.jsonl").write_bytes(line_bytes(2, "b2") + b"\n")
    shown = events(tail(tmp_path))
    assert shown[0] == "a1" and shown[1].startswith("Fatal") and shown[-2:] == ["b2", "a3"]
    assert len(shown) == 6


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        (Choice(), ["1", "2", "3", "4", "5"]),
        (Choice(request="r1"), ["1", "2"]),
        (Choice(actor="replica"), ["2", "3"]),
        (Choice(actor="replica/worker"), ["2"]),
        (Choice(level="warning"), ["3", "4"]),
        (Choice(level="warning", actor="gateway"), ["4"]),
        (Choice(request="nobody"), []),
        (Choice(request="theirs"), ["5"]),
    ],
)
def test_lines_are_chosen_by_request_actor_and_level(
    tmp_path: Path, choice: Choice, expected: list[str]
) -> None:
    lines = [
        line_bytes(1, "1", request="r1", actor="gateway"),
        line_bytes(2, "2", request="r1-0", actor="replica/worker"),
        line_bytes(3, "3", request="r12", actor="replica/cache").replace(b"info", b"error"),
        line_bytes(4, "4", actor="gateway").replace(b"info", b"warning"),
        line_bytes(5, "5", actor="replicas").replace(b"{", b'{"client_request":"theirs",', 1),
    ]
    (tmp_path / "a.jsonl").write_bytes(b"\n".join([*lines, b""]))
    assert events(tail(tmp_path, choice)) == expected


def test_a_part_has_the_name_of_the_whole_and_more() -> None:
    assert is_part("r1", "r1") and is_part("r1-2", "r1") and is_part("a/b", "a")
    assert not is_part("r12", "r1") and not is_part("r", "r1") and not is_part(None, "r1")


@given(
    st.lists(st.integers(0, 50), max_size=30),
    st.lists(st.integers(1, 40), min_size=1, max_size=10),
)
def test_any_cut_of_the_bytes_gives_the_same_lines(times: list[int], cuts: list[int]) -> None:
    data = b"".join(line_bytes(time, f"ü{time}") + b"\n" for time in times)
    splitter = Splitter("a")
    lines: list[Line] = []
    position = 0
    while position < len(data):
        for cut in cuts:
            lines += splitter.feed(data[position : position + cut])
            position += cut
    assert events(lines) == [f"ü{time}" for time in times]
    assert splitter.flush() == []


@given(st.lists(st.tuples(st.integers(0, 20), st.integers(0, 2)), max_size=60))
def test_merged_lines_come_by_time_each_once(rows: list[tuple[int, int]]) -> None:
    merge = Merge()
    shown: list[Line] = []
    for round_time in range(5, 26, 5):
        for index, (time, _) in enumerate(rows):
            if round_time - 5 <= time < round_time:  # written in this round
                merge.add([Line(stamp(time), {"event": str(index)}, b"")])
        shown += merge.take(stamp(round_time - 3))
    shown += merge.take()
    assert sorted(events(shown)) == sorted(str(index) for index in range(len(rows)))
    assert [line.timestamp for line in shown] == sorted(stamp(time) for time, _ in rows)


def test_a_run_is_found_by_name_or_as_the_newest(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="no log of a run"):
        find_run(tmp_path)
    (tmp_path / "2026-1").mkdir()
    (tmp_path / "latest").symlink_to("2026-1")
    assert find_run(tmp_path) == find_run(tmp_path, "2026-1") == tmp_path / "2026-1"
    with pytest.raises(FileNotFoundError, match="no run 2026-2"):
        find_run(tmp_path, "2026-2")
    (tmp_path / "2026-1" / "main.jsonl").touch()
    assert find_run(tmp_path / "2026-1") == tmp_path / "2026-1"
