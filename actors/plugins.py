"""This file lists the seams and what is registered at each, for `python -m app plugins`.

It does not know what an entry does. A seam is named by text and imported only when it is asked for,
since most need the device's libraries; one that can't be imported says why, and the rest is listed.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from typing import NamedTuple

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
