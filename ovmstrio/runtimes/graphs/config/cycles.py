"""Cycles that no back edge allows."""

from __future__ import annotations

from collections.abc import Iterator

from ovmstrio.config.findings import Findings
from ovmstrio.runtimes.graphs.config.graph_config import GraphConfig, StreamRef
from ovmstrio.runtimes.graphs.config.graph_messages import INITIALIZATION

__all__ = ["check_cycles"]


def check_cycles(graph: GraphConfig, findings: Findings) -> None:
    """Note each cycle of nodes once, at the input by which it was found."""
    edges = _edges(graph)
    settled: set[int] = set()
    for start in range(len(graph.nodes)):
        if start not in settled:
            _visit(start, edges, settled, graph, findings)


def _edges(graph: GraphConfig) -> list[list[tuple[int, StreamRef]]]:
    """Give, for each node, whom it feeds and by which of their inputs; back edges are left out."""
    made = {ref.name: number for number, node in enumerate(graph.nodes) for ref in node.outputs}
    made_side = {ref.name: number for number, node in enumerate(graph.nodes) for ref in node.side_outputs}
    edges: list[list[tuple[int, StreamRef]]] = [[] for _ in graph.nodes]
    for number, node in enumerate(graph.nodes):
        for ref in node.inputs:
            if ref.name in made and ref.port not in node.back_edges:
                edges[made[ref.name]].append((number, ref))
        for ref in node.side_inputs:
            if ref.name in made_side:
                edges[made_side[ref.name]].append((number, ref))
    return edges


def _visit(
    start: int, edges: list[list[tuple[int, StreamRef]]], settled: set[int], graph: GraphConfig, findings: Findings
) -> None:
    """Go through everything that a node feeds, without recursion, for graphs may be long."""
    path = [start]
    ahead: list[Iterator[tuple[int, StreamRef]]] = [iter(edges[start])]
    while path:
        step = next(ahead[-1], None)
        if step is None:
            settled.add(path.pop())
            ahead.pop()
            continue
        number, ref = step
        if number in path:
            _refuse(graph, path[path.index(number) :], ref, findings)
        elif number not in settled:
            path.append(number)
            ahead.append(iter(edges[number]))


def _refuse(graph: GraphConfig, cycle: list[int], ref: StreamRef, findings: Findings) -> None:
    names = " -> ".join(graph.nodes[number].canonical_name for number in [*cycle, cycle[0]])
    tag_index = f"{ref.port.tag}:{ref.port.index}"
    findings.refuse(
        ref.at,
        f'{INITIALIZATION} - INVALID_ARGUMENT: calculator stream cycle detected: {names} by stream "{ref.name}"',
        suggestion=f'add input_stream_info {{ tag_index: "{tag_index}" back_edge: true }} to that node',
    )
