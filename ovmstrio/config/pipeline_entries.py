"""The entries of a ``pipeline_config_list``, each of which joins models and custom nodes to one servable.

Only the form of an entry is checked here, and that its custom node libraries are configured; whether its nodes fit
together is found out when it is loaded.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ovmstrio.config.documents import OPTIONAL, Schema, check_members, is_whole, items_of
from ovmstrio.config.findings import Findings
from ovmstrio.config.located import Located
from ovmstrio.config.model_entries import Place
from ovmstrio.config.model_options import check_name
from ovmstrio.config.node_libraries import NodeLibraries
from ovmstrio.config.pipeline_nodes import DemultiplyCount, read_demultiply_count, read_node, read_sources
from ovmstrio.config.specs import PipelineNode, PipelineSpec
from ovmstrio.core.errors import Problem

__all__ = ["PipelineEntries"]


class _Entry(Schema):
    name: str
    inputs: list[str]
    nodes: list[dict[str, Any]]
    outputs: list[dict[str, Any]]
    demultiply_count: DemultiplyCount = OPTIONAL


@dataclass(slots=True)
class PipelineEntries:
    """Reads the entries of one file.

    Attributes:
        findings: the problems of the file.
        directory: where the paths in the file lead on from.
        libraries: the custom node libraries of the file, read before.
        places: where each pipeline is configured, by its name.
    """

    findings: Findings
    directory: Path
    libraries: NodeLibraries
    places: dict[str, Place] = field(default_factory=dict)

    def read(self, entries: Iterable[Located]) -> list[PipelineSpec]:
        """Read entries in their order; of two with one name the first counts."""
        found = [self._read_entry(entry) for entry in entries]
        return [spec for spec in found if spec is not None]

    def _read_entry(self, entry: Located) -> PipelineSpec | None:
        members = check_members(entry, _Entry, self.findings)
        located = items_of(members, "nodes")
        nodes = [node for node in (read_node(each, self.findings) for each in located) if node is not None]
        outputs = read_sources(items_of(members, "outputs"), self.findings)
        is_good = is_whole(entry, members, _Entry) and len(nodes) == len(located)
        if not is_good or outputs is None or not self._is_first(entry, members["name"]):
            return None
        libraries, problems = self._find_libraries(zip(nodes, located, strict=True))
        problems += [self.findings.place(entry, problem) for problem in check_name(members["name"].value)]
        return PipelineSpec(
            name=members["name"].value,
            base_path=self.directory,
            origin=f"{self.findings.file}:{entry.line}",
            problems=tuple(problems),
            inputs=self._read_inputs(members["inputs"]),
            outputs=outputs,
            nodes=tuple(nodes),
            demultiply_count=read_demultiply_count(members, self.findings),
            libraries=libraries,
        )

    def _read_inputs(self, named: Located) -> tuple[str, ...]:
        names: list[str] = named.plain()
        inputs = tuple(dict.fromkeys(names))
        if len(inputs) < len(names):
            twice = next(name for name in names if names.count(name) > 1)
            self.findings.warn(named, f"the input {twice!r} is given twice", "remove one of them")
        return inputs

    def _is_first(self, entry: Located, named: Located) -> bool:
        name = named.value
        first = self.places.setdefault(name, Place(self.findings.file, entry)).settings
        if first is not entry:
            message = f"there is a pipeline {name!r} already, so this one is left out"
            self.findings.warn(named, message, f"line {first.line} has it")
        return first is entry

    def _find_libraries(self, nodes: Iterable[tuple[PipelineNode, Located]]) -> tuple[dict[str, Path], list[Problem]]:
        paths: dict[str, Path] = {}
        problems: list[Problem] = []
        for node, located in nodes:
            if not node.library:
                continue
            found = self.libraries.find(node.library)
            if isinstance(found, Path):
                paths[node.library] = found
            else:
                problems.append(self.findings.place(located, found))
        return paths, problems
