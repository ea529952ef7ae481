from __future__ import annotations

import os
from pathlib import Path

import pytest

from ovmstrio.util.container_limits import free_memory, memory_limit, usable_cores

MIB = 2**20


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
def test_cores_are_limited_by_the_cgroup_quota_rounded_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, files: dict[str, str], own: str, count: int
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    groups = tmp_path / "groups"
    for name, text in files.items():
        file = groups / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="ascii")
    (tmp_path / "own").write_text(own, encoding="ascii")
    assert usable_cores(groups, tmp_path / "own") == count


@pytest.mark.parametrize(
    ("own", "limits"),
    [
        pytest.param(
            "0::/pod/one\n",
            {"pod/one/memory.max": "max", "pod/memory.max": f"{100 * MIB}", "memory.max": f"{200 * MIB}"},
            id="smallest limit of a group and its ancestors",
        ),
        pytest.param(
            "5:cpu,cpuacct:/pod\n4:memory:/pod\n0::/\n",
            {
                "memory/pod/memory.limit_in_bytes": f"{100 * MIB}",
                "memory/memory.limit_in_bytes": "9223372036854771712",
            },
            id="version 1",
        ),
        pytest.param("0::/docker/0123\n", {"memory.max": f"{100 * MIB}"}, id="container with its group at the root"),
    ],
)
def test_memory_limit_is_that_of_the_cgroups(tmp_path: Path, own: str, limits: dict[str, str]) -> None:
    (tmp_path / "own").write_text(own)
    for path, limit in limits.items():
        file = tmp_path / "groups" / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"{limit}\n")
    assert memory_limit(tmp_path / "groups", tmp_path / "own") == 100 * MIB


def test_memory_limit_without_cgroups_is_that_of_the_machine(tmp_path: Path) -> None:
    assert memory_limit(tmp_path / "none", tmp_path / "none") > 100 * MIB


@pytest.mark.parametrize(
    ("own", "files", "free"),
    [
        pytest.param("0::/pod\n", {}, 1000, id="no limit"),
        pytest.param("0::/pod\n", {"pod/memory.max": "max", "pod/memory.current": "5"}, 1000, id="unlimited group"),
        pytest.param("0::/pod\n", {"pod/memory.max": f"{900 * MIB}"}, 900, id="nothing used"),
        pytest.param(
            "0::/pod/one\n",
            {
                "pod/one/memory.max": f"{900 * MIB}",
                "pod/one/memory.current": f"{500 * MIB}",
                "pod/one/memory.stat": f"anon 7\ninactive_file {100 * MIB}\nactive_file 9",
                "pod/memory.max": f"{2000 * MIB}",
                "pod/memory.current": f"{1700 * MIB}",
            },
            300,
            id="ancestor with less left",
        ),
        pytest.param(
            "4:memory:/pod\n",
            {
                "memory/pod/memory.limit_in_bytes": f"{900 * MIB}",
                "memory/pod/memory.usage_in_bytes": f"{500 * MIB}",
                "memory/pod/memory.stat": f"inactive_file 1\ntotal_inactive_file {100 * MIB}",
                "memory/memory.limit_in_bytes": "9223372036854771712",
            },
            500,
            id="version 1",
        ),
        pytest.param("0::/pod\n", {"pod/memory.max": "5", "pod/memory.current": f"{MIB}"}, 0, id="nothing left"),
        pytest.param("0::/pod\n", {"pod/memory.max": f"{1200 * MIB}"}, 1000, id="machine with less left"),
    ],
)
def test_free_memory_is_the_smallest_rest_of_the_machine_and_the_cgroups(
    tmp_path: Path, own: str, files: dict[str, str], free: int
) -> None:
    (tmp_path / "own").write_text(own)
    (tmp_path / "machine").write_text(f"MemTotal: 99 kB\nMemAvailable:  {1000 * 1024} kB\n")
    for path, text in files.items():
        file = tmp_path / "groups" / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"{text}\n")
    assert free_memory(tmp_path / "groups", tmp_path / "own", tmp_path / "machine") == free * MIB


def test_free_memory_without_cgroups_is_that_of_the_machine(tmp_path: Path) -> None:
    assert free_memory(tmp_path / "none", tmp_path / "none") > 10 * MIB
    assert free_memory(tmp_path / "none", tmp_path / "none", tmp_path / "none") > 0
