"""This file says what a GPU does in decode steps, by kernel, and how long it idles between steps.

It runs a profiler over steps of N rows of a model shape with invented weights (`bench.house`).
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from bench import gpu
from bench.command import parser_of
from bench.gpu_workloads import Load, random_prompts
from bench.house import House
from bench.report import Report

GPU_KINDS = ("kernel", "gpu_memcpy", "gpu_memset")
ABOUT = """\
What a GPU does in steps of a model shape with invented weights, and how long it idles within and
between them.

  python -m app bench gaps
  python -m app bench gaps --model llama31_8b --rows 1,64,256 --input-len 512 --top 12
  python -m app bench gaps --model llama31_8b --rows "" --prefill 8192 --top 12
"""


def main(words: Sequence[str]) -> int:
    parser = parser_of("gaps", ABOUT)
    parser.add_argument("--model", action="append", choices=sorted(gpu.MODELS))
    parser.add_argument("--rows", default="1,64,256", help="of decode steps, by comma")
    parser.add_argument("--prefill", type=int, default=0, help="also prompts of so many tokens")
    parser.add_argument("--input-len", type=int, default=512, help="of the rows")
    parser.add_argument("--steps", type=int, default=20, help="of each, in the profile")
    parser.add_argument("--top", type=int, default=0, help="kernels to list for each")
    parser.add_argument("--budget", type=int, default=8192, help="tokens of one step")
    parser.add_argument("--page-size", type=int, default=16)
    parser.add_argument("--attention", default="auto")
    parser.add_argument("--kv-dtype", default="auto")
    parser.add_argument("--deterministic", action="store_true")
    parser.add_argument("--no-graphs", action="store_true")
    parser.add_argument("--json", action="store_true", help="one JSON object a line")
    found = parser.parse_args(list(words))
    found.lazy_graphs = True
    if not torch.cuda.is_available():
        print("bench gaps: there is no CUDA device", file=sys.stderr)
        return 2
    report = Report("gaps", as_json=found.json, device=torch.cuda.get_device_name())
    for name in found.model or sorted(gpu.MODELS):
        runner = gpu.load_runner(name, found)
        runner.warm_up()
        if found.prefill:
            house = House(runner, gpu.RUNNING_MAX, found.budget)
            events = trace_prefill(house, found)
            report.add(model=name, rows=f"prompts of {found.prefill}", **idle(events, skip=0))
            for line in by_kernel(events, found.top):
                print(line, file=sys.stderr, flush=True)
        for count in map(int, filter(None, found.rows.split(","))):
            events = trace(House(runner, gpu.RUNNING_MAX, found.budget), count, found)
            report.add(model=name, rows=count, **idle(events))
            for line in by_kernel(events, found.top):
                print(line, file=sys.stderr, flush=True)
        del runner
        torch.cuda.empty_cache()
    report.close()
    return 0


def trace(house: House, count: int, found: argparse.Namespace) -> list[dict[str, Any]]:
    """What the GPU did in `steps` decode steps of `count` rows, in order of time."""
    prompts = random_prompts(count, count, found.input_len)
    house.run(Load(prompts, [8] * count))  # graphs and cached prompts
    decoded = 0
    launch = house.runner.launch
    window: list[Any] = []

    def counted(step: Any) -> Any:
        nonlocal decoded
        if len(step.slots) == count and int(step.counts.max()) == 1:
            decoded += 1
            if decoded == 5:
                torch.cuda.synchronize()
                window.append(profile(activities=[ProfilerActivity.CUDA]))
                window[0].__enter__()
            if decoded == 5 + found.steps + 2:
                torch.cuda.synchronize()
                window[0].__exit__(None, None, None)
        return launch(step)

    house.runner.launch = counted  # type: ignore[method-assign]
    house.run(Load(prompts, [found.steps + 16] * count), temperature=0.6)
    del house.runner.launch
    return gpu_events(window[0])


def gpu_events(seen: Any) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "trace.json"
        seen.export_chrome_trace(str(path))
        content = json.loads(path.read_text("utf-8"))
    events = [event for event in content["traceEvents"] if event.get("cat") in GPU_KINDS]
    return sorted(events, key=lambda event: event["ts"])


def trace_prefill(house: House, found: argparse.Namespace) -> list[dict[str, Any]]:
    """What the GPU did for three prompts of `prefill` tokens."""
    house.run(Load(random_prompts(1, 3, found.prefill), [1] * 3))
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        house.run(Load(random_prompts(2, 5, found.prefill), [1] * 5))
    return gpu_events(seen)


def idle(events: list[dict[str, Any]], skip: int = 2) -> dict[str, Any]:
    """A step begins with its upload and ends with its download."""
    uploads = [
        n
        for n, event in enumerate(events)
        if "HtoD" in event["name"] and (n == 0 or "HtoD" not in events[n - 1]["name"])
    ]
    between, within, total = 0.0, 0.0, 0.0
    for begin, after in zip(uploads[skip:], uploads[skip + 1 :], strict=False):
        step = events[begin:after]
        end = max(event["ts"] + event["dur"] for event in step)
        total += events[after]["ts"] - step[0]["ts"]
        between += max(events[after]["ts"] - end, 0.0)
        seen = step[0]["ts"] + step[0]["dur"]
        for event in step[1:]:
            within += max(event["ts"] - seen, 0.0)
            seen = max(seen, event["ts"] + event["dur"])
    count = max(len(uploads) - skip - 1, 1)
    return {
        "steps": count,
        "step_us": total / count,
        "between_us": between / count,
        "between_share": between / max(total, 1e-9),
        "within_us": within / count,
        "kernels": len(events) / max(len(uploads), 1),
    }


def by_kernel(events: list[dict[str, Any]], top: int) -> list[str]:
    if not top:
        return []
    steps = max(sum("pick_kernel" in event["name"] for event in events), 1)
    sums: dict[str, list[float]] = defaultdict(lambda: [0.0, 0])
    for event in events:
        sums[event["name"]][0] += event["dur"]
        sums[event["name"]][1] += 1
    order = sorted(sums.items(), key=lambda item: -item[1][0])[:top]
    return [
        f"    {us / steps:9.1f} us a step  {us / times:8.2f} us x {times / steps:6.1f}  {name[:90]}"
        for name, (us, times) in order
    ]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
