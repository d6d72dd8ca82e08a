"""This file plants bugs, one at a time, and counts how many seeds the simulation needs to see each.

A mutant is an exact piece of source and what stands in its place, in a copy of the project. A piece
that is not found is an error, so that the list cannot go stale unseen; so is a run that ends in any
other way than by a law that was broken. The copy without a bug is run first, and must pass.
"""

from __future__ import annotations

import concurrent.futures
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

from bench.command import parser_of
from bench.report import Report

ABOUT = """\
Plants bugs, one at a time, and counts how many seeds the simulation needs to see each; exit status
1 if one lives through all its seeds.

  python -m app bench mutants                 all of them
  python -m app bench mutants -k attempt      those with the word in their name

Not planted is what a second safeguard makes good: a gateway that does not hear of a death, of
the scheduler or the detokenizer, asks after its silent requests, and is told which are unknown.
"""
ROOT = Path(__file__).resolve().parents[1]
PARTS = ("actors", "messages", "kernels", "bench", "app.py")
SEEDS = 200
BATCH = 10  # seeds a process runs before it is asked again
CONTROL_SEEDS = 10
WORLD_S = 360.0


class Mutant(NamedTuple):
    name: str
    path: str
    old: str
    new: str


class Found(NamedTuple):
    mutant: Mutant
    seed: int | None  # the first that failed, counted from 1; None: none did
    what: str
    elapsed_s: float


RECORD = "actors/gateway/record.py"
GATEWAY = "actors/gateway/actor.py"
CALLS = "actors/gateway/calls.py"
RECOVERY = "actors/gateway/recovery.py"
SCHEDULE = "actors/scheduler/schedule.py"
LEDGER = "actors/cache/ledger.py"
CACHE = "actors/cache/actor.py"
RADIX = "actors/cache/radix.py"
PAGES = "actors/cache/pages.py"
OUTPUT = "actors/scheduler/output.py"
LINK = "actors/runtime/link.py"
CREDIT = "actors/runtime/credit.py"
ASKING = "actors/gateway/doors/asking.py"
DETOKENIZER = "actors/detokenizer/actor.py"
RESUME = "actors/gateway/doors/resume.py"
FLIGHTS = "actors/scheduler/flights.py"

CONTROL = Mutant("no bug", "app.py", "", "")
MUTANTS = (
    Mutant(
        "gateway: results of any attempt are taken",
        RECORD,
        "if record is None or record.attempt != attempt or not attempt:",
        "if record is None:",
    ),
    Mutant(
        "gateway: a new attempt is told of one token twice",
        RECORD,
        "emitted=bytes(record.emitted)",
        "emitted=bytes(record.emitted + record.emitted[-4:])",
    ),
    Mutant(
        "gateway: attempts have no numbers",
        RECORD,
        "        record.attempt += 1\n",
        "        record.attempt = 1\n",
    ),
    Mutant(
        "gateway: interrupted requests are not sent again",
        RECOVERY,
        "        for record in self.ledger.ready(self.context.now_s()):\n"
        "            self._send(record)",
        "        self.ledger.ready(self.context.now_s())",
    ),
    Mutant(
        "scheduler: an end frees no pages",
        "actors/scheduler/leases.py",
        "        self.output.to_cache.append(cache.Release("
        "request.id, request.attempt, computed, granted))\n",
        "",
    ),
    Mutant(
        "scheduler: one step too many in flight",
        SCHEDULE,
        "self.depth = max(1, min(config.max_inflight, facts.credits))",
        "self.depth = max(1, min(config.max_inflight, facts.credits)) + 1",
    ),
    Mutant(
        "scheduler: who waits behind another is not woken",
        "actors/scheduler/admission.py",
        "        for follower in self._behind.pop(request.id, ()):\n"
        "            self.queue.push(follower)",
        "        pass",
    ),
    Mutant(
        "scheduler: pages that became free are not heard of",
        SCHEDULE,
        "        self.reserve.hint()\n        self.admission.freed()",
        "        pass",
    ),
    Mutant(
        "scheduler: who has just come is told that its grammar had no turn",
        "actors/scheduler/grammars.py",
        "                leaving = self._late(wait, now_s)\n",
        "",
    ),
    Mutant(
        "scheduler: a stop string is not heard of",
        "actors/scheduler/actor.py",
        "        self.schedule.stop_met(message)\n",
        "",
    ),
    Mutant(
        "scheduler: every life has the same epoch",
        "actors/scheduler/actor.py",
        "epoch=self.context.address.incarnation",
        "epoch=1",
    ),
    Mutant(
        "scheduler: a resumed request counts from its first token again",
        OUTPUT,
        "        emitted = request.tokens[request.prompt_len :][: request.resumed_len].tobytes()",
        "        emitted = b''",
    ),
    Mutant(
        "cache: the last prompt token is taken from the cache too",
        LEDGER,
        "        page_max = (token_count - 1) // self.page_size\n        match",
        "        page_max = token_count // self.page_size\n        match",
    ),
    Mutant(
        "cache: a page is freed twice",
        LEDGER,
        "        self._pages.give(lease.pages[lease.committed :])",
        "        self._pages.give(lease.pages[max(0, lease.committed - 1) :])",
    ),
    Mutant(
        "cache: what is matched is not locked",
        LEDGER,
        "        node = self._tree.lock(namespace, match)\n",
        "        node = self._tree.lock(namespace, match)\n"
        "        self._tree.unlock(node)\n        node.lock_count += node.parent is None\n",
    ),
    Mutant(
        "cache: prefixes are shared over namespaces",
        LEDGER,
        "        match = self._tree.find(namespace, tokens, page_max)",
        "        namespace = ''\n        match = self._tree.find(namespace, tokens, page_max)",
    ),
    Mutant(
        "cache: what a dead scheduler held stays leased",
        CACHE,
        "        self.ledger.forget_leases()\n",
        "",
    ),
    Mutant(
        "cache: a dead scheduler's late messages count",
        CACHE,
        "        if sender.incarnation < self.incarnation_min:\n            return False\n",
        "",
    ),
    Mutant(
        "cache: reserved pages are not taken back",
        LEDGER,
        "            self._reserved.remove(page)\n            self._pages.give((page,))",
        "            self._reserved.remove(page)",
    ),
    Mutant(
        "detokenizer: what a dead scheduler ran is kept",
        DETOKENIZER,
        "            del self.outputs[name]\n",
        "            pass\n",
    ),
    Mutant(
        "detokenizer: a dead scheduler's late tokens count",
        DETOKENIZER,
        "sender.incarnation < self.incarnation_min:",
        "sender.incarnation < 0:",
    ),
    Mutant(
        "detokenizer: an end leaves its entry",
        DETOKENIZER,
        "            del self.outputs[tail.request]\n",
        "",
    ),
    Mutant(
        "detokenizer: a character is not whole where its token was sent before",
        "actors/detokenizer/output.py",
        "        self.push(unpack(opened.emitted))\n",
        "        self.push(unpack(opened.emitted))\n        self.stream.finish()\n",
    ),
    Mutant(
        "detokenizer: tokens sent before are not replayed",
        "actors/detokenizer/output.py",
        "        self.push(unpack(opened.emitted))",
        "        self.token_count = len(opened.emitted) // 4",
    ),
    Mutant(
        "detokenizer: stop strings do not count in a resumed text",
        "actors/detokenizer/output.py",
        "            if rules.strings or rules.patterns\n",
        "            if (rules.strings or rules.patterns) and not opened.emitted\n",
    ),
    Mutant(
        "tokenizer: a cancel overtakes its request",
        "actors/tokenizer/actor.py",
        "            pending.is_cancelled = True\n            return",
        "            pass",
    ),
    Mutant(
        "node: a message for a dead life is given to its successor",
        "actors/runtime/arrivals.py",
        "is_there = life is not None and life.address == header.target and not life.is_dead",
        "is_there = life is not None and not life.is_dead",
    ),
    Mutant(
        "link: what came twice is delivered twice",
        LINK,
        "        if frame.seq <= self._received:\n"
        "            self.counts.duplicate += 1\n            self._ack_due = True\n"
        "            return up\n",
        "",
    ),
    Mutant(
        "link: a gap is not told",
        LINK,
        "                self._gap_due = True\n            return up",
        "                self._gap_due = True\n                self._received = frame.seq - 1\n"
        "            return up",
    ),
    Mutant(
        "supervisor: siblings of a dead worker are left alone",
        "actors/runtime/restart.py",
        "                return self.order[first:]",
        "                return self.order[first : first + 1]",
    ),
    Mutant(
        # Not only where its links are lost: its beats that are missed would tell as well.
        "root: a node that hangs is left alone",
        "actors/runtime/nodes.py",
        "            outpost.launched.kill()\n\n    def kill_process",
        "            if reason.cause is not Cause.HUNG:\n"
        "                outpost.launched.kill()\n\n    def kill_process",
    ),
    Mutant(
        "node: who stood still with all others blames them",
        "actors/runtime/pulse.py",
        "        if late_s > self.beat_s:\n",
        "        if late_s > 1e9:\n",
    ),
    Mutant(
        "node: a mailbox that is kept for a next life is kept for ever",
        "actors/runtime/host.py",
        "        kept = self.kept.pop(order.path, None)\n        if kept is not None and not",
        "        kept = self.kept.get(order.path)\n        if kept is not None and not",
    ),
    Mutant(
        "gateway: it looks after its calls when there are none",
        GATEWAY,
        '        self.context.cancel_timer("sweep")\n',
        "",
    ),
    Mutant(
        "gateway: a stream is kept by a gateway that has ended",
        RESUME,
        "            if kept.expiry is not None:\n                kept.expiry.cancel()\n"
        "        self.kept.clear()",
        "            pass\n        self.kept.clear()",
    ),
    Mutant(
        "gateway: who waited beside suspects becomes one",
        RECORD,
        "        chosen = [record for record in parked if not record.losses]\n",
        "        chosen = [record for record in parked if not record.is_suspect]\n",
    ),
    Mutant(
        "gateway: log probabilities of a token come twice",
        "actors/gateway/held.py",
        "        logprobs=delta.logprobs[tokens:],\n",
        "",
    ),
    Mutant(
        "gateway: of the events of one row, those that a client has come again",
        "actors/gateway/held.py",
        "                is_new = self.passed[choice] > mark.events\n",
        "",
    ),
    Mutant(
        "batches: one that had begun does not go on in the next life",
        "actors/gateway/batches/store.py",
        'RUNNABLE = ("validating", "in_progress", "finalizing", "cancelling")',
        'RUNNABLE = ("validating", "validating", "finalizing", "cancelling")',
    ),
    Mutant(
        "batches: a line that finds no room has failed",
        "actors/gateway/doors/batch_runner.py",
        "    return problem.fault in (Fault.OVERLOADED, Fault.UNAVAILABLE)\n",
        "    return False\n",
    ),
    Mutant(
        "batches: what a drain keeps from running has failed",
        "actors/gateway/doors/batch_runner.py",
        "                if is_for_now(refused.problem):\n",
        "                if is_for_now(refused.problem) and self.gateway.is_open:\n",
    ),
    Mutant(
        "batches: those of a front end that is no more are nobody's",
        "actors/gateway/doors/batch_runner.py",
        "            await self.keep(lambda: self.store.adopt(self.owner, owners))\n",
        "            pass\n",
    ),
    Mutant(
        "batches: one that goes on begins afresh",
        "actors/gateway/doors/batch_runner.py",
        '            if batch.status == "validating":\n',
        '            if batch.status in ("validating", "in_progress"):\n',
    ),
    Mutant(
        "batches: what one came to is not kept for long",
        "actors/gateway/batches/store.py",
        "        expires_at = None if seconds is None else now_s + seconds\n",
        "        expires_at = now_s + (seconds or 30)\n",
    ),
    Mutant(
        "tools: a strict one is not held to where the model chooses",
        "actors/gateway/shape.py",
        "        if tags is not None:\n",
        "        if tags is True:\n",
    ),
    Mutant(
        "tools: others than those that are allowed may be called",
        "actors/gateway/shape.py",
        "tags(signatures_of(callable_tools, always=False))",
        "tags(signatures_of(tools, always=False))",
    ),
    Mutant(
        "tools: a second call is told where one is allowed",
        "actors/gateway/reading.py",
        "            if not isinstance(event, Text) and self.shape.single and event.call:\n",
        "            if not isinstance(event, Text) and self.shape.single and event.call < 0:\n",
    ),
    Mutant(
        "tools: a marker that comes in two pieces is text",
        "actors/gateway/tools/base.py",
        "    held = max((begun(text, marker) for marker in markers), default=0)\n",
        "    held = 0\n",
    ),
    Mutant(
        "gateway: how long an answer took is told by the wall clock",
        "actors/gateway/doors/generate.py",
        "created_s, now_s)",
        "created_s, time.time)",
    ),
    Mutant(
        "responses: who comes back misses an event",
        "actors/gateway/doors/tapes.py",
        "place = 0 if after is None else int(after) + 1",
        "place = 0 if after is None else int(after) + 2",
    ),
    Mutant(
        "scheduler: who let go of its pages still has them",
        "actors/scheduler/admission.py",
        "            del self._holders[request.id]\n",
        "            pass\n",
    ),
    Mutant(
        "worker: a matcher outlives its request",
        "kernels/constrain.py",
        "        self.guides.pop(slot, None)\n",
        "",
    ),
    Mutant(
        "tokenizer: a prompt that is through is still pending",
        "actors/tokenizer/actor.py",
        "        pending = self.pending.pop(message.key)\n",
        "        pending = self.pending[message.key]\n",
    ),
    Mutant(
        "gateway: a reader that leaves cancels nothing",
        ASKING,
        """        pass
    stream.close()
""",
        """        pass
""",
    ),
    Mutant(
        "gateway: a closed call goes on",
        CALLS,
        """            message = "The stream was closed by its reader."
            self._fail(open_call, Problem(fault=Fault.INTERNAL, message=message))""",
        """            self._end(open_call)""",
    ),
    Mutant(
        "gateway: what a guilty request kills is blamed on nobody",
        RECORD,
        "        if len(accused) == 1:\n",
        "        if len(accused) == -1:\n",
    ),
    Mutant(
        "gateway: while it drains, calls are taken",
        GATEWAY,
        "return not (self.is_draining or self.is_stopping)",
        "return not self.is_stopping",
    ),
    Mutant(
        "gateway: a stream left unread is never cut",
        CALLS,
        "            if now_s - since_s > self.config.stream_stall_s:",
        "            if now_s - since_s > 1e9:",
    ),
    Mutant(
        "gateway: a stream nobody comes back for is kept for ever",
        RESUME,
        "            kept.expiry = loop.call_later(self.config.resume_s, self.drop, kept.name)",
        "            pass",
    ),
    Mutant(
        "gateway: who comes back gets what it has already",
        RESUME,
        "        place = Place(kept.held, marks)",
        "        place = Place(kept.held, ())",
    ),
    Mutant(
        "gateway: a refusal does not say when to try again",
        "actors/gateway/exchange.py",
        "        if refusal.retry_after_s is not None:",
        "        if refusal.retry_after_s is None:",
    ),
    Mutant(
        "scheduler: a credit is not given back",
        FLIGHTS,
        "        self.credit.grant(flight.step + self.credit.window, self.epoch)\n",
        "        if flight.step % 7:\n"
        "            self.credit.grant(flight.step + self.credit.window, self.epoch)\n",
    ),
    Mutant(
        # Not one that is told late: a sender that is paused asks for it, and only waits longer.
        "runtime: a credit is skipped",
        CREDIT,
        "        self.waiting -= 1\n",
        "        self.waiting -= self.arrived % 5 > 0\n",
    ),
    Mutant(
        "scheduler: what was generated before counts as prompt",
        FLIGHTS,
        "prompt_len=request.prompt_len,",
        "prompt_len=len(request.tokens),",
    ),
    Mutant(
        "worker: a grammar begins afresh for a resumed request",
        "kernels/constrain.py",
        "for token in generated:",
        "for token in ():",
    ),
    Mutant(
        "worker: a row ends with what its grammar shares with others",
        "kernels/constrain.py",
        "whole[index] = self._renew(guide, words[index : index + 1])",
        "whole[index] = False",
    ),
    Mutant(
        "worker: a grammar that is made again begins afresh",
        "kernels/constrain.py",
        "            self._replay(guide)\n            if not",
        "            if not",
    ),
    Mutant(
        "worker: a mask is believed that was made of a spent grammar",
        "kernels/constrain.py",
        "{root for root in {guide.root for _, guide in bound} if root.is_worn}",
        "{guide.root for _, guide in bound if guide.matcher.is_broken}",
    ),
    Mutant(
        "cache: a page that is being read is evicted",
        RADIX,
        "        node.lock_count = 1\n",
        "        node.lock_count = 0\n",
    ),
    Mutant(
        "root: a restart that is asked for is not made",
        "actors/runtime/system.py",
        "                    leaf.parent.restart_child(leaf.name)",
        "                    pass",
    ),
)


def plant(mutant: Mutant, folder: Path) -> None:
    for part in PARTS:
        source = ROOT / part
        if source.is_dir():
            ignore = shutil.ignore_patterns("__pycache__", "*.pyc")
            shutil.copytree(source, folder / part, ignore=ignore)
        else:
            shutil.copy(source, folder / part)
    path = folder / mutant.path
    text = path.read_text("utf-8")
    assert text.count(mutant.old) >= 1, f"{mutant.name}: {mutant.path} has no such piece"
    path.write_text(text.replace(mutant.old, mutant.new), "utf-8")


def hunt(mutant: Mutant, seeds: int) -> Found:
    begin_s = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="mutant-") as name:
        folder = Path(name)
        plant(mutant, folder)
        for first in range(0, seeds, BATCH):
            count = min(BATCH, seeds - first)
            failed = try_seeds(folder, first, count)
            if failed is not None:
                return Found(mutant, failed[0] + 1, failed[1], time.monotonic() - begin_s)
    return Found(mutant, None, "", time.monotonic() - begin_s)


def try_seeds(folder: Path, first: int, count: int) -> tuple[int, str] | None:
    """The first seed of these that fails, and how."""
    command = [sys.executable, "-m", "app", "simulate", "--jobs", "1", "--seeds", str(count)]
    command += ["--first-seed", str(first), "--hours", repr(count * WORLD_S / 3600)]
    paths = os.pathsep.join(filter(None, (str(folder), os.environ.get("PYTHONPATH"))))
    environment = {**os.environ, "PYTHONPATH": paths, "PYTHONDONTWRITEBYTECODE": "1"}
    try:
        ran = subprocess.run(
            [*command, "--stop"],
            cwd=folder,
            env=environment,
            capture_output=True,
            text=True,
            timeout=600,
        )
    except subprocess.TimeoutExpired:
        return first, "it does not come to an end"
    if ran.returncode == 0:
        return None
    for line in ran.stdout.splitlines():
        if line.startswith("seed ") and " FAILED: " in line:
            seed, _, what = line.removeprefix("seed ").partition(" FAILED: ")
            return int(seed), what
    raise RuntimeError(f"the simulation ended with {ran.returncode}: {ran.stderr[-2000:]}")


def main(words: list[str]) -> int:
    parser = parser_of("mutants", ABOUT)
    parser.add_argument("-k", default="", metavar="WORD", help="only those with it in their name")
    parser.add_argument("--seeds", type=int, default=SEEDS, metavar="N", help="tried, at most")
    parser.add_argument(
        "--jobs", type=int, default=len(os.sched_getaffinity(0)), metavar="N", help="bugs at once"
    )
    parser.add_argument("--json", action="store_true", help="one JSON object a line")
    arguments = parser.parse_args(words)
    report = Report("mutants", as_json=arguments.json, seeds=arguments.seeds)
    chosen = [mutant for mutant in MUTANTS if arguments.k in mutant.name]
    control = hunt(CONTROL, CONTROL_SEEDS)
    if control.seed is not None:
        print(f"without a bug, seed {control.seed - 1} fails: {control.what}", file=sys.stderr)
        return 2
    alive = 0
    with concurrent.futures.ThreadPoolExecutor(arguments.jobs) as pool:
        for found in pool.map(lambda mutant: hunt(mutant, arguments.seeds), chosen):
            alive += found.seed is None
            if arguments.json:
                report.add(
                    mutant=found.mutant.name,
                    seed=found.seed,
                    seconds=found.elapsed_s,
                    found=found.what,
                )
                continue
            seed = f"seed {found.seed:3}" if found.seed is not None else "ALIVE   "
            print(
                f"{seed}  {found.elapsed_s:5.0f} s  {found.mutant.name:58}  {found.what[:90]}",
                flush=True,
            )
    summary = f"{len(chosen) - alive} of {len(chosen)} found within {arguments.seeds} seeds"
    print(summary, file=sys.stderr if arguments.json else sys.stdout)
    return 1 if alive else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
