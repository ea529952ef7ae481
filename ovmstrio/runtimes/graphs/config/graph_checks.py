"""Checks of a whole graph: what it takes from requests and gives to responses, and cycles that no back edge allows."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from ovmstrio.config.findings import Findings
from ovmstrio.config.located import Located
from ovmstrio.runtimes.graphs.config.graph_config import GraphConfig, StreamRef
from ovmstrio.runtimes.graphs.config.graph_messages import (
    FILE_INVALID,
    INITIALIZATION,
    INTERNAL,
    NOT_IMPLEMENTED,
    REQUEST_INPUTS,
    REQUEST_MISSING,
    REQUEST_OUTPUTS,
    RESPONSE_MISSING,
)
from ovmstrio.runtimes.graphs.packets import REQUEST_PAYLOAD, RESPONSE_PAYLOAD, TFLITE

__all__ = ["check_borders", "check_cycles"]

_REQUEST: Final = "REQUEST"
_RESPONSE: Final = "RESPONSE"


def check_borders(graph: GraphConfig, findings: Findings) -> None:
    """Check the graph's own streams by number and tag."""
    for kind, refs in (("input_stream", graph.inputs), ("output_stream", graph.outputs)):
        if not refs:
            findings.refuse(
                Located(None, 1, kind),
                f"{INTERNAL} - having less than one input or output is disallowed",
                suggestion=f'add {kind}: "OVMS_PY_TENSOR:name" outside the nodes',
            )
        for ref in refs:
            if ref.port.tag.startswith(TFLITE):
                message = f"{NOT_IMPLEMENTED} - streams tagged {ref.port.tag} are not supported"
                findings.refuse(ref.at, message, suggestion=f'write "OVTENSOR:{ref.name}"')
    _check_messages(graph, findings)
    _check_payloads(graph, findings)


def _check_messages(graph: GraphConfig, findings: Findings) -> None:
    """Check a graph that takes the whole request: it has nothing but that, and gives the whole response."""
    request, response = _tagged(graph.inputs, _REQUEST), _tagged(graph.outputs, _RESPONSE)
    only_input, only_output = _alone("input", _REQUEST), _alone("output", _RESPONSE)
    if request and not response:
        at = Located(None, request.line, "output_stream")
        findings.refuse(at, f"{RESPONSE_MISSING} - it takes REQUEST", suggestion=only_output)
    if response and not request:
        at = Located(None, response.line, "input_stream")
        findings.refuse(at, f"{REQUEST_MISSING} - it gives RESPONSE", suggestion=only_input)
    if request is None:
        return
    if len(graph.outputs) > 1:
        found, message = str(len(graph.outputs)), f"{REQUEST_OUTPUTS} - a graph that takes REQUEST has one output"
        findings.refuse(graph.outputs[1].at, message, expected="1", found=found, suggestion=only_output)
    if len(graph.inputs) > 1:
        found, message = str(len(graph.inputs)), f"{REQUEST_INPUTS} - a graph that takes REQUEST has one input"
        other = next(ref for ref in graph.inputs if ref is not request)
        findings.refuse(other.at, message, expected="1", found=found, suggestion=only_input)


def _check_payloads(graph: GraphConfig, findings: Findings) -> None:
    """Check a graph that takes requests over HTTP: it takes nothing else, and gives documents, and nothing else."""
    request, response = _tagged(graph.inputs, REQUEST_PAYLOAD), _tagged(graph.outputs, RESPONSE_PAYLOAD)
    if request is None and response is None:
        return
    for kind, tag, refs, found in (
        ("input", REQUEST_PAYLOAD, graph.inputs, request),
        ("output", RESPONSE_PAYLOAD, graph.outputs, response),
    ):
        if found is None or len(refs) > 1:
            other = next((ref for ref in refs if ref is not found), None)
            line = other.line if other is not None else (request or response or graph.inputs[0]).line
            message = f"{FILE_INVALID} - a graph of requests over HTTP has one {kind}, tagged {tag}"
            found_text = ", ".join(f"{ref.port}:{ref.name}" for ref in refs)
            at = Located(None, line, f"{kind}_stream")
            findings.refuse(at, message, expected=f"{tag}:name", found=found_text, suggestion=_alone(kind, tag))


def _tagged(refs: tuple[StreamRef, ...], prefix: str) -> StreamRef | None:
    payload = f"{prefix}_PAYLOAD"  # a document of HTTP, which is no message of inference
    found = (ref for ref in refs if ref.port.tag.startswith(prefix) and not ref.port.tag.startswith(payload))
    return next(found, None)


def _alone(direction: str, tag: str) -> str:
    return f'let the only {direction}_stream of the graph be "{tag}:name"'


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
