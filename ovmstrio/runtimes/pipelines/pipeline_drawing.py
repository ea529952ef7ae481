"""Pipelines as pictures: a box for each node, and for each input and output of the pipeline."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ovmstrio.core.drawing import Drawing, DrawnBox, DrawnEdge, arrange
from ovmstrio.runtimes.pipelines.structure import DYNAMIC, ENTRY, EXIT, examine_structure

if TYPE_CHECKING:
    from ovmstrio.config.specs import NodeInput, PipelineNode, PipelineSpec
    from ovmstrio.runtimes.pipelines.structure import Level, Structure

__all__ = ["draw"]

_Sources = dict[tuple[str, str], tuple[str, str]]
"""By node and alias: the key of the box, and the output's own name where that is another."""


def draw(spec: PipelineSpec) -> Drawing:
    """Arrange a pipeline, which may be wrong: what leads nowhere is left out, cycles are cut somewhere."""
    structure, _ = examine_structure(spec)
    splits = () if spec.demultiply_count is None else (_splits(spec.demultiply_count),)
    inputs = [DrawnBox(f"i{number}", "input", name, notes=splits) for number, name in enumerate(spec.inputs)]
    nodes = [_node(node, f"n{number}", spec, structure) for number, node in enumerate(spec.nodes)]
    outputs = [
        DrawnBox(f"o{number}", "output", given.name, notes=_gathers_at_exit(given, structure))
        for number, given in enumerate(spec.outputs)
    ]
    return arrange(inputs, nodes, outputs, _edges(spec))


def _node(node: PipelineNode, key: str, spec: PipelineSpec, structure: Structure | None) -> DrawnBox:
    notes = []
    level = () if structure is None else structure.levels.get(node.name, ())
    if level:
        notes.append(f"once for each shard of {_shown(level[::-1])}")
    if node.gather_from_node is not None:
        notes.append(f"gathers {_shown((node.gather_from_node,))}")
    if node.demultiply_count is not None:
        notes.append(_splits(node.demultiply_count))
    return DrawnBox(key, "node", node.name, _runs(node, spec), tuple(notes))


def _runs(node: PipelineNode, spec: PipelineSpec) -> str:
    """Say what a node calls."""
    if node.model_name:
        return f"model {node.model_name}{f' version {node.version}' if node.version else ''}"
    library = spec.libraries.get(node.library)
    return f"library {node.library}{f' ({library.name})' if library is not None else ''}"


def _splits(count: int) -> str:
    return "splits into shards" if count == DYNAMIC else f"splits into {count} shard{'' if count == 1 else 's'}"


def _gathers_at_exit(given: NodeInput, structure: Structure | None) -> tuple[str, ...]:
    for edge in [] if structure is None else structure.into(EXIT):
        if edge.name == given.name and edge.gathers:
            return (f"gathers {_shown(edge.gathers)}",)
    return ()


def _shown(innermost_first: Level) -> str:
    return " in ".join("the request" if name == ENTRY else name for name in innermost_first)


def _edges(spec: PipelineSpec) -> list[DrawnEdge]:
    """Draw each connection from where it comes, if there is such a place; tags are the names that nodes have for it."""
    sources: _Sources = {(ENTRY, name): (f"i{number}", "") for number, name in enumerate(spec.inputs)}
    for number, node in enumerate(spec.nodes):
        for output in node.outputs:
            own = output.data_item if output.data_item != output.alias else ""
            sources.setdefault((node.name, output.alias), (f"n{number}", own))
    wanted = [(given, f"n{number}", given.name) for number, node in enumerate(spec.nodes) for given in node.inputs]
    wanted += [(given, f"o{number}", "") for number, given in enumerate(spec.outputs)]
    edges = []
    for given, target, tag in wanted:
        found = sources.get((given.node, given.data_item))
        if found is not None:
            source, own = found
            edges.append(DrawnEdge(source, target, given.data_item, own, tag))
    return edges
