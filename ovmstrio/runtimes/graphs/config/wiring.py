"""Whether the nodes of a graph fit together: what the file alone cannot say, for it takes the nodes' contracts."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from ovmstrio.config.findings import did_you_mean
from ovmstrio.core.errors import Problem
from ovmstrio.runtimes.graphs.calculator import ContractError, NodeContract
from ovmstrio.runtimes.graphs.config.borders import check_borders
from ovmstrio.runtimes.graphs.config.cycles import check_cycles
from ovmstrio.runtimes.graphs.config.found import INITIALIZATION, GraphFindings
from ovmstrio.runtimes.graphs.config.handlers import check_handlers
from ovmstrio.runtimes.graphs.config.producers import Producer, Producers, find_producers
from ovmstrio.runtimes.graphs.config.types import PYTHON_TENSOR, stream_type, tag_for, type_name
from ovmstrio.runtimes.graphs.config.values import GraphConfig, NodeConfig, StreamRef

__all__ = ["check_wiring"]

_SERVER_SIDE = "py"
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
    findings = GraphFindings(graph.file)
    check_borders(graph, findings)
    _tell_contracts(graph, contracts, findings)
    known = {name: contract for name, contract in contracts.items() if isinstance(contract, NodeContract)}
    producers = find_producers(graph, known, findings)
    for number, node in enumerate(graph.nodes):
        check = _NodeCheck(f"node[{number}]", node, known.get(node.canonical_name, NodeContract()), producers, findings)
        check.inputs()
        check.side_inputs(graph)
        check_handlers(number, node, policies, findings)
    _check_outputs(graph, producers, findings)
    check_cycles(graph, findings)
    return findings.problems


def _tell_contracts(
    graph: GraphConfig, contracts: Mapping[str, NodeContract | ContractError], findings: GraphFindings
) -> None:
    for number, node in enumerate(graph.nodes):
        contract = contracts.get(node.canonical_name)
        if isinstance(contract, ContractError):
            details = f'{contract.code}: {contract.message} (node "{node.canonical_name}")'
            findings.add(INITIALIZATION, details, node.line, f"node[{number}]", fix=contract.fix)


@dataclass(frozen=True, slots=True)
class _NodeCheck:
    path: str
    node: NodeConfig
    contract: NodeContract
    producers: Producers
    findings: GraphFindings

    def inputs(self) -> None:
        """See that each input has a producer, of the right type where another node is."""
        for place, ref in enumerate(self.node.inputs):
            path = f"{self.path}.input_stream[{place}]"
            producer = self.producers.streams.get(ref.name)
            wanted = self.contract.inputs.get(ref.port, object)
            if producer is None:
                self._refuse_missing(ref, path)
            elif _differ(wanted, producer.kind):
                (self._warn_input if producer.node is None else self._refuse_type)(ref, wanted, producer, path)

    def _refuse_missing(self, ref: StreamRef, path: str) -> None:
        where = f'Input Stream "{ref.name}" for node "{self.node.canonical_name}"'
        details = f"{where} does not have a corresponding output stream."
        hint = "let a node or the graph's input_stream give it"
        fix = did_you_mean(ref.name, self.producers.streams, otherwise=hint)
        self.findings.add(INITIALIZATION, details, ref.line, path, fix=fix)

    def _refuse_type(self, ref: StreamRef, wanted: type, producer: Producer, path: str) -> None:
        given = type_name(producer.kind)
        self.findings.add(
            INITIALIZATION,
            f'INVALID_ARGUMENT: Input stream "{ref.name}" of calculator "{self.node.canonical_name}" expects packets '
            f"of type {type_name(wanted)} but the connected output stream will contain packets of type {given}",
            ref.line, path, expected=type_name(wanted), found=f"{given} of {producer.node}",
            fix=_conversion(wanted, producer.kind),
        )  # fmt: skip

    def _warn_input(self, ref: StreamRef, wanted: type, producer: Producer, path: str) -> None:
        """Tell what only requests will show: the graph's own tag does not take part in the check of types."""
        tag = tag_for(wanted)
        self.findings.warn(
            f'every request will fail: input stream "{ref.name}" of the graph carries {type_name(producer.kind)}, '
            f'and node "{self.node.canonical_name}" takes {type_name(wanted)}',
            producer.ref.line, path, fix=f'write input_stream: "{tag}:{ref.name}"' if tag else "",
        )  # fmt: skip

    def side_inputs(self, graph: GraphConfig) -> None:
        """See that side packets have the right type, and tell of those that nothing but a request can give."""
        given = {ref.name for ref in graph.side_inputs}
        for place, ref in enumerate(self.node.side_inputs):
            path = f"{self.path}.input_side_packet[{place}]"
            producer = self.producers.side.get(ref.name)
            if producer is not None and producer.node is not None:
                self._check_side_type(ref, producer, path)
            elif ref.port.tag == "PYTHON_NODE_RESOURCES":
                self._check_resources(ref, path)
            elif ref.name not in given:
                text = f'requests without a parameter "{ref.name}" will fail: no node produces that side packet'
                hint = f'add a node with output_side_packet: "TAG:{ref.name}"'
                fix = did_you_mean(ref.name, self.producers.side, otherwise=hint)
                self.findings.warn(text, ref.line, path, fix=fix)

    def _check_side_type(self, ref: StreamRef, producer: Producer, path: str) -> None:
        wanted = self.contract.side_inputs.get(ref.port, object)
        if _differ(wanted, producer.kind):
            self.findings.add(
                INITIALIZATION,
                f'INVALID_ARGUMENT: side packet "{ref.name}" is not what node "{self.node.canonical_name}" takes',
                ref.line, path, expected=type_name(wanted), found=f"{type_name(producer.kind)} of {producer.node}",
            )  # fmt: skip

    def _check_resources(self, ref: StreamRef, path: str) -> None:
        if ref.name != _SERVER_SIDE:
            text = f'every request will fail: side packet "{ref.name}" is required, and the server provides "py"'
            self.findings.warn(text, ref.line, path, fix=f'write "PYTHON_NODE_RESOURCES:{_SERVER_SIDE}"')


def _conversion(wanted: type, found: type) -> str:
    if {tag_for(wanted), tag_for(found)} == {PYTHON_TENSOR, "OVTENSOR"}:
        return "put a PyTensorOvTensorConverterCalculator between the two"
    return ""


def _check_outputs(graph: GraphConfig, producers: Producers, findings: GraphFindings) -> None:
    for place, ref in enumerate(graph.outputs):
        path = f"output_stream[{place}]"
        producer = producers.streams.get(ref.name)
        kind = stream_type(ref.port.tag)
        if producer is None:
            details = f'NOT_FOUND: Unable to attach observer to output stream "{ref.name}" because it doesn\'t exist.'
            fix = did_you_mean(ref.name, producers.streams, otherwise="let a node have it as output_stream")
            findings.add(_NO_OUTPUT, details, ref.line, path, fix=fix)
        elif _differ(kind, producer.kind):
            tag = tag_for(producer.kind)
            findings.add(
                INITIALIZATION,
                f'INVALID_ARGUMENT: output stream "{ref.name}" of the graph is tagged as {type_name(kind)} and carries '
                f"{type_name(producer.kind)}",
                ref.line, path, expected=f"{tag}:{ref.name}" if tag else "an output of another type",
                found=f"{ref.port.tag}:{ref.name}" if ref.port.tag else ref.name,
                fix=f'write output_stream: "{tag}:{ref.name}"' if tag else "let a node convert it",
            )  # fmt: skip


def _differ(wanted: type, found: type) -> bool:
    return wanted is not found and object not in {wanted, found}
