"""This file turns a TOML text and command-line flags into a `Config`.

It does not know where the text came from, what a model is, or what a room does with a setting; it
touches no file. Laws: every field of `messages/config.py` has one row in `FLAGS` or is named
in `INTERNAL` (a test holds the two together); a flag that was given beats the file, the file beats
the default; an unknown key is an error that names it, never ignored.
"""

from __future__ import annotations

import argparse
import difflib
import tomllib
from collections.abc import Mapping
from typing import Any, NamedTuple

import msgspec

from messages.config import Config


class SettingsError(ValueError):
    """The user's settings are wrong. The message is one that they can act on."""


class Flag(NamedTuple):
    """How one field of a section is spelled on the command line."""

    section: str
    field: str
    flag: str
    help: str
    choices: tuple[str, ...] = ()
    metavar: str | None = None

    @property
    def key(self) -> str:
        return f"{self.section}.{self.field}"


PLACEMENTS = ("inline", "threads", "processes")
DTYPES = ("auto", "quantized", "bfloat16", "float16", "float32")
LEVELS = ("debug", "info", "warning", "error")
FORMATS = ("auto", "safetensors", "gguf", "dummy")

# Not offered as flags or keys: the program itself decides them.
INTERNAL = frozenset({"gateway.http", "gateway.places", "gateway.shares_port", "gateway.slots"})

FLAGS: tuple[Flag, ...] = (
    Flag(
        "model",
        "path",
        "--model",
        "a directory with config.json and safetensors, a .gguf file, or a hub id;"
        " without it SmolLM2-135M-Instruct, fetched once",
        metavar="MODEL",
    ),
    Flag("model", "name", "--served-model-name", "what /v1/models calls it", metavar="NAME"),
    Flag("model", "dtype", "--dtype", "precision of weights and KV", choices=DTYPES),
    Flag("model", "device", "--device", "auto, cpu, cuda or cuda:N"),
    Flag("model", "load_format", "--load-format", "how to read the weights", choices=FORMATS),
    Flag("model", "context_len", "--context-len", "tokens of one request; 0: the model's own"),
    Flag("model", "seed", "--weights-seed", "seed of the random weights of --load-format dummy"),
    Flag("gateway", "host", "--host", "address to listen on"),
    Flag("gateway", "port", "--port", "port to listen on; 0: any free one"),
    Flag(
        "gateway",
        "open_max",
        "--open-max",
        "requests that may be open, each choice of each prompt is one; more get 503",
    ),
    Flag("gateway", "body_bytes_max", "--body-bytes-max", "largest request body; larger get 413"),
    Flag("gateway", "header_timeout_s", "--header-timeout", "seconds to send the headers"),
    Flag("gateway", "body_timeout_s", "--body-timeout", "seconds to send the body"),
    Flag("gateway", "keep_alive_s", "--keep-alive", "seconds an idle connection is kept"),
    Flag("gateway", "stream_bytes_max", "--stream-bytes-max", "unread bytes of one stream"),
    Flag("gateway", "stream_stall_s", "--stream-stall", "seconds a client may not read its stream"),
    Flag(
        "gateway",
        "ping_s",
        "--ping",
        "seconds without events, or at most twice as many, until a stream gives a sign of life;"
        " 0: never",
    ),
    Flag(
        "gateway",
        "recover_s",
        "--recover",
        "seconds that an interrupted request waits for the part that was lost",
    ),
    Flag("gateway", "resume_s", "--resume", "seconds a stream waits for a client to come back"),
    Flag("gateway", "resume_streams_max", "--resume-streams-max", "streams that wait, or may"),
    Flag("gateway", "choices_max", "--choices-max", "largest `n` of a request"),
    Flag(
        "gateway",
        "prompts_max",
        "--prompts-max",
        "prompts, inputs, items or documents of one request",
    ),
    Flag("gateway", "stops_max", "--stops-max", "stop strings of a request"),
    Flag("gateway", "stop_chars_max", "--stop-chars-max", "characters of one stop string"),
    Flag(
        "gateway",
        "default_max_tokens",
        "--default-max-tokens",
        "for chats that name no max_tokens; 0: what is left of the context",
    ),
    Flag(
        "gateway",
        "tool_parser",
        "--tool-call-parser",
        "format of the model's tool calls; auto: by its chat template, none: off",
    ),
    Flag(
        "gateway",
        "reasoning_parser",
        "--reasoning-parser",
        "format of the model's reasoning; auto: by its chat template, none: off",
    ),
    Flag("gateway", "tools_max", "--tools-max", "tools of a request"),
    Flag(
        "gateway",
        "request_templates",
        "--request-templates",
        "let chats bring their own chat template (rendered in the sandbox)",
    ),
    Flag(
        "gateway",
        "sampling_defaults",
        "--sampling-defaults",
        "what a request does not say: as the model's files recommend, or as OpenAI has it",
        choices=("model", "openai"),
    ),
    Flag(
        "gateway",
        "api_key_file",
        "--api-key-file",
        "keys that clients need, one a line; also from HISTRIO_API_KEYS, between commas",
        metavar="FILE",
    ),
    Flag(
        "gateway",
        "admin_key_file",
        "--admin-key-file",
        "keys for the control routes, which are refused without; also HISTRIO_ADMIN_KEYS",
        metavar="FILE",
    ),
    Flag("gateway", "metrics_open", "--metrics-open", "/metrics needs no key"),
    Flag(
        "gateway",
        "cors_origins",
        "--cors-origin",
        "web pages that may ask: origins between commas, or * for all",
        metavar="ORIGINS",
    ),
    Flag("gateway", "tls_cert", "--tls-cert", "certificate chain (PEM): HTTPS", metavar="FILE"),
    Flag("gateway", "tls_key", "--tls-key", "its private key (PEM)", metavar="FILE"),
    Flag("gateway", "responses_max", "--responses-max", "answers of /v1/responses that are kept"),
    Flag(
        "gateway",
        "responses_bytes_max",
        "--responses-bytes-max",
        "memory of the answers that are kept; the oldest go first",
    ),
    Flag(
        "gateway",
        "batch_dir",
        "--batch-dir",
        "where /v1/files and /v1/batches are kept; without it they are off",
        metavar="DIR",
    ),
    Flag("gateway", "batch_running_max", "--batch-running", "batch requests open at once"),
    Flag("gateway", "file_bytes_max", "--file-bytes-max", "largest file of /v1/files"),
    Flag("tokenizer", "threads", "--tokenizer-threads", "threads that encode prompts"),
    Flag(
        "tokenizer",
        "logits_processors",
        "--logits-processors",
        "that requests may choose, between commas",
        metavar="NAMES",
    ),
    Flag("tokenizer", "queued_max", "--tokenizer-queued", "prompts that may wait to be encoded"),
    Flag(
        "tokenizer",
        "chat_template",
        "--chat-template",
        "a jinja2 file that replaces the model's chat template",
        metavar="FILE",
    ),
    Flag(
        "tokenizer",
        "chars_per_token_max",
        "--chars-per-token-max",
        "a prompt longer than this many characters a context token is refused unread",
    ),
    Flag(
        "scheduler",
        "running_max",
        "--max-running",
        "requests that run at once; 0: 64, or 256 where a GPU computes",
    ),
    Flag("scheduler", "queued_max", "--max-queued", "requests that may wait; more get 503"),
    Flag(
        "scheduler",
        "prefill_budget",
        "--prefill-budget",
        "tokens that one step may compute; 0: 512, or 8192 where a GPU computes",
    ),
    Flag("scheduler", "policy", "--policy", "who is next: fcfs, or lpm (longest cached prefix)"),
    Flag(
        "scheduler",
        "max_inflight",
        "--max-inflight",
        "steps sent before their results are here; over two only while they are short",
    ),
    Flag(
        "scheduler",
        "grammar_timeout_s",
        "--grammar-timeout",
        "seconds that a request's grammar may be compiled, or wait for its turn",
    ),
    Flag("cache", "page_size", "--page-size", "tokens of one KV page"),
    Flag(
        "cache",
        "kv_tokens",
        "--kv-tokens",
        "tokens of the KV pool; 0: what --memory-fraction of the free memory holds, on a CPU at"
        " most 4 GiB unless one context needs more",
    ),
    Flag(
        "cache",
        "kv_dtype",
        "--kv-cache-dtype",
        "what keys and values are kept in: auto, or fp8_e4m3, which takes half the memory",
    ),
    Flag("cache", "prefix_cache", "--prefix-cache", "reuse the KV of shared prefixes"),
    Flag("cache", "eviction", "--eviction", "which cached prefix goes first"),
    Flag("worker", "threads", "--threads", "threads of the forward; 0: as many as cores"),
    Flag("worker", "attention", "--attention", "attention backend"),
    Flag("worker", "grammar", "--grammar-backend", "engine of structured output"),
    Flag("worker", "token_jump", "--token-jump", "do not sample what a grammar forces"),
    Flag(
        "worker",
        "hang_s",
        "--forward-hang",
        "seconds without progress that end a forward; on a GPU no less than four of the largest"
        " steps take",
    ),
    Flag(
        "worker",
        "memory_fraction",
        "--memory-fraction",
        "of the memory that is free beside weights, steps and graphs, for the KV pool;"
        " 0: 0.5, or 0.9 of a GPU's",
    ),
    Flag(
        "worker",
        "deterministic",
        "--deterministic",
        "the same bits in any company: batch, chunks and cache change no result; slower on a GPU",
    ),
    Flag("worker", "graphs", "--graphs", "on a GPU: capture steps as graphs"),
    Flag(
        "worker",
        "lazy_graphs",
        "--lazy-graphs",
        "capture them when first needed, not at the start: a quicker start, some slow steps",
    ),
    Flag(
        "worker",
        "graph_start_s",
        "--graph-start",
        "seconds of the start for capturing; what is left is captured when first needed",
    ),
    Flag(
        "worker",
        "graph_bytes_max",
        "--graph-bytes",
        "of the device's memory for graphs; with less than all need, steps take larger ones",
    ),
    Flag("log", "dir", "--log-dir", "where each run gets a directory of logs", metavar="DIR"),
    Flag("log", "level", "--log-level", "least level that is written", choices=LEVELS),
    Flag("log", "file_bytes_max", "--log-file-bytes", "size at which a log file is rotated"),
    Flag("log", "files_max", "--log-files", "rotated files kept of each process"),
    Flag(
        "runtime",
        "placement",
        "--placement",
        "one loop, threads of one process, or processes",
        choices=PLACEMENTS,
    ),
    Flag(
        "runtime",
        "front_ends",
        "--front-ends",
        "processes with a gateway, a tokenizer and a detokenizer each, on the one port;"
        " 0: as the machine has cores to spare",
    ),
    Flag(
        "runtime", "seed", "--seed", "seed of all that no request seeds; 0: another one in each run"
    ),
    Flag(
        "runtime",
        "encode_always",
        "--encode-always",
        "encode and decode every message, also within one process (debugging)",
    ),
    Flag("runtime", "start_timeout_s", "--start-timeout", "seconds each part may take to start"),
    Flag("runtime", "drain_s", "--drain", "seconds that running requests get on SIGTERM"),
    Flag("runtime", "heartbeat_s", "--heartbeat", "seconds between heartbeats of nodes at work"),
    Flag("runtime", "hang_s", "--hang", "seconds without progress after which a part is killed"),
    Flag("runtime", "spares", "--spares", "a process in reserve for each, for quick restarts"),
    Flag(
        "runtime", "spare_after_s", "--spare-after", "seconds from a start to the next in reserve"
    ),
    Flag("runtime", "hot_spare", "--hot-spare", "those in reserve hold model or vocabulary"),
    Flag("runtime", "check", "--check", "assert the invariants of every room when it is idle"),
)

SECTIONS: dict[str, str] = {
    "model": "the model",
    "gateway": "gateway: HTTP",
    "tokenizer": "tokenizer: text to ids",
    "scheduler": "scheduler: who runs",
    "cache": "cache: pages and prefixes",
    "worker": "worker: the forward",
    "log": "logs",
    "runtime": "runtime: actors and processes",
}


def add_flags(parser: argparse.ArgumentParser, sections: tuple[str, ...] = tuple(SECTIONS)) -> None:
    """Adds one option for each row of `FLAGS`, grouped by section.

    An option that was not given is absent from the namespace, so that the file's value stands.
    """
    for section in sections:
        group = parser.add_argument_group(SECTIONS[section])
        for row in FLAGS:
            if row.section == section:
                add_flag(group, row)


def add_flag(group: argparse._ArgumentGroup, row: Flag) -> None:
    default = getattr(getattr(Config(), row.section), row.field)
    shown = "" if default == "" else f" (default: {default})"
    keywords: dict[str, Any] = {
        "dest": row.key,
        "default": argparse.SUPPRESS,
        "help": (row.help + shown).replace("%", "%%"),
    }
    if isinstance(default, bool):
        keywords["action"] = argparse.BooleanOptionalAction
    else:
        keywords["type"] = type(default)
        keywords["metavar"] = row.metavar or {int: "N", float: "X", str: "NAME"}[type(default)]
        if row.choices:
            keywords["choices"] = row.choices
            keywords["metavar"] = "|".join(row.choices)
    group.add_argument(row.flag, **keywords)


def given_flags(namespace: Mapping[str, Any]) -> dict[str, Any]:
    """Which settings the command line gave: `{"scheduler.running_max": 8}`."""
    keys = {row.key for row in FLAGS}
    return {key: value for key, value in namespace.items() if key in keys}


def read_config(
    text: str | None = None,
    given: Mapping[str, Any] | None = None,
    *,
    source: str = "the file",
    defaults: Mapping[str, Any] | None = None,
) -> Config:
    """Builds the settings from a TOML text and the values given on top of it; `defaults` are of
    the program, where neither says anything.

    Raises: SettingsError, the user's fault: not TOML, an unknown key, or a value out of its range.
    """
    merged = read_toml(text, source) if text is not None else {}
    flags = {row.key: row.flag for row in FLAGS}
    for key, value in (given or {}).items():
        section, field = key.split(".", 1)
        merged.setdefault(section, {})[field] = value
    for key, value in (defaults or {}).items():
        section, field = key.split(".", 1)
        merged.setdefault(section, {}).setdefault(field, value)
    for section, values in merged.items():
        for field, value in values.items():
            key = f"{section}.{field}"
            where = flags[key] if given is not None and key in given else f"{source}: {key}"
            check_value(section, field, value, where)
    return msgspec.convert(merged, Config)


def read_toml(text: str, source: str) -> dict[str, dict[str, Any]]:
    try:
        found = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise SettingsError(f"{source} is not TOML: {error}") from None
    known = {row.key for row in FLAGS}
    unknown: list[str] = []
    for section, values in found.items():
        if not isinstance(values, dict):
            unknown.append(section)
            continue
        unknown.extend(
            f"{section}.{field}" for field in values if f"{section}.{field}" not in known
        )
        if section not in SECTIONS and not values:
            unknown.append(section)
    if unknown:
        raise SettingsError(f"{source}: unknown {', '.join(map(unknown_key, sorted(unknown)))}")
    return found


def unknown_key(key: str) -> str:
    """Names the key and, where one is near, what was probably meant."""
    keys = [row.key for row in FLAGS]
    near = difflib.get_close_matches(key, keys, n=1, cutoff=0.6)
    if not near:  # a good field in the wrong section
        near = [known for known in keys if known.split(".")[1] == key.split(".")[-1]][:1]
    return f"`{key}`" + (f" (did you mean `{near[0]}`?)" if near else "")


def check_value(section: str, field: str, value: Any, where: str) -> None:
    """Raises: SettingsError naming `where` the value came from and what it should have been."""
    row = next(row for row in FLAGS if (row.section, row.field) == (section, field))
    if row.choices and value not in row.choices:
        raise SettingsError(f"{where}: {value!r} is not one of {', '.join(row.choices)}")
    try:
        msgspec.convert({section: {field: value}}, Config)
    except msgspec.ValidationError as error:
        raise SettingsError(f"{where}: {str(error).split(' - at ')[0]}, got {value!r}") from None
