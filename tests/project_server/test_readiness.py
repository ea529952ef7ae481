"""The file that says that a project can be called."""

from __future__ import annotations

from pathlib import Path

import pytest
from ovmstrio.project_server import readiness
from ovmstrio.project_server.readiness import ReadinessFile


def test_the_file_is_there_while_the_project_is_ready(tmp_path: Path) -> None:
    """Its folder is made, and one of an earlier run is removed at the start."""
    path = tmp_path / "workspace" / "ready.txt"
    path.parent.mkdir()
    path.touch()
    file = ReadinessFile(path)
    assert (path.exists(), file.is_ready) == (False, False)
    file.create()
    assert (path.exists(), file.is_ready) == (True, True)
    file.remove()
    file.remove()
    assert (path.exists(), file.is_ready) == (False, False)


def test_a_file_that_cannot_be_written_keeps_nobody_from_serving(tmp_path: Path) -> None:
    """It is ready all the same."""
    (tmp_path / "file").touch()
    file = ReadinessFile(tmp_path / "file" / "ready.txt")
    file.create()
    assert file.is_ready
    file.remove()


def test_the_usual_file_is_used_where_its_folder_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And no folder is made for it elsewhere."""
    usual = tmp_path / "workspace" / "api_readiness.txt"
    monkeypatch.setattr(readiness, "USUAL_FILE", usual)
    ReadinessFile(None).create()
    assert not usual.parent.exists()
    usual.parent.mkdir()
    ReadinessFile(None).create()
    assert usual.exists()


def test_a_relative_path_stays_where_it_was_meant(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Though the working directory becomes that of the project."""
    monkeypatch.chdir(tmp_path)
    file = ReadinessFile(Path("ready.txt"))
    (tmp_path / "other").mkdir()
    monkeypatch.chdir(tmp_path / "other")
    file.create()
    assert (tmp_path / "ready.txt").exists()
