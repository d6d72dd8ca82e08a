"""This file holds the settings: one frozen section per room. Command-line flags and TOML keys
are made from these fields by `actors/settings.py`. It does not know how values are found or how
they are settled (`actors/resolve.py` returns a new struct); nothing mutates one.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

NonNegative = Annotated[int, msgspec.Meta(ge=0)]
Positive = Annotated[int, msgspec.Meta(ge=1)]
Seconds = Annotated[float, msgspec.Meta(ge=0.0)]


class Section(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of the sections."""


class ModelConfig(Section, frozen=True):
    path: str = ""  # directory or .gguf file; settled before the tree starts
    name: str = ""  # what /v1/models calls it
    dtype: str = "auto"  # auto | quantized | bfloat16 | float16 | float32
    device: str = "auto"
    load_format: str = "auto"  # auto | safetensors | gguf | dummy
    context_len: NonNegative = 0  # 0: the model's own
    seed: int = 0  # of dummy weights


class GatewayConfig(Section, frozen=True):
    host: str = "127.0.0.1"
    port: NonNegative = 8000  # 0: any free port
    http: bool = True  # False: the tree without HTTP (Engine)
    open_max: Positive = 10_000  # open requests
    body_bytes_max: Positive = 8 << 20
    header_timeout_s: Seconds = 10.0
    body_timeout_s: Seconds = 30.0
    keep_alive_s: Seconds = 30.0
    stream_bytes_max: Positive = 1 << 20  # unread by one client
    stream_stall_s: Seconds = 60.0  # how long a client may leave its stream unread
    ping_s: Seconds = 10.0  # of silence, twice at most, until a stream gives a sign; 0: never
    recover_s: Seconds = 30.0  # how long an interrupted request waits for the lost part
    shares_port: bool = False  # other gateways of this tree listen there as well
    places: NonNegative = 0  # requests that may run or wait behind all gateways; 0: not said
    slots: NonNegative = 0  # of these, requests that may run; 0: not said
    resume_s: Seconds = 30.0  # how long a stream that can be come back to is kept for its client
    resume_streams_max: Positive = 128
    choices_max: Positive = 128
    prompts_max: Positive = 2048
    stops_max: Positive = 16
    stop_chars_max: Positive = 1024
    default_max_tokens: NonNegative = 0  # 0: what is left of the context
    tool_parser: str = "auto"  # auto: by the chat template
    reasoning_parser: str = "auto"  # auto: by the chat template
    tools_max: Positive = 128
    request_templates: bool = False  # whether a chat may bring its own chat template
    sampling_defaults: str = "model"  # model (its generation_config.json) | openai
    api_key_file: str = ""  # also HISTRIO_API_KEYS; without any key everybody may ask
    admin_key_file: str = ""  # also HISTRIO_ADMIN_KEYS; without any, control routes are refused
    metrics_open: bool = False  # /metrics without a key
    cors_origins: str = ""  # between commas, or *
    tls_cert: str = ""
    tls_key: str = ""
    responses_max: NonNegative = 1000  # answers of /v1/responses kept in memory
    responses_bytes_max: Positive = 64 << 20
    batch_dir: str = ""  # of /v1/files and /v1/batches; empty: they are off
    batch_running_max: Positive = 8  # requests of batches that are open at once
    file_bytes_max: Positive = 64 << 20


class TokenizerConfig(Section, frozen=True):
    threads: Positive = 2
    queued_max: Positive = 4096
    chat_template: str = ""  # a file that replaces the model's
    chars_per_token_max: Positive = 64  # a longer prompt is refused before it is encoded
    logits_processors: str = ""  # which of those installed a request may choose; between commas


class SchedulerConfig(Section, frozen=True):
    running_max: NonNegative = 0  # 0: by the machine, as the next one
    queued_max: Positive = 1024
    prefill_budget: NonNegative = 0  # tokens one step may compute
    policy: str = "lpm"  # fcfs | lpm
    max_inflight: Positive = 3  # or as many as the worker grants, if those are fewer
    grammar_timeout_s: Seconds = 10.0  # of a compilation, and of the wait for its turn


class CacheConfig(Section, frozen=True):
    page_size: Positive = 16
    kv_tokens: NonNegative = 0  # 0: sized from memory
    kv_dtype: str = "auto"  # auto: as the operators like it | fp8_e4m3
    prefix_cache: bool = True
    eviction: str = "lru"


class WorkerConfig(Section, frozen=True):
    threads: NonNegative = 0  # 0: as many as cores
    attention: str = "auto"
    grammar: str = "auto"  # the engine of structured output
    token_jump: bool = True  # tokens that a grammar forces are not sampled
    hang_s: Seconds = 1.5  # a forward without any progress for so long is hung
    memory_fraction: Annotated[float, msgspec.Meta(ge=0.0, le=1.0)] = 0.0  # 0: by the machine
    graphs: bool = True  # steps are captured, where the device can
    deterministic: bool = False  # results have the same bits in any batch, cut in any chunks
    lazy_graphs: bool = False  # when first needed, not at the start
    graph_start_s: Seconds = 60.0  # of the start for capturing; those left when first needed
    graph_bytes_max: NonNegative = 2 << 30  # of the device's memory


class LogConfig(Section, frozen=True):
    dir: str = ""  # empty: a directory per run in the user's state directory
    level: str = "info"
    file_bytes_max: Positive = 16 << 20
    files_max: Positive = 4


class RuntimeConfig(Section, frozen=True):
    placement: str = "processes"  # inline | threads | processes
    front_ends: NonNegative = 0  # gateways on the one port; 0: by the machine
    seed: NonNegative = 0  # 0: another one in each run
    encode_always: bool = False  # messages are encoded and decoded even within one process
    start_timeout_s: Seconds = 300.0
    drain_s: Seconds = 30.0
    heartbeat_s: Seconds = 0.25
    hang_s: Seconds = 1.5
    check: bool = False  # actors run their cores' check() when idle
    spares: bool = True  # a loaded process in reserve for each: a restart need not wait for imports
    spare_after_s: Seconds = 10.0  # how long after a start the next one in reserve is made
    hot_spare: bool = False  # they hold model or vocabulary, whose memory it costs once more


class Paths(Section, frozen=True):
    """Where each room's peers are in the tree."""

    metrics: str = "metrics"
    worker: str = "replica/worker"
    cache: str = "replica/cache"
    scheduler: str = "replica/scheduler"
    detokenizer: str = "detokenizer"
    router: str = "router"
    tokenizer: str = "tokenizer"
    gateway: str = "gateway"
    # All front ends. The gateway `gateways[i]` reads what `detokenizers[i]` writes.
    gateways: tuple[str, ...] = ("gateway",)
    detokenizers: tuple[str, ...] = ("detokenizer",)


class Config(Section, frozen=True):
    model: ModelConfig = ModelConfig()
    gateway: GatewayConfig = GatewayConfig()
    tokenizer: TokenizerConfig = TokenizerConfig()
    scheduler: SchedulerConfig = SchedulerConfig()
    cache: CacheConfig = CacheConfig()
    worker: WorkerConfig = WorkerConfig()
    log: LogConfig = LogConfig()
    runtime: RuntimeConfig = RuntimeConfig()


__all__ = [
    "CacheConfig",
    "Config",
    "GatewayConfig",
    "LogConfig",
    "ModelConfig",
    "Paths",
    "RuntimeConfig",
    "SchedulerConfig",
    "Section",
    "TokenizerConfig",
    "WorkerConfig",
]
