"""This file measures a server over HTTP: any OpenAI-compatible one, or one that it starts itself.

It does not know whose server it is. Prompts are token ids by default (`/v1/completions`), so that
every server computes the same number of tokens whatever its tokenizer; end of sequence is ignored
so that each answer has the length that was asked for.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from bench.client import Client, Outcome
from bench.command import parser_of
from bench.crowd import Crowd, Part, delays, send_part
from bench.report import ROOT, Report, median, percentile
from bench.workload import PRESETS, VOCAB, Request, Workload, chosen, lengths

ABOUT = """\
Opens streams, and reports tokens/s, time to the first token and between tokens, and errors.

  python -m app bench serve --spawn --preset all
  python -m app bench serve --url http://127.0.0.1:8000 --preset bs1,c8,c32
  python -m app bench serve --concurrency 16 --requests 64 --input-len 64:512 --output-len 32:128
  python -m app bench serve --shared-len 1024 --concurrency 8 --requests 32
  python -m app bench serve --spawn --preset c32 -- --placement inline --max-running 32

What follows `--` goes to the server of --spawn.
"""


def arguments_of(words: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    parser = parser_of("serve", ABOUT)
    where = parser.add_mutually_exclusive_group()
    where.add_argument("--url", default="http://127.0.0.1:8000", help="the server")
    where.add_argument("--spawn", action="store_true", help="start a server for the measurement")
    parser.add_argument("--key", default="", help="bearer token for the server")
    parser.add_argument("--model", default="", help="name to ask for; default: the first it lists")
    parser.add_argument(
        "--prompt", choices=("ids", "text", "chat"), default="ids", help="what is sent"
    )
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds for one request")
    parser.add_argument("--clients", type=int, default=1, help="processes that the streams are in")
    add_load(parser)
    words, rest = split_words(words)
    found = parser.parse_args(words)
    found.loads = loads_of(parser, found)
    return found, rest


def split_words(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """At the first `--`."""
    at = list(words).index("--") if "--" in words else len(words)
    return list(words[:at]), list(words[at + 1 :])


def add_load(parser: argparse.ArgumentParser) -> None:
    """The flags that say what to send; shared with `bench offline`."""
    group = parser.add_argument_group("load")
    group.add_argument("--preset", help=f"{', '.join(PRESETS)}; several with commas; or all")
    group.add_argument("--concurrency", type=int, default=8, help="streams open at once")
    group.add_argument("--requests", type=int, help="requests in all; default: --concurrency")
    group.add_argument("--rate", type=float, help="requests/s that arrive, instead of all at once")
    group.add_argument(
        "--input-len",
        type=lengths,
        default=lengths("32"),
        metavar="N|LOW:HIGH",
        help="tokens of a prompt (32)",
    )
    group.add_argument(
        "--output-len",
        type=lengths,
        default=lengths("128"),
        metavar="N|LOW:HIGH",
        help="tokens of an answer (128)",
    )
    group.add_argument("--shared-len", type=int, default=0, help="tokens that all prompts share")
    group.add_argument("--repeats", type=int, help="waves; the one of median rate is reported")
    group.add_argument("--warm-up", type=int, default=1, help="waves before, not counted")
    group.add_argument("--seed", type=int, default=0, help="of the load")
    group.add_argument("--vocab", type=int, default=VOCAB, help="ids are below this")
    parser.add_argument("--json", action="store_true", help="one JSON object a line")


def loads_of(parser: argparse.ArgumentParser, found: argparse.Namespace) -> list[Workload]:
    if found.preset:
        try:
            loads = chosen(found.preset)
        except ValueError as error:
            parser.error(str(error))
    else:
        count = found.requests or found.concurrency
        name = f"c{found.concurrency}x{count}"
        loads = [
            Workload(
                name,
                count,
                found.concurrency,
                found.input_len,
                found.output_len,
                found.shared_len,
            )
        ]
    return [load._replace(repeats=found.repeats or load.repeats) for load in loads]


def main(words: Sequence[str]) -> int:
    found, rest = arguments_of(words)
    with contextlib.ExitStack() as stack:
        url = stack.enter_context(spawned(rest)) if found.spawn else found.url
        crowd = stack.enter_context(Crowd(found.clients)) if found.clients > 1 else None
        return asyncio.run(measure(found, url, crowd))


async def measure(found: argparse.Namespace, url: str, crowd: Crowd | None) -> int:
    client = Client(url, key=found.key, timeout_s=found.timeout)
    try:
        model = found.model or await first_model(client)
    except (OSError, ValueError, TimeoutError, LookupError) as error:
        print(f"bench serve: {url} does not answer /v1/models: {error}", file=sys.stderr)
        return 1
    report = Report(
        "serve", as_json=found.json, url=url, model=model, seed=found.seed, clients=found.clients
    )
    failed = 0
    for load in found.loads:
        waves = []
        for repeat in range(-found.warm_up, load.repeats):
            requests = load.wave(found.seed, repeat, found.vocab)
            outcomes = await send_wave(client, model, load, requests, found, repeat, crowd)
            if repeat >= 0:
                waves.append(summary(load, outcomes))
        row = middle(waves)
        failed += sum(wave["errors"] for wave in waves)
        report.add(**row)
    report.close()
    return 1 if failed else 0


async def first_model(client: Client) -> str:
    status, body = await client.get("/v1/models")
    if status != 200:
        raise ValueError(f"status {status}")
    name: str = json.loads(body)["data"][0]["id"]
    return name


async def send_wave(
    client: Client,
    model: str,
    load: Workload,
    requests: Sequence[Request],
    found: argparse.Namespace,
    repeat: int,
    crowd: Crowd | None = None,
) -> list[Outcome]:
    """Sends all, at most `concurrency` at once; with a rate, at seeded random times."""
    room = load.concurrency if found.rate is None else len(requests)
    after_s = delays(len(requests), found.rate, f"arrivals/{found.seed}/{repeat}")
    bodies = (body_of(request, model, found.prompt) for request in requests)
    asks = [(delay_s, *body) for delay_s, body in zip(after_s, bodies, strict=True)]
    if crowd is not None:
        return crowd.send(client, asks, room)
    url = client.url.geturl()
    return await send_part(Part(url, client.key, client.timeout_s, 0.0, room, asks))


def body_of(request: Request, model: str, prompt: str) -> tuple[str, dict[str, object]]:
    """Path and body of one greedy request of exactly `output_len` tokens."""
    body: dict[str, object] = {
        "model": model,
        "max_tokens": request.output_len,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if prompt == "chat":
        body["messages"] = [{"role": "user", "content": request.text()}]
        return "/v1/chat/completions", body
    body["prompt"] = request.text() if prompt == "text" else list(request.ids)
    return "/v1/completions", body


def summary(load: Workload, outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """The row of one wave. Rates are over the time from the first send to the last end."""
    good = [outcome for outcome in outcomes if outcome.error is None]
    elapsed_s = max(o.done_s for o in outcomes) - min(o.sent_s for o in outcomes)
    output = sum(outcome.completion_tokens for outcome in good)
    total = output + sum(outcome.prompt_tokens for outcome in good)
    first_ms = [(o.arrivals_s[0] - o.sent_s) * 1e3 for o in good if o.arrivals_s]
    gaps_ms = [
        (later - earlier) * 1e3
        for o in good
        for earlier, later in zip(o.arrivals_s, o.arrivals_s[1:], strict=False)
    ]
    counted = output if load.headline == "output" else total - output
    row: dict[str, Any] = {
        "load": load.name,
        "requests": len(outcomes),
        "errors": len(outcomes) - len(good),
        f"{'tokens/s'}": counted / elapsed_s,
        "of": load.headline,
        "total tokens/s": total / elapsed_s,
        "ttft p50 ms": percentile(first_ms, 0.5),
        "ttft p99 ms": percentile(first_ms, 0.99),
        "itl p50 ms": percentile(gaps_ms, 0.5),
        "itl p99 ms": percentile(gaps_ms, 0.99),
        "seconds": elapsed_s,
    }
    errors = [outcome.error for outcome in outcomes if outcome.error]
    if errors:
        print(f"  {load.name}: {len(errors)} failed, the first: {errors[0]}", file=sys.stderr)
    return row


def middle(waves: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The wave of median rate, with the range of all beside it."""
    rates = [wave["tokens/s"] for wave in waves]
    aim = median(rates)
    row = dict(min(waves, key=lambda wave: abs(wave["tokens/s"] - aim)))
    row["range"] = f"{min(rates):,.0f}-{max(rates):,.0f}"
    row["errors"] = sum(wave["errors"] for wave in waves)
    return row


@contextlib.contextmanager
def spawned(words: Sequence[str], *, start_timeout_s: float = 600.0) -> Iterator[str]:
    """A server of this checkout on a free port, ended with the block. Yields its address.

    Raises RuntimeError: it ended, or was not ready in time; the message has its last lines.
    """
    port = free_port()
    command = [sys.executable, "-m", "app", "serve", "--port", str(port), *words]
    with tempfile.NamedTemporaryFile("w+", suffix=".log") as log:
        process = subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=log)
        try:
            asyncio.run(wait_ready(process, f"http://127.0.0.1:{port}", start_timeout_s))
            yield f"http://127.0.0.1:{port}"
        except TimeoutError:
            lines = Path(log.name).read_text("utf-8", "replace").splitlines()[-15:]
            raise RuntimeError("\n".join(["the server did not start:", *lines])) from None
        finally:
            process.terminate()
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


async def wait_ready(process: subprocess.Popen[bytes], url: str, timeout_s: float) -> None:
    """Raises TimeoutError: not ready in time, or the process has ended."""
    client = Client(url, timeout_s=5.0)
    async with asyncio.timeout(timeout_s):
        while process.poll() is None:
            with contextlib.suppress(OSError, ValueError, TimeoutError):
                status, _ = await client.get("/ready")
                if status == 200:
                    return
            await asyncio.sleep(0.1)
    raise TimeoutError
