"""The nodes of a graph file: message and lines become values."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from google.protobuf.message import DecodeError

from ovmstrio.protocol.descriptors import message_class
from ovmstrio.runtimes.graphs.config.found import FILE_INVALID, INITIALIZATION, GraphFindings
from ovmstrio.runtimes.graphs.config.names import InvalidName, parse_tag_index
from ovmstrio.runtimes.graphs.config.places import Place, first_block, line_of, lines_of, places_of
from ovmstrio.runtimes.graphs.config.ports import PortReader
from ovmstrio.runtimes.graphs.config.syntax import Block
from ovmstrio.runtimes.graphs.config.values import NodeConfig, PolicyConfig, Port, StreamRef

__all__ = ["canonical_names", "read_nodes", "read_policy"]

_HANDLER = "input_stream_handler"


def canonical_names(nodes: Sequence[Any]) -> list[str]:
    """Give each node a name of its own: its name or calculator, numbered from 1 where several share it."""
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


def read_policy(config: Any, place: Place, default: PolicyConfig) -> PolicyConfig:
    """Read the input stream handler of a message that may have one."""
    if not config.HasField(_HANDLER) or not config.input_stream_handler.input_stream_handler:
        return default
    handler = config.input_stream_handler.input_stream_handler
    at = first_block(place, _HANDLER)
    wanted = f"mediapipe.{handler}Options"
    extensions = [value for known, value in config.input_stream_handler.options.ListFields() if known.is_extension]
    options = next((value for value in extensions if value.DESCRIPTOR.full_name == wanted), None)
    inside = first_block(at, "options", f"{wanted}.ext")
    sets = places_of(inside, "sync_set")
    tag_lines = [line for each in sets for line in lines_of(each, "tag_index")]
    tag_lines += lines_of(inside, "timestamp_base_tag_index")
    return PolicyConfig(handler, options, line_of(at, _HANDLER), tuple(tag_lines))


@dataclass(frozen=True, slots=True)
class _NodeReader:
    message: Any
    place: Place
    path: str
    findings: GraphFindings

    def streams(self, kind: str, *aliases: str) -> tuple[StreamRef, ...]:
        texts = [text for name in (kind, *aliases) for text in getattr(self.message, name)]
        lines = [line for name in (kind, *aliases) for line in lines_of(self.place, name)]
        return PortReader(self.findings, self.path).read(kind, texts, lines)

    def back_edges(self, inputs: Sequence[StreamRef]) -> frozenset[Port]:
        known = {ref.port for ref in inputs}
        found: set[Port] = set()
        places = places_of(self.place, "input_stream_info")
        for number, (info, at) in enumerate(zip(self.message.input_stream_info, places, strict=True)):
            path, line = f"{self.path}input_stream_info[{number}]", line_of(at, "tag_index")
            try:
                port = parse_tag_index(info.tag_index)
            except InvalidName as error:
                self._refuse(error.message, line, path, expected=error.expected, found=info.tag_index, fix=error.fix)
                continue
            if port in known:
                found.update({port} if info.back_edge else ())
            elif info.back_edge:
                have = ", ".join(map(str, sorted(known))) or "none"
                details = f'input_stream_info names "{info.tag_index}", which is no input of the node'
                self._refuse(details, line, path, expected=f"one of its inputs: {have}", found=info.tag_index)
            else:
                self.findings.warn(f'input_stream_info names "{info.tag_index}", which is no input', line, path)
        return frozenset(found)

    def node_options(self) -> tuple[Any, ...]:
        found: dict[str, Any] = {}
        places = places_of(self.place, "node_options")
        for packed, at in zip(self.message.node_options, places, strict=True):
            name = packed.TypeName()
            if not name:
                continue
            if name in found:
                details = f"INVALID_ARGUMENT: Options type {name} is specified more than once"
                self.findings.add(INITIALIZATION, details, at.line, f"{self.path}node_options", fix="keep one of them")
                continue
            try:
                found[name] = message_class(name).FromString(packed.value)
            except (KeyError, DecodeError):
                details = f"{name} is unknown, or the bytes beside it are no such message"
                self.findings.add(FILE_INVALID, details, at.line, f"{self.path}node_options")
        return tuple(found.values())

    def _refuse(
        self, details: str, line: int, path: str, *, expected: str = "", found: str = "", fix: str = ""
    ) -> None:
        details = f"INVALID_ARGUMENT: {details}"
        self.findings.add(INITIALIZATION, details, line, path, expected=expected, found=found or "nothing", fix=fix)


def read_nodes(message: Any, place: Place, policy: PolicyConfig, findings: GraphFindings) -> Iterator[NodeConfig]:
    """Read the nodes of a graph, whose own input stream handler is ``policy``."""
    places = places_of(place, "node")
    for number, name in enumerate(canonical_names(message.node)):
        yield _read_node(_NodeReader(message.node[number], places[number], f"node[{number}].", findings), name, policy)


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
        policy=read_policy(message, reader.place, policy),
        back_edges=reader.back_edges(inputs),
        max_in_flight=max(message.max_in_flight, 1),
        executor=message.executor,
        line=reader.place.line,
        options_line=_first_line(first_block(reader.place, "node_options")),
    )


def _first_line(place: Place) -> int:
    """Give the line of the first field inside the first message of a block."""
    messages = [value for entry in place.entries for value in entry.values if isinstance(value, Block)]
    return messages[0].entries[0].line if messages and messages[0].entries else 0
