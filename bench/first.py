"""This file shows where the time to the first token goes when many requests arrive at once: when
each of them passed each room, and what the steps of the first tokens were.

The server is the real one; its rooms note when they see a request. With `--paced` the model is
replaced by a clock, which needs no device: steps take as long as stated, and everything around them
is real. It does not know why a room is late. All clocks are the machine's one.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import msgspec
import numpy as np

from actors.gateway.actor import Gateway
from actors.runtime import spec
from actors.runtime.actor import Actor, MailboxSpec
from actors.scheduler.actor import Scheduler
from actors.tokenizer.actor import Done, Tokenizer
from bench.client import Client, Outcome
from bench.command import parser_of
from bench.crowd import Crowd
from bench.front import busy_ns, make_vocabulary
from bench.report import ROOT, Report, percentile
from bench.serve import free_port, send_wave, wait_ready
from bench.workload import Workload, fixed
from messages import worker
from messages.base import Address
from messages.config import CacheConfig, ModelConfig, Paths, SchedulerConfig, WorkerConfig
from messages.gateway import Deltas
from messages.scheduler import Acquired, Submit
from messages.tokenizer import Encode
from messages.types import pack, unpack
from messages.worker import Facts, StepDone

ABOUT = """\
When the first tokens of requests that arrive together passed each room, after the first was sent.

  python -m app bench first --paced 2,300000 --streams 64,256
  python -m app bench first --shape bench/models/qwen3_0_6b -- --load-format dummy

--paced MS,RATE: each step takes MS milliseconds and its tokens at RATE a second. What follows `--`
goes to the server.
"""
MARKS = "HISTRIO_BENCH_MARKS"  # the folder of the notes, for all processes of the server
PACE = "HISTRIO_BENCH_PACE"
STAGES = (
    "client sent",
    "gateway opened",
    "tokenizer began",
    "tokenizer done",
    "scheduler got",
    "pages leased",
    "gateway first",
    "client first",
)
STEPS_SHOWN = 12


class Notes:
    """One process's file; a line is: what, of whom, when."""

    def __init__(self) -> None:
        self.file = open(Path(os.environ[MARKS]) / f"{os.getpid()}.txt", "a", buffering=1)

    def put(self, what: str, whom: str | int) -> None:
        self.file.write(f"{what}\t{whom}\t{time.monotonic()}\n")


class NotingGateway(Gateway):
    notes: Notes

    async def on_start(self) -> bytes:
        self.notes = Notes()
        self.noted: set[str] = set()
        return await super().on_start()

    def open(self, call: Any, call_id: str | None = None) -> Any:
        self.notes.put("gateway opened", str(call_id))
        return super().open(call, call_id)

    def on_deltas(self, message: Deltas) -> None:
        for row in message.rows:
            if row.token_count and row.request not in self.noted:
                self.noted.add(row.request)
                self.notes.put("gateway first", row.request)
        super().on_deltas(message)


class NotingTokenizer(Tokenizer):
    async def on_start(self) -> bytes:
        self.notes = Notes()
        return await super().on_start()

    def on_encode(self, message: Encode) -> None:
        self.notes.put("tokenizer began", message.request)
        super().on_encode(message)

    def on_done(self, message: Done) -> None:
        self.notes.put("tokenizer done", message.key[0])
        super().on_done(message)


class NotingScheduler(Scheduler):
    async def on_start(self) -> bytes:
        self.notes = Notes()
        return await super().on_start()

    def on_submit(self, message: Submit) -> None:
        self.notes.put("scheduler got", message.request)
        super().on_submit(message)

    def on_acquired(self, message: Acquired) -> None:
        self.notes.put("pages leased", message.request)
        super().on_acquired(message)

    def on_step_done(self, message: StepDone) -> None:
        self.notes.put("step done", message.step)
        super().on_step_done(message)

    def _go_on(self) -> None:
        self.schedule.pump(self.context.now_s())
        for step in self.schedule.output.steps:
            counts = unpack(step.counts)
            rows = f"{step.step} {len(counts)} {sum(counts)} {len(step.opened)}"
            self.notes.put("step sent", rows)
        super()._go_on()


class Answer(NamedTuple):
    """A step is through."""

    asker: Address
    done: worker.StepDone


class PacedWorker(Actor):
    """The worker's room with a clock in it: steps one after the other, each as long as stated."""

    accepts = worker.In
    private: ClassVar[Any] = Answer
    mailbox = MailboxSpec(count_max=16)

    def __init__(
        self,
        model: ModelConfig,
        cache: CacheConfig,
        scheduler: SchedulerConfig,
        worker: WorkerConfig,
        paths: Paths,
    ) -> None:
        self.base_s, self.rate = map(float, os.environ[PACE].split(","))
        self.page_count = max(1, cache.kv_tokens // cache.page_size)
        self.page_size = cache.page_size
        self.computed = np.zeros(scheduler.running_max, np.int64)
        self.known = np.zeros(scheduler.running_max, np.int64)
        self.free_s = 0.0  # when the device is through with what it has

    async def on_start(self) -> bytes:
        facts = Facts("paced", 4096, 1 << 16, self.page_size, self.page_count, (), "none", "clock")
        return msgspec.msgpack.encode(facts)

    def on_compile(self, message: worker.Compile) -> None:
        raise AssertionError("a grammar for nobody")

    def on_step(self, message: worker.Step) -> None:
        for row in message.opened:
            self.known[row.slot] = len(row.tokens) // 4
            self.computed[row.slot] = row.cached_len
        slots, counts = (np.frombuffer(b, np.int32) for b in (message.slots, message.counts))
        self.computed[slots] += counts
        sampled = slots[self.computed[slots] == self.known[slots]]
        self.known[sampled] += 1
        now_s = self.context.now_s()
        self.free_s = max(self.free_s, now_s) + self.base_s / 1e3 + counts.sum() / self.rate
        tokens = 256 + (self.known[sampled] * 7 + sampled) % 3000
        done = worker.StepDone(message.epoch, message.step, pack(sampled), pack(tokens.tolist()))
        assert self.context.sender is not None
        answer = Answer(self.context.sender, done)
        self.context.start_timer(message.step, answer, after_s=self.free_s - now_s)

    def on_answer(self, message: Answer) -> None:
        self.context.ref(message.asker).tell(message.done)


NOTING = {"gateway": NotingGateway, "tokenizer": NotingTokenizer, "scheduler": NotingScheduler}


def noting(branch: spec.Supervisor) -> spec.Supervisor:
    """The same tree, whose rooms note what passes."""
    factories = {name: f"bench.first:{kind.__name__}" for name, kind in NOTING.items()}
    if PACE in os.environ:
        factories["worker"] = "bench.first:PacedWorker"
    children = tuple(
        noting(child)
        if isinstance(child, spec.Supervisor)
        else msgspec.structs.replace(child, factory=factories.get(child.name, child.factory))
        for child in branch.children
    )
    return msgspec.structs.replace(branch, children=children)


def serve(words: Sequence[str]) -> int:
    """The server's process."""
    import app
    from actors import tree

    build = tree.build

    def build_noting(config: Any) -> Any:
        root, nodes = build(config)
        return noting(root), nodes

    tree.build = build_noting  # what `actors.run` calls
    return app.main(["serve", *words])


@contextlib.contextmanager
def running(found: argparse.Namespace, folder: Path) -> Iterator[str]:
    """The server's address."""
    model = folder / "model"
    model.mkdir()
    if found.shape:
        shutil.copy(Path(found.shape) / "config.json", model)
    vocab_size = 4096
    if found.shape:
        vocab_size = json.loads((model / "config.json").read_text("utf-8"))["vocab_size"]
    make_vocabulary(model, vocab_size)
    (folder / "marks").mkdir()
    words = ["--model", str(model), "--served-model-name", "m"]
    environment = {**os.environ, MARKS: str(folder / "marks")}
    if found.paced:
        (model / "config.json").write_text("{}", "utf-8")
        environment[PACE] = found.paced
        words += ["--load-format", "dummy", "--max-running", "256", "--prefill-budget", "8192"]
        words += ["--kv-tokens", "1000000", "--device", "cpu"]
    port = free_port()
    command = [sys.executable, "-m", "bench.first", *words, "--port", str(port), *found.rest]
    with open(folder / "server.txt", "wb") as log:
        process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=log, stderr=log)
    try:
        asyncio.run(wait_ready(process, f"http://127.0.0.1:{port}", 600.0))
        yield f"http://127.0.0.1:{port}"
    except TimeoutError:
        text = (folder / "server.txt").read_text("utf-8", "replace")
        raise RuntimeError(f"the server did not start:\n{text[-2000:]}") from None
    finally:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(60)
        process.kill()


def read_notes(folder: Path, begin_s: float, end_s: float) -> list[tuple[str, str, float]]:
    """Of all processes, within [begin_s, end_s], in order of time."""
    notes = []
    for file in folder.iterdir():
        for line in file.read_text("utf-8").splitlines():
            what, whom, at = line.split("\t")
            if begin_s <= float(at) <= end_s:
                notes.append((what, whom, float(at)))
    return sorted(notes, key=lambda note: note[2])


def stages_of(
    outcomes: Sequence[Outcome], notes: Sequence[tuple[str, str, float]]
) -> dict[str, list[float]]:
    """When requests passed each stage, of each its first time there."""
    seen: dict[str, dict[str, float]] = {stage: {} for stage in STAGES}
    for what, whom, at in notes:
        if what in seen:
            seen[what].setdefault(whom, at)
    times = {stage: sorted(each.values()) for stage, each in seen.items()}
    times["client sent"] = sorted(o.sent_s for o in outcomes)
    times["client first"] = sorted(o.arrivals_s[0] for o in outcomes if o.arrivals_s)
    return times


def add_stages(report: Report, streams: int, times: dict[str, list[float]]) -> None:
    begin_s = times["client sent"][0]
    for stage, each in times.items():
        after_ms = [1e3 * (at - begin_s) for at in each]
        if after_ms:
            report.add(
                streams=streams,
                stage=stage,
                count=len(each),
                first_ms=after_ms[0],
                p50_ms=percentile(after_ms, 0.5),
                p90_ms=percentile(after_ms, 0.9),
                last_ms=after_ms[-1],
            )


def show_steps(notes: Sequence[tuple[str, str, float]], begin_s: float) -> None:
    """The first steps, for people: what was in them, and when."""
    done = {int(whom): at for what, whom, at in notes if what == "step done"}
    sent = [(whom, at) for what, whom, at in notes if what == "step sent"]
    for whom, at in sent[:STEPS_SHOWN]:
        step, rows, tokens, opened = map(int, whom.split())
        ended = f"{1e3 * (done[step] - begin_s):.1f}" if step in done else "?"
        print(
            f"  step {step}: {rows} rows, {tokens} tokens, {opened} new;"
            f" sent at {1e3 * (at - begin_s):.1f} ms, done at {ended} ms",
            file=sys.stderr,
        )


def measure(found: argparse.Namespace) -> int:
    report = Report("first", as_json=found.json, paced=found.paced or "no", shape=found.shape)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with running(found, folder) as url:
            for streams in found.streams:
                middle, busy = middle_wave(found, url, streams)
                begin_s = min(o.sent_s for o in middle)
                notes = read_notes(folder / "marks", begin_s, max(o.done_s for o in middle))
                print(f"{streams} streams; ms of a processor for each, by node:", file=sys.stderr)
                print(f"  {busy}", file=sys.stderr)
                show_steps(notes, begin_s)
                add_stages(report, streams, stages_of(middle, notes))
    report.close()
    return 0


def processes_of(url: str) -> dict[str, int]:
    """By node."""
    status, body = asyncio.run(Client(url).get("/actors"))
    assert status == 200, status
    return {row["node"]: row["pid"] for row in json.loads(body)}


def middle_wave(found: argparse.Namespace, url: str, streams: int) -> tuple[list[Outcome], str]:
    """Of some waves the one whose median first token is in the middle, and what they cost the
    processes. Raises RuntimeError: a request failed."""
    load = Workload(f"f{streams}", streams, streams, fixed(found.input_len), fixed(8))
    client = Client(url)
    settings = argparse.Namespace(rate=None, seed=0, prompt="ids")
    waves: list[list[Outcome]] = []
    processes = processes_of(url)
    before: dict[str, tuple[int, int]] = {}
    with Crowd(found.clients) as crowd:
        for nth in range(found.waves + 1):
            if nth == 1:
                before = {node: busy_ns(pid) for node, pid in processes.items()}
            requests = load.wave(0, nth, 3000)
            outcomes = asyncio.run(send_wave(client, "m", load, requests, settings, nth, crowd))
            errors = [outcome.error for outcome in outcomes if outcome.error]
            if errors:
                raise RuntimeError(f"{len(errors)} of {streams} failed: {errors[0]}")
            if nth > 0:
                waves.append(outcomes)

    def first_of(outcomes: list[Outcome]) -> float:
        return percentile([o.arrivals_s[0] - o.sent_s for o in outcomes], 0.5)

    each = 1e6 * streams * found.waves
    after = {node: busy_ns(pid) for node, pid in processes.items()}
    busy = ", ".join(
        f"{node} {(after[node][0] - was[0]) / each:.2f} + {(after[node][1] - was[1]) / each:.2f}"
        for node, was in before.items()
    )
    return sorted(waves, key=first_of)[len(waves) // 2], busy


def main(words: Sequence[str]) -> int:
    parser = parser_of("first", ABOUT)

    def numbers(text: str) -> list[int]:
        return [int(word) for word in text.split(",")]

    parser.add_argument("--streams", type=numbers, default=[64, 256], help="one or more, by comma")
    parser.add_argument("--input-len", type=int, default=128, help="tokens of a prompt")
    parser.add_argument("--waves", type=int, default=5, help="the middle one is shown")
    parser.add_argument("--clients", type=int, default=2, help="processes that the streams are in")
    parser.add_argument("--paced", default="", metavar="MS,RATE", help="a clock for a device")
    parser.add_argument("--shape", default="", metavar="DIR", help="whose config.json is served")
    parser.add_argument("--json", action="store_true", help="one JSON object a line")
    at = list(words).index("--") if "--" in words else len(words)
    found = parser.parse_args(words[:at])
    found.rest = list(words[at + 1 :])
    return measure(found)


if __name__ == "__main__":
    sys.exit(serve(sys.argv[1:]))
