"""Parser of ``pipeline_config_list`` and ``custom_node_library_config_list``.

Only the form of entries is checked here; connections between nodes are checked at load time.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Final, NamedTuple

from pydantic import Field

from ovmstrio.config.config_file import ConfigFile
from ovmstrio.config.documents import Findings, Located, did_you_mean, to_short_json
from ovmstrio.config.schema import OPTIONAL, Reader, Schema, check_members, is_whole
from ovmstrio.config.service_options import ServiceEntry, check_name, check_path
from ovmstrio.config.specs import NodeInput, NodeOutput, PipelineNode, PipelineSpec
from ovmstrio.core.errors import Problem
from ovmstrio.util.regular_files import is_file

_IN_CONTAINER: Final = re.compile(r"/ovms/lib/custom_nodes/libcustom_node_(\w+)\.so")
_SHORT_NAME: Final = re.compile(r"\w+")


class LibraryEntry(Schema):
    """Keys of an entry of ``custom_node_library_config_list``."""

    name: str
    base_path: str


class _Library(NamedTuple):
    """A registered library; ``path`` is None if its entry is invalid."""

    path: Path | None
    line: int


def find_library(base_path: str, directory: Path) -> Path:
    """Return the path of a custom node library, or the short name of a built-in one."""
    path = directory / base_path
    built_in = _IN_CONTAINER.fullmatch(base_path)
    short = built_in.group(1) if built_in else _SHORT_NAME.fullmatch(base_path) and base_path
    return Path(short) if short and not is_file(path) else path


@dataclass(slots=True)
class NodeLibraries:
    """Custom node libraries of one file.

    Errors are warnings: they affect only pipelines that use the library.
    """

    findings: Findings
    directory: Path
    _known: dict[str, _Library] = field(default_factory=dict)

    def read(self, entries: Iterable[Located]) -> None:
        """Parse the entries in order; the first of a name is used."""
        for entry in entries:
            members = check_members(entry, LibraryEntry, self.findings)
            if is_whole(entry, members, LibraryEntry):
                self._add(entry, members["name"].value, members["base_path"].value)

    def find(self, name: str) -> Path | Problem:
        """Return the path of a library, or the problem for a node that uses it."""
        library = self._known.get(name)
        if library is None:
            known = f"known are {', '.join(self._known)}" if self._known else ""
            return Problem(
                f"unknown custom node library {name!r}",
                path="library_name",
                expected="a name of custom_node_library_config_list",
                suggestion=did_you_mean(name, self._known, otherwise=known),
            )
        if library.path is None:
            hint = f"see line {library.line}"
            return Problem(f"invalid custom node library {name!r}", path="library_name", suggestion=hint)
        return library.path

    def _add(self, entry: Located, name: str, base_path: str) -> None:
        if name in self._known:
            message = f"duplicate custom node library {name!r}, ignored"
            self.findings.warn(entry.find("name"), message, f"first defined in line {self._known[name].line}")
            return
        content = "a file, or the name of a built-in custom node"
        problems = [*check_name(name), *check_path("base_path", base_path, content, has_parents=False)]
        self.findings.problems += [
            self.findings.place(entry, replace(problem, severity="warning")) for problem in problems
        ]
        self._known[name] = _Library(None if problems else find_library(base_path, self.directory), entry.line)


DYNAMIC_DEMULTIPLY: Final = -1
"""``demultiply_count`` for a dimension of any size."""

DemultiplyCount = Annotated[int, Field(ge=DYNAMIC_DEMULTIPLY, le=10_000)]

_MODEL: Final = "DL model"
_CUSTOM: Final = "custom"
TARGET_KEYS: Final = {_MODEL: "model_name", _CUSTOM: "library_name"}
"""Key of the called service or library, by node type."""
_KEY_TYPES: Final = {"version": _MODEL, "params": _CUSTOM}
"""Keys for one node type only."""

_SOURCE_FORM: Final = 'one name with its source, such as {"input": {"node_name": "request", "data_item": "image"}}'


class _Node(Schema):
    name: str
    type: str
    model_name: Annotated[str, Field(min_length=1)] = ""
    library_name: Annotated[str, Field(min_length=1)] = ""
    version: Annotated[int, Field(ge=1)] = OPTIONAL
    inputs: list[dict[str, NodeInput]]
    outputs: list[NodeOutput]
    params: dict[str, str] = OPTIONAL
    demultiply_count: DemultiplyCount = OPTIONAL
    gather_from_node: str = OPTIONAL


def _build_node(node: _Node, at: Located, findings: Findings) -> PipelineNode:
    return PipelineNode(
        name=node.name,
        model_name=node.model_name,
        version=node.version or 0,
        library=node.library_name,
        params=node.params or {},
        inputs=_named(node.inputs),
        outputs=tuple(node.outputs),
        demultiply_count=_demultiply_count(node.demultiply_count, at, findings),
        gather_from_node=node.gather_from_node,
        origin=f"{findings.file}:{at.line}",
    )


def _named(sources: Iterable[Mapping[str, NodeInput]]) -> tuple[NodeInput, ...]:
    return tuple(source.model_copy(update={"name": name}) for each in sources for name, source in each.items())


def _demultiply_count(count: int | None, at: Located, findings: Findings) -> int | None:
    """Return the split count; None if nothing is split."""
    if count == 0:
        findings.warn(at.find("demultiply_count"), "demultiply_count 0 is deprecated", f"use {DYNAMIC_DEMULTIPLY}")
    return DYNAMIC_DEMULTIPLY if count == 0 else count


def _check_sources(at: Located, key: str, findings: Findings) -> None:
    for item in _objects(at, key):
        if len(item.value) != 1:
            found = to_short_json(item.plain())
            findings.refuse(item, "wrong number of names", expected=_SOURCE_FORM, found=found)


def _objects(at: Located, key: str) -> list[Located]:
    items = at.members[key].value if key in at.members else None
    return [item for item in items if isinstance(item.value, dict)] if isinstance(items, list) else []


def _check_type(node: Located, findings: Findings) -> None:
    members = node.members
    kind = members["type"].value if "type" in members else None
    if not isinstance(kind, str):
        return
    if kind not in TARGET_KEYS:
        expected = " or ".join(map(repr, TARGET_KEYS))
        hint = did_you_mean(kind, TARGET_KEYS)
        findings.refuse(
            members["type"], "unknown node type", expected=expected, found=to_short_json(kind), suggestion=hint
        )
        return
    wanted, other = TARGET_KEYS[kind], next(key for each, key in TARGET_KEYS.items() if each != kind)
    if other in node.value:
        hint = "remove it, or change the type"
        findings.refuse(node.find(other), f"{other!r} is not allowed for node type {kind!r}", suggestion=hint)
    if wanted not in node.value:
        findings.refuse(node, f"the key {wanted!r} is missing", suggestion=f"required for node type {kind!r}")
    for key, owner in _KEY_TYPES.items():
        if key in members and owner != kind:
            findings.warn(members[key], f"{key!r} has no effect for node type {kind!r}", "remove it")


PIPELINES: Final = "pipeline_config_list"
NODE_LIBRARIES: Final = "custom_node_library_config_list"


class PipelineEntry(ServiceEntry):
    """Keys of an entry of ``pipeline_config_list``."""

    name: str
    inputs: list[str]
    nodes: list[_Node]
    outputs: list[dict[str, NodeInput]]
    demultiply_count: DemultiplyCount = OPTIONAL


def read_pipelines(file: ConfigFile) -> list[PipelineSpec]:
    """Parse the entries in order; the first of a name is used."""
    libraries = NodeLibraries(file.findings, file.directory)
    libraries.read(file.items(NODE_LIBRARIES))
    found = [_read_entry(entry, file, libraries) for entry in file.items(PIPELINES)]
    return [spec for spec in found if spec is not None]


def _read_entry(entry: Located, file: ConfigFile, libraries: NodeLibraries) -> PipelineSpec | None:
    findings = file.findings
    problem_count, fatal_count = len(findings.problems), len(findings.fatal)
    read = Reader(findings).read(entry, PipelineEntry)
    located = _objects(entry, "nodes")
    for node in located:
        _check_sources(node, "inputs", findings)
    _check_sources(entry, "outputs", findings)
    is_valid = len(findings.fatal) == fatal_count
    for node in located:
        _check_type(node, findings)
    if read is None or not is_valid or not file.is_first(PipelineSpec.kind, entry, entry.members["name"]):
        return None
    nodes = [_build_node(node, at, findings) for node, at in zip(read.nodes, located, strict=True)]
    paths, problems = _find_libraries(zip(nodes, located, strict=True), libraries, findings)
    place = file.place(entry)
    problems += map(place.of, check_name(read.name))
    # The file is rejected because of these; included so that a check reports everything.
    problems += [problem for problem in findings.problems[problem_count:] if problem.severity == "error"]
    return PipelineSpec(
        name=read.name,
        base_path=file.directory,
        origin=file.origin(entry),
        problems=tuple(problems),
        inputs=_read_inputs(entry.members["inputs"], findings),
        outputs=_named(read.outputs),
        nodes=tuple(nodes),
        demultiply_count=_demultiply_count(read.demultiply_count, entry, findings),
        libraries=paths,
        place=place,
    )


def _read_inputs(named: Located, findings: Findings) -> tuple[str, ...]:
    names: list[str] = named.plain()
    inputs = tuple(dict.fromkeys(names))
    if len(inputs) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        findings.warn(named, f"duplicate input {twice!r}", "remove one of them")
    return inputs


def _find_libraries(
    nodes: Iterable[tuple[PipelineNode, Located]], configured: NodeLibraries, findings: Findings
) -> tuple[dict[str, Path], list[Problem]]:
    paths: dict[str, Path] = {}
    problems: list[Problem] = []
    for node, located in nodes:
        if not node.library:
            continue
        found = configured.find(node.library)
        if isinstance(found, Path):
            paths[node.library] = found
        else:
            problems.append(findings.place(located, found))
    return paths, problems
