"""This file breaks the processes of a real server under load, and compares every stream with the
undisturbed run, token by token.

It knows a process by its id and its log, and a stream by its tokens.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import datetime
import itertools
import json
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from bench.chaos_load import KINDS, Load, Plan, Stream, plans
from bench.chaos_server import Server
from bench.client import CUT, Client
from bench.command import parser_of
from bench.fused import GO_WRONG
from bench.report import Report, percentile
from bench.serve import first_model

ABOUT = """\
Breaks the processes of a real server under load, and compares every stream with the undisturbed
run, token by token.

  python -m app bench chaos --streams 200 --ways kill:30,stop:10,spin:5,memory:5
  python -m app bench chaos --roles worker --ways kill:3,stop:3 --model smol.gguf --hot-spare
  python -m app bench chaos --journal faults.jsonl     # goes on where that run ended; shows all

The streams are always open: where one ends the next begins. A fault comes by an event, after the
k-th token of a drawn stream (a few from the last one), and the next one when all streams that it
met have gone on: one stream may meet several, and each of them counts it. Ways:
`kill` (SIGKILL), `stop` (SIGSTOP, never continued), `spin` (a busy loop on the process's event
loop), `deadlock` (the worker's forward waits for ever), `memory` (no more is to be had), `assert`
(one that fails on the GPU: the worker's process can't use that any more).

The server computes on the CPU, in float32, where tokens don't depend on who else is in the batch.
A GPU is asked for behind --, and then with `--device cuda --deterministic`.

Kinds of streams: plain ones with a temperature and a seed, with penalties, with log probabilities,
of two choices, with stop strings, and three with constraints: an expression, a JSON schema, a
choice between texts whose tokens are forced. All of a stream is compared: tokens, text, end, and
probabilities.

Roles are processes: worker, engine (scheduler and cache), front (tokenizer, detokenizer, router),
gateway. The root does nothing but supervise, as where a server is deployed. Where `gateway` is
broken, clients of its connections come back with the last event that they have; without that role
(`--roles worker,engine,front`) nobody does. A role is not struck before it has its process in
reserve, but with --unready.

Figures: streams equal to the undisturbed run; `went on`: those that got tokens from after the
fault (the others had all theirs in a socket by then); errors a client saw; `seen`: from the fault
until the root had told everybody, by its log; `next`: until the first token after the
fault's; `all`: the same of every stream.
"""
ROLES = {"worker": "replica/worker", "engine": "replica/scheduler", "front": "tokenizer"}
GATEWAY = "gateway"  # the role and its actor
PATHS = {**ROLES, GATEWAY: GATEWAY}
WAYS = ("kill", "stop", "spin", "deadlock", "memory", "assert")
ONLY_WORKER = ("deadlock", "assert")
DEFAULT_WAYS = "kill:30,stop:10,spin:5,memory:5,deadlock:5"
PATIENCE_S = 300.0  # of a machine that others use as well
POLL_S = 0.005
AHEAD_LEN = 20  # tokens, at most, from now to the next fault


class Struck(NamedTuple):
    """One fault and what came of it. Seconds since the fault; None: it did not come about."""

    role: str
    way: str
    seen_s: float | None  # the root knew
    up_s: float | None  # the new process was linked
    next_s: float | None  # the first token from it
    all_s: tuple[float, ...]  # the same of each stream that was open
    count: int  # streams that were open
    equal: int
    errors: tuple[str, ...]


class Met(NamedTuple):
    """A fault whose streams may not have ended yet. `cut`: those that lost their connection by it,
    though that is none of the gateway's business."""

    struck: Struck
    streams: list[Stream]
    cut: list[Stream]

    @property
    def is_over(self) -> bool:
        return all(stream.is_equal is not None for stream in self.streams)

    def outcome(self) -> Struck:
        errors = {stream.error for stream in self.streams if stream.error}
        return self.struck._replace(
            equal=sum(s.is_equal is True and s not in self.cut for s in self.streams),
            errors=tuple(sorted(errors | ({CUT} if self.cut else set()))),
        )


class RootLog:
    """What the root has said since the last look."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("rb")
        self._half = b""
        self.reserved: set[str] = set()  # nodes that have a process in reserve

    def news(self) -> list[dict[str, Any]]:
        *lines, self._half = (self._half + self._file.read()).split(b"\n")
        found = [json.loads(line) for line in lines if b'"peer"' in line]
        for line in found:
            if line["event"] == "in reserve":
                self.reserved.add(line["peer"])
            elif line["event"] == "node up":
                self.reserved.discard(line["peer"])
        return found

    def close(self) -> None:
        self._file.close()


def at_s(line: dict[str, Any]) -> float:
    return datetime.datetime.fromisoformat(line["timestamp"]).timestamp()


class Chaos:
    """One server, its load, and faults one after the other."""

    def __init__(self, server: Server, load: Load, rng: random.Random, *, waits: bool) -> None:
        """`waits`: for a process in reserve, before each fault."""
        self.server = server
        self.load = load
        self.rng = rng
        self.waits = waits
        self.client = Client(server.url, timeout_s=PATIENCE_S)
        self.log = RootLog(server.log_dir / "latest" / "main.jsonl")

    async def strike(self, role: str, way: str) -> Met:
        """One fault, until all streams that it met have ended or gone on. They may end later."""
        fault = None
        while fault is None:
            if self.waits:
                await until(time.monotonic() + PATIENCE_S, lambda: self.is_reserved(role))
            _, body = await self.client.get("/actors")
            (pid,) = [row["pid"] for row in json.loads(body) if row["path"] == PATHS[role]]
            self.log.news()
            with contextlib.suppress(ProcessLookupError):  # it died by itself meanwhile
                fault = await self._fault(pid, way)
        struck_s, met = fault
        seen_s: float | None = None
        up_s: float | None = None
        until_s = time.monotonic() + PATIENCE_S
        while time.monotonic() < until_s and up_s is None:
            await asyncio.sleep(POLL_S)
            for line in self.log.news():
                if line["peer"] == role and line["event"] in ("node killed", "node died"):
                    seen_s = seen_s or at_s(line)
                elif line["peer"] == role and line["event"] == "node up":
                    up_s = at_s(line)
        after: tuple[float, ...] = ()
        if up_s is not None:
            await self.back(until_s)
            ready_s = time.time()
            there = [*met, *self.load.open.values()]
            await until(until_s, lambda: all(is_past(stream, ready_s) for stream in there))
            went_on = [stream for stream in met if first_after(stream, ready_s) is not None]
            after = tuple(sorted(resumed_s(s.times, struck_s, ready_s) - struck_s for s in went_on))
        struck = Struck(
            role,
            way,
            seen_s - struck_s if seen_s is not None else None,
            up_s - struck_s if up_s is not None else None,
            after[0] if after else None,
            after,
            len(met),
            0,
            (),
        )
        cut = [stream for stream in met if any(at > struck_s for at in stream.breaks)]
        return Met(struck, met, [] if role == GATEWAY else cut)

    async def back(self, until_s: float) -> None:
        """Until all parts are in service, not only their processes, or time is up."""
        status = 0
        while status != 200 and time.monotonic() < until_s:
            await asyncio.sleep(POLL_S)
            with contextlib.suppress(OSError, TimeoutError, ValueError):
                status, _ = await self.client.get("/health")

    def is_reserved(self, role: str) -> bool:
        self.log.news()
        return role in self.log.reserved

    async def _fault(self, pid: int, way: str) -> tuple[float, list[Stream]]:
        """Waits for its event. Gives when it was, and which streams had begun and not ended."""
        drawn = self.rng.choice(list(self.load.open.values()))
        after_len = drawn.ids_len + self.rng.randint(1, AHEAD_LEN)
        passes = None
        if after_len >= self.load.ids_len(drawn.place):
            # Of the stream that comes next there.
            passes, after_len = drawn, self.rng.randint(1, AHEAD_LEN)
        done: asyncio.Future[float] = asyncio.get_running_loop().create_future()
        met: list[Stream] = []

        def heard(stream: Stream) -> None:
            if stream.place != drawn.place or stream is passes or done.done():
                return
            if stream.ids_len < after_len:  # one event may bring several tokens
                return
            if not is_child(pid, self.server.process.pid):
                done.set_exception(ProcessLookupError(pid))
                return
            met.extend(one for one in self.load.open.values() if one.is_equal is None)
            send = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}.get(way) or GO_WRONG[way]
            done.set_result(time.time())
            os.kill(pid, send)

        self.load.heard = heard
        try:
            return await asyncio.wait_for(done, PATIENCE_S), met
        finally:
            self.load.heard = None


async def until(until_s: float, what: Callable[[], bool]) -> None:
    """Polls until it is so, or time is up."""
    while time.monotonic() < until_s:
        if what():
            return
        await asyncio.sleep(POLL_S)


def is_past(stream: Stream, at: float) -> bool:
    return stream.is_equal is not None or first_after(stream, at) is not None


def first_after(stream: Stream, at: float) -> float | None:
    return next((t for t in stream.times if t > at), None)


def resumed_s(times: Sequence[float], struck_s: float, ready_s: float) -> float:
    """When a stream that went on got the first token from after the fault. Some from before may
    come later than the fault: it is the end of the longest silence that had begun when all parts
    were back."""
    known = [max((at for at in times if at <= struck_s), default=struck_s)]
    known += [at for at in times if at > struck_s]
    silences = [(b - a, b) for a, b in itertools.pairwise(known) if a <= ready_s]
    return max(silences)[1]


def is_child(pid: int, parent: int) -> bool:
    """Nobody else's process is ever harmed, also where a pid was given again."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text("ascii").rpartition(")")[2].split()
    except OSError:
        return False
    return int(fields[1]) == parent


def wanted(roles: str, ways: str) -> list[tuple[str, str]]:
    """All faults, roles in turn, so that each role has time to get its process in reserve back.

    Raises ValueError: no such role or way.
    """
    left: dict[str, list[str]] = {role: [] for role in roles.split(",")}
    for word in ways.split(","):
        way, _, count = word.partition(":")
        if way not in WAYS or not set(left) <= set(PATHS):
            raise ValueError(f"no such role or way: {roles} {word}")
        for role, faults in left.items():
            if role == "worker" or way not in ONLY_WORKER:
                faults += [way] * int(count or 1)
    found = []
    while any(left.values()):
        found += [(role, faults.pop(0)) for role, faults in left.items() if faults]
    return found


def done_before(journal: Path | None) -> list[Struck]:
    if journal is None or not journal.exists():
        return []
    rows = [json.loads(line) for line in journal.read_text("utf-8").splitlines()]
    return [Struck(**{**row, "all_s": tuple(row["all_s"])}) for row in rows]


def left_of(faults: list[tuple[str, str]], done: list[Struck]) -> list[tuple[str, str]]:
    before = [(one.role, one.way) for one in done]
    found = []
    for fault in faults:
        if fault in before:
            before.remove(fault)
        else:
            found.append(fault)
    return found


async def break_all(
    server: Server,
    asked: list[Plan],
    faults: list[tuple[str, str]],
    rng: random.Random,
    took: Callable[[Struck], None],
    *,
    waits: bool,
) -> int:
    """Strikes one fault after the other, telling `took` of each. Gives how many of all streams were
    not equal."""
    comes_back = any(role == GATEWAY for role, _ in faults)
    load = Load(server.url, await first_model(Client(server.url)), asked, comes_back=comes_back)
    begin_s = time.monotonic()
    same = await load.learn()
    took_s = (time.monotonic() - begin_s) / 2
    print(f"undisturbed: {len(asked)} streams in {took_s:.1f} s, {same} equal again", flush=True)
    chaos = Chaos(server, load, rng, waits=waits)
    load.start()
    pending: list[Met] = []
    try:
        for role, way in faults:
            pending.append(await chaos.strike(role, way))
            while pending and pending[0].is_over:
                took(pending.pop(0).outcome())
        until_s = time.monotonic() + PATIENCE_S
        await until(until_s, lambda: all(met.is_over for met in pending))
        for met in pending:
            took(met.outcome())
        wrong = sum(not stream.is_equal for stream in load.take_ended())
    finally:
        await load.stop()
        chaos.log.close()
    return wrong + len(asked) - same


def show(results: list[Struck], *, as_json: bool, **facts: Any) -> int:
    """The table; how many streams were not equal."""
    report = Report("chaos", as_json=as_json, **facts)
    rows: dict[tuple[str, str], list[Struck]] = {}
    for one in results:
        rows.setdefault((one.role, one.way), []).append(one)
    for (role, way), mine in sorted(rows.items()):
        found: dict[str, Any] = {"role": role, "way": way, "faults": len(mine)}
        found["streams"] = sum(one.count for one in mine)
        found["went on"] = sum(len(one.all_s) for one in mine)
        found["equal"] = sum(one.equal for one in mine)
        found["errors"] = "; ".join(sorted({error for one in mine for error in one.errors}))[:80]
        for name, values in (
            ("seen", [one.seen_s for one in mine]),
            ("next", [one.next_s for one in mine]),
            ("all", [value for one in mine for value in one.all_s]),
        ):
            for share in (0.5, 0.99):
                ms = [1000 * value for value in values if value is not None]
                found[f"{name} p{share * 100:.0f} ms"] = percentile(ms, share)
        found["not seen or not up"] = sum(one.seen_s is None or one.up_s is None for one in mine)
        report.add(**found)
    report.close()
    return sum(one.count - one.equal for one in results)


async def main_async(found: argparse.Namespace) -> int:
    asked = plans(found.streams, found.tokens, found.kinds.split(","))
    done = done_before(found.journal)
    faults = left_of(wanted(found.roles, found.ways), done)
    words = ["--spare-after", "1", "--resume-streams-max", "1024", "--recover", f"{PATIENCE_S:g}"]
    words += [*(["--hot-spare"] if found.hot_spare else []), *found.words]
    wrong = 0

    def took(one: Struck) -> None:
        done.append(one)
        if found.journal is not None:
            with found.journal.open("a", encoding="utf-8") as file:
                file.write(json.dumps(one._asdict()) + "\n")
        print(
            f"{len(done):4} {one.role:7} {one.way:9} {one.equal}/{one.count} equal, "
            + f"{len(one.all_s)} went on  "
            + "  ".join(
                f"{name} {value * 1000:.0f} ms" if value is not None else f"{name} never"
                for name, value in (("seen", one.seen_s), ("up", one.up_s), ("next", one.next_s))
            )
            + f"  {'; '.join(one.errors)[:200]}",
            flush=True,
        )

    if faults:
        with contextlib.ExitStack() as stack:
            folder = found.folder or Path(
                stack.enter_context(tempfile.TemporaryDirectory(prefix="chaos-"))
            )
            server = Server(found.model, folder, found.threads, *words, apart=True)
            stack.enter_context(server)
            await asyncio.to_thread(server.wait_ready)
            rng = random.Random(f"{found.seed}/{len(done)}")
            wrong = await break_all(server, asked, faults, rng, took, waits=not found.unready)
    wrong += show(done, as_json=found.json, streams=found.streams, hot_spare=found.hot_spare)
    return 1 if wrong else 0


def main(words: list[str]) -> int:
    parser = parser_of("chaos", ABOUT, "[option ...] [-- option of the server ...]")
    parser.add_argument("words", nargs="*", help="for the server, after --")
    parser.add_argument("--model", default="", help="folder or .gguf; default: a tiny random Llama")
    parser.add_argument("--streams", type=int, default=200, help="open at once")
    parser.add_argument("--tokens", type=int, default=100, help="at most, of one stream")
    parser.add_argument("--kinds", default=",".join(KINDS), help="of streams, in turn")
    parser.add_argument("--roles", default=",".join(PATHS), help="which are struck")
    parser.add_argument("--ways", default=DEFAULT_WAYS, help="way:times for each role")
    parser.add_argument("--hot-spare", action="store_true", help="as of the server")
    parser.add_argument("--unready", action="store_true", help="strike without one in reserve")
    parser.add_argument(
        "--journal", type=Path, help="a line for each fault; those are not repeated"
    )
    parser.add_argument("--folder", type=Path, help="keeps the server's logs, and its model")
    parser.add_argument("--threads", type=int, default=1, help="of the forward")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true", help="one JSON object a line")
    return asyncio.run(main_async(parser.parse_args(words)))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
