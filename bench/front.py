"""This file measures the front end alone: real gateways, tokenizers, detokenizers, links, sockets,
and behind them a scripted scheduler that makes every stream a token at a stated rate.

It does not know models: nothing is computed. It reports the processor time of the front
end's processes for each event that reached a client, and the rate that this time allows for.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import resource
import socket
import string
import tempfile
from collections import deque
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import msgspec
import structlog
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from actors import tree
from actors.runtime import spec
from actors.runtime.actor import Actor, MailboxSpec
from actors.runtime.context import Ref
from actors.runtime.system import System
from actors.scheduler.mail import Mail
from bench.command import parser_of
from bench.flood import Flooder, Found, Seen, Wave, post
from bench.report import Report
from messages import detokenizer, scheduler, worker
from messages.config import (
    CacheConfig,
    Config,
    GatewayConfig,
    ModelConfig,
    Paths,
    RuntimeConfig,
    SchedulerConfig,
    WorkerConfig,
)
from messages.detokenizer import Open, Tail
from messages.scheduler import Submit
from messages.types import FinishReason, Usage, pack
from messages.worker import Facts

ABOUT = """\
Processor time of the front end for each event, with a scripted back end.

  python -m app bench front
  python -m app bench front --streams 64,256 --rate 12000 --front-ends 2 --chat
"""

WORDS = 4096  # of four letters, so that an event is as long as one of a real model
STEP_ROWS = 1024  # of a step at most
FILES_BESIDE = 1024  # of a gateway, beside its connections
GATHER_S = 0.2  # after the last request has come, before the first step


class Script(msgspec.Struct, frozen=True, kw_only=True):
    """What the scripted scheduler plays."""

    streams: int  # it begins when so many are there
    steps_per_s: float


class Tick(NamedTuple):
    """The next step is due."""


class Silent(Actor):
    """The worker's room without a worker in it."""

    accepts = worker.Step
    mailbox = MailboxSpec(count_max=16)

    def __init__(
        self,
        model: ModelConfig,
        cache: CacheConfig,
        scheduler: SchedulerConfig,
        worker: WorkerConfig,
        paths: Paths,
    ) -> None:
        pass

    async def on_start(self) -> bytes:
        return msgspec.msgpack.encode(
            Facts("scripted", WORDS, 1 << 20, 16, 64, (), "float32", "none")
        )

    def on_step(self, message: worker.Step) -> None:
        raise AssertionError("a step for nobody")


class Played:
    """One request, and how far it is."""

    __slots__ = ("index", "mail", "submit")

    def __init__(self, submit: Submit, mail: Mail) -> None:
        self.submit = submit
        self.mail = mail
        self.index = 0


class Scripted(Actor):
    """The scheduler's room: each step is a token for everybody, or for a batch where there are too
    many for one step; batches take turns."""

    accepts = Submit | scheduler.Cancel | scheduler.Poll | scheduler.StopMet
    private: ClassVar[Any] = Tick
    mailbox = MailboxSpec(count_max=1 << 17)

    def __init__(self, script: Script, paths: Paths) -> None:
        self.script = script
        self.paths = paths
        self.mails: dict[str, Mail] = {}
        self.played: list[Played] = []  # those who wait for the rest
        self.batches: deque[list[Played]] = deque()  # the next to have a step first
        self.due_s: float | None = None

    async def on_start(self) -> bytes:
        self.detokenizers: dict[str, Ref[detokenizer.In]] = {}
        pairs = zip(self.paths.gateways, self.paths.detokenizers, strict=True)
        for gateway_path, detokenizer_path in pairs:
            self.detokenizers[gateway_path] = self.context.peer(detokenizer_path)
            self.mails[gateway_path] = Mail()
        rng = random.Random(0)
        self.tokens = [pack([256 + rng.randrange(WORDS - 256)]) for _ in range(1024)]
        return b""

    def on_submit(self, message: Submit) -> None:
        mail = self.mails[message.reply_to.path]
        usage = Usage(prompt_tokens=len(message.prompt) // 4)
        mail.opened.append(
            Open(message.request, message.attempt, message.reply_to, message.stop, b"", usage)
        )
        self.played.append(Played(message, mail))
        if self.due_s is None and len(self.played) == self.script.streams:
            count = -(-len(self.played) // STEP_ROWS)
            self.batches.extend(self.played[nth::count] for nth in range(count))
            self.played = []
            self.due_s = self.context.now_s() + GATHER_S
            self.context.start_timer("step", Tick(), after_s=GATHER_S)

    def on_tick(self, message: Tick) -> None:
        tokens = self.tokens
        going = []
        for played in self.batches.popleft():
            submit, index = played.submit, played.index
            played.index = index + 1
            finish, usage = None, None
            if played.index == submit.sampling.max_tokens:
                finish, usage = FinishReason.LENGTH, Usage(8, played.index)
            else:
                going.append(played)
            token = tokens[(index * 7 + len(going)) & 1023]
            tail = Tail(submit.request, submit.attempt, index, token, (), finish, None, usage)
            played.mail.rows.append(tail)
        for path, mail in self.mails.items():
            if mail.rows:
                self.detokenizers[path].tell(mail.take())
        if going:
            self.batches.append(going)
        assert self.due_s is not None
        if not self.batches:
            self.due_s = None
            return
        self.due_s += 1 / (self.script.steps_per_s * len(self.batches))
        after_s = max(0.0, self.due_s - self.context.now_s())
        self.context.start_timer("step", Tick(), after_s=after_s)

    # Nothing of this happens here

    def on_cancel(self, message: scheduler.Cancel) -> None: ...

    def on_poll(self, message: scheduler.Poll) -> None: ...

    def on_stop_met(self, message: scheduler.StopMet) -> None: ...


def scripted(branch: spec.Supervisor, script: Script, paths: Paths) -> spec.Supervisor:
    """The same tree, scripted from the scheduler on."""
    children: list[spec.Child | spec.Supervisor] = []
    for child in branch.children:
        if isinstance(child, spec.Supervisor):
            children.append(scripted(child, script, paths))
        elif child.name == "worker":
            children.append(
                msgspec.structs.replace(child, factory="bench.front:Silent", node="engine")
            )
        elif child.name == "scheduler":
            arguments: dict[str, Any] = {"script": script, "paths": paths}
            children.append(
                msgspec.structs.replace(child, factory="bench.front:Scripted", arguments=arguments)
            )
        else:
            children.append(child)
    return msgspec.structs.replace(branch, children=tuple(children))


def make_vocabulary(folder: Path, word_count: int = WORDS) -> None:
    """A byte-level tokenizer of the 256 bytes and many words."""
    letters = 3 if word_count <= WORDS else 5
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    rng = random.Random(0)
    vocab = {letter: index for index, letter in enumerate(alphabet)}
    while len(vocab) < word_count:
        word = "".join(rng.choices(string.ascii_lowercase, k=letters))
        vocab.setdefault("\u0120" + word, len(vocab))
    tokenizer = Tokenizer(models.BPE(vocab, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "chat_template": "{% for message in messages %}{{ message['content'] }}{% endfor %}",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config), "utf-8")


def request_of(found: argparse.Namespace, max_tokens: int) -> bytes:
    body: dict[str, Any] = {"model": "m", "max_tokens": max_tokens, "stream": True}
    if found.chat:
        body["messages"] = [{"role": "user", "content": "Hello"}]
        return post("/v1/chat/completions", body, keeps=False)
    return post("/v1/completions", {**body, "prompt": list(range(32))}, keeps=False)


@contextlib.asynccontextmanager
async def running(found: argparse.Namespace, script: Script, port: int) -> AsyncIterator[System]:
    with tempfile.TemporaryDirectory() as folder:
        make_vocabulary(Path(folder))
        config = Config(
            model=ModelConfig(path=folder, name="m"),
            gateway=GatewayConfig(port=port, open_max=max(10_000, script.streams)),
            cache=CacheConfig(kv_tokens=1024),
            # The gateway refuses what they would have no place for.
            scheduler=SchedulerConfig(running_max=script.streams),
            runtime=RuntimeConfig(front_ends=found.front_ends),
        )
        root, nodes = tree.build(config)
        paths = tree.paths_of(found.front_ends)[0]
        silent = structlog.wrap_logger(structlog.ReturnLogger(), processors=[])
        system = System(
            scripted(root, script, paths),
            nodes=[node for node in nodes if node.name != "worker"],
            seed=1,
            log=silent,
            log_dir=Path(folder) / "logs",
            log_level="warning",
        )
        await system.start()
        try:
            yield system
        finally:
            await system.stop()


def busy_ns(pid: int) -> tuple[int, int]:
    """Time on a processor: of the loop's thread, and of all others (those of the sockets between
    processes, mostly)."""
    loop = others = 0
    for task in Path(f"/proc/{pid}/task").iterdir():
        used = int((task / "schedstat").read_text().split()[0])
        if task.name == str(pid):
            loop += used
        else:
            others += used
    return loop, others


def check_files(streams: int) -> None:
    """Raises SystemExit where that many connections cannot be open."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < streams + FILES_BESIDE:
        raise SystemExit(f"{streams} streams need more open files than the {hard} allowed here")


async def measure_one(found: argparse.Namespace, streams: int, report: Report) -> None:
    """One server, one wave of streams. From when all have begun until the first has ended."""
    check_files(streams)
    steps_per_s = found.rate / streams
    steps = max(20, round(found.seconds * steps_per_s))
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    script = Script(streams=streams, steps_per_s=steps_per_s)
    requests = [request_of(found, steps)]
    wave = Wave(port=port, requests=requests, clients=streams, once=True, seconds=600, keeps=False)
    async with running(found, script, port) as system:
        fronts = {row.pid for row in system.actors() if row.path.endswith("gateway")}
        assert os.getpid() not in fronts
        if found.announce:
            print("front ends:", *fronts, flush=True)
        with Flooder() as flooder:
            flooder.start(wave)
            begun = await asyncio.to_thread(flooder.next)
            before = [busy_ns(pid) for pid in fronts]
            ended = await asyncio.to_thread(flooder.next)
            after = [busy_ns(pid) for pid in fronts]
            mib = sum(rss_mib(pid) for pid in fronts)
            last = await asyncio.to_thread(flooder.next)
    assert isinstance(begun, Seen) and isinstance(ended, Seen) and isinstance(last, Found)
    events, elapsed_s = ended.events - begun.events, ended.at_s - begun.at_s
    loop_ns = sum(b[0] - a[0] for a, b in zip(before, after, strict=True))
    other_ns = sum(b[1] - a[1] for a, b in zip(before, after, strict=True))
    report.add(
        streams=streams,
        front_ends=found.front_ends,
        route="chat" if found.chat else "completions",
        errors=sum(not answer.is_whole for answer in last.answers),
        asked_per_s=found.rate,
        events_per_s=events / elapsed_s,
        events_a_read=events / max(1, ended.reads - begun.reads),
        loop_us_an_event=loop_ns / events / 1e3,
        links_us_an_event=other_ns / events / 1e3,
        client_us_an_event=1e6 * last.cpu_s / sum(answer.events for answer in last.answers),
        busy=loop_ns / 1e9 / elapsed_s / len(fronts),
        events_per_s_a_core=1e9 * events / loop_ns,
        front_mib=mib,
    )


def rss_mib(pid: int) -> float:
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * resource.getpagesize() / 2**20


async def measure(found: argparse.Namespace) -> int:
    report = Report("front", as_json=found.json)
    for streams in found.streams:
        await measure_one(found, streams, report)
    report.close()
    return 1 if any(row["errors"] for row in report.rows) else 0


def main(words: Sequence[str]) -> int:
    parser = parser_of("front", ABOUT)

    def numbers(text: str) -> list[int]:
        return [int(word) for word in text.split(",")]

    parser.add_argument("--streams", type=numbers, default=[64, 256], help="one or more, by comma")
    parser.add_argument("--rate", type=float, default=6000, help="events/s in all")
    parser.add_argument("--seconds", type=float, default=4.0, help="of each wave")
    parser.add_argument("--front-ends", type=int, default=1, help="as of the server")
    parser.add_argument("--chat", action="store_true", help="/v1/chat/completions")
    parser.add_argument("--announce", action="store_true", help="print the processes, to profile")
    parser.add_argument("--json", action="store_true", help="one JSON object a line")
    return asyncio.run(measure(parser.parse_args(list(words))))
