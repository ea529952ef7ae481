from __future__ import annotations

import ast
import re
import sys
import tomllib
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from importlib.machinery import ModuleSpec
from importlib.metadata import packages_distributions
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.support.source_facts import source_facts

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]

_PATH = re.compile(r"(?<![\w/.])(?:ovmstrio|cli|compat|protos|samples|tests|benchmarks)(?:/[\w.]+)+/?")
_MODULE = re.compile(r"\b(?:from|import) (ovmstrio(?:\.\w+)*)|(?<![\w.\"'])(ovmstrio(?:\.[a-z_]+)+)\b")
_LINK = re.compile(r"\]\((?!https?:|#)([^)#]+)(?:#[^)]*)?\)")
_OWN = {"ovmstrio", "pyovms", "cortex_internal", "paddle_serving_server", "paddle_serving_app", "paddle_serving_client"}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_path_and_link_of_a_page_exists(page: Path) -> None:
    text = page.read_text()
    named = {found.rstrip(".") for found in _PATH.findall(text)}
    missing = {path for path in named if not (ROOT / path).exists()}
    missing |= {link for link in _LINK.findall(text) if not (page.parent / link).exists()}
    assert not missing


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_module_of_a_page_can_be_found(page: Path) -> None:
    named = {first or second for first, second in _MODULE.findall(page.read_text())}
    assert not {name for name in named if not _is_there(name)}


def test_the_architecture_page_names_every_package() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text()
    packages = [path.parent.name for path in (ROOT / "ovmstrio").glob("*/__init__.py")]
    assert packages
    assert not [name for name in packages if f"`ovmstrio/{name}/" not in text]


def test_imported_packages_are_declared_and_documented() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    given = [
        *project["dependencies"],
        *(each for name, extra in extras.items() if not name.startswith("dev") for each in extra),
    ]
    declared = {_normal(re.split(r"[\[<>=~!; ]", each)[0]) for each in given}
    rows = (ROOT / "docs" / "dependencies.md").read_text().splitlines()
    named = {_normal(name) for row in rows if row.startswith("| ") for name in row.split("|")[1].split(",")}
    brought = packages_distributions()
    for module in sorted(set(_imported())):
        names = {_normal(name) for name in brought.get(module, [module])}
        assert names & declared, f"{module} is imported, and none of {sorted(names)} is declared in pyproject.toml"
        assert names & declared & named, f"{module} is imported, and docs/dependencies.md does not say why"


def _is_there(name: str) -> bool:
    """Return whether a name is a module, or an attribute of a module."""
    parent, _, last = name.rpartition(".")
    if _spec(name) is not None:
        return True
    found = _spec(parent)
    return found is not None and found.origin is not None and last in Path(found.origin).read_text()


def _spec(name: str) -> ModuleSpec | None:
    try:
        return find_spec(name) if name else None
    except ModuleNotFoundError:
        return None


def _imported() -> Iterator[str]:
    for name, file in _modules().items():
        if name.startswith("ovmstrio.samples"):
            continue
        for node in source_facts(file).imports:
            names = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif node.module and not node.level:
                names = [node.module]
            tops = {name.split(".")[0] for name in names}
            yield from tops - _OWN - set(sys.stdlib_module_names)


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name.strip()).lower()


COMPAT = ROOT / "ovmstrio" / "compat"


def _modules() -> dict[str, Path]:
    found = {}
    for file in (ROOT / "ovmstrio").rglob("*.py"):
        base = COMPAT if file.is_relative_to(COMPAT) else ROOT
        parts = file.relative_to(base).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = file
    return found


def _imports_of(file: Path, module: str) -> Iterator[tuple[str, str]]:
    """Yield what a module imports, inside functions and for types as well: a name and the module that may have it."""
    is_package = file.name == "__init__.py"
    for node in source_facts(file).imports:
        if isinstance(node, ast.Import):
            yield from ((alias.name, "") for alias in node.names)
        else:
            above = module.split(".")[: len(module.split(".")) - node.level + is_package] if node.level else []
            base = ".".join([*above, *filter(None, [node.module])])
            yield from ((f"{base}.{alias.name}", base) for alias in node.names)


def _graph() -> dict[str, set[str]]:
    """Return the modules that each module imports, without packages that only contain an imported module."""
    modules = _modules()
    graph = {}
    for name, file in modules.items():
        found = {whole if whole in modules else base for whole, base in _imports_of(file, name)}
        graph[name] = found & modules.keys() - {name}
    return graph


def test_no_modules_import_each_other() -> None:
    try:
        TopologicalSorter(_graph()).prepare()
    except CycleError as error:
        pytest.fail(f"modules import each other: {' -> '.join(error.args[1])}")


def test_each_alert_has_an_entry_in_the_runbook() -> None:
    alerts = set(re.findall(r"(?m)^ *- alert: (\w+)$", (ROOT / "deploy/grafana/alerts.yml").read_text()))
    headings = set(re.findall(r"(?m)^### (\w+)$", (ROOT / "docs/sizing.md").read_text()))
    assert alerts
    assert alerts - headings == set()
