"""Licences of the packages that a plain installation brings: ``python -m tests.support.licences`` writes the page."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable
from importlib.metadata import Distribution, distribution
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "licences.md"
_ALIASES = {
    "3-Clause BSD License": "BSD-3-Clause",
    "Apache 2": "Apache-2.0",
    "Apache 2.0": "Apache-2.0",
    "Apache Software License 2.0": "Apache-2.0",
    "BSD License": "BSD-3-Clause",
    "Dual License": "Apache-2.0 OR BSD-3-Clause",  # of python-dateutil
    "ISC License": "ISC",
    "MIT License": "MIT",
    "OSI Approved :: Apache Software License": "Apache-2.0",
}
_HEAD = """# Check the licences of dependencies

A plain installation brings these packages. The licences are those that the packages declare. `just licences` writes
this page, and `just sbom` a bill of materials in CycloneDX's format with all versions. ovmstrio itself is under
Apache-2.0.

| package | licence |
|---|---|
"""


def installed_packages() -> dict[str, str]:
    """Return the licence of each dependency of a plain installation, direct or not."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    found: dict[str, str] = {}
    _visit(map(Requirement, project["dependencies"]), found, set())
    return dict(sorted(found.items()))


def _visit(requirements: Iterable[Requirement], found: dict[str, str], seen: set[tuple[str, frozenset[str]]]) -> None:
    for each in requirements:
        name, extras = re.sub(r"[-_.]+", "-", each.name).lower(), frozenset(each.extras)
        if (name, extras) in seen:
            continue
        seen.add((name, extras))
        package = distribution(name)
        found[name] = _licence(package)
        inner = map(Requirement, package.requires or [])
        needed = [one for one in inner if _applies(one, extras)]
        _visit(needed, found, seen)


def _applies(requirement: Requirement, extras: frozenset[str]) -> bool:
    marker = requirement.marker
    return marker is None or any(marker.evaluate({"extra": extra}) for extra in {"", *extras})


def _field(package: Distribution, name: str) -> str:
    return (package.metadata[name] or "") if name in package.metadata else ""


def _licence(package: Distribution) -> str:
    metadata = package.metadata
    declared = _field(package, "License-Expression")
    if not declared:
        classifiers = [text for text in metadata.get_all("Classifier") or [] if text.startswith("License ::")]
        short = _field(package, "License").strip()
        declared = (
            short if short and "\n" not in short else " AND ".join(text.split(" :: ")[-1] for text in classifiers)
        )
    return _ALIASES.get(declared, declared)


if __name__ == "__main__":
    rows = [f"| {name} | {licence} |\n" for name, licence in installed_packages().items()]
    PAGE.write_text(_HEAD + "".join(rows))
