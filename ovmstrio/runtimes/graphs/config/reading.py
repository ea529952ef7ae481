"""Read a graph file.

::

    text ── syntax (tree with lines) ── schema (what does not fit is told and left out) ── protobuf's own parser
         └─ pool directive              └────────────── lines ──────────────┐                    │ message
                                                                            GraphConfig  <───────┘
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, Final

from google.protobuf import text_format

from ovmstrio.core.errors import ConfigError, Problem
from ovmstrio.protocol.descriptors import POOL, message_class
from ovmstrio.runtimes.graphs.config.executors import check_executors
from ovmstrio.runtimes.graphs.config.found import FILE_INVALID, INITIALIZATION, GraphFindings
from ovmstrio.runtimes.graphs.config.nodes import read_nodes, read_policy
from ovmstrio.runtimes.graphs.config.places import Place, first_block, line_of, lines_of, places_of
from ovmstrio.runtimes.graphs.config.pool import PoolDirective, read_pool
from ovmstrio.runtimes.graphs.config.ports import PortReader
from ovmstrio.runtimes.graphs.config.schema import prune
from ovmstrio.runtimes.graphs.config.syntax import InvalidSyntax, parse
from ovmstrio.runtimes.graphs.config.values import GraphConfig, NodeConfig, PolicyConfig

__all__ = ["Reading", "examine_text", "read_graph"]

_GRAPH: Final = "mediapipe.CalculatorGraphConfig"
_QUEUE_SIZE: Final = 100
_IN_ORDER: Final = "InOrderOutputStreamHandler"
_BESIDE_CONTRACTS: Final = re.compile(r"node\[\d+\]\.(?:executor|output_stream_handler|input_stream_info)")


@dataclass(frozen=True, slots=True)
class Reading:
    """What a file says as far as it could be read.

    ``config`` is None where nothing could.  ``doubtful`` are the canonical names of nodes of which a part was left
    out, so that what else is said of them may be misleading.
    """

    config: GraphConfig | None
    problems: tuple[Problem, ...]
    doubtful: frozenset[str] = frozenset()


def read_graph(content: str, file: str) -> GraphConfig:
    """Read a graph file's text; ``file`` is how problems call it.

    Raises:
        ConfigError: it cannot be used; has every problem.
    """
    reading = examine_text(content, file)
    errors = [problem for problem in reading.problems if problem.severity == "error"]
    if errors or reading.config is None:
        raise ConfigError(errors)
    return reading.config


def examine_text(content: str, file: str) -> Reading:
    """Read as much of a graph file as can be read."""
    findings = GraphFindings(file)
    pool = read_pool(content, findings)
    try:
        entries = parse(content)
    except InvalidSyntax as error:
        findings.add(FILE_INVALID, error.message, error.line, expected=error.expected, found=error.found, fix=error.fix)
        return Reading(None, tuple(findings.problems))
    if not entries:
        findings.add(FILE_INVALID, "the file is empty", 1, expected="a graph", found="nothing")
        return Reading(None, tuple(findings.problems))
    before = len(findings.problems)
    pruned = prune(content, entries, _GRAPH, findings)
    message = _parse(pruned.text, findings)
    if message is None:
        return Reading(None, tuple(findings.problems))
    config = _build(message, Place(pruned.entries, 1), pool, findings)
    left_out = {problem.line for problem in findings.problems[before:] if not _BESIDE_CONTRACTS.match(problem.path)}
    ends = [content.count("\n", 0, entry.end) + 1 for entry in pruned.entries if entry.name == "node"]
    doubtful = _doubtful(config, ends, left_out) if len(ends) == len(config.nodes) else _all_names(config)
    return Reading(config, tuple(findings.problems), doubtful)


def _parse(text: str, findings: GraphFindings) -> Any:
    try:
        return text_format.Parse(text, message_class(_GRAPH)(), descriptor_pool=POOL)
    except text_format.ParseError as error:
        findings.add(FILE_INVALID, str(error), error.GetLine() or 1)
        return None


def _doubtful(config: GraphConfig, ends: list[int], left_out: set[int | None]) -> frozenset[str]:
    return frozenset(
        node.canonical_name
        for node, end in zip(config.nodes, ends, strict=True)
        if any(line is not None and node.line <= line <= end for line in left_out)
    )


def _all_names(config: GraphConfig) -> frozenset[str]:
    """Doubt every node: a list of nodes in one entry gives no single places."""
    return frozenset(node.canonical_name for node in config.nodes)


def _build(message: Any, place: Place, pool: PoolDirective, findings: GraphFindings) -> GraphConfig:
    reader = PortReader(findings)
    streams = {
        kind: reader.read(kind, getattr(message, kind), lines_of(place, kind))
        for kind in ("input_stream", "output_stream", "input_side_packet", "output_side_packet")
    }
    policy = read_policy(message, place, PolicyConfig())
    nodes = tuple(read_nodes(message, place, policy, findings))
    _check_output_handler(message, place, "", findings)
    for number, (node, at) in enumerate(zip(message.node, places_of(place, "node"), strict=True)):
        _check_output_handler(node, at, f"node[{number}].", findings)
    _check_pool(pool, nodes, findings)
    check_executors(message, place, findings)
    return GraphConfig(
        file=findings.file,
        inputs=streams["input_stream"],
        outputs=streams["output_stream"],
        side_inputs=streams["input_side_packet"],
        side_outputs=streams["output_side_packet"],
        nodes=nodes,
        max_queue_size=max(message.max_queue_size or _QUEUE_SIZE, -1),
        num_threads=message.num_threads,
        report_deadlock=message.report_deadlock,
        pool_size=pool.size,
    )


def _check_output_handler(message: Any, place: Place, path: str, findings: GraphFindings) -> None:
    name = message.output_stream_handler.output_stream_handler
    if name not in {"", _IN_ORDER}:
        findings.add(
            INITIALIZATION,
            f'NOT_FOUND: "{name}" is not a registered output stream handler.',
            line_of(first_block(place, "output_stream_handler"), "output_stream_handler"),
            f"{path}output_stream_handler", expected=_IN_ORDER, found=name, fix="remove it",
        )  # fmt: skip


def _check_pool(pool: PoolDirective, nodes: tuple[NodeConfig, ...], findings: GraphFindings) -> None:
    if not pool.size:
        return
    for number, node in enumerate(nodes):
        loops = [ref for ref in node.inputs if ref.port.tag.startswith("LOOPBACK")]
        if loops and node.calculator == "PythonExecutorCalculator":
            findings.add(
                FILE_INVALID,
                f'OVMS_GRAPH_QUEUE_MAX_SIZE is given, and node "{node.canonical_name}" has a LOOPBACK, which ends with '
                "each stream",
                pool.line, f"node[{number}].input_stream", fix="remove OVMS_GRAPH_QUEUE_MAX_SIZE",
            )  # fmt: skip
