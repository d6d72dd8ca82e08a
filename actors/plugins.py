"""This file lists the seams and what is registered at each, for `python -m app plugins`.

It does not know what an entry does. A seam is named by text and imported only when it is asked for,
since most need the device's libraries; one that can't be imported says why, and the rest is listed.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from typing import Any, NamedTuple

from kernels.registry import Entry, Registry

# Where each seam's registry is: module and name.
SEAMS = (
    ("kernels.models.base", "MODELS"),
    ("kernels.load.base", "LOADERS"),
    ("kernels.ops.base", "OPS"),
    ("kernels.attention.base", "ATTENTION"),
    ("kernels.constrain", "GRAMMARS"),
    ("actors.processors.base", "PROCESSORS"),
    ("actors.vocab.pretokenize", "PRETOKENIZERS"),
    ("actors.scheduler.queue", "POLICIES"),
    ("actors.cache.evict", "EVICTIONS"),
    ("actors.gateway.tools.base", "TOOL_PARSERS"),
    ("actors.gateway.reasoning.base", "REASONING_PARSERS"),
)


# Settings that name entries of a seam: section and field, the seam, and what names none. Those of
# the device's seams are left to the worker, which is the first to start.
SETTINGS = (
    ("scheduler", "policy", ("actors.scheduler.queue", "POLICIES"), ()),
    ("cache", "eviction", ("actors.cache.evict", "EVICTIONS"), ()),
    ("gateway", "tool_parser", ("actors.gateway.tools.base", "TOOL_PARSERS"), ("auto", "none")),
    (
        "gateway",
        "reasoning_parser",
        ("actors.gateway.reasoning.base", "REASONING_PARSERS"),
        ("auto", "none", ""),
    ),
    ("tokenizer", "logits_processors", ("actors.processors.base", "PROCESSORS"), ("",)),
)


class Missing(NamedTuple):
    """A seam that can't be looked at on this machine."""

    where: str
    why: str


def listed() -> Iterator[Entry | Missing]:
    """Every entry of every seam."""
    for module, name in SEAMS:
        try:
            registry: Registry[object] = getattr(importlib.import_module(module), name)
            yield from registry.entries()
        except (ImportError, ValueError) as error:
            yield Missing(f"{module}.{name}", str(error))


def unknown(config: Any) -> Iterator[tuple[str, str]]:
    """The settings (as SECTION.FIELD) that name what no seam has, and what is wrong; a setting may
    hold several names between commas. Imports only the seams of those that were changed."""
    for section, field, (module, name), others in SETTINGS:
        own = getattr(config, section)
        value = getattr(own, field)
        if value == getattr(type(own)(), field):
            continue
        registry: Registry[object] = getattr(importlib.import_module(module), name)
        for word in value.split(","):
            if word.strip() in (*others, *registry.names()):
                continue
            known = ", ".join(sorted({*others, *registry.names()} - {""}))
            yield f"{section}.{field}", f"there is no {word.strip()!r}; known are: {known}"
