"""One ``config.json`` as the kinds of services read it: each takes its own lists, and says what they configure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Final, Protocol

from pydantic import create_model

from ovmstrio.config.documents import (
    OPTIONAL,
    Findings,
    Located,
    Place,
    Schema,
    by_line,
    check_members,
    did_you_mean,
    items_of,
    load_document,
)
from ovmstrio.config.model_entries import KnownModel, ModelEntries
from ovmstrio.config.service_options import with_limits
from ovmstrio.config.specs import MetricsSpec, ServableSpec, ServerSpec
from ovmstrio.core.errors import ConfigError, Problem
from ovmstrio.core.metric_families import FAMILIES, OWN_FAMILIES, families_like
from ovmstrio.util.regular_files import read_regular_bytes

__all__ = [
    "ConfigFile",
    "Examined",
    "ReadsConfig",
    "Subconfigs",
    "check_families",
    "examine_config",
    "parse_config",
    "with_article",
]

# ----------------------------------------------------------------------
# One ``config.json`` as the kinds of services read it: each takes its own lists, and says what they configure
# ----------------------------------------------------------------------


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
    """What a kind of service says of its entries; ``ovmstrio.serving.kind.Kind`` is one."""

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


# ----------------------------------------------------------------------
# OVMS's ``config.json``, read into specs with every problem of the file at once
# ----------------------------------------------------------------------

_NOT_SERVED: Final = "is not served by this version"

Object = dict[str, Any]


class _File(Schema):
    model_config_list: list[Any]


class _Monitoring(Schema):
    metrics: Object


class _Metrics(Schema):
    hints: ClassVar[Mapping[str, str]] = {"endpoint_path": "metrics are served on /metrics; remove it"}

    enable: bool
    metrics_list: list[str] = OPTIONAL


@dataclass(frozen=True, slots=True)
class Examined:
    """What was understood of a file: ``fatal`` problems make it unusable, whatever ``spec`` holds."""

    spec: ServerSpec
    fatal: tuple[Problem, ...]


def parse_config(
    kinds: Iterable[ReadsConfig], content: bytes, path: Path, *, cache_dir: Path | None = None
) -> ServerSpec:
    """Read the content of a file.

    Who watches a file that others write reads it again after a pause when this fails, because it may be half written.

    Args:
        kinds: read the lists of their services; a name that several use is the first one's of them.
        content: what the file holds.
        path: where it lies, for messages and for the paths in it, which lead on from its directory.
        cache_dir: where models keep what was compiled; the file cannot say.

    Returns:
        What to serve.  Anything whose settings cannot be used is there with its problems, and must not be
        loaded; the specification's own problems are of neither, or warnings.

    Raises:
        ConfigError: the file as a whole cannot be used; lists every problem that it has.
    """
    examined = examine_config(kinds, content, path, cache_dir=cache_dir)
    if examined.fatal:
        spec = examined.spec
        own = [problem for service in spec.services for problem in service.problems]
        raise ConfigError(by_line([*examined.fatal, *spec.problems, *own]))
    return examined.spec


def examine_config(
    kinds: Iterable[ReadsConfig], content: bytes, path: Path, *, cache_dir: Path | None = None
) -> Examined:
    """Read the content of a file as far as it can be understood; see :func:`parse_config`.

    Raises:
        ConfigError: it is not JSON.
    """
    document = load_document(content, str(path))
    findings = Findings(str(path))
    findings.refuse_repeated(document)
    # Paths in the file must not come to hold the `..` that led to the file.
    directory = path.parent.resolve()
    kinds = tuple(kinds)
    members = check_members(document.root, _schema(kinds), findings)
    file = ConfigFile(findings, directory, members, cache_dir)
    services = _read_services(kinds, file)
    metrics = _read_monitoring(members["monitoring"], findings) if "monitoring" in members else None
    for item in items_of(members, "custom_loader_config_list"):
        findings.warn(item, f"{_loader_name(item)} {_NOT_SERVED}", "it is left out")
    spec = ServerSpec(
        services=services,
        metrics=metrics,
        problems=(*by_line(findings.problems), *file.subconfigs.problems),
        further_files=file.subconfigs.contents,
    )
    return Examined(spec, by_line(findings.fatal))


def check_families(names: Sequence[str], *, patterns: bool = False) -> list[tuple[int, str, str]]:
    """Check a list of metric families; gives the position, the message and the suggestion of each wrong one.

    With ``patterns`` they are patterns of the names of any families, and else names of OVMS's.
    """
    wrong = []
    known = (*FAMILIES, *OWN_FAMILIES) if patterns else tuple(FAMILIES)
    for index, name in enumerate(names):
        if not (families_like([name]) if patterns else name in known):
            suggestion = did_you_mean(name, known, otherwise=f"known are {', '.join(known)}")
            wrong.append((index, f"unknown metric family {name!r}", suggestion))
        elif name in names[:index]:
            wrong.append((index, f"the metric family {name!r} is given twice", "remove one of them"))
    return wrong


def _schema(kinds: Iterable[ReadsConfig]) -> type[Schema]:
    sections = [name for kind in kinds for name in (kind.section, *kind.further_sections) if name]
    lists: dict[str, Any] = dict.fromkeys([*sections, "custom_loader_config_list"], (list[Object], OPTIONAL))
    lists.pop("model_config_list", None)
    return create_model("_WholeFile", __base__=_File, **lists, monitoring=(Object, OPTIONAL))


def _read_services(kinds: Sequence[ReadsConfig], file: ConfigFile) -> tuple[ServableSpec, ...]:
    """Read every list, and leave out whatever has the name of something that is served already."""
    # The models that graphs bring with them are known once the graphs have been read.
    read = {kind: kind.read(file) for kind in reversed(kinds)}
    taken: dict[str, ServableSpec] = {}
    for kind in kinds:
        for each in read[kind]:
            spec = with_limits(each, file.findings)
            first = taken.setdefault(spec.name, spec)
            if first is not spec:
                _refuse_occupied(kind.occupied, spec, first, file.findings)
    return tuple(taken.values())


def _refuse_occupied(message: str, spec: ServableSpec, other: ServableSpec, findings: Findings) -> None:
    problem = Problem(
        f"{message}: {spec.name!r} is {with_article(other.kind)}'s, which is served",
        path="name",
        expected="a name of its own",
        suggestion=f"{other.origin} has it",
    )
    findings.problems.append(spec.placed(problem))


def _read_monitoring(node: Located, findings: Findings) -> MetricsSpec | None:
    members = check_members(node, _Monitoring, findings)
    if "metrics" not in members:
        return None
    metrics = check_members(members["metrics"], _Metrics, findings)
    if "metrics_list" not in metrics:
        return MetricsSpec(enable=metrics["enable"].value) if "enable" in metrics else None
    names = metrics["metrics_list"].plain()
    for index, message, suggestion in check_families(names):
        findings.refuse(metrics["metrics_list"].find(index), message, suggestion=suggestion)
    return MetricsSpec(enable=metrics["enable"].value, families=tuple(names)) if "enable" in metrics else None


def _loader_name(item: Located) -> str:
    name = item.find("config", "loader_name").value
    return f"custom loader {name!r}" if isinstance(name, str) else "custom loader"
