"""A pipeline made ready to be run: what each node calls, and where what it gives goes."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ovmstrio.core.service import StreamTally
from ovmstrio.pipelines.structure import DYNAMIC, ENTRY, EXIT, examine_structure
from ovmstrio.util.drawing import Drawing, DrawnBox, DrawnEdge, arrange

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ovmstrio.config.specs import NodeInput, PipelineNode, PipelineSpec
    from ovmstrio.core.request import InferRequest
    from ovmstrio.core.tensor import Tensor
    from ovmstrio.pipelines.run import NodeCall
    from ovmstrio.pipelines.structure import Level, Structure

__all__ = ["Link", "NodePlan", "draw", "make_plan"]

# ----------------------------------------------------------------------
# A pipeline made ready to be run: what each node calls, and where what it gives goes
# ----------------------------------------------------------------------


@dataclass(frozen=True, slots=True, eq=False)
class Link:
    """One connection: ``item`` of the node that holds it becomes the input ``name`` of ``target``.

    ``gathers`` are the demultiplexers gathered on the way, innermost first; ``is_shared`` tells whether the same item
    goes anywhere else; ``tally`` counts what went along it.
    """

    item: str
    target: NodePlan
    name: str
    gathers: Level
    is_shared: bool
    tally: StreamTally = field(default_factory=StreamTally)


@dataclass(slots=True, eq=False)
class NodePlan:
    """One node: ``needs`` is the number of its inputs, ``splits`` its ``demultiply_count``, 0 if it has none.

    ``follower`` is the node that needs what this one gives and nothing else, unsplit and ungathered, if there is one.
    """

    name: str
    call: NodeCall
    needs: int
    splits: int
    links: list[Link] = field(default_factory=list)
    follower: NodePlan | None = None


def make_plan(structure: Structure, calls: Mapping[str, NodeCall]) -> NodePlan:
    """Link the nodes of a sound structure and give its entry; ``calls`` has what each but entry and exit does."""
    calls = {ENTRY: _nothing, EXIT: _nothing, **calls}
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


async def _nothing(inputs: Mapping[str, Tensor], request: InferRequest) -> dict[str, Tensor]:
    """Stand for entry and exit, which are not called.  Never waits."""
    del request
    return dict(inputs)


# ----------------------------------------------------------------------
# Pipelines as pictures: a box for each node, and for each input and output of the pipeline
# ----------------------------------------------------------------------

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
