"""Where each stream and side packet of a graph comes from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from ovmstrio.config.findings import Findings
from ovmstrio.runtimes.graphs.calculator import NodeContract
from ovmstrio.runtimes.graphs.config.graph_config import GraphConfig, StreamRef
from ovmstrio.runtimes.graphs.config.graph_messages import INITIALIZATION
from ovmstrio.runtimes.graphs.config.stream_types import stream_type

__all__ = ["Producer", "Producers", "find_producers"]


@dataclass(frozen=True, slots=True)
class Producer:
    """Who gives a stream: a node by canonical name, or the graph (None); ``kind`` is what it carries."""

    node: str | None
    ref: StreamRef
    kind: type


@dataclass(frozen=True, slots=True)
class Producers:
    """The producers of streams and side packets by name."""

    streams: dict[str, Producer] = field(default_factory=dict)
    side: dict[str, Producer] = field(default_factory=dict)


def find_producers(graph: GraphConfig, contracts: Mapping[str, NodeContract], findings: Findings) -> Producers:
    """Find them all; a second producer of a stream is a problem."""
    found = Producers()
    for ref in graph.inputs:
        found.streams.setdefault(ref.name, Producer(None, ref, stream_type(ref.port.tag)))
    for ref in graph.side_inputs:
        found.side.setdefault(ref.name, Producer(None, ref, object))
    for node in graph.nodes:
        contract = contracts.get(node.canonical_name, NodeContract())
        for made, refs, types, what in (
            (found.streams, node.outputs, contract.outputs, "Output Stream"),
            (found.side, node.side_outputs, contract.side_outputs, "Output Side Packet"),
        ):
            for ref in refs:
                producer = Producer(node.canonical_name, ref, types.get(ref.port, object))
                other = made.setdefault(ref.name, producer)
                if other is not producer:
                    message = f'{INITIALIZATION} - UNKNOWN: {what} "{ref.name}" defined twice.'
                    fix = f"use another name; line {other.ref.line} has this one"
                    findings.refuse(ref.at, message, suggestion=fix)
    return found
