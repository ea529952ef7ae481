"""Graphs as pictures: a box for each node, and for each stream or side packet that enters or leaves the graph."""

from __future__ import annotations

from ovmstrio.core.drawing import BoxKind, Drawing, DrawnBox, DrawnEdge, arrange
from ovmstrio.runtimes.graphs.config.graph_config import GraphConfig, NodeConfig, Port, StreamRef

__all__ = ["draw"]


def draw(graph: GraphConfig) -> Drawing:
    """Arrange a graph, which may be wrong: streams without a producer are left out, cycles are cut somewhere."""
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
