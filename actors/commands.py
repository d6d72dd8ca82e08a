"""This file is what the command line offers: subcommands, their flags, and what `--help` says.

It does not know what a subcommand does: `app.py` gives a function for each. Flags of settings are
`settings.py`'s; those of a bench or of `simulate` are its own.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from typing import Any

from actors.settings import add_flags

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

LEVELS = ("debug", "info", "warning", "error")
PROMPTS = "[option ...] [PROMPT ...]"
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


def parser(
    run: Mapping[str, Callable[[argparse.Namespace], int]], version: str
) -> argparse.ArgumentParser:
    """Reads a command line into a namespace whose `run` is the subcommand's entry of `run`."""
    root = argparse.ArgumentParser(
        prog="python -m app",
        usage="python -m app COMMAND [option ...]",
        description=ABOUT,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    root.add_argument("--version", action="version", version=f"histrio {version}")
    commands = root.add_subparsers(metavar="COMMAND", required=True, help=argparse.SUPPRESS)

    def command(name: str, about: str, words: str = "[option ...]") -> argparse.ArgumentParser:
        found = commands.add_parser(
            name,
            # argparse would put sixty flags before the first sentence.
            usage=f"python -m app {name} {words}",
            description=about,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )
        found.set_defaults(run=run[name])
        return found

    one = command("serve", SERVE)
    add_config(one)
    add_flags(one)

    quiet = ("model", "tokenizer", "scheduler", "cache", "worker", "log", "runtime")
    one = command("generate", GENERATE, PROMPTS)
    one.add_argument("prompts", nargs="*", metavar="PROMPT", help="a prompt; `-` reads stdin")
    one.add_argument("--file", metavar="FILE", help="a text, or JSON lines of many prompts")
    one.add_argument("--out", metavar="FILE", help="where the answers go instead of stdout")
    one.add_argument("--chat", action="store_true", help="prompts are what a user says")
    one.add_argument("--json", action="store_true", help="JSON lines also for one prompt")
    add_config(one)
    add_sampling(one)
    add_flags(one, quiet)

    one = command("chat", CHAT)
    one.add_argument("--system", metavar="TEXT", help="the system message")
    add_config(one)
    add_sampling(one)
    add_flags(one, quiet)

    one = command("logs", LOGS)
    one.add_argument("-f", "--follow", action="store_true", help="go on with what is written next")
    one.add_argument("--request", metavar="ID", help="lines about this request")
    one.add_argument("--actor", metavar="PATH", help="lines of this actor and those below it")
    one.add_argument("--level", default="debug", choices=LEVELS, help="least level shown")
    one.add_argument("--run", dest="run_name", metavar="RUN", help="a run; default: the newest")
    one.add_argument("--log-dir", default="", metavar="DIR", help="where the runs are")
    one.add_argument("--json", action="store_true", help="the lines as they are in the files")

    one = command("top", TOP)
    one.add_argument(
        "--url", default="http://127.0.0.1:8000", help="the server (http://127.0.0.1:8000)"
    )
    one.add_argument("--key", metavar="KEY", help="bearer token, where the server wants one")
    one.add_argument(
        "--interval", type=float, default=2.0, metavar="S", help="seconds between two (2)"
    )
    one.add_argument("--once", action="store_true", help="one screen and no more")

    one = command("plugins", PLUGINS)
    one.add_argument("--json", action="store_true", help="one JSON object a line")

    command("simulate", "")  # for its name: what it runs reads its flags
    one = command("bench", BENCH, "[NAME] [option ...]")
    one.add_argument("name", nargs="?", help="what to measure")

    one = command("doctor", DOCTOR)
    add_config(one)
    add_flags(one, ("model", "gateway", "log", "runtime"))
    return root


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


def sampling_of(arguments: argparse.Namespace) -> dict[str, Any]:
    """What the command line says of the draw, by the names of the API."""
    return {name: value for name, value in vars(arguments).items() if name in SAMPLING}
