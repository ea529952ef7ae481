"""The entries of a ``custom_node_library_config_list``: names for the libraries that custom nodes of pipelines run.

A library is a file, or built in.  A built-in one is written as its short name (``add_one``), or as the path at which
OVMS's container has it (``/ovms/lib/custom_nodes/libcustom_node_add_one.so``), unless there is such a file.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePosixPath
from typing import Final, NamedTuple

from ovmstrio.config.documents import Schema, check_members, is_whole
from ovmstrio.config.findings import Findings, did_you_mean, shown
from ovmstrio.config.located import Located
from ovmstrio.config.model_options import check_local_path, check_name
from ovmstrio.core.errors import Problem

__all__ = ["NodeLibraries", "find_library"]

_IN_CONTAINER: Final = re.compile(r"/ovms/lib/custom_nodes/libcustom_node_(\w+)\.so")
_SHORT: Final = re.compile(r"\w+")


class _LibraryEntry(Schema):
    name: str
    base_path: str


class _Library(NamedTuple):
    """A library that has taken its name; ``path`` is None if its entry cannot be used."""

    path: Path | None
    line: int


def find_library(base_path: str, directory: Path) -> Path:
    """Find what a library's path means: a file, or the short name of what is built in.

    Args:
        base_path: as it is written.
        directory: where relative paths lead on from.
    """
    path = directory / base_path
    built_in = _IN_CONTAINER.fullmatch(base_path)
    short = built_in.group(1) if built_in else _SHORT.fullmatch(base_path) and base_path
    return Path(short) if short and not path.is_file() else path


@dataclass(slots=True)
class NodeLibraries:
    """Reads the entries of one file.

    What is wrong with an entry is a warning: it hurts only the pipelines that use the library.

    Attributes:
        findings: the problems of the file.
        directory: where the paths in the file lead on from.
    """

    findings: Findings
    directory: Path
    _known: dict[str, _Library] = field(default_factory=dict)

    def read(self, entries: Iterable[Located]) -> None:
        """Read entries in their order; of two with one name the first counts."""
        for entry in entries:
            members = check_members(entry, _LibraryEntry, self.findings)
            if is_whole(entry, members, _LibraryEntry):
                self._add(entry, members["name"].value, members["base_path"].value)

    def find(self, name: str) -> Path | Problem:
        """Find a library by its name, or tell why a node cannot use it."""
        library = self._known.get(name)
        if library is None:
            known = f"known are {', '.join(self._known)}" if self._known else ""
            return Problem(
                f"there is no custom node library {name!r}",
                path="library_name",
                expected="a name out of the custom_node_library_config_list",
                suggestion=did_you_mean(name, self._known, otherwise=known),
            )
        if library.path is None:
            hint = f"mend line {library.line}, where it is configured"
            return Problem(f"the custom node library {name!r} cannot be used", path="library_name", suggestion=hint)
        return library.path

    def _add(self, entry: Located, name: str, base_path: str) -> None:
        if name in self._known:
            message = f"there is a custom node library {name!r} already, so this one is left out"
            self.findings.warn(entry.find("name"), message, f"line {self._known[name].line} has it")
            return
        problems = [*check_name(name), *_check_path(base_path)]
        self.findings.problems += [
            self.findings.place(entry, replace(problem, severity="warning")) for problem in problems
        ]
        self._known[name] = _Library(None if problems else find_library(base_path, self.directory), entry.line)


def _check_path(base_path: str) -> list[Problem]:
    problem = Problem("the path cannot be used", path="base_path", found=shown(base_path))
    if not base_path:
        return [replace(problem, expected="a file, or the name of a custom node that is built in")]
    if ".." in PurePosixPath(base_path).parts:
        return [replace(problem, expected="a path without '..'", suggestion="write it from the root, or from here")]
    return check_local_path(base_path)
