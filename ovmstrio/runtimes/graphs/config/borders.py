"""What a graph takes from requests and gives to responses."""

from __future__ import annotations

from typing import Final

from ovmstrio.config.findings import Findings
from ovmstrio.config.located import Located
from ovmstrio.runtimes.graphs.config.graph_config import GraphConfig, StreamRef
from ovmstrio.runtimes.graphs.config.graph_messages import (
    INTERNAL,
    NOT_IMPLEMENTED,
    REQUEST_INPUTS,
    REQUEST_MISSING,
    REQUEST_OUTPUTS,
    RESPONSE_MISSING,
)
from ovmstrio.runtimes.graphs.packets import TFLITE

__all__ = ["check_borders"]

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


def _tagged(refs: tuple[StreamRef, ...], prefix: str) -> StreamRef | None:
    return next((ref for ref in refs if ref.port.tag.startswith(prefix)), None)


def _alone(direction: str, tag: str) -> str:
    return f'let the only {direction}_stream of the graph be "{tag}:name"'
