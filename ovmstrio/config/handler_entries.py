"""The entries of a ``handler_config_list``, each of which names a project with a ``nucleus.yaml``.

Only the form of an entry is checked here; the project's own file is read when it is loaded.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

from ovmstrio.config.documents import Schema, check_members, is_whole
from ovmstrio.config.findings import Findings, shown
from ovmstrio.config.located import Located
from ovmstrio.config.model_entries import Place
from ovmstrio.config.model_options import check_local_path, check_name
from ovmstrio.config.specs import HandlerSpec
from ovmstrio.core.errors import Problem

__all__ = ["HandlerEntries"]

_SUFFIXES: Final = (".yaml", ".yml")
_RESERVED: Final = ("v1", "v2", "metrics")
"""What paths of REST begin with that are the server's own."""


class _Entry(Schema):
    name: str
    path: str


@dataclass(slots=True)
class HandlerEntries:
    """Reads the entries of one file.

    Attributes:
        findings: the problems of the file.
        directory: where the paths in the file lead on from.
        places: where each handler is configured, by its name.
    """

    findings: Findings
    directory: Path
    places: dict[str, Place] = field(default_factory=dict)

    def read(self, entries: Iterable[Located]) -> list[HandlerSpec]:
        """Read entries in their order; of two with one name the first counts."""
        found = [self._read_entry(entry) for entry in entries]
        return [spec for spec in found if spec is not None]

    def _read_entry(self, entry: Located) -> HandlerSpec | None:
        members = check_members(entry, _Entry, self.findings)
        if not is_whole(entry, members, _Entry) or not self._is_first(entry, members["name"]):
            return None
        name, path = members["name"].value, members["path"].value
        problems = [self.findings.place(entry, problem) for problem in (*_check_name(name), *_check_path(path))]
        whole = self.directory / path
        return HandlerSpec(
            name=name,
            base_path=whole.parent if whole.suffix in _SUFFIXES else whole,
            path=whole,
            origin=f"{self.findings.file}:{entry.line}",
            problems=tuple(problems),
        )

    def _is_first(self, entry: Located, named: Located) -> bool:
        name = named.value
        first = self.places.setdefault(name, Place(self.findings.file, entry)).settings
        if first is not entry:
            message = f"there is a handler {name!r} already, so this one is left out"
            self.findings.warn(named, message, f"line {first.line} has it")
        return first is entry


def _check_name(name: str) -> list[Problem]:
    """Check a name that paths of REST begin with."""
    if name in _RESERVED:
        problem = Problem("the name is the beginning of the server's own paths", path="name", found=shown(name))
        return [replace(problem, expected=f"a name other than {', '.join(_RESERVED)}")]
    if "/" in name:
        return [Problem("the name cannot be used", path="name", expected="a name without '/'", found=shown(name))]
    return check_name(name)


def _check_path(path: str) -> list[Problem]:
    if not path:
        expected = "the folder with a nucleus.yaml, or that file"
        return [Problem("the path is empty", path="path", expected=expected, found='""')]
    return [replace(problem, path="path") for problem in check_local_path(path)]
