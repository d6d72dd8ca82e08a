"""This file is the table of cases: each a name, what it is about, what it needs, and a function.

It does not know what the cases ask.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from bench.cases.asking import Peer

# How a server must have been started for the cases that need a certain one.
SETTINGS: dict[str, tuple[str, ...]] = {
    "plain": ("--kv-tokens", "16384"),
    "small": ("--page-size", "16", "--kv-tokens", "512", "--max-running", "4"),
    "queue": ("--kv-tokens", "4096", "--max-running", "2", "--max-queued", "4"),
    "limits": ("--kv-tokens", "4096", "--header-timeout", "3", "--body-timeout", "3"),
}


class Case(NamedTuple):
    name: str
    about: str
    run: Callable[[Peer], None]
    settings: str
    slow: bool


CASES: list[Case] = []


def case(
    name: str, about: str, *, settings: str = "plain", slow: bool = False
) -> Callable[[Callable[[Peer], None]], Callable[[Peer], None]]:
    """Adds a function to the table. `slow`: only with --slow."""
    assert settings in SETTINGS, settings

    def add(run: Callable[[Peer], None]) -> Callable[[Peer], None]:
        CASES.append(Case(name, about, run, settings, slow))
        return run

    return add
