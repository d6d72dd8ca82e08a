"""This file tests the log: what a line says, where it goes, and that files stay within limits."""

from __future__ import annotations

import datetime
import io
import json
import logging
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from actors.runtime.log import LINE_BYTES_MAX, LogFile, Logs, make_run_log_dir, render_line

NOW = datetime.datetime(2026, 11, 29, 18, 46, 0, 123456, tzinfo=datetime.UTC)


def make(directory: Path | None, **options: object) -> tuple[Logs, io.StringIO]:
    terminal = io.StringIO()
    logs = Logs(
        node="main",
        directory=directory,
        terminal=terminal,
        now=lambda: NOW,
        **options,  # type: ignore[arg-type]
    )
    return logs, terminal


def lines_of(directory: Path, name: str = "main.jsonl") -> list[dict[str, object]]:
    return [json.loads(line) for line in (directory / name).read_text().splitlines()]


@pytest.fixture
def root_logger() -> Iterator[logging.Logger]:
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    yield root
    root.handlers[:] = handlers
    root.setLevel(level)


def test_a_line_says_when_where_and_about_what(tmp_path: Path) -> None:
    logs, terminal = make(tmp_path)
    logs.log_for("replica/worker").bind(request="r1").warning("step was slow", elapsed_ms=12)
    logs.close()
    (line,) = lines_of(tmp_path)
    assert line == {
        "timestamp": "2026-11-29T18:46:00.123456Z",
        "level": "warning",
        "event": "step was slow",
        "node": "main",
        "actor": "replica/worker",
        "request": "r1",
        "elapsed_ms": 12,
    }
    assert terminal.getvalue() == (
        "18:46:00.123 warning main/replica/worker step was slow request=r1 elapsed_ms=12\n"
    )


def test_a_node_itself_logs_without_an_actor(tmp_path: Path) -> None:
    logs, terminal = make(tmp_path)
    logs.log_for().info("up")
    logs.close()
    assert lines_of(tmp_path)[0]["actor"] == ""
    assert terminal.getvalue() == "18:46:00.123 info    main up\n"


def test_lines_below_the_level_are_not_written(tmp_path: Path) -> None:
    logs, terminal = make(tmp_path, level="warning")
    log = logs.log_for("x")
    log.info("no")
    log.debug("no")
    log.error("yes")
    logs.close()
    assert [line["event"] for line in lines_of(tmp_path)] == ["yes"]
    assert terminal.getvalue().count("\n") == 1


def test_an_exception_is_in_the_line_and_below_it_on_the_terminal(tmp_path: Path) -> None:
    logs, terminal = make(tmp_path)
    try:
        raise KeyError("slot")
    except KeyError:
        logs.log_for("x").exception("handler failed")
    logs.close()
    (line,) = lines_of(tmp_path)
    assert line["level"] == "error"
    assert str(line["exception"]).endswith("KeyError: 'slot'")
    assert terminal.getvalue().splitlines()[1].startswith("Traceback")


def test_what_json_does_not_have_is_written_as_words(tmp_path: Path) -> None:
    logs, _ = make(tmp_path)
    log = logs.log_for("x")
    log.info("odd", path=Path("/x"), many={1, 2}, broken="\udc80", none=None, number=1 << 80)
    log.info("deep", deep=deep(2000))
    logs.close()
    first, second = lines_of(tmp_path)
    assert "/x" in str(first["path"]) and "broken" in first
    assert second["event"] == "deep"


def deep(levels: int) -> list[object]:
    value: list[object] = []
    for _ in range(levels):
        value = [value]
    return value


def test_a_huge_line_is_cut_to_its_first_keys(tmp_path: Path) -> None:
    logs, _ = make(tmp_path)
    logs.log_for("x").bind(request="r").info("e", data="x" * (LINE_BYTES_MAX + 1))
    logs.close()
    (line,) = lines_of(tmp_path)
    assert line["request"] == "r" and "data" not in line


def test_what_a_terminal_would_obey_is_escaped() -> None:
    text = render_line({"event": "hi\x1b[2J\n", "request": "a\rb\u202e"})
    assert "\x1b" not in text and "\n" not in text and "\r" not in text and "\u202e" not in text
    assert "hi\\x1b[2J\\n" in text


def test_a_value_of_several_words_is_quoted() -> None:
    text = render_line({"event": "node ended", "detail": "exit code 0", "count": 3})
    assert text.endswith('node ended detail="exit code 0" count=3')


def test_colors_are_only_where_they_are_asked_for() -> None:
    line = {"timestamp": "2026-11-29T18:46:00.123456Z", "level": "error", "event": "x"}
    assert "\x1b[31m" in render_line(line, colors=True)
    assert "\x1b" not in render_line(line)


def test_files_rotate_by_size_and_are_never_more_than_allowed(tmp_path: Path) -> None:
    file = LogFile(tmp_path / "n.jsonl", bytes_max=100, files_max=3)
    for number in range(40):
        file.write(b"%09d\n" % number)
    file.close()
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["n.jsonl", "n.jsonl.1", "n.jsonl.2"]
    assert all(path.stat().st_size <= 100 for path in tmp_path.iterdir())
    kept = b"".join((tmp_path / name).read_bytes() for name in reversed(names))
    assert kept == b"".join(b"%09d\n" % number for number in range(10, 40))


def test_one_file_alone_starts_over(tmp_path: Path) -> None:
    file = LogFile(tmp_path / "n.jsonl", bytes_max=25, files_max=1)
    for number in range(5):
        file.write(b"%09d\n" % number)
    file.close()
    assert os.listdir(tmp_path) == ["n.jsonl"]
    assert (tmp_path / "n.jsonl").read_bytes() == b"000000004\n"


def test_a_new_life_appends_after_the_half_line_of_the_last(tmp_path: Path) -> None:
    (tmp_path / "main.jsonl").write_bytes(b'{"event":"old"}\n{"event":"ha')
    logs, _ = make(tmp_path)
    logs.log_for("x").info("new")
    logs.close()
    lines = (tmp_path / "main.jsonl").read_bytes().splitlines()
    assert lines[1] == b'{"event":"ha' and json.loads(lines[2])["event"] == "new"


def test_a_disk_that_takes_nothing_loses_lines_not_the_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    logs, terminal = make(tmp_path)

    def full(fd: int, data: bytes) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "write", full)
    logs.log_for("x").info("e")
    monkeypatch.undo()
    logs.close()
    assert logs.lost_count == 1
    assert "e" in terminal.getvalue()


def test_a_closed_terminal_is_no_reason_to_die(tmp_path: Path) -> None:
    logs, terminal = make(tmp_path)
    terminal.close()
    logs.log_for("x").info("e")
    logs.close()
    assert len(lines_of(tmp_path)) == 1


def test_threads_do_not_mix_their_lines(tmp_path: Path) -> None:
    logs, _ = make(tmp_path, file_bytes_max=5000, files_max=100)
    threads = [
        threading.Thread(
            target=lambda name=name: [  # type: ignore[misc]
                logs.log_for(name).info("e", n=n, filler="x" * 50) for n in range(200)
            ]
        )
        for name in ("a", "b", "c")
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    logs.close()
    lines = [line for path in tmp_path.iterdir() for line in lines_of(tmp_path, path.name)]
    assert len(lines) == 600


def test_what_libraries_log_becomes_lines(tmp_path: Path, root_logger: logging.Logger) -> None:
    logs, _ = make(tmp_path)
    logs.adopt_stdlib()
    logging.getLogger("some.library").warning("slow client %s", 3)
    logging.getLogger("noisy").debug("no")
    try:
        raise ValueError("x")
    except ValueError:
        logging.getLogger("lib").exception("broken")
    logs.close()
    assert root_logger.handlers == []
    first, second = lines_of(tmp_path)
    assert (first["event"], first["logger"], first["level"]) == (
        "slow client 3",
        "some.library",
        "warning",
    )
    assert "ValueError: x" in str(second["exception"])


def test_nodes_in_one_process_have_logs_of_their_own(tmp_path: Path) -> None:
    one = Logs(node="one", directory=tmp_path, terminal=None)
    two = Logs(node="two", directory=tmp_path, terminal=None)
    one.log_for("a").info("1")
    two.log_for("b").info("2")
    one.close()
    two.close()
    assert [line["node"] for line in lines_of(tmp_path, "one.jsonl")] == ["one"]
    assert [line["node"] for line in lines_of(tmp_path, "two.jsonl")] == ["two"]


def test_a_node_with_a_slash_in_its_name_has_a_file(tmp_path: Path) -> None:
    logs = Logs(node="worker/0", directory=tmp_path, terminal=None)
    logs.log_for("a").info("1")
    logs.close()
    assert lines_of(tmp_path, "worker-0.jsonl")[0]["node"] == "worker/0"


def test_the_newest_run_is_pointed_to_and_the_oldest_removed(tmp_path: Path) -> None:
    paths = [
        make_run_log_dir(tmp_path, NOW + datetime.timedelta(seconds=number)) for number in range(25)
    ]
    assert (tmp_path / "latest").resolve() == paths[-1]
    kept = [path for path in paths if path.exists()]
    assert kept == paths[5:]
    assert (tmp_path / "latest").is_symlink()
