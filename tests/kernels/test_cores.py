"""How many cores a process may use, with and without a container's quota."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from kernels.cores import usable_cores

ALL = len(os.sched_getaffinity(0))


@pytest.mark.parametrize(
    ("content", "cores"),
    [
        ("max 100000", ALL),
        ("100000 100000", 1),
        ("150000 100000", min(ALL, 2)),
        ("50000 100000", 1),
        ("9900000 100000", ALL),
        ("0 100000", ALL),
        ("nonsense", ALL),
    ],
)
def test_a_quota_limits_the_cores(tmp_path: Path, content: str, cores: int) -> None:
    (tmp_path / "cpu.max").write_text(content + "\n")
    assert usable_cores(tmp_path) == cores


@pytest.mark.parametrize(("quota", "cores"), [("-1", ALL), ("100000", 1)])
def test_the_older_kind_of_quota_counts_too(tmp_path: Path, quota: str, cores: int) -> None:
    (tmp_path / "cpu").mkdir()
    (tmp_path / "cpu" / "cpu.cfs_quota_us").write_text(quota)
    (tmp_path / "cpu" / "cpu.cfs_period_us").write_text("100000")
    assert usable_cores(tmp_path) == cores


def test_no_control_group_is_no_limit(tmp_path: Path) -> None:
    assert usable_cores(tmp_path / "nothing") == ALL
