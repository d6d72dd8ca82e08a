"""A short run of schemathesis over a server's own description; `bench fuzz` has the long ones."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from bench import fuzz
from tests.house.server import ROOT

CASES = 60


@pytest.mark.slow
def test_no_drawn_request_finds_a_5xx_or_an_answer_of_another_shape() -> None:
    """Server alive, and nothing left in it. The server and the cases are in processes of their
    own: what schemathesis warns of there is not ours."""
    assert fuzz.program_of("") is not None, "pip install -e '.[dev]'"
    words = ["fuzz", "--quick", "--cases", str(CASES), "--seed", "1", "--json"]
    ran = subprocess.run(
        [sys.executable, "-m", "app", "bench", *words],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert ran.returncode == 0, ran.stderr[-8000:]
    found = json.loads(ran.stdout)
    assert found["ok"] and found["healthy"] and not found["5xx"] and not found["left"]
    assert found["cases"] >= CASES and {"200", "400"} <= set(found["statuses"])
