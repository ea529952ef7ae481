from __future__ import annotations

from pathlib import Path

from ovmstrio.config.specs import GraphSpec
from ovmstrio.repository.graph_files import graph_mark


def _graph(root: Path, *handlers: str) -> GraphSpec:
    path = root / "graph.pbtxt"
    path.write_text("".join(f"handler_path: {handler}\n" for handler in handlers))
    return GraphSpec(name="g", base_path=root, graph_path=path)


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def test_every_python_file_beside_a_handler_counts(tmp_path: Path) -> None:
    """The handler, its neighbours and packages do; other files, and what the interpreter writes, do not."""
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


def test_the_graphs_own_file_counts_by_its_content(tmp_path: Path) -> None:
    """Writing the same again is no change, losing it is one."""
    spec = _graph(tmp_path, '"a.py"')
    first = graph_mark(spec)
    spec.graph_path.write_bytes(spec.graph_path.read_bytes())
    assert graph_mark(spec) == first
    spec.graph_path.write_text("# changed")
    second = graph_mark(spec)
    spec.graph_path.unlink()
    assert len({first, second, graph_mark(spec)}) == 3
