"""Marks of files and directories, which change with their content."""

from __future__ import annotations

from pathlib import Path

import pytest

from ovmstrio.config.specs import GraphSpec
from ovmstrio.repository.fingerprints import content_mark, tree_mark
from ovmstrio.repository.graph_files import graph_mark


def test_equal_content_has_an_equal_mark() -> None:
    """A file that is rewritten as it was has not changed."""
    assert content_mark(b"{}") == content_mark(b"{}") != content_mark(b"{ }")


@pytest.mark.parametrize("change", ["grow", "add", "remove", "nested"])
def test_any_change_below_a_directory_changes_its_mark(tmp_path: Path, change: str) -> None:
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


def test_a_missing_path_has_its_own_mark(tmp_path: Path) -> None:
    missing = tree_mark(tmp_path / "model.onnx")
    (tmp_path / "model.onnx").touch()
    assert tree_mark(tmp_path / "model.onnx") != missing


def test_circular_and_dangling_links_have_a_mark(tmp_path: Path) -> None:
    (tmp_path / "circle").symlink_to(tmp_path, target_is_directory=True)
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    assert tree_mark(tmp_path) == tree_mark(tmp_path)


@pytest.mark.parametrize("name", ["x" * 300, "a\0b"])
def test_an_impossible_name_has_the_mark_of_a_missing_path(tmp_path: Path, name: str) -> None:
    """Whoever writes it into a graph has that graph fail alone."""
    assert tree_mark(tmp_path / name) == tree_mark(tmp_path / "nowhere")


# Files of graphs


def _graph(root: Path, *handlers: str) -> GraphSpec:
    path = root / "graph.pbtxt"
    path.write_text("".join(f"handler_path: {handler}\n" for handler in handlers))
    return GraphSpec(name="g", base_path=root, graph_path=path)


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def test_every_python_file_next_to_a_handler_is_in_the_mark(tmp_path: Path) -> None:
    spec = _graph(tmp_path, '"code/model.py"', "'more\\\\other.py'")
    seen = {graph_mark(spec)}
    for count, name in enumerate(["code/model.py", "code/tool.py", "code/pkg/__init__.py", "code/pkg/deep.py"], 2):
        _write(tmp_path / name, "x")
        seen.add(graph_mark(spec))
        assert len(seen) == count
    _write(tmp_path / "more/other.py", "x")
    assert graph_mark(spec) not in seen
    seen.add(graph_mark(spec))
    for name in ("code/notes.txt", "code/data/x.py", "code/__pycache__/model.pyc", "elsewhere.py"):
        _write(tmp_path / name, "x")
    assert graph_mark(spec) in seen
    _write(tmp_path / "code/model.py", "longer")
    assert graph_mark(spec) not in seen


def test_the_content_of_the_graph_file_is_in_the_mark(tmp_path: Path) -> None:
    spec = _graph(tmp_path, '"a.py"')
    first = graph_mark(spec)
    spec.graph_path.write_bytes(spec.graph_path.read_bytes())
    assert graph_mark(spec) == first
    spec.graph_path.write_text("# changed")
    second = graph_mark(spec)
    spec.graph_path.unlink()
    assert len({first, second, graph_mark(spec)}) == 3
