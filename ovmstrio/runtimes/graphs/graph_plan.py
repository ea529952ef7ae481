"""A loaded graph, laid out for running: which stream leads where, and in which order nodes open."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from ovmstrio.core.hooks import NULL_NODE_HOOKS
from ovmstrio.core.inspection import NodeTally, StreamTally
from ovmstrio.runtimes.graphs.config.graph_config import PolicyConfig

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ovmstrio.core.hooks import NodeHooks
    from ovmstrio.runtimes.graphs.calculator import NodeContract, NodeResources
    from ovmstrio.runtimes.graphs.config.graph_config import GraphConfig, NodeConfig, Port, StreamRef
    from ovmstrio.work.threads.worker_threads import WorkerThreads

__all__ = [
    "Consumer",
    "GraphNodePlan",
    "GraphPlan",
    "LoadedGraph",
    "LoadedNode",
    "StreamRoute",
    "close_nodes",
    "make_graph_plan",
]


class LoadedNode(NamedTuple):
    """A node with what its calculator said and made; ``hooks`` are told of its runs."""

    config: NodeConfig
    contract: NodeContract
    resources: NodeResources
    hooks: NodeHooks = NULL_NODE_HOOKS


class Consumer(NamedTuple):
    """One end of a stream: the input number ``slot``, in the order of tags, of a node, and the type that it takes."""

    node: int
    slot: int
    type: type


@dataclass(frozen=True, slots=True)
class StreamRoute:
    """Where the packets of one stream go: inputs of nodes, and outputs of the graph by number, counted by ``tally``."""

    stream: str
    consumers: tuple[Consumer, ...]
    outputs: tuple[int, ...]
    tally: StreamTally = field(default_factory=StreamTally, compare=False)


@dataclass(frozen=True, slots=True)
class GraphNodePlan:
    """One node, with its inputs in the order of tags, the routes of its outputs in that order, and its input policy.

    ``tally`` counts its runs.
    """

    config: NodeConfig
    contract: NodeContract
    resources: NodeResources
    inputs: tuple[StreamRef, ...]
    routes: Mapping[Port, StreamRoute]
    policy: PolicyConfig
    tally: NodeTally = field(default_factory=NodeTally, compare=False)


@dataclass(frozen=True, slots=True)
class GraphPlan:
    """One loaded graph; nodes are in the order in which they open, makers of side packets before their users.

    ``is_chain``: no two nodes can ever have something to do at once, so that running them in parallel gains nothing.
    """

    config: GraphConfig
    nodes: tuple[GraphNodePlan, ...]
    inputs: Mapping[str, StreamRoute]
    outputs: tuple[str, ...]
    is_chain: bool


@dataclass(frozen=True, slots=True)
class LoadedGraph:
    """A graph whose nodes are ready; ``side`` are the side packets that the server gives every instance."""

    plan: GraphPlan
    threads: WorkerThreads
    side: dict[str, Any] = field(default_factory=dict)

    async def aclose(self) -> None:
        """Give back what the nodes share, the last node first, and end the threads.

        Cancellation: whoever calls this shields it; each node bounds its own time.
        """
        await close_nodes(self.plan.nodes, self.threads)


async def close_nodes(nodes: Sequence[LoadedNode | GraphNodePlan], threads: WorkerThreads) -> None:
    """Give back what nodes share, the last one first, and end the threads.

    Cancellation: whoever calls this shields it; each node bounds its own time.
    """
    for node in reversed(nodes):
        await node.resources.aclose()
    await threads.aclose()


def make_graph_plan(config: GraphConfig, nodes: Sequence[LoadedNode]) -> GraphPlan:
    """Lay out a graph that has been checked (``graphs.config.wiring``)."""
    ordered = _by_side_packets(nodes)
    routes = _routes(config, ordered)

    def route(name: str) -> StreamRoute:
        return routes.get(name) or StreamRoute(name, (), ())

    plans = tuple(
        GraphNodePlan(
            node.config,
            node.contract,
            node.resources,
            node.config.sorted_inputs,
            {ref.port: route(ref.name) for ref in node.config.sorted_outputs},
            _policy(node),
            NodeTally(node.hooks),
        )
        for node in ordered
    )
    inputs = {ref.name: route(ref.name) for ref in config.inputs}
    return GraphPlan(config, plans, inputs, tuple(ref.name for ref in config.outputs), _is_chain(ordered))


def _policy(node: LoadedNode) -> PolicyConfig:
    """Give the policy that the file names, else the calculator's own, else the default."""
    own = node.contract.policy
    return PolicyConfig(own) if own and node.config.policy == PolicyConfig() else node.config.policy


def _is_chain(nodes: Sequence[LoadedNode]) -> bool:
    """Tell whether each node that takes packets takes those of one stream, and no two the same."""
    feeds = [
        tuple(ref.name for ref in node.config.inputs if ref.port not in node.config.back_edges)
        for node in nodes
        if node.config.inputs
    ]
    if len(feeds) <= 1:
        return all(node.config.max_in_flight <= 1 for node in nodes)
    single = all(len(names) == 1 for names in feeds)
    return single and len({names[0] for names in feeds}) == len(feeds) and _has_one_start(nodes, feeds)


def _has_one_start(nodes: Sequence[LoadedNode], feeds: Sequence[tuple[str, ...]]) -> bool:
    made = {ref.name for node in nodes for ref in node.config.outputs}
    fans_out = any(
        sum(any(ref.name == names[0] for names in feeds) for ref in node.config.outputs) > 1 for node in nodes
    )
    return not fans_out and sum(names[0] not in made for names in feeds) == 1


def _routes(config: GraphConfig, nodes: Sequence[LoadedNode]) -> dict[str, StreamRoute]:
    consumers: dict[str, list[Consumer]] = {}
    outputs: dict[str, list[int]] = {}
    for number, node in enumerate(nodes):
        for slot, ref in enumerate(node.config.sorted_inputs):
            wanted = node.contract.inputs.get(ref.port, object)
            consumers.setdefault(ref.name, []).append(Consumer(number, slot, wanted))
    for index, ref in enumerate(config.outputs):
        outputs.setdefault(ref.name, []).append(index)
    return {
        name: StreamRoute(name, tuple(consumers.get(name, ())), tuple(outputs.get(name, ())))
        for name in consumers.keys() | outputs.keys()
    }


def _by_side_packets(nodes: Sequence[LoadedNode]) -> list[LoadedNode]:
    """Order nodes so that each comes after the makers of its side packets, else as in the file."""
    makers = {ref.name: node for node in nodes for ref in node.config.side_outputs}
    ordered: list[LoadedNode] = []

    def add(node: LoadedNode) -> None:
        if any(node is known for known in ordered):
            return
        for ref in node.config.side_inputs:
            maker = makers.get(ref.name)
            if maker is not None and maker is not node:
                add(maker)
        ordered.append(node)

    for node in nodes:
        add(node)
    return ordered
