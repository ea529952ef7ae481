"""Validation of a graph file without running user code."""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import Final

from ovmstrio.config.documents import Findings, InvalidValue, Located, did_you_mean, sorted_by_line
from ovmstrio.core.errors import ConfigError, Problem
from ovmstrio.core.generation import Task
from ovmstrio.graphs.calculator import ContractError, NodeContract
from ovmstrio.graphs.calculators import calculator_names, find_calculator
from ovmstrio.graphs.calculators.text import LOOPBACK, TEXT_CALCULATORS, read_node_options
from ovmstrio.graphs.graph_config import (
    FILE_INVALID,
    HANDLER_MISSING,
    INITIALIZATION,
    INTERNAL,
    NODE_NAME_MISSING,
    NODE_NAME_TAKEN,
    NODE_OPTIONS_MISSING,
    NOT_IMPLEMENTED,
    REQUEST_INPUTS,
    REQUEST_MISSING,
    REQUEST_OUTPUTS,
    RESPONSE_MISSING,
    GraphConfig,
    NodeConfig,
    Port,
    StreamRef,
)
from ovmstrio.graphs.graph_file import parse_graph_text
from ovmstrio.graphs.packets import (
    PYTHON_TENSOR_TAG,
    REQUEST_PAYLOAD_TAG,
    RESPONSE_PAYLOAD_TAG,
    TFLITE_TAG,
    stream_type,
    tag_of_type,
    type_name,
)
from ovmstrio.graphs.policies import policy_names
from ovmstrio.graphs.stream_refs import parse_tag_index
from ovmstrio.util.regular_files import is_file, is_folder, read_regular_text

# Graph inputs, outputs and cycles

_REQUEST: Final = "REQUEST"
_RESPONSE: Final = "RESPONSE"


def _check_graph_streams(graph: GraphConfig, findings: Findings) -> None:
    for kind, refs in (("input_stream", graph.inputs), ("output_stream", graph.outputs)):
        if not refs:
            findings.refuse(
                Located(None, 1, kind),
                f"{INTERNAL} - having less than one input or output is disallowed",
                suggestion=f'add {kind}: "OVMS_PY_TENSOR:name" outside the nodes',
            )
        for ref in refs:
            if ref.port.tag.startswith(TFLITE_TAG):
                message = f"{NOT_IMPLEMENTED} - streams tagged {ref.port.tag} are not supported"
                findings.refuse(ref.at, message, suggestion=f'write "OVTENSOR:{ref.name}"')
    _check_messages(graph, findings)
    _check_payloads(graph, findings)


def _check_messages(graph: GraphConfig, findings: Findings) -> None:
    request, response = _tagged(graph.inputs, _REQUEST), _tagged(graph.outputs, _RESPONSE)
    only_input, only_output = _only_stream_hint("input", _REQUEST), _only_stream_hint("output", _RESPONSE)
    if request and not response:
        at = Located(None, request.line, "output_stream")
        findings.refuse(at, f"{RESPONSE_MISSING} - the graph has a REQUEST input", suggestion=only_output)
    if response and not request:
        at = Located(None, response.line, "input_stream")
        findings.refuse(at, f"{REQUEST_MISSING} - the graph has a RESPONSE output", suggestion=only_input)
    if request is None:
        return
    if len(graph.outputs) > 1:
        found, message = str(len(graph.outputs)), f"{REQUEST_OUTPUTS} - a graph with a REQUEST input has one output"
        findings.refuse(graph.outputs[1].at, message, expected="1", found=found, suggestion=only_output)
    if len(graph.inputs) > 1:
        found, message = str(len(graph.inputs)), f"{REQUEST_INPUTS} - a graph with a REQUEST input has one input"
        other = next(ref for ref in graph.inputs if ref is not request)
        findings.refuse(other.at, message, expected="1", found=found, suggestion=only_input)


def _check_payloads(graph: GraphConfig, findings: Findings) -> None:
    request, response = _tagged(graph.inputs, REQUEST_PAYLOAD_TAG), _tagged(graph.outputs, RESPONSE_PAYLOAD_TAG)
    if request is None and response is None:
        return
    for kind, tag, refs, found in (
        ("input", REQUEST_PAYLOAD_TAG, graph.inputs, request),
        ("output", RESPONSE_PAYLOAD_TAG, graph.outputs, response),
    ):
        if found is None or len(refs) > 1:
            other = next((ref for ref in refs if ref is not found), None)
            line = other.line if other is not None else (request or response or graph.inputs[0]).line
            message = f"{FILE_INVALID} - a graph for raw HTTP requests has one {kind}, tagged {tag}"
            found_text = ", ".join(f"{ref.port}:{ref.name}" for ref in refs)
            at = Located(None, line, f"{kind}_stream")
            findings.refuse(
                at, message, expected=f"{tag}:name", found=found_text, suggestion=_only_stream_hint(kind, tag)
            )


def _tagged(refs: tuple[StreamRef, ...], prefix: str) -> StreamRef | None:
    payload = f"{prefix}_PAYLOAD"  # an HTTP document, not an inference message
    found = (ref for ref in refs if ref.port.tag.startswith(prefix) and not ref.port.tag.startswith(payload))
    return next(found, None)


def _only_stream_hint(direction: str, tag: str) -> str:
    return f'use "{tag}:name" as the only {direction}_stream of the graph'


def _check_cycles(graph: GraphConfig, findings: Findings) -> None:
    edges = _edges(graph)
    settled: set[int] = set()
    for start in range(len(graph.nodes)):
        if start not in settled:
            _visit(start, edges, settled, graph, findings)


def _edges(graph: GraphConfig) -> list[list[tuple[int, StreamRef]]]:
    """Return, for each node, the nodes it feeds and their inputs, without back edges."""
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
    """Visit all nodes that a node feeds, without recursion because graphs can be long."""
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
            _report_cycle(graph, path[path.index(number) :], ref, findings)
        elif number not in settled:
            path.append(number)
            ahead.append(iter(edges[number]))


def _report_cycle(graph: GraphConfig, cycle: list[int], ref: StreamRef, findings: Findings) -> None:
    names = " -> ".join(graph.nodes[number].canonical_name for number in [*cycle, cycle[0]])
    tag_index = f"{ref.port.tag}:{ref.port.index}"
    findings.refuse(
        ref.at,
        f'{INITIALIZATION} - INVALID_ARGUMENT: calculator stream cycle detected: {names} by stream "{ref.name}"',
        suggestion=f'add input_stream_info {{ tag_index: "{tag_index}" back_edge: true }} to that node',
    )


# Generators

_SYNCHRONIZING: Final = frozenset(
    {"DefaultInputStreamHandler", "EarlyCloseInputStreamHandler", "SyncSetInputStreamHandler"}
)


def _check_generators(graph: GraphConfig, findings: Findings) -> None:
    """Report LOOPBACKs that cannot work; warn about generators that block each other or differ in length."""
    origins = _origins(graph)
    for node in graph.nodes:
        _check_own_loop(node, findings)
        fed = [(ref, origins.get(ref.name, frozenset())) for ref in _data_inputs(node)]
        above = sorted({name for _, names in fed for name in names})
        if above and _has_loop(node):
            ref = next(ref for ref, names in fed if names)
            _warn_of_nested_generators(node, ref, above, findings)
        elif len({names for _, names in fed}) > 1 and node.policy.handler in _SYNCHRONIZING:
            ref = next(ref for ref, names in fed if names)
            _warn_of_different_lengths(node, ref, above, findings)


def _has_loop(node: NodeConfig) -> bool:
    return any(ref.port == LOOPBACK for ref in node.inputs)


def _data_inputs(node: NodeConfig) -> list[StreamRef]:
    return [ref for ref in node.sorted_inputs if ref.port != LOOPBACK and ref.port not in node.back_edges]


def _origins(graph: GraphConfig) -> Mapping[str, frozenset[str]]:
    """Return, for each stream, the nodes with a LOOPBACK that its packets come from; the graph may have cycles."""
    found: dict[str, frozenset[str]] = {}
    is_settled = False
    while not is_settled:
        is_settled = True
        for node in graph.nodes:
            above = frozenset[str]().union(*(found.get(ref.name, frozenset()) for ref in _data_inputs(node)))
            own = frozenset({node.canonical_name}) if _has_loop(node) else frozenset[str]()
            for ref in node.outputs:
                if found.get(ref.name, frozenset()) != above | own:
                    found[ref.name] = above | own
                    is_settled = False
    return found


def _check_own_loop(node: NodeConfig, findings: Findings) -> None:
    read = [ref for ref in node.inputs if ref.port == LOOPBACK]
    made = {ref.name for ref in node.outputs if ref.port == LOOPBACK}
    for ref in read:
        if made and ref.name not in made:
            findings.refuse(
                ref.at,
                f'{INITIALIZATION} - INVALID_ARGUMENT: the generator of node "{node.canonical_name}" would stop after '
                "its first value: its LOOPBACK input and output are different streams",
                expected=f"LOOPBACK:{min(made)}",
                found=f"LOOPBACK:{ref.name}",
                suggestion="use the same stream name for LOOPBACK input and output",
            )


def _warn_of_nested_generators(node: NodeConfig, ref: StreamRef, above: list[str], findings: Findings) -> None:
    findings.warn(
        ref.at,
        f'node "{node.canonical_name}" has a LOOPBACK and is fed by {_quoted(above)}, which also has one: if both '
        "yield several values, the second generator still runs when its next input arrives, and the call fails with "
        "RESOURCE_EXHAUSTED",
        "yield a single value in one of them, or return lists",
    )


def _warn_of_different_lengths(node: NodeConfig, ref: StreamRef, above: list[str], findings: Findings) -> None:
    findings.warn(
        ref.at,
        f'node "{node.canonical_name}" synchronizes inputs, and {_quoted(above)} may yield more values on some of '
        "them: values without a partner at their timestamp wait for the next request or the end of the stream",
        'use input_stream_handler { input_stream_handler: "ImmediateInputStreamHandler" }, and check input names',
    )


def _quoted(names: list[str]) -> str:
    return " and ".join(f'"{name}"' for name in names)


# Input stream handlers

_SYNC_SET: Final = "SyncSetInputStreamHandler"
_UNSYNCHRONIZED: Final = frozenset({"ImmediateInputStreamHandler", "MuxInputStreamHandler"})
_INVALID: Final = f"{INITIALIZATION} - INVALID_ARGUMENT"


def _check_handlers(node: NodeConfig, policies: Collection[str], findings: Findings) -> None:
    policy = node.policy
    check = _HandlerCheck(node, findings)
    if policy.handler not in policies:
        fix = did_you_mean(policy.handler, policies, otherwise=f"known: {', '.join(sorted(policies))}")
        details = f'{INITIALIZATION} - NOT_FOUND: "{policy.handler}" is not a registered input stream handler.'
        check.refuse(details, policy.line, found=policy.handler, fix=fix)
        return
    if policy.handler == _SYNC_SET:
        check.sync_sets()
    elif policy.handler == "TimestampAlignInputStreamHandler":
        check.align()
    elif policy.handler == "FixedSizeInputStreamHandler":
        check.fixed_size()
    elif policy.options is not None and getattr(policy.options, "batch_size", 1) != 1:
        found = str(policy.options.batch_size)
        details = f"{NOT_IMPLEMENTED} - batch_size of {policy.handler} is {found}"
        check.refuse(details, policy.line, expected="1", found=found, fix="remove batch_size")
    check.loopback()


class _HandlerCheck:
    def __init__(self, node: NodeConfig, findings: Findings) -> None:
        self.node = node
        self.findings = findings
        self.ports = {ref.port for ref in node.inputs}
        self.sets: list[set[Port]] = []

    def refuse(self, message: str, line: int, *, expected: str = "", found: str = "", fix: str = "") -> None:
        at = Located(None, line or self.node.line, f"{self.node.at.path}.input_stream_handler")
        self.findings.refuse(at, message, expected=expected, found=found, suggestion=fix)

    def sync_sets(self) -> None:
        options, lines = self.node.policy.options, iter(self.node.policy.tag_lines)
        for declared in options.sync_set if options is not None else ():
            members: set[Port] = set()
            for text in declared.tag_index:
                line = next(lines, self.node.policy.line)
                port = self._port(text, "sync_set", line)
                if port is not None and port in chain(members, *self.sets):
                    details = f'{_INVALID}: input "{text}" is in two sync sets'
                    self.refuse(details, line, found=text, fix="remove it from one of them")
                elif port is not None:
                    members.add(port)
            self.sets.append(members)

    def align(self) -> None:
        options, line, lines = self.node.policy.options, self.node.policy.line, iter(self.node.policy.tag_lines)
        if options is None or not options.HasField("timestamp_base_tag_index"):
            extension = "[mediapipe.TimestampAlignInputStreamHandlerOptions.ext]"
            fix = f'add options {{ {extension} {{ timestamp_base_tag_index: "TAG:0" }} }}'
            self.refuse(f"{_INVALID}: the handler needs timestamp_base_tag_index", line, fix=fix)
        else:
            self._port(options.timestamp_base_tag_index, "timestamp_base_tag_index", next(lines, line))

    def fixed_size(self) -> None:
        options = self.node.policy.options
        if options is not None and not 1 <= options.target_queue_size <= options.trigger_queue_size:
            self.refuse(
                f"{_INVALID}: invalid queue sizes", self.node.policy.line,
                expected="1 <= target_queue_size <= trigger_queue_size",
                found=f"target_queue_size {options.target_queue_size}, trigger_queue_size {options.trigger_queue_size}",
            )  # fmt: skip

    def loopback(self) -> None:
        if LOOPBACK not in self.ports or len(self.ports) == 1 or self.node.policy.handler in _UNSYNCHRONIZED:
            return
        own_set = next((members for members in self.sets if LOOPBACK in members), None)
        if own_set is None:
            own_set = self.ports - set(chain(*self.sets))
        if own_set == {LOOPBACK}:
            return
        line = self.node.policy.line or next(ref.line for ref in self.node.inputs if ref.port == LOOPBACK)
        option = '[mediapipe.SyncSetInputStreamHandlerOptions.ext] { sync_set { tag_index: "LOOPBACK:0" } }'
        self.refuse(
            f"{_INVALID}: every request would hang: LOOPBACK is synchronized with "
            f"{', '.join(str(port) for port in sorted(own_set - {LOOPBACK}))}",
            line, expected="LOOPBACK alone in a sync set", found=self.node.policy.handler,
            fix=f'use input_stream_handler {{ input_stream_handler: "{_SYNC_SET}" options {{ {option} }} }}',
        )  # fmt: skip

    def _port(self, text: str, option: str, line: int) -> Port | None:
        try:
            port = parse_tag_index(text)
        except InvalidValue as error:
            self.refuse(f"{_INVALID}: {error.message}", line, expected=error.expected, found=text, fix=error.suggestion)
            return None
        if port in self.ports:
            return port
        names = [str(known) for known in sorted(self.ports)]
        self.refuse(
            f'{_INVALID}: {option} "{text}" is not an input of the node', line,
            expected=f"one of its inputs: {', '.join(names) or 'none'}", found=text or "nothing",
            fix=did_you_mean(str(port), names),
        )  # fmt: skip
        return None


# Streams between nodes

_SERVER_SIDE = "py"

_NO_OUTPUT = "Failed to add mediapipe graph output stream"


def check_wiring(
    graph: GraphConfig, contracts: Mapping[str, NodeContract | ContractError], policies: Collection[str]
) -> list[Problem]:
    """Return all problems of the connections between nodes.

    Args:
        graph: the parsed graph file.
        contracts: contracts by canonical node name; nodes without one are not checked.
        policies: the known input stream handlers.
    """
    findings = Findings(graph.file)
    _check_graph_streams(graph, findings)
    _report_contracts(graph, contracts, findings)
    known = {name: contract for name, contract in contracts.items() if isinstance(contract, NodeContract)}
    producers = _find_producers(graph, known, findings)
    for node in graph.nodes:
        check = _NodeCheck(node, known.get(node.canonical_name, NodeContract()), producers, findings)
        check.inputs()
        check.side_inputs(graph)
        _check_handlers(node, policies, findings)
    _check_outputs(graph, producers, findings)
    _check_cycles(graph, findings)
    _check_generators(graph, findings)
    return list(findings.all)


def _report_contracts(
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
    producers: _Producers
    findings: Findings

    def inputs(self) -> None:
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
        hint = "add it to a node's output_stream or the graph's input_stream"
        fix = did_you_mean(ref.name, self.producers.streams, otherwise=hint)
        self.findings.refuse(ref.at, f"{INITIALIZATION} - {details}", suggestion=fix)

    def _refuse_type(self, ref: StreamRef, wanted: type, producer: _Producer) -> None:
        given = type_name(producer.kind)
        self.findings.refuse(
            ref.at,
            f'{_INVALID}: Input stream "{ref.name}" of calculator "{self.node.canonical_name}" expects packets '
            f"of type {type_name(wanted)} but the connected output stream will contain packets of type {given}",
            expected=type_name(wanted),
            found=f"{given} of {producer.node}",
            suggestion=_conversion(wanted, producer.kind),
        )

    def _warn_input(self, ref: StreamRef, wanted: type, producer: _Producer) -> None:
        tag = tag_of_type(wanted)
        self.findings.warn(
            replace(ref.at, line=producer.ref.line),
            f'every request will fail: input stream "{ref.name}" of the graph carries {type_name(producer.kind)}, '
            f'node "{self.node.canonical_name}" accepts {type_name(wanted)}',
            f'write input_stream: "{tag}:{ref.name}"' if tag else "",
        )

    def side_inputs(self, graph: GraphConfig) -> None:
        given = {ref.name for ref in graph.side_inputs}
        for ref in self.node.side_inputs:
            producer = self.producers.side.get(ref.name)
            if producer is not None and producer.node is not None:
                self._check_side_type(ref, producer)
            elif ref.port.tag == "PYTHON_NODE_RESOURCES":
                if ref.name != _SERVER_SIDE:
                    text = f'every request will fail: side packet "{ref.name}" is required, the server has only "py"'
                    self.findings.warn(ref.at, text, f'write "PYTHON_NODE_RESOURCES:{_SERVER_SIDE}"')
            elif ref.name not in given and ref.port not in self.contract.optional_side:
                text = f'requests without a parameter "{ref.name}" will fail: no node produces that side packet'
                hint = f'add a node with output_side_packet: "TAG:{ref.name}"'
                fix = did_you_mean(ref.name, self.producers.side, otherwise=hint)
                self.findings.warn(ref.at, text, fix)

    def _check_side_type(self, ref: StreamRef, producer: _Producer) -> None:
        wanted = self.contract.side_inputs.get(ref.port, object)
        if _differ(wanted, producer.kind):
            self.findings.refuse(
                ref.at,
                f'{_INVALID}: side packet "{ref.name}" of node "{self.node.canonical_name}" has the wrong type',
                expected=type_name(wanted),
                found=f"{type_name(producer.kind)} of {producer.node}",
            )


def _conversion(wanted: type, found: type) -> str:
    if {tag_of_type(wanted), tag_of_type(found)} == {PYTHON_TENSOR_TAG, "OVTENSOR"}:
        return "add a PyTensorOvTensorConverterCalculator between the two nodes"
    return ""


def _check_outputs(graph: GraphConfig, producers: _Producers, findings: Findings) -> None:
    for ref in graph.outputs:
        producer = producers.streams.get(ref.name)
        kind = stream_type(ref.port.tag)
        if producer is None:
            details = f'NOT_FOUND: Unable to attach observer to output stream "{ref.name}" because it doesn\'t exist.'
            fix = did_you_mean(ref.name, producers.streams, otherwise="add it to a node's output_stream")
            findings.refuse(ref.at, f"{_NO_OUTPUT} - {details}", suggestion=fix)
        elif _differ(kind, producer.kind):
            tag = tag_of_type(producer.kind)
            findings.refuse(
                ref.at,
                f'{_INVALID}: output stream "{ref.name}" of the graph is tagged as {type_name(kind)}, but carries '
                f"{type_name(producer.kind)}",
                expected=f"{tag}:{ref.name}" if tag else "an output of another type",
                found=f"{ref.port.tag}:{ref.name}" if ref.port.tag else ref.name,
                suggestion=f'write output_stream: "{tag}:{ref.name}"' if tag else "add a node that converts it",
            )


def _differ(wanted: type, found: type) -> bool:
    return object not in {wanted, found} and not issubclass(found, wanted)


@dataclass(frozen=True, slots=True)
class _Producer:
    """Producer of a stream: a node by canonical name, or the graph (None); ``kind`` is the packet type."""

    node: str | None
    ref: StreamRef
    kind: type


@dataclass(frozen=True, slots=True)
class _Producers:
    streams: dict[str, _Producer] = field(default_factory=dict)
    side: dict[str, _Producer] = field(default_factory=dict)


def _find_producers(graph: GraphConfig, contracts: Mapping[str, NodeContract], findings: Findings) -> _Producers:
    found = _Producers()
    for ref in graph.inputs:
        found.streams.setdefault(ref.name, _Producer(None, ref, stream_type(ref.port.tag)))
    for ref in graph.side_inputs:
        found.side.setdefault(ref.name, _Producer(None, ref, object))
    for node in graph.nodes:
        contract = contracts.get(node.canonical_name, NodeContract())
        for made, refs, types, what in (
            (found.streams, node.outputs, contract.outputs, "Output Stream"),
            (found.side, node.side_outputs, contract.side_outputs, "Output Side Packet"),
        ):
            for ref in refs:
                producer = _Producer(node.canonical_name, ref, types.get(ref.port, object))
                other = made.setdefault(ref.name, producer)
                if other is not producer:
                    message = f'{INITIALIZATION} - UNKNOWN: {what} "{ref.name}" defined twice.'
                    fix = f"use another name; line {other.ref.line} defines this one"
                    findings.refuse(ref.at, message, suggestion=fix)
    return found


# Graph files

_PYTHON: Final = "PythonExecutorCalculator"
_PYTHON_OPTIONS: Final = "mediapipe.PythonExecutorCalculatorOptions"
_REPORTED_BY_PYTHON_CHECKS: Final = (NODE_NAME_MISSING, NODE_NAME_TAKEN, NODE_OPTIONS_MISSING)
_CANNOT_OPEN: Final = "File not found or cannot open"


@dataclass(frozen=True, slots=True)
class GraphValidation:
    """Parsed graph file (None if it cannot be parsed) and its problems by line."""

    config: GraphConfig | None
    problems: tuple[Problem, ...]

    @property
    def errors(self) -> tuple[Problem, ...]:
        """The problems that prevent the graph from loading."""
        return tuple(problem for problem in self.problems if problem.severity == "error")


def validate_graph(graph_path: Path, directory: Path | None = None) -> GraphValidation:
    """Parse a graph file and check its nodes and their connections. Reads the disk.

    Relative paths in the file start at ``directory``, by default the file's folder.
    """
    file = str(graph_path)
    try:
        content = read_regular_text(graph_path)
    except OSError as error:
        return GraphValidation(None, (Problem(f"{_CANNOT_OPEN} - {error.strerror or error}", file),))
    except UnicodeDecodeError as error:
        return GraphValidation(None, (Problem(f"{_CANNOT_OPEN} - not UTF-8: {error.reason}", file),))
    reading = parse_graph_text(content, file)
    problems = list(reading.problems)
    if reading.config is not None:
        certain = [node for node in reading.config.nodes if node.canonical_name not in reading.doubtful]
        results = ((node, _contract(node) if node in certain else _unknown(node)) for node in reading.config.nodes)
        contracts = {node.canonical_name: contract for node, contract in results if contract is not None}
        problems += check_wiring(reading.config, contracts, policy_names())
        problems += _check_text_models(reading.config, contracts, directory or graph_path.parent)
        problems += _check_python_nodes(reading.config, certain, directory or graph_path.parent)
    return GraphValidation(reading.config, sorted_by_line(problems))


def examine_graph(graph_path: Path, directory: Path | None = None) -> GraphValidation:
    """Validate a graph file and its Python nodes' source, for problems that show at the first call. Reads the disk."""
    validated = validate_graph(graph_path, directory)
    if validated.config is None:
        return validated
    findings = Findings(validated.config.file)
    for node in validated.config.nodes:
        file = _source_of(node, directory or graph_path.parent)
        if file is not None and not _has_loop(node) and _yields(file):
            hint = 'add input_stream and output_stream "LOOPBACK:loopback", a back edge and a SyncSetInputStreamHandler'
            message = f'execute of node "{node.canonical_name}" yields, but LOOPBACK is not defined in the node'
            findings.refuse(node.at, message, found=str(file), suggestion=hint)
    return replace(validated, problems=sorted_by_line([*validated.problems, *findings.all]))


def _source_of(node: NodeConfig, directory: Path) -> Path | None:
    options = next((each for each in node.node_options if each.DESCRIPTOR.full_name == _PYTHON_OPTIONS), None)
    return None if options is None else _handler_file(options.handler_path, directory)


_NODE_CLASS: Final = "OvmsPythonModel"


def _yields(file: Path) -> bool:
    """Return whether ``execute`` of a node's class, or of its base class in the same file, is a generator."""
    try:
        tree = ast.parse(read_regular_text(file))
    except (OSError, ValueError, SyntaxError, RecursionError):
        return False
    classes = {each.name: each for each in tree.body if isinstance(each, ast.ClassDef)}
    waiting, seen = [_NODE_CLASS], set[str]()
    while waiting:
        name = waiting.pop(0)
        if name in seen or name not in classes:
            continue
        seen.add(name)
        methods = (each for each in classes[name].body if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef))
        execute = next((each for each in methods if each.name == "execute"), None)
        if execute is not None:
            return not execute.decorator_list and _is_generator(execute)
        waiting += [base.id for base in classes[name].bases if isinstance(base, ast.Name)]
    return False


def _is_generator(function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    waiting: list[ast.AST] = list(function.body)
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.Yield | ast.YieldFrom):
            return True
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Lambda):
            waiting += ast.iter_child_nodes(node)
    return False


def _handler_file(handler_path: str, directory: Path) -> Path:
    return directory / handler_path.replace("\\", "/")


def _contract(node: NodeConfig) -> NodeContract | ContractError | None:
    """Return the node's contract; None for errors that ``_check_python_nodes`` reports."""
    try:
        kind = find_calculator(node.calculator)
    except ConfigError as error:
        return ContractError(error.message, code="NOT_FOUND")
    if kind is None:
        return _unknown(node)
    try:
        return kind.contract(node)
    except ContractError as error:
        return None if error.message.startswith(_REPORTED_BY_PYTHON_CHECKS) else error


def _unknown(node: NodeConfig) -> ContractError | None:
    """Return the error for an unknown calculator; None if the calculator exists."""
    names = calculator_names()
    if node.calculator in names:
        return None
    fix = did_you_mean(node.calculator, names, otherwise=f"known: {', '.join(names)}")
    return ContractError(f'Unable to find Calculator "{node.calculator}"', fix=fix, code="NOT_FOUND")


def _check_text_models(
    graph: GraphConfig, contracts: Mapping[str, NodeContract | ContractError], directory: Path
) -> list[Problem]:
    findings = Findings(graph.file)
    options: list[Problem] = []
    for node in graph.nodes if len(graph.nodes) > 1 else ():
        calculator = TEXT_CALCULATORS.get(node.calculator)
        if calculator is None or not isinstance(contracts.get(node.canonical_name), NodeContract):
            continue
        if calculator.task is not Task.TEXT_GENERATION:
            findings.refuse(
                node.at,
                f'node "{node.canonical_name}": a {node.calculator} must be the only node of its graph',
                expected="1 node",
                found=f"{len(graph.nodes)} nodes",
                suggestion="move it to a separate graph",
            )
            continue
        _check_text_node(graph, node, findings)
        options += read_node_options(node, calculator.task, calculator.options, directory, findings)[1]
    return [*findings.all, *options]


def _check_text_node(graph: GraphConfig, node: NodeConfig, findings: Findings) -> None:
    who = f'node "{node.canonical_name}": a {node.calculator} among other nodes'
    if not graph.payload:
        findings.refuse(
            node.at,
            f"{who} needs a graph for raw HTTP requests",
            suggestion=_only_stream_hint("input", REQUEST_PAYLOAD_TAG),
        )
    if not {LOOPBACK} <= {ref.port for ref in node.inputs} & {ref.port for ref in node.outputs}:
        findings.refuse(
            node.at,
            f"{who} streams its response, and has no LOOPBACK",
            suggestion='add input_stream and output_stream "LOOPBACK:name", a back edge and a '
            "SyncSetInputStreamHandler",
        )


def _check_python_nodes(graph: GraphConfig, certain: Sequence[NodeConfig], directory: Path) -> list[Problem]:
    findings = Findings(graph.file)
    first: dict[str, int] = {}
    for node in graph.nodes:
        if node.calculator != _PYTHON or node not in certain:
            continue
        if not node.name:
            findings.refuse(node.at, f"{NODE_NAME_MISSING} - a Python node needs a name", suggestion='add name: "..."')
        elif node.name in first:
            fix = f"use another name; the node of line {first[node.name]} has this one"
            at = Located(None, node.line, f"{node.at.path}.name")
            findings.refuse(at, f'{NODE_NAME_TAKEN} - duplicate name "{node.name}"', suggestion=fix)
        first.setdefault(node.name, node.line)
        _check_options(node, directory, findings)
    return list(findings.all)


def _check_options(node: NodeConfig, directory: Path, findings: Findings) -> None:
    options = next((each for each in node.node_options if each.DESCRIPTOR.full_name == _PYTHON_OPTIONS), None)
    if options is None:
        fix = f'add node_options {{ [type.googleapis.com/{_PYTHON_OPTIONS}]: {{ handler_path: "model.py" }} }}'
        where = f'node "{node.canonical_name}" has no node_options with a handler_path'
        findings.refuse(node.at, f"{NODE_OPTIONS_MISSING} - {where}", suggestion=fix)
        return
    file = _handler_file(options.handler_path, directory)
    if not is_file(file):
        nearby = sorted(each.name for each in file.parent.glob("*.py")) if is_folder(file.parent) else []
        findings.refuse(
            Located(None, node.options_line or node.line, f"{node.at.path}.node_options[0]"),
            f'{HANDLER_MISSING} - handler_path of node "{node.canonical_name}"',
            expected="a Python file",
            found=str(file),
            suggestion=did_you_mean(file.name, nearby, otherwise=f"paths are relative to {directory}"),
        )
