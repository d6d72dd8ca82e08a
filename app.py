"""This file is the command line: it parses, hands over, and prints.

It does not know how anything is done: a subcommand finds its settings, starts the tree or reads a
file, and shows what comes back. What there is to say, and what `--help` says of it, is in
`actors/commands.py`. Rule for editing: the top imports the standard library only, since whatever
starts a child of `python -m app` may execute this file again; the rest is imported inside the
subcommand that needs it.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from actors.engine import Engine
    from messages.config import Config

OK, FAILED, MISUSED = 0, 1, 2


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one subcommand; returns the exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    if words[:1] == ["bench"] and words[1:2] not in ([], ["-h"], ["--help"]):
        return bench(words[1], words[2:])  # its flags are its own
    if words[:1] == ["simulate"]:
        return simulate(words[1:])  # so are these
    arguments = parser().parse_args(words)
    from actors.settings import SettingsError
    from actors.source import SourceError

    try:
        code: int = arguments.run(arguments)
        return code
    except SettingsError as error:
        return complain(str(error), MISUSED)
    except SourceError as error:
        return complain(str(error))
    except BrokenPipeError:  # `| head` has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return OK
    except KeyboardInterrupt:
        return 128 + signal.SIGINT


def parser() -> argparse.ArgumentParser:
    from actors import commands

    return commands.parser(RUN, version())


def config_of(arguments: argparse.Namespace, defaults: Mapping[str, Any] | None = None) -> Config:
    """Raises: SettingsError, the user's fault."""
    from actors.settings import SettingsError, given_flags, read_config

    text, source = None, "the file"
    if arguments.config:
        source = arguments.config
        try:
            text = Path(source).read_text("utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise SettingsError(f"--config {source}: {error}") from None
    given = given_flags(vars(arguments))
    return read_config(text, given, source=source, defaults=defaults)


def complain(text: str, code: int = FAILED) -> int:
    print(f"app: {text}", file=sys.stderr, flush=True)
    return code


def version() -> str:
    from importlib import metadata

    try:
        return metadata.version("histrio")
    except metadata.PackageNotFoundError:
        return "0 (not installed: run from a checkout)"


def serve(arguments: argparse.Namespace) -> int:
    """Until a signal. Progress goes to stderr, the address to stdout once it answers."""
    from actors import run
    from actors.runtime.system import run as run_program

    try:
        config = settled(arguments)
    except run.CannotListen as error:
        return complain(str(error))
    began_s = time.monotonic()

    def ready() -> None:
        host, port = config.gateway.host, config.gateway.port
        scheme = "https" if config.gateway.tls_cert else "http"
        url = f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}"
        print(f"Serving {config.model.name} on {url}", flush=True)
        tell(f"ready after {time.monotonic() - began_s:.1f} s; logs in {config.log.dir}")
        tell(f"try: curl {url}/v1/models")

    return run_program(run.serve(config, tell, ready))


def settled(arguments: argparse.Namespace) -> Config:
    """Raises: SettingsError or SourceError, the user's fault."""
    from actors import run

    found = run.settle(config_of(arguments), tell)
    for reason in found.reasons:
        tell(reason)
    return found.config


def tell(text: str) -> None:
    """Progress, for people."""
    print(text, file=sys.stderr, flush=True)


def generate(arguments: argparse.Namespace) -> int:
    from actors import commands, console

    prompts, many = console.read_prompts(
        arguments.prompts, arguments.file, is_chat=arguments.chat, as_json=arguments.json
    )
    sampling = commands.sampling_of(arguments)

    def answer(engine: Engine) -> int:
        if many:
            return OK if console.generate_many(engine, prompts, sampling, out) else FAILED
        for delta in engine.stream(**{**sampling, **prompts[0]}):
            out.write(delta.text)
            out.flush()
        out.write("\n")
        return OK

    with console.open_out(arguments.out) as out:
        return with_engine(arguments, answer)


def with_engine(arguments: argparse.Namespace, use: Callable[[Engine], int]) -> int:
    from actors import console
    from actors.engine import Engine, Refusal, StartError

    try:
        # One user, one process: it starts in half the time.
        config = config_of(arguments, {"runtime.placement": "inline"})
        engine = Engine.of(config, show=tell)
        with console.shown_meanwhile("loading the model ..."):
            engine.start()
        try:
            return use(engine)
        finally:
            engine.stop()
    except (Refusal, StartError) as error:
        return complain(str(error))


def chat(arguments: argparse.Namespace) -> int:
    from actors import commands, console

    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  editing and history of what was typed

    def answer(engine: Engine) -> int:
        console.converse(engine, arguments.system, commands.sampling_of(arguments))
        return OK

    return with_engine(arguments, answer)


def logs(arguments: argparse.Namespace) -> int:
    from actors.runtime.log import render_line
    from actors.runtime.merge import Choice
    from actors.runtime.tail import find_run, tail

    base = Path(arguments.log_dir).expanduser() if arguments.log_dir else None
    try:
        directory = find_run(base, arguments.run_name)
    except FileNotFoundError as error:
        return complain(str(error))
    request = arguments.request
    if request:  # as a client knows it, or as the log does
        request = request.removeprefix("chatcmpl-").removeprefix("cmpl-")
    choice = Choice(request=request, actor=arguments.actor, level=arguments.level)
    tell(f"{directory}")
    colors = sys.stdout.isatty()
    for line in tail(directory, choice, follow=arguments.follow):
        text = line.raw.decode("utf-8", "replace") if arguments.json else None
        print(text or render_line(line.fields, colors=colors), flush=arguments.follow)
    return OK


def top(arguments: argparse.Namespace) -> int:
    from actors.top import NotReached, read, screen, watch

    url, key = arguments.url, arguments.key
    try:
        if arguments.once:
            print("\n".join(screen(read(url, key), None)))
            return OK
        for text in watch(url, key, max(0.1, arguments.interval)):
            print(text, flush=True)
    except NotReached as error:
        return complain(str(error))
    return OK


def plugins(arguments: argparse.Namespace) -> int:
    from actors.plugins import Missing, listed

    for entry in listed():
        if isinstance(entry, Missing):
            complain(f"{entry.where} cannot be listed: {entry.why}")
        elif arguments.json:
            fields = {"seam": entry.seam, "name": entry.name, "origin": entry.origin}
            print(json.dumps(fields))
        else:
            print(f"{entry.seam:<18} {entry.name:<32} {entry.origin}")
    return OK


def doctor(arguments: argparse.Namespace) -> int:
    from actors.doctor import checks

    marks = {"ok": "ok  ", "warn": "warn", "fail": "FAIL"}
    if sys.stdout.isatty():
        colours = {"ok": "32", "warn": "33", "fail": "31"}
        marks = {k: f"\x1b[{colours[k]}m{mark}\x1b[0m" for k, mark in marks.items()}
    failed = False
    for check in checks(config_of(arguments)):
        print(f"{marks[check.mark]}  {check.name:<20} {check.found}", flush=True)
        if check.advice:
            print(f"      {'':<20} -> {check.advice}", flush=True)
        failed = failed or check.mark == "fail"
    return FAILED if failed else OK


def bench_help(arguments: argparse.Namespace) -> int:
    from actors import commands

    print(commands.BENCH)
    return OK


def bench(name: str, words: list[str]) -> int:
    import importlib

    from actors.commands import BENCHES

    if name not in BENCHES:
        return complain(f"no bench `{name}`: there are {', '.join(BENCHES)}", MISUSED)
    code = importlib.import_module(f"bench.{name}").main(words)
    return int(code or OK)


def simulate(words: list[str]) -> int:
    import importlib

    return int(importlib.import_module("bench.simulate").main(words))


RUN: Mapping[str, Callable[[argparse.Namespace], int]] = {
    "serve": serve,
    "generate": generate,
    "chat": chat,
    "logs": logs,
    "top": top,
    "plugins": plugins,
    "simulate": bench_help,  # for its name: `main` has it read its own flags
    "bench": bench_help,
    "doctor": doctor,
}

if __name__ == "__main__":
    sys.exit(main())
