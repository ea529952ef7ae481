"""The nodes of a graph file: message and lines become values."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from google.protobuf.message import DecodeError

from ovmstrio.config.findings import Findings
from ovmstrio.config.located import Located
from ovmstrio.protocol.descriptors import message_class
from ovmstrio.runtimes.graphs.config.graph_config import NodeConfig, PolicyConfig, Port, StreamRef
from ovmstrio.runtimes.graphs.config.graph_messages import FILE_INVALID, INITIALIZATION
from ovmstrio.runtimes.graphs.config.stream_refs import InvalidName, StreamReader, parse_tag_index, refuse_name

__all__ = ["canonical_names", "read_nodes", "read_policy"]

_HANDLER = "input_stream_handler"
_INVALID = f"{INITIALIZATION} - INVALID_ARGUMENT"


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


def read_policy(message: Any, at: Located, default: PolicyConfig) -> PolicyConfig:
    """Read the input stream handler of a message that may have one."""
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
            except InvalidName as error:
                refuse_name(self.findings, at, error, text)
                continue
            if port in known:
                found.update({port} if info.back_edge else ())
            elif info.back_edge:
                have = ", ".join(map(str, sorted(known))) or "none"
                message = f'{_INVALID}: input_stream_info names "{text}", which is no input of the node'
                self.findings.refuse(at, message, expected=f"one of its inputs: {have}", found=text or "nothing")
            else:
                self.findings.warn(at, f'input_stream_info names "{text}", which is no input')
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
                    details = f"{name} is unknown, or the bytes beside it are no such message"
                    self.findings.refuse(at, f"{FILE_INVALID} - {details}")
        return tuple(found.values())


def read_nodes(message: Any, at: Located, policy: PolicyConfig, findings: Findings) -> Iterator[NodeConfig]:
    """Read the nodes of a graph, whose own input stream handler is ``policy``."""
    for name, node, place in zip(canonical_names(message.node), message.node, at.items("node"), strict=True):
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
        policy=read_policy(message, reader.at, policy),
        back_edges=reader.back_edges(inputs),
        max_in_flight=max(message.max_in_flight, 1),
        executor=message.executor,
        at=reader.at,
        options_line=_first_line(reader.at.items("node_options")),
    )


def _first_line(options: Sequence[Located]) -> int:
    """Give the line of the first field inside the first message of options."""
    messages = [each for each in options[0].members.values() if each.members] if options else []
    return _first_of(next(iter(messages[0].members.values()))).line if messages else 0


def _first_of(member: Located) -> Located:
    return member.value[0] if isinstance(member.value, list) else member
