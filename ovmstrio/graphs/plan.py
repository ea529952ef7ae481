"""Execution plan of a loaded graph: routes of streams, opening order of nodes, and the drawing."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from ovmstrio.core.hooks import NULL_NODE_HOOKS
from ovmstrio.core.service import NodeCounters, StreamCounter
from ovmstrio.graphs.graph_config import GraphConfig, NodeConfig, PolicyConfig, Port, StreamRef
from ovmstrio.util.drawing import BoxKind, Drawing, DrawnBox, DrawnEdge, arrange

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ovmstrio.core.hooks import NodeHooks
    from ovmstrio.graphs.calculator import NodeContract, NodeResources
    from ovmstrio.isolation.thread_pool import WorkerThreads


class LoadedNode(NamedTuple):
    """A node with its contract and shared state; ``hooks`` observe its runs."""

    config: NodeConfig
    contract: NodeContract
    resources: NodeResources
    hooks: NodeHooks = NULL_NODE_HOOKS


class Consumer(NamedTuple):
    """Consumer of a stream: input number ``slot`` (in tag order) of a node, and the type it accepts."""

    node: int
    slot: int
    type: type


@dataclass(frozen=True, slots=True)
class StreamRoute:
    """Consumers of one stream: node inputs, and graph outputs by number. ``tally`` counts its packets."""

    stream: str
    consumers: tuple[Consumer, ...]
    outputs: tuple[int, ...]
    tally: StreamCounter = field(default_factory=StreamCounter, compare=False)


@dataclass(frozen=True, slots=True)
class GraphNodePlan:
    """One node: inputs and output routes in tag order, and its input policy. ``tally`` counts its runs."""

    config: NodeConfig
    contract: NodeContract
    resources: NodeResources
    inputs: tuple[StreamRef, ...]
    routes: Mapping[Port, StreamRoute]
    policy: PolicyConfig
    tally: NodeCounters = field(default_factory=NodeCounters, compare=False)


@dataclass(frozen=True, slots=True)
class GraphPlan:
    """Plan of one loaded graph; nodes are in opening order, producers of side packets before their consumers.

    ``is_chain``: no two nodes can ever be runnable at once, so running them in parallel gains nothing.
    """

    config: GraphConfig
    nodes: tuple[GraphNodePlan, ...]
    inputs: Mapping[str, StreamRoute]
    outputs: tuple[str, ...]
    is_chain: bool


@dataclass(frozen=True, slots=True)
class LoadedGraph:
    """A graph whose nodes are loaded; ``side`` holds the side packets that the server gives every instance."""

    plan: GraphPlan
    threads: WorkerThreads
    side: dict[str, Any] = field(default_factory=dict)

    async def aclose(self) -> None:
        """Release the nodes' shared state, last node first, and stop the threads. The caller shields this call."""
        await close_nodes(self.plan.nodes, self.threads)


async def close_nodes(nodes: Sequence[LoadedNode | GraphNodePlan], threads: WorkerThreads) -> None:
    """Release the nodes' shared state, last node first, and stop the threads. The caller shields this call."""
    for node in reversed(nodes):
        await node.resources.aclose()
    await threads.aclose()


def create_graph_plan(config: GraphConfig, nodes: Sequence[LoadedNode]) -> GraphPlan:
    """Create the plan of a validated graph."""
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
            NodeCounters(node.hooks),
        )
        for node in ordered
    )
    inputs = {ref.name: route(ref.name) for ref in config.inputs}
    return GraphPlan(config, plans, inputs, tuple(ref.name for ref in config.outputs), _is_chain(ordered))


def _policy(node: LoadedNode) -> PolicyConfig:
    """Return the file's policy, else the calculator's default, else the global default."""
    own = node.contract.policy
    return PolicyConfig(own) if own and node.config.policy == PolicyConfig() else node.config.policy


def _is_chain(nodes: Sequence[LoadedNode]) -> bool:
    """Return whether each node reads at most one stream and no stream feeds two nodes."""
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
    """Return the nodes in file order, except that producers of side packets precede their consumers."""
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


# Drawing


def draw_graph(graph: GraphConfig) -> Drawing:
    """Draw a graph, valid or not: streams without a producer are left out, cycles are cut."""
    keys = [f"n{number}" for number in range(len(graph.nodes))]
    inputs = [_border(ref, f"i{number}", "input") for number, ref in enumerate(graph.inputs)]
    inputs += [_border(ref, f"s{number}", "input", "side packet") for number, ref in enumerate(graph.side_inputs)]
    nodes = [_node(node, key) for node, key in zip(graph.nodes, keys, strict=True)]
    outputs = [_border(ref, f"o{number}", "output") for number, ref in enumerate(graph.outputs)]
    return arrange(inputs, nodes, outputs, _edges(graph, keys))


def _border(ref: StreamRef, key: str, kind: BoxKind, what: str = "") -> DrawnBox:
    return DrawnBox(key, kind, ref.name, " ".join(part for part in (what, _tag(ref.port)) if part))


def _tag(port: Port) -> str:
    return str(port) if port.tag or port.index else ""


def _node(node: NodeConfig, key: str) -> DrawnBox:
    notes = [node.policy.handler.removesuffix("InputStreamHandler")] if node.policy.line else []
    if notes and node.policy.handler.startswith("SyncSet") and node.policy.options is not None:
        sets = [", ".join(each.tag_index) for each in node.policy.options.sync_set]
        notes[0] += "".join(f" {{{members}}}" for members in sets)
    if node.max_in_flight > 1:
        notes.append(f"{node.max_in_flight} in flight")
    calculator = node.calculator if node.calculator != node.canonical_name else ""
    return DrawnBox(key, "node", node.canonical_name, calculator, tuple(notes))


def _edges(graph: GraphConfig, keys: list[str]) -> list[DrawnEdge]:
    made = {ref.name: (f"i{number}", ref) for number, ref in enumerate(graph.inputs)}
    side = {ref.name: (f"s{number}", ref) for number, ref in enumerate(graph.side_inputs)}
    for key, node in zip(keys, graph.nodes, strict=True):
        made.update((ref.name, (key, ref)) for ref in node.outputs)
        side.update((ref.name, (key, ref)) for ref in node.side_outputs)
    edges = []
    for key, node in zip(keys, graph.nodes, strict=True):
        edges += [_edge(made[ref.name], key, ref, node) for ref in node.inputs if ref.name in made]
        edges += [_edge(side[ref.name], key, ref, node, is_side=True) for ref in node.side_inputs if ref.name in side]
    for number, ref in enumerate(graph.outputs):
        if ref.name in made:
            edges.append(_edge(made[ref.name], f"o{number}", ref))
    return edges


def _edge(
    producer: tuple[str, StreamRef], target: str, ref: StreamRef, node: NodeConfig | None = None, *,
    is_side: bool = False,
) -> DrawnEdge:  # fmt: skip
    source, given = producer
    return DrawnEdge(
        source=source,
        target=target,
        stream=ref.name,
        source_tag=_tag(given.port) if source.startswith("n") else "",
        target_tag=_tag(ref.port) if node is not None else "",
        is_back=not is_side and node is not None and ref.port in node.back_edges,
        is_side=is_side,
    )
