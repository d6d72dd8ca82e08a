"""Every set of operators has every operator, also those that only other machines can load."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

OPS = Path(__file__).resolve().parents[2] / "kernels" / "ops"
SETS = {"reference.py": "ReferenceOps", "cpu/ops.py": "CpuOps", "triton/ops.py": "TritonOps"}


def methods_of(path: str, name: str) -> dict[str, list[str]]:
    """Its methods, each with its arguments' names."""
    tree = ast.parse((OPS / path).read_text("utf-8"))
    (found,) = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == name]
    return {
        node.name: [argument.arg for argument in node.args.args]
        for node in found.body
        if isinstance(node, ast.FunctionDef)
    }


@pytest.mark.parametrize("path", SETS)
def test_operators_are_complete(path: str) -> None:
    found = methods_of(path, SETS[path])
    for name, arguments in methods_of("base.py", "Ops").items():
        assert name in found, f"{SETS[path]} has no {name}"
        assert found[name][: len(arguments)] == arguments, name
