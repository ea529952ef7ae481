"""Tests of the cache of built files."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from tests.support import model_cache
from tests.support.model_cache import cached_folder, copy_cached

BUILDS: list[str] = []


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_cache, "MODEL_CACHE", tmp_path / "cache")
    BUILDS.clear()


@cached_folder()
def write_note(folder: Path, text: str = "a", *, repeat: int = 1) -> Path:
    """Write a file below the folder, and count the build."""
    BUILDS.append(text)
    (folder / "below").mkdir()
    (folder / "below" / "note.txt").write_text(text * repeat)
    return folder


def test_same_arguments_build_once(tmp_path: Path) -> None:
    folders = [
        write_note(tmp_path / "1"),
        write_note(tmp_path / "2", "a"),
        write_note(tmp_path / "3", text="a", repeat=1),
    ]
    assert [(folder / "below/note.txt").read_text() for folder in folders] == ["a", "a", "a"]
    assert len(BUILDS) == 1


def test_other_arguments_build_again(tmp_path: Path) -> None:
    assert (write_note(tmp_path / "1", "b") / "below/note.txt").read_text() == "b"
    assert (write_note(tmp_path / "2", "b", repeat=2) / "below/note.txt").read_text() == "bb"
    assert BUILDS == ["b", "b"]


def test_changed_copy_leaves_cache_unchanged(tmp_path: Path) -> None:
    (write_note(tmp_path / "1") / "below/note.txt").write_text("changed")
    assert (write_note(tmp_path / "2") / "below/note.txt").read_text() == "a"


def test_existing_folder_keeps_other_files(tmp_path: Path) -> None:
    folder = tmp_path / "1"
    folder.mkdir()
    (folder / "graph.pbtxt").write_text("graph")
    write_note(folder)
    assert sorted(each.name for each in folder.iterdir()) == ["below", "graph.pbtxt"]


def test_failed_build_is_not_cached(tmp_path: Path) -> None:
    def fail(folder: Path) -> None:
        (folder / "half").touch()
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        copy_cached("half", fail, tmp_path / "1", {})
    copy_cached("half", lambda folder: (folder / "full").touch(), tmp_path / "2", {})
    assert [each.name for each in (tmp_path / "2").iterdir()] == ["full"]


def test_concurrent_callers_share_a_build(tmp_path: Path) -> None:
    threads = [threading.Thread(target=write_note, args=(tmp_path / str(number), "c")) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert BUILDS == ["c"]
    assert all((tmp_path / str(number) / "below/note.txt").read_text() == "c" for number in range(4))
