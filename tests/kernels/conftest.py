"""This file gives kernel tests their models: tiny random ones, and the real SmolLM2."""

from __future__ import annotations

import fcntl
import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> None:
    """Test runs share their machine: threads that wait for each other crawl."""
    torch.set_num_threads(1)


@dataclass(frozen=True, slots=True)
class Answered:
    """A model and what the oracle made of prompts."""

    path: Path
    prompts: list[list[int]]
    answers: list[list[int]]
    read: list[dict[str, list[float]]]  # of the first prompts, see `what_is_read` of the oracle


def run_oracle(*arguments: str, cwd: Path) -> None:
    """Runs oracle.py away from the checkout. Its log is shown if it fails."""
    environment = {**os.environ, "USE_HUB_KERNELS": "0", "HF_HUB_OFFLINE": "1"}
    paths = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    elsewhere = [path for path in paths if path and not Path(path, "actors").is_dir()]
    environment["PYTHONPATH"] = os.pathsep.join(elsewhere)  # libraries may lie there
    script = Path(__file__).with_name("oracle.py")
    done = subprocess.run(
        [sys.executable, "-P", "-W", "ignore", str(script), *arguments],
        cwd=cwd,
        env=environment,
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert done.returncode == 0, done.stderr[-4000:]


def oracle_once(factory: pytest.TempPathFactory, name: str, *arguments: str) -> Path:
    """A directory in which the oracle has run; shared by the processes of a parallel test run."""
    parallel = "PYTEST_XDIST_WORKER" in os.environ
    base = factory.getbasetemp().parent if parallel else factory.getbasetemp()
    directory = base / f"oracle_{name}"
    directory.mkdir(exist_ok=True)
    with (base / f"oracle_{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (directory / "done").exists():
            run_oracle(*arguments, str(directory), cwd=directory)
            (directory / "done").touch()
    return directory


@pytest.fixture(scope="session")
def tiny_models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Answered]:
    """Tiny random models of each family with the oracle's greedy answers to 64 prompts."""
    directory = oracle_once(tmp_path_factory, "tiny", "tiny")
    return {
        path.stem: answered(directory / path.stem, path)
        for path in sorted(directory.glob("*.json"))
    }


@pytest.fixture(scope="session")
def smollm2_answered(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Answered:
    """SmolLM2 with the oracle's greedy answers from its weights dequantized to float32."""
    directory = oracle_once(tmp_path_factory, "smollm2", "smollm2", str(smollm2.resolve()))
    return answered(smollm2, directory / "answers.json")


def answered(model: Path, path: Path) -> Answered:
    content = json.loads(path.read_text())
    # A near tie would make the comparison depend on rounding: the prompts are chosen without one.
    assert content["gap"] > 1e-5, content["gap"]
    return Answered(model, content["prompts"], content["answers"], content["read"])
