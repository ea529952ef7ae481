"""Execution plan of a pipeline: calls and links of its nodes, and the drawing."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ovmstrio.core.service import StreamCounter
from ovmstrio.pipelines.structure import DYNAMIC, ENTRY, EXIT, validate_structure
from ovmstrio.util.drawing import Drawing, DrawnBox, DrawnEdge, arrange

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ovmstrio.config.specs import NodeInput, PipelineNode, PipelineSpec
    from ovmstrio.core.request import InferRequest
    from ovmstrio.core.tensor import Tensor
    from ovmstrio.pipelines.node_calls import NodeCall
    from ovmstrio.pipelines.structure import Level, Structure


@dataclass(frozen=True, slots=True, eq=False)
class Link:
    """A connection: output ``item`` of the holding node becomes input ``name`` of ``target``.

    ``gathers`` are the demultiplexers gathered on the connection, innermost first. ``is_shared``: the output has other
    consumers. ``tally`` counts the tensors.
    """

    item: str
    target: NodePlan
    name: str
    gathers: Level
    is_shared: bool
    tally: StreamCounter = field(default_factory=StreamCounter)


@dataclass(slots=True, eq=False)
class NodePlan:
    """A node. ``needs`` is its number of inputs, ``splits`` its ``demultiply_count`` (0 if it has none).

    ``follower`` is the only consumer, if it needs no other input and nothing is split or gathered.
    """

    name: str
    call: NodeCall
    needs: int
    splits: int
    links: list[Link] = field(default_factory=list)
    follower: NodePlan | None = None


def create_plan(structure: Structure, calls: Mapping[str, NodeCall]) -> NodePlan:
    """Create the plan of a valid structure and return its entry; ``calls`` has the calls of all other nodes."""
    calls = {ENTRY: _pass_through, EXIT: _pass_through, **calls}
    nodes = {
        name: NodePlan(name, calls[name], len(structure.into(name)), node.demultiply_count or 0)
        for name, node in structure.nodes.items()
    }
    takers = Counter((edge.source, edge.item) for edge in structure.edges)
    for edge in structure.edges:
        is_shared = takers[edge.source, edge.item] > 1
        link = Link(edge.item, nodes[edge.target], edge.name, edge.gathers, is_shared)
        nodes[edge.source].links.append(link)
    for node in nodes.values():
        node.follower = _find_follower(node)
    return nodes[ENTRY]


def _find_follower(node: NodePlan) -> NodePlan | None:
    targets = {link.target for link in node.links}
    if node.splits or len(targets) != 1 or any(link.gathers for link in node.links):
        return None
    (target,) = targets
    return target if target.needs == len(node.links) else None


async def _pass_through(inputs: Mapping[str, Tensor], request: InferRequest) -> dict[str, Tensor]:
    """Return the inputs: entry and exit call nothing."""
    del request
    return dict(inputs)


# Drawing

_Sources = dict[tuple[str, str], tuple[str, str]]
"""Box key and output name (if it differs from the alias) by node and alias."""


def draw_pipeline(spec: PipelineSpec) -> Drawing:
    """Draw a pipeline, valid or not: unresolved connections are left out, cycles are cut."""
    structure, _ = validate_structure(spec)
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
        notes.append(f"once for each shard of {_nesting(level[::-1])}")
    if node.gather_from_node is not None:
        notes.append(f"gathers {_nesting((node.gather_from_node,))}")
    if node.demultiply_count is not None:
        notes.append(_splits(node.demultiply_count))
    return DrawnBox(key, "node", node.name, _callee(node, spec), tuple(notes))


def _callee(node: PipelineNode, spec: PipelineSpec) -> str:
    if node.model_name:
        return f"model {node.model_name}{f' version {node.version}' if node.version else ''}"
    library = spec.libraries.get(node.library)
    return f"library {node.library}{f' ({library.name})' if library is not None else ''}"


def _splits(count: int) -> str:
    return "splits into shards" if count == DYNAMIC else f"splits into {count} shard{'' if count == 1 else 's'}"


def _gathers_at_exit(given: NodeInput, structure: Structure | None) -> tuple[str, ...]:
    for edge in [] if structure is None else structure.into(EXIT):
        if edge.name == given.name and edge.gathers:
            return (f"gathers {_nesting(edge.gathers)}",)
    return ()


def _nesting(innermost_first: Level) -> str:
    return " in ".join("the request" if name == ENTRY else name for name in innermost_first)


def _edges(spec: PipelineSpec) -> list[DrawnEdge]:
    """Return the drawn connections; tags are the input and output names of the nodes."""
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
