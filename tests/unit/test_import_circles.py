"""No module imports, over whatever detours, one that imports it; imports for types and inside functions count."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from itertools import chain
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = (("", "ovmstrio"), ("cli", "ovms_cli"), ("compat", ""))


def _modules() -> dict[str, Path]:
    found = {}
    for base, package in FOLDERS:
        for file in (ROOT / base / package).rglob("*.py"):
            parts = file.relative_to(ROOT / base).with_suffix("").parts
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = file
    return found


def _imported(tree: ast.AST, module: str, *, is_package: bool) -> Iterator[tuple[str, str]]:
    """Give all that a module imports, wherever in it: a name, and the module that it may be in."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, "") for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = module.split(".")[: len(module.split(".")) - node.level + is_package] if node.level else []
            base = ".".join([*above, *filter(None, [node.module])])
            yield from ((f"{base}.{alias.name}", base) for alias in node.names)


def _graph() -> dict[str, set[str]]:
    """Give whom each module imports; a package that is only on the way to one of its modules does not count."""
    modules = _modules()
    graph = {}
    for name, file in modules.items():
        imported = _imported(ast.parse(file.read_text()), name, is_package=file.name == "__init__.py")
        found = {whole if whole in modules else base for whole, base in imported}
        graph[name] = found & modules.keys() - {name}
    return graph


def _circles(graph: dict[str, set[str]]) -> list[list[str]]:
    """Give the groups of modules of which each leads to each other, every group in the order of names."""
    order: list[str] = []
    seen: set[str] = set()
    for start in graph:
        _visit(start, graph, seen, order)
    back: dict[str, set[str]] = {name: set() for name in graph}
    for name, target in chain.from_iterable(((name, each) for each in targets) for name, targets in graph.items()):
        back[target].add(name)
    seen.clear()
    groups = []
    for start in reversed(order):
        group: list[str] = []
        _visit(start, back, seen, group)
        groups.append(sorted(group))
    return [group for group in groups if len(group) > 1]


def _visit(start: str, graph: dict[str, set[str]], seen: set[str], order: list[str]) -> None:
    """Add to ``order`` what can be reached and was not seen, each behind all that it leads to."""
    if start in seen:
        return
    seen.add(start)
    path = [(start, iter(sorted(graph[start])))]
    while path:
        name, ahead = path[-1]
        step = next((each for each in ahead if each not in seen), None)
        if step is None:
            order.append(name)
            path.pop()
        else:
            seen.add(step)
            path.append((step, iter(sorted(graph[step]))))


def test_no_modules_import_each_other() -> None:
    """There is no circle of imports."""
    found = _circles(_graph())
    assert not found, "modules import each other:\n" + "\n".join(", ".join(group) for group in found)


@pytest.mark.parametrize("imports", [{"a": {"b"}, "b": {"a"}}, {"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}}])
def test_circles_are_found_whole(imports: dict[str, set[str]]) -> None:
    """A circle is found with all its members, and without those that only lead to it."""
    assert _circles(imports) == [sorted(imports.keys() - {"d"})]
