"""One ``config.json`` as the kinds of services read it: each takes its own lists, and says what they configure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Protocol

from ovmstrio.config.documents import Schema, check_members, items_of, load_document
from ovmstrio.config.findings import Findings, by_line
from ovmstrio.config.located import Located, Place
from ovmstrio.config.model_entries import KnownModel, ModelEntries
from ovmstrio.config.specs import ServableSpec
from ovmstrio.core.errors import ConfigError, Problem
from ovmstrio.util.regular_files import read_regular_bytes

__all__ = ["ConfigFile", "ReadsConfig", "Subconfigs", "with_article"]


class _SubconfigFile(Schema):
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
            content = self.contents[path] = read_regular_bytes(path)
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
        top = check_members(document.root, _SubconfigFile, findings)
        entries = ModelEntries(findings, path.parent, self.cache_dir, dict(self.known))
        entries.read(top["model_config_list"].value if "model_config_list" in top else ())
        if findings.fatal:
            return by_line([*findings.fatal, *findings.problems])
        self._refuse_others(entries)
        self.known |= entries.known
        self.problems += by_line(findings.problems)
        return ()

    def _refuse_others(self, entries: ModelEntries) -> None:
        """Note that what is no model of this server's is configured with the others, and not with a graph."""
        for what, nodes in (("a graph", entries.graphs), ("a model of another server", entries.remotes)):
            for node in nodes:
                message = f"{what} cannot be configured beside another graph, so this one is not served"
                problem = Problem(message, suggestion="move it to the main configuration file")
                entries.findings.problems.append(entries.findings.place(node, problem))


def with_article(kind: str) -> str:
    """Give a kind's name for the middle of a sentence."""
    return f"an {kind}" if kind.startswith(tuple("aeiou")) else f"a {kind}"


@dataclass
class ConfigFile:
    """What is known of one file while it is read.

    Attributes:
        findings: the problems of the file.
        directory: where the paths in the file lead on from.
        members: its lists and objects, by their keys.
        cache_dir: where models keep what was compiled.
    """

    findings: Findings
    directory: Path
    members: dict[str, Located]
    cache_dir: Path | None = None
    _first: dict[tuple[str, str], Located] = field(default_factory=dict)

    @cached_property
    def models(self) -> ModelEntries:
        """The models so far, and the entries beside them that are graphs."""
        entries = ModelEntries(self.findings, self.directory, self.cache_dir, {})
        entries.read(self.items(ModelEntries.section))
        return entries

    @cached_property
    def subconfigs(self) -> Subconfigs:
        """The files that configure further models, which become known with the others."""
        return Subconfigs(self.cache_dir, self.models.known)

    def items(self, section: str) -> list[Located]:
        """Give the entries of a list that may be missing."""
        return items_of(self.members, section)

    def place(self, entry: Located) -> Place:
        """Say where an entry is."""
        return Place(self.findings.file, entry)

    def origin(self, entry: Located) -> str:
        """Say where an entry is, for messages."""
        return f"{self.findings.file}:{entry.line}"

    def is_first(self, kind: str, entry: Located, named: Located) -> bool:
        """Tell whether no entry of a kind had this name before; of the others it is noted that they are left out."""
        first = self._first.setdefault((kind, named.value), entry)
        if first is not entry:
            message = f"there is {with_article(kind)} {named.value!r} already, so this one is left out"
            self.findings.warn(named, message, f"line {first.line} has it")
        return first is entry


class ReadsConfig(Protocol):
    """What a kind of service says of its entries; ``ovmstrio.runtimes.kind.Kind`` is one."""

    section: ClassVar[str]
    further_sections: ClassVar[tuple[str, ...]]
    occupied: ClassVar[str]

    @property
    def spec(self) -> type[ServableSpec]:
        """What its entries become."""
        ...

    def read(self, file: ConfigFile) -> Sequence[ServableSpec]:
        """Read the entries in their order; of two with one name the first counts."""
        ...
