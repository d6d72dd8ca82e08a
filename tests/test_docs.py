"""What the pages say exists: files, commands, flags."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest

from actors.commands import BENCHES
from actors.settings import FLAGS
from bench.cases import CASES

ROOT = Path(__file__).resolve().parent.parent
PAGES = ("README.md", "ARCHITECTURE.md", "CONTRIBUTING.md")
ROOTS = ("actors", "kernels", "messages", "bench", "tests")


def text_of(page: str) -> str:
    return (ROOT / page).read_text("utf-8")


@pytest.mark.parametrize("page", PAGES)
def test_files_that_a_page_names_exist(page: str) -> None:
    named = re.findall(r"`([\w./*-]+/[\w./-]*)`", text_of(page))
    paths = [name for name in named if name.split("/")[0] in ROOTS and "*" not in name]
    if page != "README.md":
        assert paths
    missing = [
        path
        for path in paths
        if not path.isupper() and "ROOM" not in path
        if not (ROOT / path).exists()
    ]
    assert not missing


@pytest.mark.parametrize("page", PAGES)
def test_commands_and_flags_that_a_page_names_exist(page: str) -> None:
    text = text_of(page)
    known = {"serve", "generate", "chat", "logs", "top", "plugins", "simulate", "bench", "doctor"}
    assert set(re.findall(r"python -m app (\w+)", text)) <= known
    assert set(re.findall(r"python -m app bench (\w+)", text)) <= set(BENCHES)
    flags = {row.flag for row in FLAGS} | {"--help", "--config", "--request", "--url"}
    assert set(re.findall(r"`(--[a-z-]+)", text)) <= flags


def test_the_first_screen_of_the_readme_is_one_screen() -> None:
    first, _, _ = text_of("README.md").partition("\n## ")
    assert len(first.splitlines()) <= 45


def test_every_bench_that_is_offered_exists() -> None:
    assert all(importlib.util.find_spec(f"bench.{name}") for name in BENCHES)


def test_the_cases_are_held_by_tests_that_exist_and_asked_by_the_bench() -> None:
    rows = re.findall(r"^\| (B\d{3}) \| .* \| (.*) \| (•?) \|$", text_of("docs/cases.md"), re.M)
    assert [name for name, _, _ in rows] == [f"B{number:03}" for number in range(1, 194, 2)]
    asked = {case.name for case in CASES}
    for name, held, dot in rows:
        assert (dot == "•") == (name in asked), name
        tests = re.findall(r"`([\w/]+\.py)::(\w+)`", held)
        assert tests or held.startswith("does not apply: "), name
        for file, test in tests:
            found = (ROOT / "tests" / file).read_text("utf-8")
            assert re.search(rf"^(async def|def|class) {test}\b", found, re.M), (name, test)
