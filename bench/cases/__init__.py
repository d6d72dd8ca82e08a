"""This file runs public bug reports as cases against a server, and says which it passes.

It knows no server but by its address: the cases ask through HTTP. Each comes from a report about a
server of this kind; `--list` says what each is about.
"""

from __future__ import annotations

import contextlib
import sys
import time
import traceback
from collections.abc import Sequence

from bench.cases import operations, parameters, prompts, sharing, streaming
from bench.cases.asking import Failed, Peer, Skipped
from bench.cases.table import CASES, SETTINGS, Case
from bench.command import parser_of
from bench.idle import server_of
from bench.report import Report
from bench.serve import spawned, split_words

ABOUT = """\
Runs bug reports about servers of this kind as cases, and prints which this one passes.

  python -m app bench cases --spawn                    own servers, each as its cases need it
  python -m app bench cases --spawn --only B005,B145
  python -m app bench cases --url http://host:8000     any OpenAI-compatible server
  python -m app bench cases --spawn --slow -- --model ./model --placement inline

With --url the cases run that ask nothing special of the server; --settings NAME says that it was
started as --list shows. What follows `--` goes to the servers of --spawn.
"""

ROOMS = (streaming, parameters, prompts, sharing, operations)  # imported for their cases


def main(words: Sequence[str]) -> int:
    parser = parser_of("cases", ABOUT)
    where = parser.add_mutually_exclusive_group()
    where.add_argument("--url", default="http://127.0.0.1:8000", help="the server")
    where.add_argument("--spawn", action="store_true", help="start servers for the cases")
    parser.add_argument("--key", default="", help="bearer token for the server")
    parser.add_argument("--settings", choices=SETTINGS, default="plain", help="of the --url")
    parser.add_argument("--only", default="", help="cases, with commas")
    parser.add_argument("--slow", action="store_true", help="also those that take minutes")
    parser.add_argument("--vocab", type=int, default=49152, help="size of the vocabulary")
    parser.add_argument("--eos", type=int, default=2, help="id of the token that ends a chat turn")
    parser.add_argument("--list", action="store_true", help="only say what there is")
    parser.add_argument("--json", action="store_true", help="one JSON object a line")
    words, rest = split_words(words)
    found = parser.parse_args(words)
    chosen = choose(found.only, found.slow)
    if found.only and len(chosen) < len(found.only.split(",")):
        parser.error(f"unknown among {found.only}: --list says what there is")
    report = Report("cases", as_json=found.json)
    if found.list:
        for each in chosen:
            started = " ".join(SETTINGS[each.settings])
            report.add(case=each.name, about=each.about, settings=each.settings, started=started)
        report.close()
        return 0
    failed = 0
    for settings in dict.fromkeys(each.settings for each in chosen):
        cases = [each for each in chosen if each.settings == settings]
        with contextlib.ExitStack() as stack:
            if found.spawn:
                server = ("--dtype", "float32", *SETTINGS[settings], *rest)
                url = stack.enter_context(spawned(server))
            elif settings == found.settings:
                url = found.url
            else:
                names = " ".join(each.name for each in cases)
                print(f"not asked, they need --settings {settings}: {names}", file=sys.stderr)
                continue
            pids = tree_pids(url) if found.spawn else []
            peer = Peer(url, key=found.key, vocab_size=found.vocab, eos_id=found.eos, pids=pids)
            for each in cases:
                failed += run_case(each, peer, report)
    report.close()
    return 1 if failed else 0


def tree_pids(url: str) -> list[int]:
    """The server that serves there, which we have started, and its processes."""
    root = server_of(int(url.rsplit(":", 1)[1]))
    return [root.pid, *(child.pid for child in root.children(recursive=True))]


def choose(only: str, slow: bool) -> list[Case]:
    names = only.split(",") if only else []
    every = sorted(CASES, key=lambda each: (list(SETTINGS).index(each.settings), each.name))
    return [each for each in every if each.name in names or not names and (slow or not each.slow)]


def run_case(each: Case, peer: Peer, report: Report) -> bool:
    """Adds the case's row. Returns whether it failed."""
    begin_s = time.monotonic()
    result, why = "pass", ""
    try:
        each.run(peer)
        peer.expect_alive()
    except Skipped as reason:
        result, why = "skipped", str(reason)
    except Failed as failure:
        result, why = "FAIL", str(failure)
    except Exception as error:  # an answer of a shape that nobody thought of
        place = traceback.extract_tb(error.__traceback__)[-1]
        result, why = "FAIL", f"{type(error).__name__}: {error} ({place.name}:{place.lineno})"
    seconds = time.monotonic() - begin_s
    report.add(case=each.name, about=each.about, result=result, seconds=seconds, why=why)
    print(f"{each.name}  {result:<8}{seconds:6.1f} s  {why}", file=sys.stderr, flush=True)
    return result == "FAIL"
