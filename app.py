"""This file is the command line: it parses, hands over, and prints.

It does not know how anything is done: a subcommand finds its settings, starts the tree or reads a
file, and shows what comes back. Rule for editing: the top imports the standard library only, since
whatever starts a child of `python -m app` may execute this file again; the rest is imported inside
the subcommand that needs it.
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

ABOUT = """\
Histrio serves language models over OpenAI-compatible HTTP, on a tree of supervised actors.

  python -m app serve                 serve a small real model on http://127.0.0.1:8000
  python -m app chat                  talk to it in the terminal
  python -m app generate "Once upon"  complete a prompt, or a file of them
  python -m app logs -f               follow what every process of the server says
  python -m app top                   watch a server's actors and load
  python -m app bench serve           measure a server
  python -m app simulate              try whole deployments with faults, on a virtual clock
  python -m app doctor                check this machine
  python -m app plugins               list what is registered at each seam

`python -m app COMMAND --help` says more.
"""

SERVE = """\
Serves one model until Ctrl-C or SIGTERM, which let running requests finish; the second one
ends at once.

  python -m app serve
  python -m app serve --model ./Qwen3-0.6B --port 9000 --dtype bfloat16
  python -m app serve --model model.Q4_K_M.gguf --kv-tokens 65536 --max-running 128
  python -m app serve --config serve.toml --log-level debug

A file for --config has a table for each section below, whose keys are the fields in
messages/config.py; what the command line says wins:

  [scheduler]
  running_max = 128
  prefill_budget = 1024
"""

GENERATE = """\
Completes prompts without a server. One prompt is streamed as text; many give JSON lines, in order.

  python -m app generate "The capital of France is" --max-tokens 16
  python -m app generate --chat "Write a haiku about rain"
  echo "Summarize: ..." | python -m app generate
  python -m app generate --file prompts.jsonl --out answers.jsonl

A line of a JSON lines file is {"prompt": "..."} or {"messages": [...]}, and may set its own
max_tokens, temperature, seed and so on. A line of the output is
{"index": 0, "text": "...", "finish_reason": "stop", "usage": {...}}.
"""

CHAT = """\
A conversation in the terminal. Ctrl-C stops an answer; /reset forgets the conversation, /exit (or
Ctrl-D) leaves.

  python -m app chat
  python -m app chat --model ./Qwen3-0.6B --system "Answer in one sentence." --temperature 0
"""

LOGS = """\
Shows the log of a run, all processes merged by time; with -f it follows, also across rotation.

  python -m app logs                          the newest run
  python -m app logs -f --level warning
  python -m app logs -f --request cmpl-12     one request through all processes
  python -m app logs --actor replica/worker --run 2026-11-29T18-46-00-4711

A request is named by the id of its answer, or by the X-Request-Id that its client gave. What became
of it in each room is written by a server with --log-level debug.
"""

BENCHES = {
    "serve": "any OpenAI-compatible server, over HTTP: tokens/s, first token, gaps, errors",
    "offline": "the same loads through Engine, without HTTP",
    "first": "where the time to the first token goes",
    "front": "the front end, without a model: processor time of an event",
    "idle": "what a server costs unasked",
    "overhead": "what actors and recovery cost",
    "structured": "what grammars cost, and what forced tokens bring",
    "mailbox": "messages a second on one loop",
    "hop": "a step of the batch to another process and back",
    "planner": "scheduler and cache, for each decode step",
    "radix": "the cache's tree, by page size",
    "ops": "the compiled operators of a CPU",
    "kl": "how far a dtype's probabilities are from float32's",
    "gpu": "four loads on an NVIDIA GPU, without HTTP",
    "gaps": "a GPU's steps by kernel, and when it idles",
    "attention": "decode attention of one layer on a GPU",
    "gemv": "products of one row on a GPU",
    "products": "products of several rows on a GPU",
    "cases": "public bug reports, asked of any OpenAI-compatible server",
    "fuzz": "drawn requests, by the server's own description",
    "schemas": "answers within schemas, judged from outside",
    "chaos": "processes broken under load: streams equal, how soon they go on",
    "edges": "slow readers, ten times the load, SIGTERM, deaths that don't end",
    "soak": "half an hour of load and faults: what grows",
    "leak": "what is left of 10,000 requests",
    "wire": "hostile bytes for the sockets between processes",
    "mutants": "planted bugs: seeds until the simulation sees each",
}
LISTED = "\n".join(f"  {name:<11} {about}" for name, about in BENCHES.items())
BENCH = f"""\
Measures, or tries what must hold; prints a table, and with --json one JSON object a line.

  python -m app bench serve --spawn --preset all      over HTTP, own server
  python -m app bench serve --url http://host:8000    any OpenAI-compatible server
  python -m app bench NAME --help                     what it measures, and its options

{LISTED}
"""

TOP = """\
Watches a running server: what it serves a second, how full it is, and each actor with its process,
life, restarts, what waits for it and what it is doing. Ctrl-C ends it.

  python -m app top
  python -m app top --url http://host:8000 --key SECRET --interval 1
  python -m app top --once             one screen, for scripts
"""

PLUGINS = """\
Lists the entries of every seam (models, loaders, attention, grammars, parsers, policies ...) and
where each comes from. An installed package adds one by an entry point of the group histrio.SEAM.

  python -m app plugins
  python -m app plugins --json
"""

DOCTOR = """\
Checks what serving needs: versions, compiler, processor, memory, folders, port. Exits 1 if
something would keep the server from working; each such line says what to do.
"""


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
    from actors.settings import add_flags

    root = argparse.ArgumentParser(
        prog="python -m app",
        usage="python -m app COMMAND [option ...]",
        description=ABOUT,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    root.add_argument("--version", action="version", version=f"histrio {version()}")
    commands = root.add_subparsers(metavar="COMMAND", required=True, help=argparse.SUPPRESS)

    def command(
        name: str, run: Any, about: str, words: str = "[option ...]"
    ) -> argparse.ArgumentParser:
        found = commands.add_parser(
            name,
            # argparse would put sixty flags before the first sentence.
            usage=f"python -m app {name} {words}",
            description=about,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )
        found.set_defaults(run=run)
        return found

    one = command("serve", serve, SERVE)
    add_config(one)
    add_flags(one)

    quiet = ("model", "tokenizer", "scheduler", "cache", "worker", "log", "runtime")
    one = command("generate", generate, GENERATE, PROMPTS)
    one.add_argument("prompts", nargs="*", metavar="PROMPT", help="a prompt; `-` reads stdin")
    one.add_argument("--file", metavar="FILE", help="a text, or JSON lines of many prompts")
    one.add_argument("--out", metavar="FILE", help="where the answers go instead of stdout")
    one.add_argument("--chat", action="store_true", help="prompts are what a user says")
    one.add_argument("--json", action="store_true", help="JSON lines also for one prompt")
    add_config(one)
    add_sampling(one)
    add_flags(one, quiet)

    one = command("chat", chat, CHAT)
    one.add_argument("--system", metavar="TEXT", help="the system message")
    add_config(one)
    add_sampling(one)
    add_flags(one, quiet)

    one = command("logs", logs, LOGS)
    one.add_argument("-f", "--follow", action="store_true", help="go on with what is written next")
    one.add_argument("--request", metavar="ID", help="lines about this request")
    one.add_argument("--actor", metavar="PATH", help="lines of this actor and those below it")
    one.add_argument("--level", default="debug", choices=LEVELS, help="least level shown")
    one.add_argument("--run", dest="run_name", metavar="RUN", help="a run; default: the newest")
    one.add_argument("--log-dir", default="", metavar="DIR", help="where the runs are")
    one.add_argument("--json", action="store_true", help="the lines as they are in the files")

    one = command("top", top, TOP)
    one.add_argument(
        "--url", default="http://127.0.0.1:8000", help="the server (http://127.0.0.1:8000)"
    )
    one.add_argument("--key", metavar="KEY", help="bearer token, where the server wants one")
    one.add_argument(
        "--interval", type=float, default=2.0, metavar="S", help="seconds between two (2)"
    )
    one.add_argument("--once", action="store_true", help="one screen and no more")

    one = command("plugins", plugins, PLUGINS)
    one.add_argument("--json", action="store_true", help="one JSON object a line")

    command("simulate", bench_help, "")  # for its name; `simulate` reads its flags
    one = command("bench", bench_help, BENCH, "[NAME] [option ...]")
    one.add_argument("name", nargs="?", help="what to measure")

    one = command("doctor", doctor, DOCTOR)
    add_config(one)
    add_flags(one, ("model", "gateway", "log", "runtime"))
    return root


LEVELS = ("debug", "info", "warning", "error")
PROMPTS = "[option ...] [PROMPT ...]"


def add_config(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--config", metavar="FILE", help="settings as TOML; what the command line says wins"
    )


def add_sampling(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("sampling (default: what the server does by default)")
    for flag, kind, help in (
        ("--max-tokens", int, "longest answer"),
        ("--temperature", float, "0 takes the likeliest token"),
        ("--top-p", float, "keep the likeliest tokens that make up this probability"),
        ("--top-k", int, "keep this many of the likeliest tokens"),
        ("--min-p", float, "keep tokens at least this likely, relative to the likeliest"),
        ("--presence-penalty", float, "against tokens that were generated before"),
        ("--frequency-penalty", float, "against tokens, by how often they were generated"),
        ("--repetition-penalty", float, "against tokens of prompt and answer"),
    ):
        metavar = "N" if kind is int else "X"
        group.add_argument(flag, type=kind, default=argparse.SUPPRESS, metavar=metavar, help=help)
    group.add_argument(
        "--stop",
        action="append",
        default=argparse.SUPPRESS,
        metavar="TEXT",
        help="end before this text; may be given several times",
    )


SAMPLING = (
    "max_tokens",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "stop",
)


def sampling_of(arguments: argparse.Namespace) -> dict[str, Any]:
    return {name: value for name, value in vars(arguments).items() if name in SAMPLING}


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
    from actors import console

    prompts, many = console.read_prompts(
        arguments.prompts, arguments.file, is_chat=arguments.chat, as_json=arguments.json
    )
    sampling = sampling_of(arguments)

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
    from actors import console

    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  editing and history of what was typed

    def answer(engine: Engine) -> int:
        console.converse(engine, arguments.system, sampling_of(arguments))
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
    print(BENCH)
    return OK


def bench(name: str, words: list[str]) -> int:
    import importlib

    if name not in BENCHES:
        return complain(f"no bench `{name}`: there are {', '.join(BENCHES)}", MISUSED)
    code = importlib.import_module(f"bench.{name}").main(words)
    return int(code or OK)


def simulate(words: list[str]) -> int:
    import importlib

    return int(importlib.import_module("bench.simulate").main(words))


if __name__ == "__main__":
    sys.exit(main())
