"""`generate`, `chat` and `logs` as a user runs them, with the tiny model."""

from __future__ import annotations

import contextlib
import io
import json
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import app
from tests.house.server import ROOT, WAIT_S, Server, eventually


class Command:
    """Runs `python -m app COMMAND` on the tiny model."""

    def __init__(self, model: Path, log_dir: Path) -> None:
        self.model = model
        self.log_dir = log_dir

    def words(self, command: str, *words: str) -> list[str]:
        found = [sys.executable, "-m", "app", command, "--log-dir", str(self.log_dir)]
        if command != "logs":
            found += ["--model", str(self.model), "--dtype", "float32"]
            found += ["--threads", "1", "--kv-tokens", "4096"]
        return [*found, *words]

    def __call__(self, command: str, *words: str, stdin: str = "") -> Any:
        return subprocess.run(
            self.words(command, *words),
            input=stdin,
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=WAIT_S,
            check=False,
        )


class Within(Command):
    """The same in this process, which has imported all that it takes."""

    def __call__(self, command: str, *words: str, stdin: str = "") -> Any:
        out, err = io.StringIO(), io.StringIO()
        with (
            pytest.MonkeyPatch.context() as patch,
            contextlib.redirect_stdout(out),
            contextlib.redirect_stderr(err),
        ):
            patch.setattr(sys, "stdin", io.StringIO(stdin))
            line = self.words(command, *words)
            code = app.main(line[line.index(command) :])
        return subprocess.CompletedProcess(line, code, out.getvalue(), err.getvalue())


@pytest.fixture
def run(tiny: Path, tmp_path: Path) -> Command:
    return Command(tiny, tmp_path)


@pytest.fixture
def within(tiny: Path, tmp_path: Path) -> Within:
    return Within(tiny, tmp_path)


def test_a_prompt_is_completed_on_stdout(run: Command, within: Within) -> None:
    words = ("--max-tokens", "8", "--temperature", "0")
    ran = run("generate", "The house", *words)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.strip("\n")
    # As JSON, and from stdin, it is the same.
    as_json = within("generate", "--json", *words, stdin="The house\n")
    assert as_json.returncode == 0, as_json.stderr
    line = json.loads(as_json.stdout)
    assert line["text"] + "\n" == ran.stdout
    assert line["usage"]["completion_tokens"] <= 8


def test_lines_go_in_and_out_in_order(within: Within, tmp_path: Path) -> None:
    asked = [
        {"prompt": "The house", "max_tokens": 3, "ignore_eos": True},
        {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4, "ignore_eos": True},
        {"prompt": "x", "max_tokens": 5, "ignore_eos": True},
    ]
    source, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text("\n".join(map(json.dumps, asked)), "utf-8")
    ran = within("generate", "--file", str(source), "--out", str(out), "--temperature", "0")
    assert ran.returncode == 0, ran.stderr
    lines = [json.loads(line) for line in out.read_text("utf-8").splitlines()]
    assert [line["index"] for line in lines] == [0, 1, 2]
    assert [line["usage"]["completion_tokens"] for line in lines] == [3, 4, 5]
    assert all(line["finish_reason"] == "length" for line in lines)


def test_a_refused_line_is_said_and_the_others_are_answered(within: Within) -> None:
    ran = within(
        "generate", stdin='{"prompt":"x","temperature":-1}\n{"prompt":"y","max_tokens":2}\n'
    )
    assert ran.returncode == 1
    first, second = map(json.loads, ran.stdout.splitlines())
    assert "temperature" in first["error"]
    assert second["text"] is not None


def test_a_model_that_is_not_there_is_named(run: Command) -> None:
    run.model = Path("/no/such/model")
    ran = run("generate", "x")
    assert ran.returncode == 1
    assert "/no/such/model" in ran.stderr.splitlines()[-1]
    assert "Traceback" not in ran.stderr


def test_a_chat_answers_forgets_and_leaves(within: Within) -> None:
    ran = within(
        "chat",
        "--max-tokens",
        "6",
        "--temperature",
        "0",
        stdin="Hello\n/reset\nHello\n/exit\nnever read\n",
    )
    assert ran.returncode == 0, ran.stderr
    assert "forgotten" in ran.stderr
    answers = [part for part in ran.stdout.split("> ") if part.strip()]
    assert len(answers) == 2
    assert answers[0] == answers[1]


def test_ctrl_c_stops_an_answer_and_not_the_chat(run: Command) -> None:
    with subprocess.Popen(
        run.words("chat", "--max-tokens", "480", "--temperature", "0"),
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as chat:
        assert chat.stdin is not None
        assert chat.stdout is not None
        chat.stdin.write("Hello\n")
        chat.stdin.flush()
        chat.stdout.read(len("> ") + 8)  # the answer has begun
        chat.send_signal(signal.SIGINT)
        out, _ = chat.communicate("/exit\n", timeout=WAIT_S)
        assert chat.returncode == 0
    assert out.rstrip().endswith(">")


def test_logs_shows_a_run_and_follows_one(serve: Callable[..., Server]) -> None:
    server = serve("--placement", "processes", "--log-level", "debug").wait_ready()
    run = Command(Path(), server.log_dir)
    shown = run("logs")
    assert shown.returncode == 0, shown.stderr
    assert "model loaded" in shown.stdout
    only = run("logs", "--actor", "gateway", "--json")
    lines = [json.loads(line) for line in only.stdout.splitlines()]
    assert lines
    assert {line["actor"] for line in lines} == {"gateway"}
    assert run("logs", "--run", "nonsense").returncode == 1
    with subprocess.Popen(
        run.words("logs", "-f"), cwd=ROOT, stdout=subprocess.PIPE, text=True
    ) as follow:
        assert follow.stdout is not None
        seen: list[str] = []
        reading = threading.Thread(target=seen.extend, args=(follow.stdout,))
        reading.start()
        asked: list[str] = []

        def followed() -> str | None:
            """One of the requests, the first of which may have come before it followed."""
            reply = server.client().completions.create(model="tiny-llama", prompt="x", max_tokens=2)
            asked.append(reply.id.split("-")[-1])
            return next((name for name in asked if any(name in line for line in seen)), None)

        wanted = eventually(followed, "a request is shown")
        follow.send_signal(signal.SIGINT)
        assert follow.wait(WAIT_S) == 128 + signal.SIGINT
        reading.join(WAIT_S)
    mine = run("logs", "--request", wanted, "--json")
    rooms = {json.loads(line)["actor"] for line in mine.stdout.splitlines()}
    assert {"gateway", "tokenizer", "replica/scheduler", "detokenizer"} <= rooms
