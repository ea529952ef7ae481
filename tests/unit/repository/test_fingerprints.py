"""Changes on disk that must be seen, and those that are none."""

from __future__ import annotations

from pathlib import Path

import pytest

from ovmstrio.repository.fingerprints import content_mark, tree_mark


def test_the_same_content_has_the_same_mark() -> None:
    """A file that is rewritten as it was has not changed."""
    assert content_mark(b"{}") == content_mark(b"{}") != content_mark(b"{ }")


@pytest.mark.parametrize("change", ["grow", "add", "remove", "nested"])
def test_any_change_below_a_directory_changes_its_mark(tmp_path: Path, change: str) -> None:
    """A file that grows, comes or goes, at any depth, is a change."""
    file = tmp_path / "model.bin"
    file.write_bytes(b"12")
    before = tree_mark(tmp_path)
    assert tree_mark(tmp_path) == before
    match change:
        case "grow":
            file.write_bytes(b"123")
        case "add":
            (tmp_path / "model.xml").touch()
        case "remove":
            file.unlink()
        case _:
            (tmp_path / "variables").mkdir()
            (tmp_path / "variables" / "x").touch()
    assert tree_mark(tmp_path) != before


def test_a_missing_path_has_a_mark_of_its_own(tmp_path: Path) -> None:
    """What is not there differs from what is, and is no error."""
    missing = tree_mark(tmp_path / "model.onnx")
    (tmp_path / "model.onnx").touch()
    assert tree_mark(tmp_path / "model.onnx") != missing


def test_circles_of_links_and_dangling_ones_do_no_harm(tmp_path: Path) -> None:
    """A directory that leads to itself has a mark, too."""
    (tmp_path / "circle").symlink_to(tmp_path, target_is_directory=True)
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    assert tree_mark(tmp_path) == tree_mark(tmp_path)


@pytest.mark.parametrize("name", ["x" * 300, "a\0b"])
def test_a_name_that_no_file_can_have_is_a_state_like_any_other(tmp_path: Path, name: str) -> None:
    """Whoever writes it into a graph has that graph fail alone."""
    assert tree_mark(tmp_path / name) == tree_mark(tmp_path / "nowhere")
