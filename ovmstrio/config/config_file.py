"""Parser of OVMS's ``config.json``: each service kind reads its own lists."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, ClassVar, Final, NamedTuple, Protocol, TypeVar

from pydantic import create_model

from ovmstrio.config.documents import Findings, Located, Place, did_you_mean, load_document, sorted_by_line
from ovmstrio.config.model_entries import ModelEntries
from ovmstrio.config.schema import OPTIONAL, Key, Reader, Schema, check_members, is_whole, list_items
from ovmstrio.config.service_options import apply_entry_options
from ovmstrio.config.specs import MetricsSpec, ModelSpec, ServableSpec, ServerSpec
from ovmstrio.core.errors import ConfigError, Problem
from ovmstrio.core.metric_families import FAMILIES, OWN_FAMILIES, matching_families
from ovmstrio.stores.address import Address, find_address
from ovmstrio.util.regular_files import read_regular_bytes

SpecT = TypeVar("SpecT", bound=ServableSpec)


_REMOTE_SECTIONS: Final = ("model_config_list", "mediapipe_config_list", "text_model_config_list")
_PATH_KEYS: Final = ("base_path", "draft_models_path")
"""Keys of paths that begin at the folder of the configuration file."""


def use_local_copies(root: Located, file: Address | None = None) -> dict[str, Address]:
    """Replace the remote addresses in a document by the paths of their local copies.

    Args:
        root: the document, which is changed.
        file: address of the document itself, at which relative paths begin.

    Returns:
        The addresses by path.
    """
    found: dict[str, Address] = {}
    for section in _REMOTE_SECTIONS:
        entries = root.members[section].value if section in root.members else ()
        for entry in entries if isinstance(entries, list) else ():
            settings = entry.members.get("config", entry).members
            for key in [key for key in _PATH_KEYS if key in settings and isinstance(settings[key].value, str)]:
                address = find_address(settings[key].value)
                if address is None and file is not None and not settings[key].value.startswith("/"):
                    address = file.sibling(settings[key].value)
                if address is not None:
                    found[str(address.path)] = address
                    settings[key] = replace(settings[key], value=str(address.path))
    return found


def sources_of(spec: ServableSpec, addresses: Mapping[str, Address]) -> tuple[Address, ...]:
    """Return the addresses whose local copies an entry names."""
    settings = {} if spec.place is None else spec.place.settings.members
    named = [settings[key].value for key in _PATH_KEYS if key in settings]
    return tuple(addresses[each] for each in named if isinstance(each, str) and each in addresses)


class _SubconfigFile(Schema):
    model_config_list: list[Any]


@dataclass(slots=True)
class Subconfigs:
    """Subconfiguration files of graphs; each is read once.

    Attributes:
        known: models by name; models of valid files are added.
        contents: file contents, None for missing files.
        addresses: remote addresses in all files, by the path of the local copy.
        problems: problems that belong to no service.
    """

    cache_dir: Path | None
    known: dict[str, ModelSpec]
    contents: dict[Path, bytes | None] = field(default_factory=dict)
    addresses: dict[str, Address] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)
    _faults: dict[Path, tuple[Problem, ...]] = field(default_factory=dict)

    def read(self, path: Path) -> tuple[Problem, ...]:
        """Read a file and return its fatal problems; a missing file has none."""
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
        self.addresses |= use_local_copies(document.root)
        findings = Findings(str(path))
        findings.refuse_repeated(document)
        top = check_members(document.root, _SubconfigFile, findings)
        entries = ModelEntries(findings, path.parent, self.cache_dir, dict(self.known))
        entries.read(top["model_config_list"].value if "model_config_list" in top else ())
        if findings.fatal:
            return sorted_by_line([*findings.fatal, *findings.problems])
        self._refuse_other_kinds(entries)
        self.known |= entries.known
        self.problems += sorted_by_line(findings.problems)
        return ()

    def _refuse_other_kinds(self, entries: ModelEntries) -> None:
        for what, nodes in (("a graph", entries.graphs), ("a model of another server", entries.remotes)):
            for node in nodes:
                message = f"{what} is not allowed in a subconfig and is ignored"
                problem = Problem(message, suggestion="move it to the main configuration file")
                entries.findings.problems.append(entries.findings.place(node, problem))


def with_article(kind: str) -> str:
    """Return a kind's name with its indefinite article."""
    return f"an {kind}" if kind.startswith(tuple("aeiou")) else f"a {kind}"


class Entry(NamedTuple):
    """A valid entry of a list: its values by key, and its position."""

    values: dict[str, Any]
    place: Place

    def build(self, spec: type[SpecT], problems: Iterable[Problem] = (), **fields: Any) -> SpecT:
        """Return the specification of the entry with the problems of its values."""
        placed = tuple(self.place.of(problem) for problem in problems)
        return spec(name=self.values["name"], origin=str(self.place), problems=placed, place=self.place, **fields)


@dataclass
class ConfigFile:
    """Parser state of one file."""

    findings: Findings
    directory: Path
    members: dict[str, Located]
    cache_dir: Path | None = None
    addresses: dict[str, Address] = field(default_factory=dict)
    _first_entries: dict[tuple[str, str], Located] = field(default_factory=dict)

    @cached_property
    def models(self) -> ModelEntries:
        """Models of the file, and graphs and remote models among them."""
        entries = ModelEntries(self.findings, self.directory, self.cache_dir, {})
        entries.read(self.items(ModelEntries.section))
        return entries

    @cached_property
    def subconfigs(self) -> Subconfigs:
        """Subconfiguration files, which add models."""
        return Subconfigs(self.cache_dir, self.models.known, addresses=self.addresses)

    def items(self, section: str) -> list[Located]:
        """Return the entries of an optional list."""
        return list_items(self.members, section)

    def entries(self, kind: str, nodes: Iterable[Located], schema: type[Schema]) -> Iterator[Entry]:
        """Yield the valid entries of a kind; the first of a name is used."""
        for node in nodes:
            members = check_members(node, schema, self.findings)
            if is_whole(node, members, schema) and self.is_first(kind, node, members["name"]):
                yield Entry({key: member.plain() for key, member in members.items()}, self.place(node))

    def place(self, entry: Located) -> Place:
        """Return the position of an entry."""
        return Place(self.findings.file, entry)

    def origin(self, entry: Located) -> str:
        """Return the position of an entry as text."""
        return str(self.place(entry))

    def is_first(self, kind: str, entry: Located, named: Located) -> bool:
        """Return whether the name is new within a kind; otherwise warn that the entry is ignored."""
        first = self._first_entries.setdefault((kind, named.value), entry)
        if first is not entry:
            message = f"duplicate {kind} {named.value!r}, ignored"
            self.findings.warn(named, message, f"first defined in line {first.line}")
        return first is entry


class ConfigReader(Protocol):
    """Configuration parser of a service kind; implemented by ``ovmstrio.serving.kind.Kind``."""

    section: ClassVar[str]
    further_sections: ClassVar[tuple[str, ...]]
    occupied: ClassVar[str]

    @property
    def spec(self) -> type[ServableSpec]:
        """Specification class of the entries."""

    def read(self, file: ConfigFile) -> Sequence[ServableSpec]:
        """Parse the entries in order; the first of a name is used."""


# File

_NOT_SERVED: Final = "is not supported"

Object = dict[str, Any]


class _File(Schema):
    model_config_list: list[Any]
    schema_address: Annotated[str, Key("$schema")] = OPTIONAL
    """JSON schema for editors, without effect."""


class _Metrics(Schema):
    hints: ClassVar[Mapping[str, str]] = {"endpoint_path": "metrics are served on /metrics; remove it"}

    enable: bool
    metrics_list: list[str] = OPTIONAL


class Monitoring(Schema):
    """Keys of ``monitoring``."""

    metrics: _Metrics


@dataclass(frozen=True, slots=True)
class ParsedConfig:
    """Result of parsing; with ``fatal`` problems the file is unusable."""

    spec: ServerSpec
    fatal: tuple[Problem, ...]


def parse_config(
    kinds: Iterable[ConfigReader],
    content: bytes,
    path: Path,
    *,
    cache_dir: Path | None = None,
    address: Address | None = None,
) -> ServerSpec:
    """Parse the content of a configuration file.

    A watcher should retry after a pause, as the file may be partly written.

    Args:
        kinds: parsers of the lists; on name conflicts, earlier kinds have precedence.
        content: file content.
        path: for messages and relative paths.
        cache_dir: cache of compiled models.
        address: where a remote file comes from, at which relative paths begin.

    Returns:
        The configuration.  Services with errors are included with their problems and must not be loaded.

    Raises:
        ConfigError: the file is unusable, with all problems.
    """
    examined = parse_config_leniently(kinds, content, path, cache_dir=cache_dir, address=address)
    if examined.fatal:
        spec = examined.spec
        own = [problem for service in spec.services for problem in service.problems]
        raise ConfigError(sorted_by_line([*examined.fatal, *spec.problems, *own]))
    return examined.spec


def parse_config_leniently(
    kinds: Iterable[ConfigReader],
    content: bytes,
    path: Path,
    *,
    cache_dir: Path | None = None,
    address: Address | None = None,
) -> ParsedConfig:
    """Parse a configuration file as far as possible; see :func:`parse_config`.

    Raises:
        ConfigError: not JSON.
    """
    document = load_document(content, str(path))
    addresses = use_local_copies(document.root, address)
    findings = Findings(str(path))
    findings.refuse_repeated(document)
    # Resolved, so that paths do not contain the `..` of the file's path.
    directory = path.parent.resolve()
    kinds = tuple(kinds)
    members = check_members(document.root, file_schema(kinds), findings)
    file = ConfigFile(findings, directory, members, cache_dir, addresses)
    services = _read_services(kinds, file)
    metrics = _read_metrics(members["monitoring"], findings) if "monitoring" in members else None
    for item in list_items(members, "custom_loader_config_list"):
        findings.warn(item, f"{_loader_name(item)} {_NOT_SERVED}", "it is ignored")
    spec = ServerSpec(
        services=services,
        metrics=metrics,
        problems=(*sorted_by_line(findings.problems), *file.subconfigs.problems),
        # The kind of a service depends on its files, which may arrive later.
        dependencies=file.subconfigs.contents | {each.index: _read(each.index) for each in file.addresses.values()},
    )
    return ParsedConfig(spec, sorted_by_line(findings.fatal))


def check_families(names: Sequence[str], *, patterns: bool = False) -> list[tuple[int, str, str]]:
    """Return position, message and suggestion of each invalid metric family.

    With ``patterns`` the names are glob patterns of all families, else OVMS family names.
    """
    wrong = []
    known = (*FAMILIES, *OWN_FAMILIES) if patterns else tuple(FAMILIES)
    for index, name in enumerate(names):
        if not (matching_families([name]) if patterns else name in known):
            suggestion = did_you_mean(name, known, otherwise=f"known are {', '.join(known)}")
            wrong.append((index, f"unknown metric family {name!r}", suggestion))
        elif name in names[:index]:
            wrong.append((index, f"duplicate metric family {name!r}", "remove one of them"))
    return wrong


def file_schema(kinds: Iterable[ConfigReader]) -> type[Schema]:
    """Return the schema of the file's own keys."""
    sections = [name for kind in kinds for name in (kind.section, *kind.further_sections) if name]
    lists: dict[str, Any] = dict.fromkeys([*sections, "custom_loader_config_list"], (list[Object], OPTIONAL))
    lists.pop("model_config_list", None)
    return create_model("_WholeFile", __base__=_File, **lists, monitoring=(Object, OPTIONAL))


def _read_services(kinds: Sequence[ConfigReader], file: ConfigFile) -> tuple[ServableSpec, ...]:
    # Reversed: graphs add models, which are parsed last.
    read = {kind: kind.read(file) for kind in reversed(kinds)}
    taken: dict[str, ServableSpec] = {}
    for kind in kinds:
        for each in read[kind]:
            spec = apply_entry_options(each, file.findings)
            if sources := sources_of(spec, file.addresses):
                spec = spec.model_copy(update={"sources": (*spec.sources, *sources)})
            first = taken.setdefault(spec.name, spec)
            if first is not spec:
                _refuse_occupied(kind.occupied, spec, first, file.findings)
    return tuple(taken.values())


def _read(path: Path) -> bytes | None:
    try:
        return read_regular_bytes(path)
    except (OSError, ValueError):
        return None


def _refuse_occupied(message: str, spec: ServableSpec, other: ServableSpec, findings: Findings) -> None:
    problem = Problem(
        f"{message}: {spec.name!r} is {with_article(other.kind)}'s, which is served",
        path="name",
        expected="a unique name",
        suggestion=f"defined in {other.origin}",
    )
    findings.problems.append(spec.placed(problem))


def _read_metrics(node: Located, findings: Findings) -> MetricsSpec | None:
    read = Reader(findings).read(node, Monitoring)
    names = node.find("metrics", "metrics_list")
    listed = names.plain() if names.path.endswith("metrics_list") else None
    if isinstance(listed, list) and all(isinstance(name, str) for name in listed):
        for index, message, suggestion in check_families(listed):
            findings.refuse(names.find(index), message, suggestion=suggestion)
    if read is None:
        return None
    return MetricsSpec(enable=read.metrics.enable, families=None if listed is None else tuple(listed))


def _loader_name(item: Located) -> str:
    name = item.find("config", "loader_name").value
    return f"custom loader {name!r}" if isinstance(name, str) else "custom loader"
