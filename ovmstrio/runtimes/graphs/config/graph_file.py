"""Read a graph file, and the comments in it that ask for instances that are kept or name the streams of a chat.

::

    text ── parse_proto (fields) ── fit_message (what does not fit is told and left out) ── protobuf's own parser
         └─ pool directive              └────────── located values ─────────┐                    │ message
                                                                            GraphConfig  <───────┘
"""

from __future__ import annotations

import os
import re
import warnings
from dataclasses import dataclass, replace
from typing import Any, Final

from google.protobuf import text_format

from ovmstrio.config.findings import Findings
from ovmstrio.config.located import InvalidSyntax, Located
from ovmstrio.config.proto_fields import fit_message, parse_proto
from ovmstrio.core.errors import ConfigError, Problem
from ovmstrio.protocol.descriptors import POOL, message_class
from ovmstrio.runtimes.graphs.config.chat_roles import read_chat_roles
from ovmstrio.runtimes.graphs.config.executors import check_executors
from ovmstrio.runtimes.graphs.config.graph_config import GraphConfig, NodeConfig, PolicyConfig
from ovmstrio.runtimes.graphs.config.graph_messages import FILE_INVALID, INITIALIZATION
from ovmstrio.runtimes.graphs.config.node_reader import read_nodes, read_policy
from ovmstrio.runtimes.graphs.config.stream_refs import StreamReader

__all__ = ["PoolDirective", "Reading", "examine_text", "read_graph", "read_pool"]

_GRAPH: Final = "mediapipe.CalculatorGraphConfig"
_OPTIONS: Final = "mediapipe.CalculatorOptions"
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
    findings = Findings(file)
    pool = read_pool(content, findings)
    config = _read(content, pool, findings)
    if config is None:
        return Reading(None, findings.all)
    left_out = [problem.path for problem in findings.all if not _BESIDE_CONTRACTS.match(problem.path)]
    doubtful = frozenset(
        node.canonical_name
        for node in config.nodes
        if any(path == node.at.path or path.startswith(f"{node.at.path}.") for path in left_out)
    )
    _check_pool(pool, config.nodes, findings)
    return Reading(config, findings.all, doubtful)


def _read(content: str, pool: PoolDirective, findings: Findings) -> GraphConfig | None:
    try:
        fields = parse_proto(content)
    except InvalidSyntax as error:
        message, at = f"{FILE_INVALID} - {error.message}", Located(None, error.line or 1)
        findings.refuse(at, message, expected=error.expected, found=error.found, suggestion=error.suggestion)
        return None
    if not fields:
        findings.refuse(Located(None, 1), f"{FILE_INVALID} - the file is empty", expected="a graph", found="nothing")
        return None
    graph, options = (POOL.FindMessageTypeByName(name) for name in (_GRAPH, _OPTIONS))
    root, text = fit_message(content, fields, graph, findings, refusal=FILE_INVALID, options=options)
    try:
        with warnings.catch_warnings():
            # An escape that means nothing is kept as it is, of which Python's decoder warns.
            warnings.simplefilter("ignore", DeprecationWarning)
            message = text_format.Parse(text, message_class(_GRAPH)(), descriptor_pool=POOL)
    except text_format.ParseError as error:
        findings.refuse(Located(None, error.GetLine() or 1), f"{FILE_INVALID} - {error}")
        return None
    config = _build(message, root, pool, findings)
    chat = read_chat_roles(content, config.inputs, config.outputs, config.nodes, findings)
    return config if chat is None else replace(config, chat=chat)


def _build(message: Any, root: Located, pool: PoolDirective, findings: Findings) -> GraphConfig:
    reader = StreamReader(findings, is_graph=True)
    streams = {
        kind: reader.read(kind, getattr(message, kind), root.items(kind))
        for kind in ("input_stream", "output_stream", "input_side_packet", "output_side_packet")
    }
    nodes = tuple(read_nodes(message, root, read_policy(message, root, PolicyConfig()), findings))
    for each, at in ((message, root), *zip(message.node, root.items("node"), strict=True)):
        _check_output_handler(each, at, findings)
    check_executors(message, root, findings)
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


def _check_output_handler(message: Any, at: Located, findings: Findings) -> None:
    name = message.output_stream_handler.output_stream_handler
    if name not in {"", _IN_ORDER}:
        found = f'{INITIALIZATION} - NOT_FOUND: "{name}" is not a registered output stream handler.'
        at = at.find("output_stream_handler", "output_stream_handler")
        findings.refuse(at, found, expected=_IN_ORDER, found=name, suggestion="remove it")


def _check_pool(pool: PoolDirective, nodes: tuple[NodeConfig, ...], findings: Findings) -> None:
    for node in nodes if pool.size else ():
        loops = [ref for ref in node.inputs if ref.port.tag.startswith("LOOPBACK")]
        if loops and node.calculator == "PythonExecutorCalculator":
            findings.refuse(
                Located(None, pool.line, f"{node.at.path}.input_stream"),
                f'{FILE_INVALID} - OVMS_GRAPH_QUEUE_MAX_SIZE is given, and node "{node.canonical_name}" has a '
                "LOOPBACK, which ends with each stream",
                suggestion="remove OVMS_GRAPH_QUEUE_MAX_SIZE",
            )


_DIRECTIVE: Final = re.compile(r"^[ \t]*#[ \t]*OVMS_GRAPH_QUEUE_MAX_SIZE[ \t]*:(?P<value>.*)$", re.MULTILINE)
_SIZE: Final = re.compile(r"[0-9]{1,9}")
_OFF_SWITCH: Final = "OVMS_GRAPH_QUEUE_OFF"


@dataclass(frozen=True, slots=True)
class PoolDirective:
    """How many instances are asked for, 0 for none, and where."""

    size: int = 0
    line: int = 0


def read_pool(text: str, findings: Findings) -> PoolDirective:
    """Find the directive; the number is bounded by that of processors."""
    match = _DIRECTIVE.search(text)
    if match is None:
        return PoolDirective()
    line = text.count("\n", 0, match.start()) + 1
    value = match["value"].strip()
    if value != "AUTO" and not _SIZE.fullmatch(value):
        findings.refuse(
            Located(None, line),
            f"{FILE_INVALID} - OVMS_GRAPH_QUEUE_MAX_SIZE cannot be used",
            expected="AUTO or a number from 0",
            found=value,
            suggestion="write AUTO, a number, or remove the line",
        )
        return PoolDirective(line=line)
    processors = os.cpu_count() or 1
    asked = processors if value == "AUTO" else int(value)
    if asked > processors:
        message = f"OVMS_GRAPH_QUEUE_MAX_SIZE is more than there are processors; {processors} are used"
        findings.warn(Located(None, line), message)
    is_off = os.environ.get(_OFF_SWITCH) == "1"
    return PoolDirective(0 if is_off else min(asked, processors), line)
