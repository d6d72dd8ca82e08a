"""This file measures a GPU: four loads for two model shapes with invented weights, offline.

It does not know actors or HTTP (`bench.house` runs their cores); `bench serve` measures those.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from bench import gpu_steps
from bench import gpu_workloads as loads
from bench.command import parser_of
from bench.house import House
from bench.report import Report, median
from kernels.runner import Runner, RunnerOptions

ABOUT = """\
Four loads for two model shapes with invented weights, offline, beside what the device could do:

W1 256 requests at once, in and out 100 to 1,024, T = 0.6   W2 one request, 128 in, 256 out
W3 64 requests that share 2,048 tokens, cold and warm       W4 16 prompts of 8,192 tokens

  python -m app bench gpu
  python -m app bench gpu --model qwen3_0_6b --loads W2,W3 --json
  python -m app bench gpu --loads W1 --sampling top_p=0.9,top_k=50 --sampling penalties,logprobs
"""
# What `--sampling` adds to W1's requests, beside fields by name.
KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "penalties": {"frequency_penalty": 0.1, "presence_penalty": 0.1, "repetition_penalty": 1.05},
    "logprobs": {"logprobs": 5},
    "bias": {"logit_bias": ((100, 1.0), (200, -1.0))},
}
FIELDS: dict[str, Callable[[str], Any]] = {
    "top_k": int,
    "top_p": float,
    "min_p": float,
    "min_tokens": int,
    "logprobs": int,
    "frequency_penalty": float,
    "presence_penalty": float,
    "repetition_penalty": float,
}
MODELS = {"llama31_8b": 80_000_000_000, "qwen3_0_6b": 60_000_000_000}  # bytes of KV
CONTEXT_LEN = 8448
RUNNING_MAX = 256


def main(words: Sequence[str]) -> int:
    parser = parser_of("gpu", ABOUT)
    parser.add_argument("--model", action="append", choices=sorted(MODELS))
    parser.add_argument("--loads", default="W2,W3,W4,W1", help="which, by comma")
    parser.add_argument("--budget", type=int, default=8192, help="tokens of one step")
    parser.add_argument("--page-size", type=int, default=16)
    parser.add_argument("--attention", default="auto")
    parser.add_argument("--kv-dtype", default="auto")
    parser.add_argument("--deterministic", action="store_true")
    parser.add_argument("--no-graphs", action="store_true")
    parser.add_argument("--lazy-graphs", action="store_true")
    parser.add_argument("--repeats", type=int, default=3, help="of W2, W3, W4")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1], help="of W1")
    parser.add_argument(
        "--sampling",
        action="append",
        metavar="WORDS",
        help=f"W1 again with FIELD=VALUE,... or any of {', '.join(KINDS)}; beside T = 0.6 alone",
    )
    parser.add_argument("--by-step", action="store_true", help="where W1's time went (slows it)")
    parser.add_argument("--json", action="store_true", help="one JSON object a line")
    found = parser.parse_args(list(words))
    for kind in found.sampling or []:
        sampling_of(kind)  # before anything is loaded
    if not torch.cuda.is_available():
        print("bench gpu: there is no CUDA device", file=sys.stderr)
        return 2
    ceilings = measure_ceilings()
    report = Report(
        "gpu",
        as_json=found.json,
        device=torch.cuda.get_device_name(),
        torch=torch.__version__,
        copy=f"{ceilings[0] / 1e12:.2f} TB/s",
        product=f"{ceilings[1] / 1e12:.0f} TFLOP/s",
    )
    for name in found.model or sorted(MODELS):
        measure_model(name, found, report, ceilings)
        gc.collect()
        torch.cuda.empty_cache()
    report.close()
    return 0


def measure_ceilings() -> tuple[float, float]:
    """Bytes a second of a copy (read and written), FLOP a second of a bf16 product."""
    source, target = (torch.empty(1 << 32, dtype=torch.uint8, device="cuda") for _ in range(2))
    source.random_()
    copy_s = timed(lambda: target.copy_(source), 10)
    a, b = (torch.randn((8192, 8192), device="cuda").bfloat16() for _ in range(2))
    product_s = timed(lambda: a @ b, 20)
    return 2 * source.nbytes / copy_s, 2 * 8192**3 / product_s


def timed(call: Callable[[], Any], count: int) -> float:
    """Seconds of a call on the device, the median."""
    events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
    for nth in range(count + 3):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        call()
        end.record()
        if nth >= 3:
            events.append((begin, end))
    torch.cuda.synchronize()
    return median(begin.elapsed_time(end) / 1e3 for begin, end in events)


def load_runner(name: str, found: argparse.Namespace) -> Runner:
    path = Path(__file__).with_name("models") / name
    config = json.loads((path / "config.json").read_text("utf-8"))
    token_bytes = 4 * config["num_hidden_layers"] * config["num_key_value_heads"]
    token_bytes *= config["head_dim"]
    runner = Runner.load(
        path,
        RunnerOptions(
            load_format="dummy",
            device="cuda",
            dtype="bfloat16",
            context_len=CONTEXT_LEN,
            slot_count=RUNNING_MAX,
            step_tokens_max=max(found.budget, RUNNING_MAX),
            kv_tokens=MODELS[name] // token_bytes,
            page_size=found.page_size,
            attention=found.attention,
            kv_dtype=found.kv_dtype,
            deterministic=found.deterministic,
            graphs=not found.no_graphs,
            lazy_graphs=found.lazy_graphs,
        ),
    )
    return runner


def measure_model(
    name: str, found: argparse.Namespace, report: Report, ceilings: tuple[float, float]
) -> None:
    begin_s = time.perf_counter()
    runner = load_runner(name, found)
    loaded_s = time.perf_counter()
    runner.warm_up()
    warm_s = time.perf_counter() - loaded_s
    say(f"{name}: loaded in {loaded_s - begin_s:.1f} s, warm in {warm_s:.1f} s")
    say("  " + "; ".join(runner.facts.notes))

    def house() -> House:
        return House(runner, RUNNING_MAX, found.budget)

    for load in loads.warm_ups():
        begin_s = time.perf_counter()
        house().run(load)
        say(f"  warm-up {time.perf_counter() - begin_s:.2f} s")
    gc.collect()
    gc.freeze()
    for wanted in found.loads.split(","):
        for row in LOADS[wanted](house, found, runner, ceilings):
            report.add(model=name, load=wanted, **row)
            say(f"  {wanted} {row}")


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def measure_w1(
    house: Callable[[], House],
    found: argparse.Namespace,
    runner: Runner,
    ceilings: tuple[float, float],
) -> list[dict[str, Any]]:
    rows = []
    kinds = ["plain", *(found.sampling or [])]
    for seed in found.seeds:
        load = loads.mixed(seed)
        for kind in kinds:
            more = sampling_of(kind)
            run = house().run(load, 0.6, more)
            rate = load.output_count / run.end_s
            what = f"seed {seed}: output tok/s" + (f", {kind}" if more else "")
            first_s = median(map(run.first_s, run.arrivals_s))
            more_told = {"steps": run.step_count, "host_s": run.host_s, "first_s": first_s}
            rows.append(row_of(what, rate) | more_told)
            if found.by_step:
                with gpu_steps.watched(runner) as seen:
                    house().run(load, 0.6, more)
                for line in seen.by_kind():
                    say(f"  W1 seed {seed}, {kind}: " + json.dumps(line))
    return rows


def sampling_of(words: str) -> dict[str, Any]:
    """Fields of `Sampling` that "top_p=0.9,penalties" stands for. Raises SystemExit."""
    found: dict[str, Any] = {}
    for word in words.split(","):
        name, _, value = word.partition("=")
        if not value and name in KINDS:
            found |= KINDS[name]
        elif value and name in FIELDS:
            found[name] = FIELDS[name](value)
        else:
            raise SystemExit(f"bench gpu: --sampling knows no {word!r}")
    return found


def measure_w2(
    house: Callable[[], House],
    found: argparse.Namespace,
    runner: Runner,
    ceilings: tuple[float, float],
) -> list[dict[str, Any]]:
    gaps, firsts, hosts = [], [], []
    for nth in range(found.repeats + 1):
        run = house().run(loads.single(nth, 256))
        (arrivals,) = run.arrivals_s.values()
        first = house().run(loads.single(nth, 1))
        if nth > 0:
            gaps.append(1e3 * (arrivals[255] - arrivals[0]) / 255)
            firsts.append(1e3 * first.end_s)
            hosts.append(run.host_s)
    config = runner.model.config
    read = 2 * weight_count(runner)
    read += 2 * 2 * config.layer_count * config.heads.kv * config.heads.dim * 256
    share = read / ceilings[0] / (median(gaps) / 1e3)
    return [
        row_of("inter-token ms", median(gaps), share) | {"host_s": median(hosts)},
        row_of("first token ms", median(firsts)),
    ]


def measure_w3(
    house: Callable[[], House],
    found: argparse.Namespace,
    runner: Runner,
    ceilings: tuple[float, float],
) -> list[dict[str, Any]]:
    cold, warm, steps = [], [], 0
    for _ in range(found.repeats):
        fresh = house()  # an empty cache
        run = fresh.run(loads.shared(warm=False))
        cold.append(run.end_s)
        steps = run.step_count
        warm.append(fresh.run(loads.shared(warm=True)).end_s)
    return [
        row_of("cold s", median(cold)) | {"steps": steps},
        row_of("warm s", median(warm)),
    ]


def measure_w4(
    house: Callable[[], House],
    found: argparse.Namespace,
    runner: Runner,
    ceilings: tuple[float, float],
) -> list[dict[str, Any]]:
    rates, hosts = [], []
    for nth in range(found.repeats):
        load = loads.prefill(nth)
        run = house().run(load)
        hosts.append(run.host_s)
        rates.append((load.input_count + load.output_count) / run.end_s)
    config = runner.model.config
    layer_weights = weight_count(runner) - config.vocab_size * config.hidden_len
    attention = 2 * 2 * config.layer_count * config.heads.query * config.heads.dim * 8192 / 2
    share = (2 * layer_weights + attention) * median(rates) / ceilings[1]
    say("  each " + ", ".join(f"{rate:,.0f}" for rate in rates))
    return [row_of("tok/s", median(rates), share) | {"host_s": median(hosts)}]


def row_of(what: str, value: float, share: float | None = None) -> dict[str, Any]:
    return {"what": what, "value": value, "of_limit": share}


def weight_count(runner: Runner) -> int:
    """Weights that a step reads: all, but the input embedding where it isn't the head too."""
    config = runner.model.config
    embedding = 0 if config.tied_embeddings else config.vocab_size * config.hidden_len
    return runner.facts.parameter_count - embedding


LOADS = {"W1": measure_w1, "W2": measure_w2, "W3": measure_w3, "W4": measure_w4}

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
