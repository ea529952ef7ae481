"""The entries of a ``pipeline_config_list``, each of which joins models and custom nodes to one servable.

Only the form of an entry is checked here, and that its custom node libraries are configured; whether its nodes fit
together is found out when it is loaded.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePosixPath
from typing import Annotated, Any, Final, NamedTuple, TypeVar

from pydantic import Field

from ovmstrio.config.config_file import ConfigFile
from ovmstrio.config.documents import (
    OPTIONAL,
    Findings,
    Located,
    Schema,
    check_members,
    did_you_mean,
    is_whole,
    items_of,
    shown,
)
from ovmstrio.config.model_options import check_local_path, check_name
from ovmstrio.config.service_options import ServiceEntry
from ovmstrio.config.specs import NodeInput, NodeOutput, PipelineNode, PipelineSpec
from ovmstrio.core.errors import Problem

__all__ = ["NODE_LIBRARIES", "PIPELINES", "find_library", "read_pipelines"]

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


DYNAMIC: Final = -1
"""The ``demultiply_count`` that splits a dimension of whatever size."""

DemultiplyCount = Annotated[int, Field(ge=DYNAMIC, le=10_000)]

_MODEL: Final = "DL model"
_CUSTOM: Final = "custom"
_CALLS: Final = {_MODEL: "model_name", _CUSTOM: "library_name"}
"""The types of nodes, with the key that says what a node of it calls."""
_ONLY_FOR: Final = {"version": _MODEL, "params": _CUSTOM}
"""Keys that have a meaning for nodes of one type only."""

Object = dict[str, Any]
_Read = TypeVar("_Read")


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
    """Read one node; None if its form is wrong, which is noted.

    A node of an unknown type, or without what it calls, is given all the same: it shows how the others are connected.
    """
    members = check_members(node, _Node, findings)
    inputs = read_sources(items_of(members, "inputs"), findings)
    outputs = _all(items_of(members, "outputs"), lambda item: _read_output(item, findings))
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
    """Read what inputs of a node, or outputs of a pipeline, come from; None if the form is wrong, which is noted."""
    return _all(items, lambda item: _read_source(item, findings))


def read_demultiply_count(members: Mapping[str, Located], findings: Findings) -> int | None:
    """Read into how many parts something is split; None if it is not split."""
    if "demultiply_count" not in members:
        return None
    count: int = members["demultiply_count"].value
    if count != 0:
        return count
    message = f"a demultiply_count of 0 is the deprecated way to write {DYNAMIC}"
    findings.warn(members["demultiply_count"], message, f"write {DYNAMIC}")
    return DYNAMIC


def _read_source(item: Located, findings: Findings) -> NodeInput | None:
    if len(item.value) != 1:
        expected = 'one name with its source, such as {"input": {"node_name": "request", "data_item": "image"}}'
        findings.refuse(item, "wrong number of names", expected=expected, found=shown(item.plain()))
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
    """Check that a node says what it calls, in the way of its type."""
    if "type" not in members:
        return
    kind = members["type"].value
    if kind not in _CALLS:
        expected = " or ".join(map(repr, _CALLS))
        hint = did_you_mean(kind, _CALLS)
        findings.refuse(
            members["type"], "unknown type of a node", expected=expected, found=shown(kind), suggestion=hint
        )
        return
    wanted, other = _CALLS[kind], next(key for each, key in _CALLS.items() if each != kind)
    if other in node.value:
        hint = f"remove it, or the node is of another type than {kind!r}"
        findings.refuse(node.find(other), f"{other!r} is not for a node of type {kind!r}", suggestion=hint)
    if wanted not in node.value:
        findings.refuse(node, f"the key {wanted!r} is missing", suggestion=f"add it: a node of type {kind!r} needs it")
    for key, owner in _ONLY_FOR.items():
        if key in members and owner != kind:
            findings.warn(members[key], f"{key!r} has no effect on a node of type {kind!r}", "remove it")


def _all(items: Iterable[Located], read: Callable[[Located], _Read | None]) -> tuple[_Read, ...] | None:
    """Read every item, so that all problems are told; None if any cannot be read."""
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
    """Read entries in their order; of two with one name the first counts."""
    libraries = NodeLibraries(file.findings, file.directory)
    libraries.read(file.items(NODE_LIBRARIES))
    found = [_read_entry(entry, file, libraries) for entry in file.items(PIPELINES)]
    return [spec for spec in found if spec is not None]


def _read_entry(entry: Located, file: ConfigFile, libraries: NodeLibraries) -> PipelineSpec | None:
    findings = file.findings
    told = len(findings.problems)
    members = check_members(entry, _PipelineEntry, findings)
    located = items_of(members, "nodes")
    nodes = [node for node in (read_node(each, findings) for each in located) if node is not None]
    outputs = read_sources(items_of(members, "outputs"), findings)
    is_good = is_whole(entry, members, _PipelineEntry) and len(nodes) == len(located)
    if not is_good or outputs is None or not file.is_first(PipelineSpec.kind, entry, members["name"]):
        return None
    paths, problems = _find_libraries(zip(nodes, located, strict=True), libraries, findings)
    place = file.place(entry)
    problems += [place.of(problem) for problem in check_name(members["name"].value)]
    # With these nothing of the file is served; they go along so that a check tells what else is wrong here.
    problems += [problem for problem in findings.problems[told:] if problem.severity == "error"]
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
        findings.warn(named, f"the input {twice!r} is given twice", "remove one of them")
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
