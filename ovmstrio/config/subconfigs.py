"""Files beside graphs that configure further models; what is wrong with one is a problem of the graphs that name it."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ovmstrio.config.documents import Schema, check_members, load_document
from ovmstrio.config.findings import Findings, by_line
from ovmstrio.config.model_entries import KnownModel, ModelEntries
from ovmstrio.core.errors import ConfigError, Problem

__all__ = ["Subconfigs"]


class _File(Schema):
    model_config_list: list[Any]


@dataclass(slots=True)
class Subconfigs:
    """Reads each file once, however many graphs name it.

    Attributes:
        cache_dir: where models keep what was compiled.
        known: the models so far, by name; those of a usable file are added.
        contents: what was read, None for files that are not there.
        problems: those that belong to no model and no graph.
    """

    cache_dir: Path | None
    known: dict[str, KnownModel]
    contents: dict[Path, bytes | None] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)
    _faults: dict[Path, tuple[Problem, ...]] = field(default_factory=dict)

    def read(self, path: Path) -> tuple[Problem, ...]:
        """Read a file and give the problems for which it cannot be used; one that is not there has none."""
        if path not in self._faults:
            self._faults[path] = self._read(path)
        return self._faults[path]

    def _read(self, path: Path) -> tuple[Problem, ...]:
        self.contents[path] = None
        try:
            content = self.contents[path] = path.read_bytes()
        except (FileNotFoundError, NotADirectoryError):
            return ()
        except (OSError, ValueError) as error:
            return (Problem(f"the file cannot be read: {error}", str(path)),)
        try:
            document = load_document(content, str(path))
        except ConfigError as error:
            return error.problems
        findings = Findings(str(path))
        findings.refuse_repeated(document)
        top = check_members(document.root, _File, findings)
        entries = ModelEntries(findings, path.parent, self.cache_dir, dict(self.known))
        entries.read(top["model_config_list"].value if "model_config_list" in top else ())
        if findings.fatal:
            return by_line([*findings.fatal, *findings.problems])
        self._refuse_graphs(entries)
        self.known |= entries.known
        self.problems += by_line(findings.problems)
        return ()

    def _refuse_graphs(self, entries: ModelEntries) -> None:
        for node in entries.graphs:
            message = "a graph cannot be configured beside another graph, so this one is not served"
            problem = Problem(message, suggestion="move it to the main configuration file")
            entries.findings.problems.append(entries.findings.place(node, problem))
