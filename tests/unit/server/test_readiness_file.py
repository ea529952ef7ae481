"""The file that says that what is served can be called."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import trio
import trio.testing
from structlog.testing import capture_logs

from ovmstrio.config.specs import ModelSpec
from ovmstrio.server import readiness_file
from ovmstrio.server.readiness_file import ReadinessFile, usual_file
from tests.support.stub_registry import StubServable, add_versions, open_plane_of


def test_the_file_is_there_while_the_project_is_ready(tmp_path: Path) -> None:
    """Its folder is made, and one of an earlier run is removed at the start."""
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


async def test_the_file_follows_what_the_data_plane_says(tmp_path: Path) -> None:
    """From its first readiness to the drain; and nobody leaves it behind."""
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


def test_a_file_that_cannot_be_written_keeps_nobody_from_serving(tmp_path: Path) -> None:
    """It is told, and raises nothing."""
    (tmp_path / "file").touch()
    file = ReadinessFile(tmp_path / "file" / "ready.txt")
    with capture_logs() as logs:
        file.show(ready=True)
        file.show(ready=False)
    assert [(each["log_level"], each["path"]) for each in logs] == [("warning", str(tmp_path / "file" / "ready.txt"))]
    assert (tmp_path / "file").read_bytes() == b""


def test_a_fifo_is_neither_written_nor_removed(tmp_path: Path) -> None:
    """Nor is a device; the server goes on."""
    fifo = tmp_path / "ready"
    os.mkfifo(fifo)
    file = ReadinessFile(fifo)
    file.show(ready=True)
    file.show(ready=False)
    assert fifo.is_fifo()


def test_the_usual_file_is_used_where_its_folder_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And no folder is made for it elsewhere."""
    usual = tmp_path / "workspace" / "api_readiness.txt"
    monkeypatch.setattr(readiness_file, "USUAL_FILE", usual)
    ReadinessFile(usual_file()).show(ready=True)
    assert not usual.parent.exists()
    usual.parent.mkdir()
    ReadinessFile(usual_file()).show(ready=True)
    assert usual.exists()


def test_a_relative_path_stays_where_it_was_meant(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Though the working directory becomes that of the project."""
    monkeypatch.chdir(tmp_path)
    file = ReadinessFile(Path("ready.txt"))
    (tmp_path / "other").mkdir()
    monkeypatch.chdir(tmp_path / "other")
    file.show(ready=True)
    assert (tmp_path / "ready.txt").exists()
