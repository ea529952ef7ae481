"""How many cores a process may use."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from ovmstrio.work.cores import CoreShare, usable_cores


@pytest.fixture(autouse=True)
def _eight_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))


@pytest.mark.parametrize(
    ("files", "own", "count"),
    [
        ({}, "", 8),
        ({"cpu.max": "max 100000\n"}, "0::/\n", 8),
        ({"cpu.max": "200000 100000\n"}, "0::/\n", 2),
        ({"cpu.max": "150000 100000\n"}, "0::/\n", 2),
        ({"cpu.max": "10000 100000\n"}, "0::/\n", 1),
        ({"cpu.max": "1600000 100000\n"}, "0::/\n", 8),
        ({"pods/one/cpu.max": "300000 100000\n", "pods/cpu.max": "max 100000\n"}, "0::/pods/one\n", 3),
        ({"pods/one/cpu.max": "max 100000\n", "pods/cpu.max": "400000 100000\n"}, "0::/pods/one\n", 4),
        ({"pods/other/cpu.max": "100000 100000\n"}, "0::/pods/one\n", 8),
        ({"cpu/cpu.cfs_quota_us": "300000\n", "cpu/cpu.cfs_period_us": "100000\n"}, "2:cpu,cpuacct:/docker/x\n", 3),
        ({"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, "2:cpu,cpuacct:/docker/x\n", 8),
        ({"cpu/x/cpu.cfs_quota_us": "100000\n", "cpu/x/cpu.cfs_period_us": "50000\n"}, "1:cpu:/x\n3:memory:/y\n", 2),
        ({"cpu.max": "nonsense\n"}, "nonsense\n", 8),
    ],
)
def test_the_limit_of_a_container_counts(tmp_path: Path, files: dict[str, str], own: str, count: int) -> None:
    """As its whole cores, rounded up, of whichever of its groups has the lowest."""
    groups = tmp_path / "groups"
    for name, text in files.items():
        file = groups / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="ascii")
    (tmp_path / "own").write_text(own, encoding="ascii")
    assert usable_cores(groups, tmp_path / "own") == count


def test_on_few_cores_nothing_is_bound_to_them() -> None:
    """The event loop computes there, too, unless nothing is to be chosen by that."""
    few, many = CoreShare(2), CoreShare(3)
    assert few.is_shared
    assert not many.is_shared
    few.chooses = False
    assert not few.is_shared
