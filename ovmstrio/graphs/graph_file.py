"""Parser of graph files and of their comments (instance pool, chat streams).

::

    text ── parse_proto (fields) ── fit_message (reports and drops invalid fields) ── protobuf's own parser
         └─ pool directive              └────────── located values ─────────┐                    │ message
                                                                            GraphConfig  <───────┘
"""

from __future__ import annotations

import os
import re
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from google.protobuf import text_format
from google.protobuf.message import DecodeError

from ovmstrio.config.documents import Findings, InvalidSyntax, InvalidValue, Located, did_you_mean, suggest_key
from ovmstrio.config.proto_text import fit_message, parse_proto
from ovmstrio.core.errors import Problem
from ovmstrio.encoding.messages import POOL, message_class
from ovmstrio.graphs.graph_config import (
    FILE_INVALID,
    INITIALIZATION,
    ChatRoles,
    GraphConfig,
    NodeConfig,
    PolicyConfig,
    Port,
    StreamRef,
)
from ovmstrio.graphs.packets import PYTHON_TENSOR_TAG
from ovmstrio.graphs.stream_refs import StreamReader, parse_tag_index, report_invalid_name

# Nodes

_HANDLER = "input_stream_handler"
_INVALID = f"{INITIALIZATION} - INVALID_ARGUMENT"


def _canonical_names(nodes: Sequence[Any]) -> list[str]:
    """Return a unique name per node: its name or calculator, numbered from 1 if several nodes share it."""
    wanted = [node.name or node.calculator for node in nodes]
    counts = Counter(wanted)
    taken = {name for name, count in counts.items() if count == 1}
    numbers: Counter[str] = Counter()
    names = []
    for name in wanted:
        unique = name
        while counts[name] > 1 and (unique == name or unique in taken):
            numbers[name] += 1
            unique = f"{name}_{numbers[name]}"
        taken.add(unique)
        names.append(unique)
    return names


def _read_policy(message: Any, at: Located, default: PolicyConfig) -> PolicyConfig:
    if not message.HasField(_HANDLER) or not message.input_stream_handler.input_stream_handler:
        return default
    handler = message.input_stream_handler.input_stream_handler
    wanted = f"mediapipe.{handler}Options"
    extensions = [value for known, value in message.input_stream_handler.options.ListFields() if known.is_extension]
    options = next((value for value in extensions if value.DESCRIPTOR.full_name == wanted), None)
    inside = at.find(_HANDLER, "options", f"{wanted}.ext")
    tags = [tag for each in inside.items("sync_set") for tag in each.items("tag_index")]
    if "timestamp_base_tag_index" in inside.members:
        tags.append(inside.find("timestamp_base_tag_index"))
    return PolicyConfig(handler, options, at.find(_HANDLER, _HANDLER).line, tuple(tag.line for tag in tags))


@dataclass(frozen=True, slots=True)
class _NodeReader:
    message: Any
    at: Located
    findings: Findings

    def streams(self, kind: str, *aliases: str) -> tuple[StreamRef, ...]:
        texts = [text for name in (kind, *aliases) for text in getattr(self.message, name)]
        places = [place for name in (kind, *aliases) for place in self.at.items(name)]
        return StreamReader(self.findings).read(kind, texts, places)

    def back_edges(self, inputs: Sequence[StreamRef]) -> frozenset[Port]:
        known = {ref.port for ref in inputs}
        found: set[Port] = set()
        infos = zip(self.message.input_stream_info, self.at.items("input_stream_info"), strict=True)
        for info, place in infos:
            at, text = place.find("tag_index"), info.tag_index
            try:
                port = parse_tag_index(text)
            except InvalidValue as error:
                report_invalid_name(self.findings, at, error, text)
                continue
            if port in known:
                found.update({port} if info.back_edge else ())
            elif info.back_edge:
                have = ", ".join(map(str, sorted(known))) or "none"
                message = f'{_INVALID}: input_stream_info "{text}" is not an input of the node'
                self.findings.refuse(at, message, expected=f"one of its inputs: {have}", found=text or "nothing")
            else:
                self.findings.warn(at, f'input_stream_info "{text}" is not an input of the node')
        return frozenset(found)

    def node_options(self) -> tuple[Any, ...]:
        found: dict[str, Any] = {}
        for packed, at in zip(self.message.node_options, self.at.items("node_options"), strict=True):
            name = packed.TypeName()
            if name in found:
                message = f"{_INVALID}: Options type {name} is specified more than once"
                self.findings.refuse(at, message, suggestion="keep one of them")
            elif name:
                try:
                    found[name] = message_class(name).FromString(packed.value)
                except (KeyError, DecodeError):
                    details = f"unknown message type {name}, or invalid bytes"
                    self.findings.refuse(at, f"{FILE_INVALID} - {details}")
        return tuple(found.values())


def _read_nodes(message: Any, at: Located, policy: PolicyConfig, findings: Findings) -> Iterator[NodeConfig]:
    """Parse the nodes of a graph; ``policy`` is the graph's default input stream handler."""
    for name, node, place in zip(_canonical_names(message.node), message.node, at.items("node"), strict=True):
        yield _read_node(_NodeReader(node, place, findings), name, policy)


def _read_node(reader: _NodeReader, name: str, policy: PolicyConfig) -> NodeConfig:
    message = reader.message
    inputs = reader.streams("input_stream")
    return NodeConfig(
        name=message.name,
        canonical_name=name,
        calculator=message.calculator,
        inputs=inputs,
        outputs=reader.streams("output_stream"),
        side_inputs=reader.streams("input_side_packet", "external_input"),
        side_outputs=reader.streams("output_side_packet"),
        node_options=reader.node_options(),
        options=tuple(value for known, value in message.options.ListFields() if known.is_extension),
        policy=_read_policy(message, reader.at, policy),
        back_edges=reader.back_edges(inputs),
        max_in_flight=max(message.max_in_flight, 1),
        executor=message.executor,
        at=reader.at,
        options_line=_first_line(reader.at.items("node_options")),
    )


def _first_line(options: Sequence[Located]) -> int:
    """Return the line of the first field inside the first options message."""
    messages = [each for each in options[0].members.values() if each.members] if options else []
    if not messages:
        return 0
    member = next(iter(messages[0].members.values()))
    return (member.value[0] if isinstance(member.value, list) else member).line


# Chat streams

_CHAT_COMMENT: Final = "OVMSTRIO_CHAT"
_COMMENT: Final = re.compile(r"^[ \t]*#[ \t]*(?P<name>OVMSTRIO_\w+)[ \t]*:(?P<value>.*)$", re.MULTILINE)
_INPUT_ROLES: Final = ("prompt", "messages")
_OUTPUT_ROLES: Final = ("text", "end", "usage")
_EXAMPLE: Final = f"# {_CHAT_COMMENT}: prompt=NAME text=NAME"


def _read_chat_roles(
    content: str,
    inputs: Sequence[StreamRef],
    outputs: Sequence[StreamRef],
    nodes: Sequence[NodeConfig],
    findings: Findings,
) -> ChatRoles | None:
    """Return the chat streams of a graph, from its comment or its shape; None if it has none.

    Args:
        content: the text of the graph file.
        inputs: the graph's inputs.
        outputs: the graph's outputs.
        nodes: all nodes.
        findings: receives problems of the comment.
    """
    comment = _find_comment(content, findings)
    if comment is None:
        return _default_roles(inputs, outputs, nodes)
    at, value = comment
    reader = _ChatComment(at, {ref.name: ref for ref in inputs}, {ref.name: ref for ref in outputs}, findings)
    return reader.read(value)


def _find_comment(content: str, findings: Findings) -> tuple[Located, str] | None:
    """Return the chat comment; report duplicates and misspelt comments."""
    found: tuple[Located, str] | None = None
    for match in _COMMENT.finditer(content):
        at = Located(None, content.count("\n", 0, match.start("name")) + 1)
        if match["name"] != _CHAT_COMMENT:
            hint = did_you_mean(match["name"], [_CHAT_COMMENT], otherwise=f"known: {_CHAT_COMMENT}")
            findings.warn(at, f"unknown comment {match['name']} ignored", hint)
        elif found is None:
            found = at, match["value"]
        else:
            findings.refuse(
                at, f"{FILE_INVALID} - duplicate {_CHAT_COMMENT}", suggestion=f"remove it; line {found[0].line} has one"
            )
    return found


def _default_roles(
    inputs: Sequence[StreamRef], outputs: Sequence[StreamRef], nodes: Sequence[NodeConfig]
) -> ChatRoles | None:
    most_outputs = 2
    fits = len(inputs) == 1 and 0 < len(outputs) <= most_outputs and all(map(_is_text, (*inputs, *outputs)))
    if not fits or not any(ref.port.tag == "LOOPBACK" for node in nodes for ref in node.inputs):
        return None
    return ChatRoles(prompt=inputs[0].name, text=outputs[0].name, end=outputs[1].name if len(outputs) > 1 else "")


def _is_text(ref: StreamRef) -> bool:
    return ref.port.tag.startswith(PYTHON_TENSOR_TAG)


class _ChatComment:
    def __init__(
        self, at: Located, inputs: dict[str, StreamRef], outputs: dict[str, StreamRef], findings: Findings
    ) -> None:
        self._at = at
        self._inputs = inputs
        self._outputs = outputs
        self._findings = findings
        self._roles: dict[str, str] = {}
        self._has_errors = False

    def read(self, value: str) -> ChatRoles | None:
        for part in value.split():
            self._parse_part(*part.partition("="))
        if not self._has_errors:
            self._complete()
        return None if self._has_errors else ChatRoles(**self._roles)

    def _parse_part(self, role: str, equals: str, name: str) -> None:
        if not equals or not name:
            self._refuse("invalid part", "role=name, such as text=completion", role + equals)
        elif role not in (*_INPUT_ROLES, *_OUTPUT_ROLES):
            self._refuse(f"unknown role {role!r}", suggestion=suggest_key(role, (*_INPUT_ROLES, *_OUTPUT_ROLES)))
        elif role in self._roles:
            self._refuse(f"duplicate role {role}", suggestion="remove one of them")
        else:
            self._assign(role, name)

    def _assign(self, role: str, name: str) -> None:
        kind, streams = ("input", self._inputs) if role in _INPUT_ROLES else ("output", self._outputs)
        ref = streams.get(name)
        taken = next((other for other, stream in self._roles.items() if stream == name), "")
        if ref is None:
            known = ", ".join(streams) or "none"
            fix = did_you_mean(name, streams, otherwise=f"known: {known}")
            self._refuse(f"{role}: the graph has no {kind} {name!r}", suggestion=fix)
        elif taken:
            self._refuse(f"{role}: {name!r} already has the role {taken}", suggestion="give each stream one role")
        elif not _is_text(ref):
            self._refuse(f"{role}: {name!r} carries no text", f"{PYTHON_TENSOR_TAG}:{name}", f"{ref.port.tag}:{name}")
        else:
            self._roles[role] = name

    def _complete(self) -> None:
        """Assign unambiguous roles that the comment omits, and check that every input has a role."""
        if not any(role in self._roles for role in _INPUT_ROLES) and len(self._inputs) == 1:
            self._assign("prompt", next(iter(self._inputs)))
        if "text" not in self._roles:
            free = [name for name in self._outputs if name not in self._roles.values()]
            if not free:
                self._refuse("no output without a role is left for text", suggestion=f"write {_EXAMPLE}")
                return
            self._assign("text", free[0])
        nameless = [name for name in self._inputs if name not in self._roles.values()]
        if nameless and not self._has_errors:
            self._refuse(
                f"input {nameless[0]!r} has no role",
                suggestion="use it as prompt or messages, or remove the comment",
            )

    def _refuse(self, message: str, expected: str = "", found: str = "", *, suggestion: str = "") -> None:
        self._has_errors = True
        self._findings.refuse(
            self._at,
            f"{FILE_INVALID} - {_CHAT_COMMENT}: {message}",
            expected=expected,
            found=found,
            suggestion=suggestion,
        )


# Executors, checked as OVMS does; nodes run as tasks, so executors have no effect

_TYPES: Final = ("ApplicationThreadExecutor", "ThreadPoolExecutor")
_POOL: Final = "ThreadPoolExecutor"
_RESERVED: Final = frozenset({"default", "gpu"})


def _check_executors(message: Any, root: Located, findings: Findings) -> None:
    first: dict[str, int] = {}
    for executor, at in zip(message.executor, root.items("executor"), strict=True):
        if executor.name in first:
            details = f'duplicate ExecutorConfig for "{executor.name}"'
            fix = f"keep one; line {first[executor.name]} has the same name"
        else:
            details, fix = _executor_error(executor, message)
            first[executor.name] = at.line
        if details:
            findings.refuse(at, f"{INITIALIZATION} - INVALID_ARGUMENT: {details}", suggestion=fix)
    for name, at in ((node.executor, at) for node, at in zip(message.node, root.items("node"), strict=True)):
        if name and name not in first:
            details = f'The executor "{name}" is not declared in an ExecutorConfig.'
            fix = did_you_mean(name, first, otherwise="remove it: nodes run as tasks")
            findings.refuse(at.find("executor"), f"{INITIALIZATION} - INVALID_ARGUMENT: {details}", suggestion=fix)


def _executor_error(executor: Any, graph: Any) -> tuple[str, str]:
    """Return the error and the hint for an executor; empty if it is valid."""
    name, kind = executor.name, executor.type
    if name in _RESERVED or name.startswith("__"):
        return f'"{name}" is reserved and cannot be the name of an executor', "use another name"
    if not name and graph.num_threads:
        return "num_threads conflicts with an executor without a name", "remove num_threads"
    if name and not kind:
        return f'executor "{name}" has no type', f'add type: "{_POOL}"'
    if kind and kind not in _TYPES:
        known = did_you_mean(kind, _TYPES, otherwise=f"known: {', '.join(_TYPES)}")
        return f'"{kind}" is not a registered executor', known
    extension = POOL.FindExtensionByName("mediapipe.ThreadPoolExecutorOptions.ext")
    if kind == _POOL and executor.options.Extensions[extension].num_threads <= 0:
        option = "[mediapipe.ThreadPoolExecutorOptions.ext] { num_threads: 4 }"
        return f"a {_POOL} needs num_threads", f"add options {{ {option} }}"
    return "", ""


_GRAPH: Final = "mediapipe.CalculatorGraphConfig"
_OPTIONS: Final = "mediapipe.CalculatorOptions"
_QUEUE_SIZE: Final = 100
_IN_ORDER: Final = "InOrderOutputStreamHandler"
_NOT_IN_CONTRACTS: Final = re.compile(r"node\[\d+\]\.(?:executor|output_stream_handler|input_stream_info)")


@dataclass(frozen=True, slots=True)
class ParsedGraph:
    """Result of parsing a graph file.

    ``config`` is None if nothing could be parsed. ``doubtful`` holds the canonical names of nodes with dropped fields;
    further errors of these nodes may be misleading.
    """

    config: GraphConfig | None
    problems: tuple[Problem, ...]
    doubtful: frozenset[str] = frozenset()


def parse_graph_text(content: str, file: str) -> ParsedGraph:
    """Parse as much of a graph file as possible; a byte order mark is ignored, as in other configuration files."""
    content = content.removeprefix("\ufeff")
    findings = Findings(file)
    pool = _read_pool(content, findings)
    config = _parse(content, pool, findings)
    if config is None:
        return ParsedGraph(None, findings.all)
    left_out = [problem.path for problem in findings.all if not _NOT_IN_CONTRACTS.match(problem.path)]
    doubtful = frozenset(
        node.canonical_name
        for node in config.nodes
        if any(path == node.at.path or path.startswith(f"{node.at.path}.") for path in left_out)
    )
    _check_pool(pool, config.nodes, findings)
    return ParsedGraph(config, findings.all, doubtful)


def _parse(content: str, pool: _PoolDirective, findings: Findings) -> GraphConfig | None:
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
            # Python's decoder warns of unknown escapes, which stay unchanged.
            warnings.simplefilter("ignore", DeprecationWarning)
            message = text_format.Parse(text, message_class(_GRAPH)(), descriptor_pool=POOL)
    except text_format.ParseError as error:
        findings.refuse(Located(None, error.GetLine() or 1), f"{FILE_INVALID} - {error}")
        return None
    config = _build(message, root, pool, findings)
    chat = _read_chat_roles(content, config.inputs, config.outputs, config.nodes, findings)
    return config if chat is None else replace(config, chat=chat)


def _build(message: Any, root: Located, pool: _PoolDirective, findings: Findings) -> GraphConfig:
    reader = StreamReader(findings, is_graph=True)
    streams = {
        kind: reader.read(kind, getattr(message, kind), root.items(kind))
        for kind in ("input_stream", "output_stream", "input_side_packet", "output_side_packet")
    }
    nodes = tuple(_read_nodes(message, root, _read_policy(message, root, PolicyConfig()), findings))
    for each, at in ((message, root), *zip(message.node, root.items("node"), strict=True)):
        _check_output_handler(each, at, findings)
    _check_executors(message, root, findings)
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


def _check_pool(pool: _PoolDirective, nodes: tuple[NodeConfig, ...], findings: Findings) -> None:
    for node in nodes if pool.size else ():
        loops = [ref for ref in node.inputs if ref.port.tag.startswith("LOOPBACK")]
        if loops and node.calculator == "PythonExecutorCalculator":
            findings.refuse(
                Located(None, pool.line, f"{node.at.path}.input_stream"),
                f"{FILE_INVALID} - OVMS_GRAPH_QUEUE_MAX_SIZE does not work with the LOOPBACK of node "
                f'"{node.canonical_name}"',
                suggestion="remove OVMS_GRAPH_QUEUE_MAX_SIZE",
            )


_DIRECTIVE: Final = re.compile(r"^[ \t]*#[ \t]*OVMS_GRAPH_QUEUE_MAX_SIZE[ \t]*:(?P<value>.*)$", re.MULTILINE)
_SIZE: Final = re.compile(r"[0-9]{1,9}")
_OFF_SWITCH: Final = "OVMS_GRAPH_QUEUE_OFF"


@dataclass(frozen=True, slots=True)
class _PoolDirective:
    """Requested number of pooled instances (0 for none) and its line."""

    size: int = 0
    line: int = 0


def _read_pool(text: str, findings: Findings) -> _PoolDirective:
    """Parse the pool directive; the size is limited to the number of processors."""
    match = _DIRECTIVE.search(text)
    if match is None:
        return _PoolDirective()
    line = text.count("\n", 0, match.start()) + 1
    value = match["value"].strip()
    if value != "AUTO" and not _SIZE.fullmatch(value):
        findings.refuse(
            Located(None, line),
            f"{FILE_INVALID} - invalid OVMS_GRAPH_QUEUE_MAX_SIZE",
            expected="AUTO or a number from 0",
            found=value,
            suggestion="write AUTO, a number, or remove the line",
        )
        return _PoolDirective(line=line)
    processors = os.cpu_count() or 1
    size = processors if value == "AUTO" else int(value)
    if size > processors:
        message = f"OVMS_GRAPH_QUEUE_MAX_SIZE exceeds the number of processors; {processors} used"
        findings.warn(Located(None, line), message)
    is_off = os.environ.get(_OFF_SWITCH) == "1"
    return _PoolDirective(0 if is_off else min(size, processors), line)
