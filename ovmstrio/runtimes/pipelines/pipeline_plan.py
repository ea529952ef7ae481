"""A pipeline made ready to be run: what each node calls, and where what it gives goes."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ovmstrio.core.inspection import StreamTally
from ovmstrio.runtimes.pipelines.structure import ENTRY, EXIT

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ovmstrio.core.request import InferRequest
    from ovmstrio.core.tensor import Tensor
    from ovmstrio.runtimes.pipelines.node_calls import NodeCall
    from ovmstrio.runtimes.pipelines.structure import Level, Structure

__all__ = ["Link", "NodePlan", "make_plan"]


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
