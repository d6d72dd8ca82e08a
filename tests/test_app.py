"""The command line: what it says of itself, what it refuses, and how it reads prompts."""

from __future__ import annotations

import io
import json
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import app
from actors import console, doctor
from actors.commands import BENCHES
from messages.config import Config, GatewayConfig

ROOT = Path(__file__).resolve().parent.parent
COMMANDS = ("serve", "generate", "chat", "logs", "top", "plugins", "bench", "doctor")


def refused(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """The complaint of a command line that was refused with exit code 2."""
    try:
        code = app.main(words)
    except SystemExit as end:
        code = end.code  # type: ignore[assignment]
    assert code == 2
    return capsys.readouterr().err


@pytest.mark.parametrize("command", COMMANDS)
def test_each_command_has_help_with_examples(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        app.main([command, "--help"])
    assert end.value.code == 0
    text = capsys.readouterr().out
    if command != "doctor":
        assert f"python -m app {command}" in text


def test_the_help_names_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        app.main(["--help"])
    text = capsys.readouterr().out
    assert all(command in text for command in COMMANDS)


ALL_HELP = """
import app, contextlib, io, json
from actors.commands import BENCHES
said = {}
for name in BENCHES:
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.suppress(SystemExit):
        app.main(["bench", name, "--help"])
    said[name] = out.getvalue()
print(json.dumps(said))
"""


def test_each_bench_has_help() -> None:
    ran = subprocess.run(
        [sys.executable, "-c", ALL_HELP], cwd=ROOT, capture_output=True, text=True, timeout=500
    )
    assert ran.returncode == 0, ran.stderr
    said = json.loads(ran.stdout)
    assert list(said) == list(BENCHES)
    assert all("usage:" in text and "--json" in text for text in said.values())


def test_bench_alone_lists_the_benches(capsys: pytest.CaptureFixture[str]) -> None:
    assert app.main(["bench"]) == 0
    assert "bench serve" in capsys.readouterr().out


def test_an_unknown_bench_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert "no bench `nonsense`" in refused(capsys, "bench", "nonsense")


def test_an_unknown_flag_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert "--nonsense" in refused(capsys, "serve", "--nonsense")


def test_a_flag_is_not_guessed_from_its_beginning(capsys: pytest.CaptureFixture[str]) -> None:
    assert "--max-run" in refused(capsys, "serve", "--max-run", "3")


def test_a_value_out_of_range_is_refused_with_its_flag(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert "--page-size" in refused(capsys, "serve", "--page-size", "0")


def test_an_unknown_key_of_the_file_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "serve.toml"
    path.write_text("[scheduler]\nrunning_mx = 3\n", "utf-8")
    text = refused(capsys, "serve", "--config", str(path))
    assert "scheduler.running_mx" in text
    assert "scheduler.running_max" in text


def test_a_file_that_is_not_there_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert "/no/such.toml" in refused(capsys, "serve", "--config", "/no/such.toml")


# Prompts


def read(monkeypatch: pytest.MonkeyPatch, stdin: str, *words: str) -> tuple[list[Any], bool]:
    monkeypatch.setattr(sys, "stdin", io.StringIO(stdin))
    found = app.parser().parse_args(["generate", *words])
    return console.read_prompts(found.prompts, found.file, is_chat=found.chat, as_json=found.json)


def test_a_prompt_on_the_command_line_is_one_text(monkeypatch: pytest.MonkeyPatch) -> None:
    assert read(monkeypatch, "", "hello") == ([{"prompt": "hello"}], False)


def test_several_prompts_give_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    assert read(monkeypatch, "", "a", "b") == ([{"prompt": "a"}, {"prompt": "b"}], True)


def test_with_chat_a_prompt_is_what_the_user_says(monkeypatch: pytest.MonkeyPatch) -> None:
    found = [{"messages": [{"role": "user", "content": "hello"}]}]
    assert read(monkeypatch, "", "--chat", "hello") == (found, False)


def test_text_on_stdin_is_one_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    assert read(monkeypatch, "two\nlines\n") == ([{"prompt": "two\nlines"}], False)
    assert read(monkeypatch, "x", "-") == ([{"prompt": "x"}], False)


def test_json_lines_are_many_prompts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    lines = [{"prompt": "a", "max_tokens": 3}, {"messages": [{"role": "user", "content": "b"}]}]
    text = "\n".join(map(json.dumps, lines)) + "\n\n"
    assert read(monkeypatch, text) == (lines, True)
    path = tmp_path / "prompts.jsonl"
    path.write_text(text, "utf-8")
    assert read(monkeypatch, "", "--file", str(path)) == (lines, True)


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ('{"prompt": "a"}\n{"prompt": \n', "line 2 is not JSON"),
        ('{"prompt": "a"}\n[]\n', "line 2 needs either"),
        ('{"text": "a"}', "line 1 needs either"),
        ('{"prompt": "a", "messages": []}', "line 1 needs either"),
        ("  \n", "no prompt"),
    ],
)
def test_lines_that_cannot_be_read_are_refused(
    text: str,
    named: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO(text))
    assert named in refused(capsys, "generate")


def test_prompts_and_a_file_exclude_each_other(capsys: pytest.CaptureFixture[str]) -> None:
    assert "either prompts or --file" in refused(capsys, "generate", "--file", "x", "y")


# Progress


def test_what_is_going_on_is_shown_on_a_terminal_only(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with console.shown_meanwhile("loading"):
        pass
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    with console.shown_meanwhile("loading"):
        assert capsys.readouterr().err == "loading"
    assert capsys.readouterr().err == "\r\x1b[K"


# Doctor


def test_doctor_looks_at_everything_and_says_what_to_do() -> None:
    found = list(doctor.checks(Config()))
    names = [check.name for check in found]
    assert len(names) == len(set(names))
    assert {"python", "packages", "memory", "compiler", "port", "torch"} <= set(names)
    assert all(check.advice for check in found if check.mark != "ok")


def test_doctor_finds_a_port_in_use() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        check = doctor.check_port(Config(gateway=GatewayConfig(port=port)))
    assert check.mark == "fail"
    assert "another --port" in check.advice
    assert doctor.check_port(Config(gateway=GatewayConfig(port=0))).mark == "ok"


def test_doctor_finds_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("x", "utf-8")
    check = doctor.check_folder("cache folder", blocked / "under")
    assert check.mark == "fail"
    assert "XDG_CACHE_HOME" in check.advice


def test_a_probe_that_crashes_harms_nobody() -> None:
    found, why = doctor.probe("import os; os.kill(os.getpid(), 11)")
    assert found is None
    assert why == "died of signal 11"
    found, why = doctor.probe("import nonsense_that_is_not_there")
    assert found is None
    assert "nonsense_that_is_not_there" in why
