"""This file makes a runner from a model's files and options: settles what is "auto", reads the
weights, makes the pool as large as memory allows. It runs no step but the trial of the largest one.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from kernels.constrain import EngineUnavailable, check_engine
from kernels.cores import usable_cores
from kernels.fit import gib, largest_step, settle_page_count, step_does_not_fit
from kernels.kv import HOST_POOL_BYTES, KvPool, free_memory_bytes
from kernels.layers.decoder import Decoder
from kernels.load.base import BadConfig
from kernels.load.dummy import DummySource
from kernels.memory import forget_unused
from kernels.registry import UnknownName
from kernels.runner import ModelFacts, Progress, Runner
from kernels.settle import (
    DTYPES,
    RunnerOptions,
    attention_shape,
    check_weights_fit,
    open_source,
    pool_wanted,
    read_config,
    settle_attention,
    settle_context,
    settle_device,
    settle_kv_dtype,
    settle_ops,
)
from kernels.slots import Slots


def load_runner(path: Path, options: RunnerOptions, progress: Progress | None) -> Runner:
    if options.dtype not in DTYPES:
        raise BadConfig(f"unknown dtype {options.dtype!r}; known are: {', '.join(DTYPES)}")
    try:
        check_engine(options.grammar)
    except (UnknownName, EngineUnavailable) as error:
        raise BadConfig(str(error)) from None
    source = open_source(path, options)
    config = read_config(source)
    device = settle_device(options)
    if isinstance(source, DummySource):
        source.device = device
    notes: list[str] = []
    ops, dtype = settle_ops(options, source.weight_format, device, notes)
    kv_dtype = settle_kv_dtype(options, ops, dtype)
    ops.set_threads(options.threads or usable_cores())
    context_len = settle_context(options.context_len, config.context_len)
    if device.type != "cpu" and dtype != "quantized":
        check_weights_fit(config, dtype, device)
    model = Decoder(config, source, ops, dtype, context_len, progress)
    source.finish()

    shape = attention_shape(model, kv_dtype, context_len)
    attention = settle_attention(options, shape, notes)
    wanted = pool_wanted(options, config, kv_dtype, context_len)

    largest_step_s = 0.0

    def runner_of(page_count: int, options: RunnerOptions) -> Runner:
        size = options.page_size
        kv = KvPool(config.layer_count, config.heads, page_count, size, kv_dtype, device)
        slots = Slots(options.slot_count, context_len, size, page_count)
        facts = ModelFacts(
            name=source.name,
            vocab_size=config.vocab_size,
            context_len=context_len,
            eos_ids=source.eos_ids,
            page_size=size,
            page_count=page_count,
            dtype=dtype,
            device=str(device),
            parameter_count=model.parameter_count,
            hidden_len=config.hidden_len,
            vector_lens=config.vector_lens,
            notes=tuple(notes),
            largest_step_s=largest_step_s,
        )
        return Runner(model, kv, slots, attention, facts, options)

    if device.type == "cpu":
        page_count = -(-options.kv_tokens // options.page_size)  # committed as it is touched
        if not page_count:
            page_count = settle_page_count(wanted, free_memory_bytes(device), HOST_POOL_BYTES)
    else:
        largest_step_s = try_largest_step(runner_of, options, context_len)
        forget_unused()  # the trial's pool; what its step took is kept
        free = free_memory_bytes(device)
        page_count = settle_page_count(wanted, free)
        notes.append(f"pool {gib(page_count * wanted.page_bytes)} of {gib(free)} that were free")
    return runner_of(page_count, options)


def try_largest_step(
    runner_of: Callable[[int, RunnerOptions], Runner], options: RunnerOptions, context_len: int
) -> float:
    """How long it takes when nothing is made for the first time. Raises MemoryError if it doesn't
    fit."""
    step, page_count = largest_step(
        options.page_size, context_len, options.slot_count, options.step_tokens_max
    )
    try:
        trial = runner_of(page_count, replace(options, graphs=False))
        trial.launch_whole(step).result()
        begin_s = time.perf_counter()
        trial.launch_whole(replace(step, closed=step.slots)).result()
        return time.perf_counter() - begin_s
    except MemoryError as error:
        raise step_does_not_fit(step, error) from error
