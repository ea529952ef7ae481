from __future__ import annotations

import os
from pathlib import Path

import pytest
import trio
import trio.testing
from structlog.testing import capture_logs

from ovmstrio.config.specs import ModelSpec
from ovmstrio.server import readiness_file
from ovmstrio.server.readiness_file import ReadinessFile, default_file
from tests.support.stub_registry import StubServable, add_versions, open_plane_of


def test_file_exists_while_the_server_is_ready(tmp_path: Path) -> None:
    path = tmp_path / "workspace" / "ready.txt"
    path.parent.mkdir()
    path.touch()
    file = ReadinessFile(path)
    assert not path.exists()
    path.parent.rmdir()
    file.show(ready=True)
    file.show(ready=True)
    assert path.exists()
    file.show(ready=False)
    file.show(ready=False)
    assert not path.exists()


async def test_file_follows_the_readiness_of_the_data_plane(tmp_path: Path) -> None:
    path = tmp_path / "ready.txt"
    spec = ModelSpec(name="m", base_path=add_versions(tmp_path / "m", 1))
    async with open_plane_of(spec, StubServable(spec, 1), str) as plane, trio.open_nursery() as nursery:
        nursery.start_soon(ReadinessFile(path).follow, plane)
        await trio.testing.wait_all_tasks_blocked()
        assert path.exists()
        plane.begin_drain()
        await trio.testing.wait_all_tasks_blocked()
        assert not path.exists()
        nursery.cancel_scope.cancel()
    async with open_plane_of(spec, StubServable(spec, 1), str) as plane, trio.open_nursery() as nursery:
        nursery.start_soon(ReadinessFile(path).follow, plane)
        await trio.testing.wait_all_tasks_blocked()
        assert path.exists()
        nursery.cancel_scope.cancel()
    assert not path.exists()


def test_file_that_cannot_be_written_is_logged(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    file = ReadinessFile(tmp_path / "file" / "ready.txt")
    with capture_logs() as logs:
        file.show(ready=True)
        file.show(ready=False)
    assert [(each["log_level"], each["path"]) for each in logs] == [("warning", str(tmp_path / "file" / "ready.txt"))]
    assert (tmp_path / "file").read_bytes() == b""


def test_fifo_is_neither_written_nor_removed(tmp_path: Path) -> None:
    fifo = tmp_path / "ready"
    os.mkfifo(fifo)
    file = ReadinessFile(fifo)
    file.show(ready=True)
    file.show(ready=False)
    assert fifo.is_fifo()


def test_default_file_is_used_if_its_folder_exists(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usual = tmp_path / "workspace" / "api_readiness.txt"
    monkeypatch.setattr(readiness_file, "DEFAULT_FILE", usual)
    ReadinessFile(default_file()).show(ready=True)
    assert not usual.parent.exists()
    usual.parent.mkdir()
    ReadinessFile(default_file()).show(ready=True)
    assert usual.exists()


def test_relative_path_is_resolved_at_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    file = ReadinessFile(Path("ready.txt"))
    (tmp_path / "other").mkdir()
    monkeypatch.chdir(tmp_path / "other")
    file.show(ready=True)
    assert (tmp_path / "ready.txt").exists()
