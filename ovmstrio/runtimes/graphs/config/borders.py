"""What a graph takes from requests and gives to responses."""

from __future__ import annotations

from typing import Final

from ovmstrio.runtimes.graphs.config.found import (
    INTERNAL,
    NOT_IMPLEMENTED,
    REQUEST_INPUTS,
    REQUEST_MISSING,
    REQUEST_OUTPUTS,
    RESPONSE_MISSING,
    GraphFindings,
)
from ovmstrio.runtimes.graphs.config.types import TFLITE
from ovmstrio.runtimes.graphs.config.values import GraphConfig, StreamRef

__all__ = ["check_borders"]

_REQUEST: Final = "REQUEST"
_RESPONSE: Final = "RESPONSE"


def check_borders(graph: GraphConfig, findings: GraphFindings) -> None:
    """Check the graph's own streams by number and tag."""
    for kind, refs in (("input_stream", graph.inputs), ("output_stream", graph.outputs)):
        if not refs:
            details = "having less than one input or output is disallowed"
            findings.add(INTERNAL, details, 1, kind, fix=f'add {kind}: "OVMS_PY_TENSOR:name" outside the nodes')
        for place, ref in enumerate(refs):
            if ref.port.tag.startswith(TFLITE):
                findings.add(
                    NOT_IMPLEMENTED, f"streams tagged {ref.port.tag} are not supported", ref.line, f"{kind}[{place}]",
                    fix=f'write "OVTENSOR:{ref.name}"',
                )  # fmt: skip
    _check_messages(graph, findings)


def _check_messages(graph: GraphConfig, findings: GraphFindings) -> None:
    """Check a graph that takes the whole request: it has nothing but that, and gives the whole response."""
    request, response = _tagged(graph.inputs, _REQUEST), _tagged(graph.outputs, _RESPONSE)
    if request and not response:
        findings.add(
            RESPONSE_MISSING, "it takes REQUEST", request.line, "output_stream", fix=_alone("output", _RESPONSE)
        )
    if response and not request:
        findings.add(REQUEST_MISSING, "it gives RESPONSE", response.line, "input_stream", fix=_alone("input", _REQUEST))
    if request is None:
        return
    if len(graph.outputs) > 1:
        found = str(len(graph.outputs))
        findings.add(
            REQUEST_OUTPUTS, "a graph that takes REQUEST has one output", graph.outputs[1].line, "output_stream",
            expected="1", found=found, fix=_alone("output", _RESPONSE),
        )  # fmt: skip
    if len(graph.inputs) > 1:
        found = str(len(graph.inputs))
        other = next(ref for ref in graph.inputs if ref is not request)
        findings.add(
            REQUEST_INPUTS, "a graph that takes REQUEST has one input", other.line, "input_stream",
            expected="1", found=found, fix=_alone("input", _REQUEST),
        )  # fmt: skip


def _tagged(refs: tuple[StreamRef, ...], prefix: str) -> StreamRef | None:
    return next((ref for ref in refs if ref.port.tag.startswith(prefix)), None)


def _alone(direction: str, tag: str) -> str:
    return f'let the only {direction}_stream of the graph be "{tag}:name"'
