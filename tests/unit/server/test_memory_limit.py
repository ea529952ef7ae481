"""How much memory a server thinks that it may have, and what it lets answers take of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from ovmstrio.server import memory_limit as module
from ovmstrio.server.memory_limit import memory_limit, pending_answers
from ovmstrio.server.settings import ServerSettings

MIB = 2**20


def _groups(folder: Path, own: str, limits: dict[str, str]) -> tuple[Path, Path]:
    (folder / "own").write_text(own)
    for path, limit in limits.items():
        file = folder / "groups" / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"{limit}\n")
    return folder / "groups", folder / "own"


def test_the_smallest_limit_of_all_groups_counts(tmp_path: Path) -> None:
    """Version 2: a group may have less than those above it, or more."""
    limits = {"pod/one/memory.max": "max", "pod/memory.max": f"{100 * MIB}", "memory.max": f"{200 * MIB}"}
    groups, own = _groups(tmp_path, "0::/pod/one\n", limits)
    assert memory_limit(groups, own) == 100 * MIB


def test_the_older_version_is_read_too(tmp_path: Path) -> None:
    """Version 1: memory has a tree of its own, beside others."""
    name = "memory.limit_in_bytes"
    limits = {f"memory/pod/{name}": f"{70 * MIB}", f"memory/{name}": "9223372036854771712"}
    groups, own = _groups(tmp_path, "5:cpu,cpuacct:/pod\n4:memory:/pod\n0::/\n", limits)
    assert memory_limit(groups, own) == 70 * MIB


def test_a_container_sees_its_own_group_at_the_root(tmp_path: Path) -> None:
    """Where the path is that of the machine outside, the root of what is mounted has the limit."""
    groups, own = _groups(tmp_path, "0::/docker/0123\n", {"memory.max": f"{50 * MIB}"})
    assert memory_limit(groups, own) == 50 * MIB


def test_without_groups_the_machine_is_the_limit(tmp_path: Path) -> None:
    """Nothing to read is nothing that limits."""
    assert memory_limit(tmp_path / "none", tmp_path / "none") > 100 * MIB


def test_answers_get_a_quarter_unless_a_quota_says_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes of one server divide it among themselves."""
    monkeypatch.setattr(module, "memory_limit", lambda: 800 * MIB)
    assert pending_answers(ServerSettings()).budget.limit == 200 * MIB
    assert pending_answers(ServerSettings(), processes=2).budget.limit == 100 * MIB
    assert pending_answers(ServerSettings(grpc_memory_quota=900 * MIB)).budget.limit == 900 * MIB
    settings = ServerSettings(max_pending_response_bytes=MIB, stalled_client_seconds=7)
    pending = pending_answers(settings)
    share = pending.share()
    share.add(MIB + 1)
    assert share.is_full
    assert pending.patience_seconds == 7
