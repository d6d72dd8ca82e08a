"""This file asks a server everything that its own description allows, and much that it does not.

It does not know the routes: `/openapi.json` says them, and schemathesis makes the cases. That
program comes with the extra `dev`: it is looked for beside this Python and on the path, or named by
--schemathesis (pip install schemathesis, in an environment of its own if need be). Of what the
description leaves open only the model's name is filled in, so that cases come further than that.
What must hold: no answer is a 5xx, every body is of its described shape, errors too, the server is
healthy afterwards, and no request is left in it.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import re
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.command import parser_of
from bench.serve import spawned, split_words

ABOUT = """\
Fuzzes a server by its own OpenAPI description; exits 1 if anything that must hold does not.

  python -m app bench fuzz --cases 10000
  python -m app bench fuzz --url http://127.0.0.1:8000 --key KEY --cases 500 --seed 7

Without --url a small random model is made and served for it. What follows `--` goes to that server.
"""
PROGRAM = "schemathesis"
# They would end the parts that others are asked of.
APART = ("/pause_generation", "/actors/{path}/restart")
CHECKS = ("not_a_server_error", "response_schema_conformance", "content_type_conformance")
IDLE_S = 30.0


def arguments_of(words: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    parser = parser_of("fuzz", ABOUT)
    parser.add_argument("--url", help="a server that runs; default: one is started")
    parser.add_argument("--key", default="", help="bearer token for it")
    parser.add_argument("--cases", type=int, default=10_000, help="requests to make, at least")
    parser.add_argument("--quick", action="store_true", help="drawn cases only: no fixed ones")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=2, help="requests at once")
    parser.add_argument("--schemathesis", default="", metavar="PROGRAM", help="where it is")
    parser.add_argument("--json", action="store_true", help="the result as one JSON object")
    own, rest = split_words(words)
    return parser.parse_args(own), rest


def main(words: Sequence[str]) -> int:
    found, rest = arguments_of(words)
    program = program_of(found.schemathesis)
    if program is None:
        print("schemathesis is not here: pip install schemathesis", file=sys.stderr)
        return 2
    with contextlib.ExitStack() as stack:
        url = found.url
        if url is None:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="fuzz-")))
            url = stack.enter_context(spawned([*server_words(folder), *rest]))
        result = fuzz(program, url.rstrip("/"), found)
    if found.json:
        print(json.dumps(result))
    else:
        print("\n".join(f"{name:>10}: {value}" for name, value in result.items()))
    return 0 if result["ok"] else 1


def program_of(given: str) -> str | None:
    beside = Path(sys.executable).parent / PROGRAM
    if given:
        where = shutil.which(given)
        return None if where is None else str(Path(where).absolute())
    return str(beside) if beside.is_file() else shutil.which(PROGRAM)


def server_words(folder: Path) -> list[str]:
    """A server that answers fast: what is fuzzed is not the model."""
    from tests.house.tiny import make_model

    model = make_model(folder / "model")
    return [
        "--model",
        str(model),
        "--placement",
        "inline",
        "--batch-dir",
        str(folder / "batches"),
        "--log-dir",
        str(folder / "logs"),
        "--context-len",
        "128",
    ]


def fuzz(program: str, url: str, found: argparse.Namespace) -> dict[str, Any]:
    begin_s = time.monotonic()
    description = json.loads(get(url, "/openapi.json", found.key))
    operations = [
        operation
        for path in description["paths"].values()
        for operation in path.values()
        if "requestBody" in operation
    ]
    name_model(description, json.loads(get(url, "/v1/models", found.key))["data"][0]["id"])
    before = answers(url, found.key)
    with tempfile.TemporaryDirectory(prefix="fuzz-") as folder:  # the program leaves files
        file = Path(folder) / "openapi.json"
        file.write_text(json.dumps(description), "utf-8")
        ran = subprocess.run(
            command_of(program, url, str(file), math.ceil(found.cases / len(operations)), found),
            cwd=folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
    if ran.returncode:
        sys.stderr.write(ran.stdout[-20_000:])
    after = answers(url, found.key)
    counts = {status: after[status] - before.get(status, 0) for status in sorted(after)}
    healthy = get(url, "/health", "") is not None
    left = left_in(url, found.key)
    bad = sum(count for status, count in counts.items() if status.startswith("5"))
    return {
        "cases": sum(counts.values()),
        "statuses": {status: count for status, count in counts.items() if count},
        "seconds": round(time.monotonic() - begin_s, 1),
        "failures": ran.returncode,
        "5xx": bad,
        "healthy": healthy,
        "left": left,
        "ok": not ran.returncode and not bad and healthy and not left,
    }


def command_of(
    program: str, url: str, description: str, examples: int, found: argparse.Namespace
) -> list[str]:
    command = [
        program,
        "run",
        description,
        f"--url={url}",
        f"--checks={','.join(CHECKS)}",
        "--phases=fuzzing" if found.quick else "--phases=coverage,fuzzing",
        "--mode=all",
        f"--max-examples={examples}",
        f"--seed={found.seed}",
        f"--workers={found.workers}",
        "--request-timeout=60",
        "--generation-database=none",
        "--continue-on-failure",
        "--suppress-health-check=all",
        "--warnings=off",
        "--no-color",
        *(f"--exclude-path={path}" for path in APART),
    ]
    if found.key:
        command.append(f"--header=Authorization:Bearer {found.key}")
    return command


def name_model(description: dict[str, Any], name: str) -> None:
    for schema in description["components"]["schemas"].values():
        model = schema.get("properties", {}).get("model")
        if model is not None and model.get("type") == "string":
            model["enum"] = [name]


def get(url: str, path: str, key: str) -> str:
    request = urllib.request.Request(url + path)
    if key:
        request.add_header("Authorization", f"Bearer {key}")
    with urllib.request.urlopen(request, timeout=60) as answer:
        text: str = answer.read().decode("utf-8")
        return text


def answers(url: str, key: str) -> dict[str, int]:
    """Answers of the server so far, by status."""
    counts: dict[str, int] = {}
    for line in get(url, "/metrics", key).splitlines():
        row = re.match(r'histrio_http_requests_total\{.*status="(\d+)".*\} (\S+)', line)
        if row:
            counts[row[1]] = counts.get(row[1], 0) + int(float(row[2]))
    return counts


def left_in(url: str, key: str) -> int:
    """Requests that are still in the server, after a while."""
    end_s = time.monotonic() + IDLE_S
    while True:
        loads = json.loads(get(url, "/v1/loads", key))["loads"]
        left = sum(row["num_running_reqs"] + row["num_waiting_reqs"] for row in loads)
        if not left or time.monotonic() > end_s:
            return left
        time.sleep(0.2)
