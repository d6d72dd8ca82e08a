"""The list of planted bugs does not go stale unseen."""

from __future__ import annotations

import ast

import pytest

from bench.mutants import MUTANTS, ROOT, Mutant


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_bug_is_planted_where_it_can_be(mutant: Mutant) -> None:
    text = (ROOT / mutant.path).read_text("utf-8")
    planted = text.replace(mutant.old, mutant.new)
    assert planted != text, "there is no such piece"
    ast.parse(planted)
    assert ast.dump(ast.parse(planted)) != ast.dump(ast.parse(text))
