"""Where each stream and side packet of a graph comes from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ovmstrio.runtimes.graphs.calculator import NodeContract
from ovmstrio.runtimes.graphs.config.found import INITIALIZATION, GraphFindings
from ovmstrio.runtimes.graphs.config.types import stream_type
from ovmstrio.runtimes.graphs.config.values import GraphConfig, Port, StreamRef

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


def find_producers(graph: GraphConfig, contracts: Mapping[str, NodeContract], findings: GraphFindings) -> Producers:
    """Find them all; a second producer of a stream is a problem."""
    found = Producers()
    for ref in graph.inputs:
        found.streams.setdefault(ref.name, Producer(None, ref, stream_type(ref.port.tag)))
    for ref in graph.side_inputs:
        found.side.setdefault(ref.name, Producer(None, ref, object))
    for number, node in enumerate(graph.nodes):
        contract = contracts.get(node.canonical_name, NodeContract())
        adding = _Adding(node.canonical_name, f"node[{number}]", findings)
        adding.add(found.streams, node.outputs, contract.outputs, "Output Stream", "output_stream")
        adding.add(found.side, node.side_outputs, contract.side_outputs, "Output Side Packet", "output_side_packet")
    return found


@dataclass(frozen=True, slots=True)
class _Adding:
    node: str
    path: str
    findings: GraphFindings

    def add(
        self, found: dict[str, Producer], refs: Sequence[StreamRef], types: Mapping[Port, type], what: str, kind: str
    ) -> None:
        for place, ref in enumerate(refs):
            producer = Producer(self.node, ref, types.get(ref.port, object))
            other = found.setdefault(ref.name, producer)
            if other is not producer:
                self.findings.add(
                    INITIALIZATION, f'UNKNOWN: {what} "{ref.name}" defined twice.', ref.line,
                    f"{self.path}.{kind}[{place}]", fix=f"use another name; line {other.ref.line} has this one",
                )  # fmt: skip
