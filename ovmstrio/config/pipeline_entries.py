"""Entries of ``pipeline_config_list`` and ``custom_node_library_config_list``.

Only the form of entries is checked here; connections between nodes are checked at load time.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePosixPath
from typing import Annotated, Any, Final, NamedTuple, TypeVar

from pydantic import Field

from ovmstrio.config.config_file import ConfigFile
from ovmstrio.config.documents import Findings, did_you_mean, to_short_json
from ovmstrio.config.located import Located
from ovmstrio.config.model_options import check_local_path, check_name
from ovmstrio.config.schema import OPTIONAL, Schema, check_members, is_whole, list_items
from ovmstrio.config.service_options import ServiceEntry
from ovmstrio.config.specs import NodeInput, NodeOutput, PipelineNode, PipelineSpec
from ovmstrio.core.errors import Problem

_IN_CONTAINER: Final = re.compile(r"/ovms/lib/custom_nodes/libcustom_node_(\w+)\.so")
_SHORT_NAME: Final = re.compile(r"\w+")


class _LibraryEntry(Schema):
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
    return Path(short) if short and not path.is_file() else path


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
            members = check_members(entry, _LibraryEntry, self.findings)
            if is_whole(entry, members, _LibraryEntry):
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
        problems = [*check_name(name), *_check_path(base_path)]
        self.findings.problems += [
            self.findings.place(entry, replace(problem, severity="warning")) for problem in problems
        ]
        self._known[name] = _Library(None if problems else find_library(base_path, self.directory), entry.line)


def _check_path(base_path: str) -> list[Problem]:
    problem = Problem("the path cannot be used", path="base_path", found=to_short_json(base_path))
    if not base_path:
        return [replace(problem, expected="a file, or the name of a built-in custom node")]
    if ".." in PurePosixPath(base_path).parts:
        return [
            replace(
                problem,
                expected="a path without '..'",
                suggestion="use an absolute path, or one relative to the configuration",
            )
        ]
    return check_local_path(base_path)


DYNAMIC_DEMULTIPLY: Final = -1
"""``demultiply_count`` for a dimension of any size."""

DemultiplyCount = Annotated[int, Field(ge=DYNAMIC_DEMULTIPLY, le=10_000)]

_MODEL: Final = "DL model"
_CUSTOM: Final = "custom"
_TARGET_KEYS: Final = {_MODEL: "model_name", _CUSTOM: "library_name"}
"""Key of the called service or library, by node type."""
_KEY_TYPES: Final = {"version": _MODEL, "params": _CUSTOM}
"""Keys for one node type only."""

Object = dict[str, Any]
_ReadT = TypeVar("_ReadT")


class _Node(Schema):
    name: str
    type: str
    model_name: str = OPTIONAL
    library_name: str = OPTIONAL
    version: Annotated[int, Field(ge=1)] = OPTIONAL
    inputs: list[Object]
    outputs: list[Object]
    params: dict[str, str] = OPTIONAL
    demultiply_count: DemultiplyCount = OPTIONAL
    gather_from_node: str = OPTIONAL


class _Source(Schema):
    node_name: str
    data_item: str


class _Output(Schema):
    data_item: str
    alias: str


def read_node(node: Located, findings: Findings) -> PipelineNode | None:
    """Parse one node; None if malformed.

    A node of unknown type or without service is returned too, as it shows the connections of others.
    """
    members = check_members(node, _Node, findings)
    inputs = read_sources(list_items(members, "inputs"), findings)
    outputs = _read_all(list_items(members, "outputs"), lambda item: _read_output(item, findings))
    _check_type(node, members, findings)
    if inputs is None or outputs is None or not is_whole(node, members, _Node):
        return None
    given = {key: member.plain() for key, member in members.items()}
    return PipelineNode(
        name=given["name"],
        model_name=given.get("model_name", ""),
        version=given.get("version", 0),
        library=given.get("library_name", ""),
        params=given.get("params", {}),
        inputs=inputs,
        outputs=outputs,
        demultiply_count=read_demultiply_count(members, findings),
        gather_from_node=given.get("gather_from_node"),
        origin=f"{findings.file}:{node.line}",
    )


def read_sources(items: Iterable[Located], findings: Findings) -> tuple[NodeInput, ...] | None:
    """Parse sources of node inputs or pipeline outputs; None if malformed."""
    return _read_all(items, lambda item: _read_source(item, findings))


def read_demultiply_count(members: Mapping[str, Located], findings: Findings) -> int | None:
    """Return the split count; None if nothing is split."""
    if "demultiply_count" not in members:
        return None
    count: int = members["demultiply_count"].value
    if count != 0:
        return count
    message = "demultiply_count 0 is deprecated"
    findings.warn(members["demultiply_count"], message, f"use {DYNAMIC_DEMULTIPLY}")
    return DYNAMIC_DEMULTIPLY


def _read_source(item: Located, findings: Findings) -> NodeInput | None:
    if len(item.value) != 1:
        expected = 'one name with its source, such as {"input": {"node_name": "request", "data_item": "image"}}'
        findings.refuse(item, "wrong number of names", expected=expected, found=to_short_json(item.plain()))
        return None
    (name, source), *_ = item.value.items()
    members = check_members(source, _Source, findings)
    if not is_whole(source, members, _Source):
        return None
    return NodeInput(name=name, node=members["node_name"].value, data_item=members["data_item"].value)


def _read_output(item: Located, findings: Findings) -> NodeOutput | None:
    members = check_members(item, _Output, findings)
    if not is_whole(item, members, _Output):
        return None
    return NodeOutput(data_item=members["data_item"].value, alias=members["alias"].value)


def _check_type(node: Located, members: Mapping[str, Located], findings: Findings) -> None:
    if "type" not in members:
        return
    kind = members["type"].value
    if kind not in _TARGET_KEYS:
        expected = " or ".join(map(repr, _TARGET_KEYS))
        hint = did_you_mean(kind, _TARGET_KEYS)
        findings.refuse(
            members["type"], "unknown node type", expected=expected, found=to_short_json(kind), suggestion=hint
        )
        return
    wanted, other = _TARGET_KEYS[kind], next(key for each, key in _TARGET_KEYS.items() if each != kind)
    if other in node.value:
        hint = "remove it, or change the type"
        findings.refuse(node.find(other), f"{other!r} is not allowed for node type {kind!r}", suggestion=hint)
    if wanted not in node.value:
        findings.refuse(node, f"the key {wanted!r} is missing", suggestion=f"required for node type {kind!r}")
    for key, owner in _KEY_TYPES.items():
        if key in members and owner != kind:
            findings.warn(members[key], f"{key!r} has no effect for node type {kind!r}", "remove it")


def _read_all(items: Iterable[Located], read: Callable[[Located], _ReadT | None]) -> tuple[_ReadT, ...] | None:
    """Parse all items, so that all problems are reported; None if any is malformed."""
    found = [read(item) for item in items]
    good = tuple(each for each in found if each is not None)
    return good if len(good) == len(found) else None


PIPELINES: Final = "pipeline_config_list"
NODE_LIBRARIES: Final = "custom_node_library_config_list"


class _PipelineEntry(ServiceEntry):
    name: str
    inputs: list[str]
    nodes: list[dict[str, Any]]
    outputs: list[dict[str, Any]]
    demultiply_count: DemultiplyCount = OPTIONAL


def read_pipelines(file: ConfigFile) -> list[PipelineSpec]:
    """Parse the entries in order; the first of a name is used."""
    libraries = NodeLibraries(file.findings, file.directory)
    libraries.read(file.items(NODE_LIBRARIES))
    found = [_read_entry(entry, file, libraries) for entry in file.items(PIPELINES)]
    return [spec for spec in found if spec is not None]


def _read_entry(entry: Located, file: ConfigFile, libraries: NodeLibraries) -> PipelineSpec | None:
    findings = file.findings
    problem_count = len(findings.problems)
    members = check_members(entry, _PipelineEntry, findings)
    located = list_items(members, "nodes")
    nodes = [node for node in (read_node(each, findings) for each in located) if node is not None]
    outputs = read_sources(list_items(members, "outputs"), findings)
    is_good = is_whole(entry, members, _PipelineEntry) and len(nodes) == len(located)
    if not is_good or outputs is None or not file.is_first(PipelineSpec.kind, entry, members["name"]):
        return None
    paths, problems = _find_libraries(zip(nodes, located, strict=True), libraries, findings)
    place = file.place(entry)
    problems += [place.of(problem) for problem in check_name(members["name"].value)]
    # The file is rejected because of these; included so that a check reports everything.
    problems += [problem for problem in findings.problems[problem_count:] if problem.severity == "error"]
    return PipelineSpec(
        name=members["name"].value,
        base_path=file.directory,
        origin=file.origin(entry),
        problems=tuple(problems),
        inputs=_read_inputs(members["inputs"], findings),
        outputs=outputs,
        nodes=tuple(nodes),
        demultiply_count=read_demultiply_count(members, findings),
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
