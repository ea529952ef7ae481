"""Whether the nodes of a graph fit together: what the file alone cannot say, for it takes the nodes' contracts."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace

from ovmstrio.config.findings import Findings, did_you_mean
from ovmstrio.core.errors import Problem
from ovmstrio.runtimes.graphs.calculator import ContractError, NodeContract
from ovmstrio.runtimes.graphs.config.generator_checks import check_generators
from ovmstrio.runtimes.graphs.config.graph_checks import check_borders, check_cycles
from ovmstrio.runtimes.graphs.config.graph_config import GraphConfig, NodeConfig, StreamRef
from ovmstrio.runtimes.graphs.config.graph_messages import INITIALIZATION
from ovmstrio.runtimes.graphs.config.input_handlers import check_handlers
from ovmstrio.runtimes.graphs.packets import PYTHON_TENSOR, stream_type, tag_for, type_name

__all__ = ["Producer", "Producers", "check_wiring", "find_producers"]

_SERVER_SIDE = "py"
_INVALID = f"{INITIALIZATION} - INVALID_ARGUMENT"
_NO_OUTPUT = "Failed to add mediapipe graph output stream"


def check_wiring(
    graph: GraphConfig, contracts: Mapping[str, NodeContract | ContractError], policies: Collection[str]
) -> list[Problem]:
    """Give every problem of a graph as a whole.

    Args:
        graph: as read.
        contracts: by canonical name; of a node that is not in it nothing is assumed.
        policies: the names of input stream handlers that there are.
    """
    findings = Findings(graph.file)
    check_borders(graph, findings)
    _tell_contracts(graph, contracts, findings)
    known = {name: contract for name, contract in contracts.items() if isinstance(contract, NodeContract)}
    producers = find_producers(graph, known, findings)
    for node in graph.nodes:
        check = _NodeCheck(node, known.get(node.canonical_name, NodeContract()), producers, findings)
        check.inputs()
        check.side_inputs(graph)
        check_handlers(node, policies, findings)
    _check_outputs(graph, producers, findings)
    check_cycles(graph, findings)
    check_generators(graph, findings)
    return list(findings.all)


def _tell_contracts(
    graph: GraphConfig, contracts: Mapping[str, NodeContract | ContractError], findings: Findings
) -> None:
    for node in graph.nodes:
        contract = contracts.get(node.canonical_name)
        if isinstance(contract, ContractError):
            message = f'{INITIALIZATION} - {contract.code}: {contract.message} (node "{node.canonical_name}")'
            findings.refuse(node.at, message, suggestion=contract.fix)


@dataclass(frozen=True, slots=True)
class _NodeCheck:
    node: NodeConfig
    contract: NodeContract
    producers: Producers
    findings: Findings

    def inputs(self) -> None:
        """See that each input has a producer, of the right type where another node is."""
        for ref in self.node.inputs:
            producer = self.producers.streams.get(ref.name)
            wanted = self.contract.inputs.get(ref.port, object)
            if producer is None:
                self._refuse_missing(ref)
            elif _differ(wanted, producer.kind):
                (self._warn_input if producer.node is None else self._refuse_type)(ref, wanted, producer)

    def _refuse_missing(self, ref: StreamRef) -> None:
        where = f'Input Stream "{ref.name}" for node "{self.node.canonical_name}"'
        details = f"{where} does not have a corresponding output stream."
        hint = "let a node or the graph's input_stream give it"
        fix = did_you_mean(ref.name, self.producers.streams, otherwise=hint)
        self.findings.refuse(ref.at, f"{INITIALIZATION} - {details}", suggestion=fix)

    def _refuse_type(self, ref: StreamRef, wanted: type, producer: Producer) -> None:
        given = type_name(producer.kind)
        self.findings.refuse(
            ref.at,
            f'{_INVALID}: Input stream "{ref.name}" of calculator "{self.node.canonical_name}" expects packets '
            f"of type {type_name(wanted)} but the connected output stream will contain packets of type {given}",
            expected=type_name(wanted),
            found=f"{given} of {producer.node}",
            suggestion=_conversion(wanted, producer.kind),
        )

    def _warn_input(self, ref: StreamRef, wanted: type, producer: Producer) -> None:
        """Tell what only requests will show: the graph's own tag does not take part in the check of types."""
        tag = tag_for(wanted)
        self.findings.warn(
            replace(ref.at, line=producer.ref.line),
            f'every request will fail: input stream "{ref.name}" of the graph carries {type_name(producer.kind)}, '
            f'and node "{self.node.canonical_name}" takes {type_name(wanted)}',
            f'write input_stream: "{tag}:{ref.name}"' if tag else "",
        )

    def side_inputs(self, graph: GraphConfig) -> None:
        """See that side packets have the right type, and tell of those that nothing but a request can give."""
        given = {ref.name for ref in graph.side_inputs}
        for ref in self.node.side_inputs:
            producer = self.producers.side.get(ref.name)
            if producer is not None and producer.node is not None:
                self._check_side_type(ref, producer)
            elif ref.port.tag == "PYTHON_NODE_RESOURCES":
                self._check_resources(ref)
            elif ref.name not in given and ref.port not in self.contract.optional_side:
                text = f'requests without a parameter "{ref.name}" will fail: no node produces that side packet'
                hint = f'add a node with output_side_packet: "TAG:{ref.name}"'
                fix = did_you_mean(ref.name, self.producers.side, otherwise=hint)
                self.findings.warn(ref.at, text, fix)

    def _check_side_type(self, ref: StreamRef, producer: Producer) -> None:
        wanted = self.contract.side_inputs.get(ref.port, object)
        if _differ(wanted, producer.kind):
            self.findings.refuse(
                ref.at,
                f'{_INVALID}: side packet "{ref.name}" is not what node "{self.node.canonical_name}" takes',
                expected=type_name(wanted),
                found=f"{type_name(producer.kind)} of {producer.node}",
            )

    def _check_resources(self, ref: StreamRef) -> None:
        if ref.name != _SERVER_SIDE:
            text = f'every request will fail: side packet "{ref.name}" is required, and the server provides "py"'
            self.findings.warn(ref.at, text, f'write "PYTHON_NODE_RESOURCES:{_SERVER_SIDE}"')


def _conversion(wanted: type, found: type) -> str:
    if {tag_for(wanted), tag_for(found)} == {PYTHON_TENSOR, "OVTENSOR"}:
        return "put a PyTensorOvTensorConverterCalculator between the two"
    return ""


def _check_outputs(graph: GraphConfig, producers: Producers, findings: Findings) -> None:
    for ref in graph.outputs:
        producer = producers.streams.get(ref.name)
        kind = stream_type(ref.port.tag)
        if producer is None:
            details = f'NOT_FOUND: Unable to attach observer to output stream "{ref.name}" because it doesn\'t exist.'
            fix = did_you_mean(ref.name, producers.streams, otherwise="let a node have it as output_stream")
            findings.refuse(ref.at, f"{_NO_OUTPUT} - {details}", suggestion=fix)
        elif _differ(kind, producer.kind):
            tag = tag_for(producer.kind)
            findings.refuse(
                ref.at,
                f'{_INVALID}: output stream "{ref.name}" of the graph is tagged as {type_name(kind)} and carries '
                f"{type_name(producer.kind)}",
                expected=f"{tag}:{ref.name}" if tag else "an output of another type",
                found=f"{ref.port.tag}:{ref.name}" if ref.port.tag else ref.name,
                suggestion=f'write output_stream: "{tag}:{ref.name}"' if tag else "let a node convert it",
            )


def _differ(wanted: type, found: type) -> bool:
    return object not in {wanted, found} and not issubclass(found, wanted)


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
