"""The list of seams: every registry of the source is in it, and what can't be imported is said."""

from __future__ import annotations

import ast
import json
from pathlib import Path
from typing import Any

import pytest

import app
from actors import plugins, run
from actors.settings import SettingsError
from kernels.registry import Entry
from messages.config import (
    CacheConfig,
    Config,
    GatewayConfig,
    ModelConfig,
    SchedulerConfig,
    TokenizerConfig,
)

ROOT = Path(__file__).resolve().parent.parent


def registries() -> set[tuple[str, str]]:
    """Module and name of each registry that the source makes."""
    found = set()
    for folder in ("actors", "kernels"):
        for path in (ROOT / folder).rglob("*.py"):
            module = ".".join(path.relative_to(ROOT).with_suffix("").parts)
            for node in ast.parse(path.read_text("utf-8")).body:
                is_named = isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
                if is_named and ast.unparse(node.annotation).startswith("Registry["):
                    found.add((module, node.target.id))
    return found


def test_every_registry_of_the_source_is_listed() -> None:
    assert registries() == set(plugins.SEAMS)


def test_entries_have_seam_name_and_origin(capsys: pytest.CaptureFixture[str]) -> None:
    assert app.main(["plugins", "--json"]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert {"seam": "models", "name": "LlamaForCausalLM", "origin": "built in"} in lines
    assert {"seam": "eviction", "name": "lru", "origin": "built in"} in lines


def test_a_seam_that_cannot_be_imported_hides_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    seams = (("no.such.module", "THINGS"), ("actors.cache.evict", "EVICTIONS"))
    monkeypatch.setattr(plugins, "SEAMS", seams)
    first, *rest = plugins.listed()
    assert isinstance(first, plugins.Missing)
    assert first.where == "no.such.module.THINGS" and "no" in first.why
    assert rest and all(isinstance(entry, Entry) for entry in rest)


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"tokenizer": TokenizerConfig(logits_processors="no_repeat_ngram, nope")}, "nope"),
        ({"scheduler": SchedulerConfig(policy="fifo")}, "fcfs, lpm"),
        ({"cache": CacheConfig(eviction="x")}, "lru"),
        ({"gateway": GatewayConfig(tool_parser="x")}, "auto, "),
        ({"gateway": GatewayConfig(reasoning_parser="x")}, "none, "),
    ],
)
def test_a_setting_that_names_nothing_is_told_before_a_model_is_looked_for(
    settings: dict[str, Any], told: str
) -> None:
    with pytest.raises(SettingsError, match=told) as caught:
        run.settle(Config(model=ModelConfig(path="nowhere"), **settings), print)
    assert str(caught.value).startswith("--")


def test_names_that_there_are_and_words_for_none_pass() -> None:
    run.check_names(Config())
    run.check_names(
        Config(
            tokenizer=TokenizerConfig(logits_processors="no_repeat_ngram, thinking_budget"),
            scheduler=SchedulerConfig(policy="fcfs"),
            gateway=GatewayConfig(tool_parser="none", reasoning_parser="none"),
        )
    )
