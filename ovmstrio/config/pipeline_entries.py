"""The entries of a ``pipeline_config_list``, each of which joins models and custom nodes to one servable.

Only the form of an entry is checked here, and that its custom node libraries are configured; whether its nodes fit
together is found out when it is loaded.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final

from ovmstrio.config.config_file import ConfigFile
from ovmstrio.config.documents import OPTIONAL, Schema, check_members, is_whole, items_of
from ovmstrio.config.findings import Findings
from ovmstrio.config.located import Located
from ovmstrio.config.model_options import check_name
from ovmstrio.config.node_libraries import NodeLibraries
from ovmstrio.config.pipeline_nodes import DemultiplyCount, read_demultiply_count, read_node, read_sources
from ovmstrio.config.specs import PipelineNode, PipelineSpec
from ovmstrio.core.errors import Problem

__all__ = ["NODE_LIBRARIES", "PIPELINES", "read_pipelines"]

PIPELINES: Final = "pipeline_config_list"
NODE_LIBRARIES: Final = "custom_node_library_config_list"


class _Entry(Schema):
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
    members = check_members(entry, _Entry, findings)
    located = items_of(members, "nodes")
    nodes = [node for node in (read_node(each, findings) for each in located) if node is not None]
    outputs = read_sources(items_of(members, "outputs"), findings)
    is_good = is_whole(entry, members, _Entry) and len(nodes) == len(located)
    if not is_good or outputs is None or not file.is_first(PipelineSpec.kind, entry, members["name"]):
        return None
    paths, problems = _find_libraries(zip(nodes, located, strict=True), libraries, findings)
    place = file.place(entry)
    problems += [place.of(problem) for problem in check_name(members["name"].value)]
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
