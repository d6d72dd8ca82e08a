"""This file settles what the user left open: (config, facts about the machine) -> (config, why).

It does not know how the facts were found; it reads no file and asks no device. What only the loaded
model can tell (the size of the KV pool, the dtype behind "auto") the worker settles and reports in
its `Facts`. Law: nothing is mutated, and every change carries a reason for the log.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import msgspec

from messages.config import Config

# (section, field, on a CPU, on a GPU). A GPU is full only with steps of thousands of tokens, and
# its memory is the model's alone; a CPU's steps must be short, and of a host's memory others need
# some.
BY_DEVICE: tuple[tuple[str, str, float, float], ...] = (
    ("scheduler", "running_max", 64, 256),
    ("scheduler", "prefill_budget", 512, 8192),
    ("worker", "memory_fraction", 0.5, 0.9),
)
CORES_BEHIND = 4  # root, engine, worker, metrics
CORES_A_FRONT = 2  # its loop, and its threads that encode
FRONT_ENDS_MAX = 4  # what a rush of requests costs is spread over them (bench/NOTES.md)


class Machine(NamedTuple):
    """What the caller found out about where it runs."""

    core_count: int
    model_path: str  # located on disk
    model_name: str  # what to call the model where the user gave no name
    log_dir: str  # of this run
    free_port: int = 0  # one that was free a moment ago
    drawn_seed: int = 0  # by chance
    gpu_count: int = 0


class Settled(NamedTuple):
    config: Config
    reasons: tuple[str, ...]


def resolve(config: Config, machine: Machine) -> Settled:
    """Returns a config that leaves nothing open that can be known before the model is loaded."""
    reasons: list[str] = []

    def settle(section: str, field: str, value: Any, why: str) -> None:
        nonlocal config
        before = getattr(getattr(config, section), field)
        if value == before:
            return
        changed = msgspec.structs.replace(getattr(config, section), **{field: value})
        config = msgspec.structs.replace(config, **{section: changed})
        reasons.append(f"{section}.{field} = {value} ({why})")

    settle("model", "path", machine.model_path, "located")
    settle("model", "name", config.model.name or machine.model_name, "from the model")
    settle("log", "dir", machine.log_dir, "a directory for this run")
    if config.gateway.port == 0:
        # Settled here, not by the gateway, so that a restarted one comes back at the same address.
        settle("gateway", "port", machine.free_port, "any free one")
    if config.runtime.seed == 0:
        # A seed that were the same in every run would repeat its ids of calls, and its answers to
        # those who want them to differ.
        settle("runtime", "seed", machine.drawn_seed, "drawn for this run")
    on_gpu = bool(machine.gpu_count) and config.model.device != "cpu"
    for section, field, on_cpu, on_device in BY_DEVICE:
        if not getattr(getattr(config, section), field):
            why = "a GPU computes" if on_gpu else "the CPU computes"
            settle(section, field, on_device if on_gpu else on_cpu, why)
    if config.runtime.front_ends == 0:
        count, why = front_ends_of(config, machine)
        settle("runtime", "front_ends", count, why)
    if config.worker.threads == 0:
        settle("worker", "threads", machine.core_count, "one for each core")
    if config.scheduler.prefill_budget < config.scheduler.running_max:
        # Every running request takes one token of the budget for its next token; with less than
        # that, some would stand still in every step.
        settle(
            "scheduler",
            "prefill_budget",
            config.scheduler.running_max,
            "a step must have room for one token of each running request",
        )
    return Settled(config, tuple(reasons))


def front_ends_of(config: Config, machine: Machine) -> tuple[int, str]:
    """How many front ends, and why.

    With a fast device one Python process can't write as many events as the device makes tokens; on
    a CPU the model needs the cores, and one front end is far from being the limit.
    """
    if config.runtime.placement != "processes" or not config.gateway.http:
        return 1, "one, where processes don't share a port"
    if not machine.gpu_count or config.model.device == "cpu":
        return 1, "the CPU computes"
    spare = machine.core_count - CORES_BEHIND
    return max(1, min(FRONT_ENDS_MAX, spare // CORES_A_FRONT)), f"{machine.core_count} cores"
