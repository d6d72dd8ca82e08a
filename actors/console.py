"""This file is the terminal's side of `generate` and `chat`: reads prompts, shows answers.

It does not know the command line nor the tree: an `Engine` answers, the flags are the caller's.
Progress and remarks go to stderr, answers to where they are wanted.
"""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, TextIO

import msgspec
from tqdm import tqdm

from actors.engine import Engine, Refusal
from actors.settings import SettingsError


def tell(text: str) -> None:
    """Progress and remarks, for people."""
    print(text, file=sys.stderr, flush=True)


@contextlib.contextmanager
def shown_meanwhile(text: str) -> Iterator[None]:
    """On a terminal `text` stands there while the block runs, and is gone afterwards."""
    if not sys.stderr.isatty():
        yield
        return
    print(text, end="", file=sys.stderr, flush=True)
    try:
        yield
    finally:
        print("\r\x1b[K", end="", file=sys.stderr, flush=True)


@contextlib.contextmanager
def open_out(path: str | None) -> Iterator[TextIO]:
    """Raises: SettingsError, the user's fault."""
    if path is None:
        yield sys.stdout
        return
    try:
        file = open(path, "w", encoding="utf-8")
    except OSError as error:
        raise SettingsError(f"--out {path}: {error.strerror}") from None
    with file:
        yield file


def generate_many(
    engine: Engine, prompts: list[dict[str, Any]], sampling: dict[str, Any], out: TextIO
) -> bool:
    """All at once, lines in order, each as soon as those before it are written. Returns whether
    every one was answered."""
    is_whole = True
    tokens = 0
    with tqdm(total=len(prompts), unit="prompt", file=sys.stderr) as bar:
        asked = [{**sampling, **prompt} for prompt in prompts]
        for index, answer in enumerate(engine.each(asked)):
            line: dict[str, Any] = {"index": index}
            if isinstance(answer, Exception):
                is_whole = False
                line["error"] = str(answer)
            else:
                tokens += answer.usage.completion_tokens
                line |= {
                    "text": answer.text,
                    "finish_reason": answer.finish_reason,
                    "usage": msgspec.structs.asdict(answer.usage),
                }
            out.write(json.dumps(line, ensure_ascii=False) + "\n")
            out.flush()
            bar.set_postfix(tokens=tokens)
            bar.update()
    return is_whole


def read_prompts(
    texts: Sequence[str], file: str | None, *, is_chat: bool, as_json: bool
) -> tuple[list[dict[str, Any]], bool]:
    """What to ask, as keywords of `Engine.stream`; and whether the answers are JSON lines.

    From `texts`, or `file`, or stdin where there is neither (or `-`).
    Raises: SettingsError, the user's fault.
    """
    if file and texts:
        raise SettingsError("either prompts or --file")
    if file and file != "-":
        try:
            text = Path(file).read_text("utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise SettingsError(f"--file {file}: {error}") from None
    elif texts and list(texts) != ["-"]:
        found = [prompt_of(text, is_chat) for text in texts]
        return found, as_json or len(found) > 1
    else:
        if sys.stdin.isatty():
            tell("reading the prompt from the terminal until Ctrl-D")
        text = sys.stdin.read()
    if not text.strip():
        raise SettingsError("no prompt: give one, or a --file, or text on stdin")
    if not text.lstrip().startswith("{"):
        return [prompt_of(text.removesuffix("\n"), is_chat)], as_json
    return read_lines(text), True


def prompt_of(text: str, is_chat: bool) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}]} if is_chat else {"prompt": text}


def read_lines(text: str) -> list[dict[str, Any]]:
    """JSON lines. Raises: SettingsError naming the line."""
    found = []
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        try:
            value = json.loads(line)
        except ValueError as error:
            raise SettingsError(f"line {number} is not JSON: {error}") from None
        if not isinstance(value, dict) or ("prompt" in value) == ("messages" in value):
            raise SettingsError(f"line {number} needs either `prompt` or `messages`")
        found.append(value)
    return found


def converse(engine: Engine, system: str | None, sampling: dict[str, Any]) -> None:
    """One turn after another until /exit or Ctrl-D."""
    start = [{"role": "system", "content": system}] if system else []
    messages = list(start)
    tell(f"{engine.model}: /reset forgets, /exit leaves, Ctrl-C stops an answer")
    while True:
        try:
            text = input("> ").strip()
        except EOFError:
            print()
            return
        except KeyboardInterrupt:
            print()
            continue
        if text == "/exit":
            return
        if text == "/reset":
            messages = list(start)
            tell("forgotten")
        elif text:
            asked = [*messages, {"role": "user", "content": text}]
            try:
                answer = chat_answer(engine, asked, sampling)
            except Refusal as refusal:
                tell(f"app: {refusal}")
                continue
            messages = [*asked, {"role": "assistant", "content": answer}]


def chat_answer(engine: Engine, asked: list[dict[str, Any]], sampling: dict[str, Any]) -> str:
    """Prints the answer as it comes; returns it, or as much as there was before Ctrl-C."""
    parts = []
    try:
        for delta in engine.stream(messages=asked, **sampling):
            parts.append(delta.text)
            print(delta.text, end="", flush=True)
    except KeyboardInterrupt:
        print(" [stopped]", end="")
    print()
    return "".join(parts)
