"""Parsed graph file: streams, nodes and settings with their lines."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

from ovmstrio.config.documents import Findings, Located

__all__ = [
    "DEFAULT_POLICY",
    "FILE_INVALID",
    "HANDLER_MISSING",
    "INITIALIZATION",
    "INTERNAL",
    "NODE_NAME_MISSING",
    "NODE_NAME_TAKEN",
    "NODE_OPTIONS_MISSING",
    "NOT_IMPLEMENTED",
    "REQUEST_INPUTS",
    "REQUEST_MISSING",
    "REQUEST_OUTPUTS",
    "RESPONSE_MISSING",
    "ChatRoles",
    "GraphConfig",
    "InvalidName",
    "NodeConfig",
    "PolicyConfig",
    "Port",
    "StreamReader",
    "StreamRef",
    "is_stream_name",
    "parse_stream",
    "parse_tag_index",
    "refuse_name",
]

DEFAULT_POLICY: Final = "DefaultInputStreamHandler"
_NOWHERE: Final = Located(None)


class Port(NamedTuple):
    """Endpoint of a stream at a node or graph: tag and index; the tag is empty if the file has none."""

    tag: str
    index: int  # type: ignore[assignment]  # shadows tuple.index, which is not used

    def __str__(self) -> str:
        return f"{self.tag}:{self.index}" if self.index or not self.tag else self.tag


@dataclass(frozen=True, slots=True)
class StreamRef:
    """One ``TAG:index:name`` of a stream or side packet, and its position in the file."""

    port: Port
    name: str
    at: Located = field(default=_NOWHERE, compare=False, repr=False)

    @property
    def line(self) -> int:
        """The 1-based line."""
        return self.at.line


@dataclass(frozen=True, slots=True)
class PolicyConfig:
    """Input stream handler of a node.

    ``options`` is the message of its extension, such as ``mediapipe.SyncSetInputStreamHandlerOptions``, or None.
    ``tag_lines`` are the lines of the ``tag_index`` fields of its sets, in order.
    """

    handler: str = DEFAULT_POLICY
    options: Any = None
    line: int = 0
    tag_lines: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class NodeConfig:
    """One node.

    Attributes:
        name: may be empty.
        canonical_name: unique in the graph: name or calculator, with ``_1``, ``_2`` if several nodes share it.
        inputs: in file order; :attr:`sorted_inputs` has tag order.
        node_options: the unpacked messages of ``node_options``.
        options: the extensions of ``options``.
        policy: the node's input stream handler, else the graph's.
        options_line: line of the first field in ``node_options``, such as ``handler_path``; 0 if there is none.
    """

    name: str
    canonical_name: str
    calculator: str
    inputs: tuple[StreamRef, ...] = ()
    outputs: tuple[StreamRef, ...] = ()
    side_inputs: tuple[StreamRef, ...] = ()
    side_outputs: tuple[StreamRef, ...] = ()
    node_options: tuple[Any, ...] = ()
    options: tuple[Any, ...] = ()
    policy: PolicyConfig = PolicyConfig()
    back_edges: frozenset[Port] = frozenset()
    max_in_flight: int = 1
    executor: str = ""
    at: Located = field(default=_NOWHERE, compare=False, repr=False)
    options_line: int = 0

    @property
    def line(self) -> int:
        """The line where the node begins."""
        return self.at.line

    @property
    def sorted_inputs(self) -> tuple[StreamRef, ...]:
        """The inputs by tag and index, the order that calculators see."""
        return tuple(sorted(self.inputs, key=lambda ref: ref.port))

    @property
    def sorted_outputs(self) -> tuple[StreamRef, ...]:
        """The outputs by tag and index, the order in which packets are sent."""
        return tuple(sorted(self.outputs, key=lambda ref: ref.port))


@dataclass(frozen=True, slots=True)
class ChatRoles:
    """Chat roles of a graph's streams; an empty name means no stream.

    Attributes:
        prompt: input for the last user message, or a plain prompt.
        messages: input for all messages as JSON.
        text: output with a piece of the text per packet.
        end: output whose first packet ends the text.
        usage: output with token counts as JSON.
    """

    text: str
    prompt: str = ""
    messages: str = ""
    end: str = ""
    usage: str = ""


@dataclass(frozen=True, slots=True)
class GraphConfig:
    """One graph file; the graph's streams are in file order.

    Attributes:
        max_queue_size: packets per input stream before producers wait; -1 is no limit.
        pool_size: value of the ``OVMS_GRAPH_QUEUE_MAX_SIZE`` directive, 0 if absent.
        chat: the chat streams, or None.
    """

    file: str
    inputs: tuple[StreamRef, ...] = ()
    outputs: tuple[StreamRef, ...] = ()
    side_inputs: tuple[StreamRef, ...] = ()
    side_outputs: tuple[StreamRef, ...] = ()
    nodes: tuple[NodeConfig, ...] = field(default=())
    max_queue_size: int = 100
    num_threads: int = 0
    report_deadlock: bool = False
    pool_size: int = 0
    chat: ChatRoles | None = None

    @property
    def payload(self) -> str:
        """Name of the input for raw HTTP requests; empty if there is none."""
        return next((ref.name for ref in self.inputs if ref.port.tag.startswith("HTTP_REQUEST_PAYLOAD")), "")


# Error prefixes, taken from OVMS

FILE_INVALID: Final = "Failed to read protobuf graph configuration file"
INITIALIZATION: Final = "Failed to initialize mediapipe graph"
_INPUT_NAME: Final = "Mediapipe unexpected input stream packets name"
_OUTPUT_NAME: Final = "Mediapipe unexpected output stream packets name"
_SIDE_NAME: Final = "Mediapipe unexpected input side packet stream name"
REQUEST_INPUTS: Final = "Mediapipe unexpected input stream packets count"
REQUEST_OUTPUTS: Final = "Mediapipe unexpected output stream packets count"
RESPONSE_MISSING: Final = "Mediapipe passthrough graph misses RESPONSE in output"
REQUEST_MISSING: Final = "Mediapipe passthrough graph misses REQUEST in input"
NODE_OPTIONS_MISSING: Final = "The Python Node is missing options definition"
NODE_NAME_MISSING: Final = "The Python Node is missing name definition"
NODE_NAME_TAKEN: Final = "The Python Node name is already present in nodes list"
HANDLER_MISSING: Final = "The Python Node file path does not exist"
INTERNAL: Final = "Internal server error"
NOT_IMPLEMENTED: Final = "Functionality not implemented"


# Stream names

_GRAPH_TEXTS = {
    "input_stream": _INPUT_NAME,
    "output_stream": _OUTPUT_NAME,
    "input_side_packet": _SIDE_NAME,
    "output_side_packet": _SIDE_NAME,
}


@dataclass(frozen=True, slots=True)
class StreamReader:
    """Parser of the streams of one node or of the graph."""

    findings: Findings
    is_graph: bool = False

    def read(self, kind: str, texts: Sequence[str], places: Sequence[Located]) -> tuple[StreamRef, ...]:
        """Return the valid streams of the field ``kind`` and report the others."""
        found: dict[Port, StreamRef] = {}
        untagged = 0
        for text, at in zip(texts, places, strict=True):
            try:
                tag, index, name = parse_stream(text)
            except InvalidName as error:
                is_empty = self.is_graph and not _name_after_colon(text)
                base = _GRAPH_TEXTS[kind] if is_empty else INITIALIZATION
                refuse_name(self.findings, at, error, text, base)
                continue
            if tag is None:
                index, untagged = untagged, untagged + 1
            self._add(found, StreamRef(Port(tag or "", index), name, at))
        self._check_dense(found)
        if self.is_graph:
            self._check_repeated(_GRAPH_TEXTS[kind], found.values())
        return tuple(found.values())

    def _add(self, found: dict[Port, StreamRef], ref: StreamRef) -> None:
        other = found.setdefault(ref.port, ref)
        if other is not ref:
            self._refuse(
                ref,
                f'{INITIALIZATION} - FAILED_PRECONDITION: tag "{ref.port.tag}" index {ref.port.index} already had a '
                f'name "{other.name}" but is being reassigned a name "{ref.name}"',
                f"use another tag; line {other.line} has this one",
            )

    def _check_dense(self, found: dict[Port, StreamRef]) -> None:
        for ref in found.values():
            below = Port(ref.port.tag, ref.port.index - 1)
            if ref.port.index and below not in found:
                self._refuse(
                    ref,
                    f"{INITIALIZATION} - FAILED_PRECONDITION: Not all indexes were assigned names: tag "
                    f'"{ref.port.tag}" has index {ref.port.index} and no {below.index}',
                    "count the indexes of a tag from 0 without gaps",
                )

    def _check_repeated(self, base: str, refs: Iterable[StreamRef]) -> None:
        first: dict[str, StreamRef] = {}
        for ref in refs:
            other = first.setdefault(ref.name, ref)
            if other is not ref:
                fix = f"use another name; line {other.line} has this one"
                self._refuse(ref, f'{base} - duplicate name "{ref.name}"', fix)

    def _refuse(self, ref: StreamRef, message: str, fix: str) -> None:
        self.findings.refuse(ref.at, message, suggestion=fix)


def refuse_name(findings: Findings, at: Located, error: InvalidName, text: str, base: str = INITIALIZATION) -> None:
    """Report an invalid stream or port."""
    findings.refuse(
        at,
        f"{base} - INVALID_ARGUMENT: {error.message}",
        expected=error.expected,
        found=text or "nothing",
        suggestion=error.fix,
    )


_NAME: Final = re.compile(r"[a-z_][a-z0-9_]*")
_TAG: Final = re.compile(r"[A-Z_][A-Z0-9_]*")
_INDEX: Final = re.compile(r"0|[1-9][0-9]*")
_HIGHEST_INDEX: Final = 10_000


class InvalidName(ValueError):
    """A stream or port is malformed; ``expected`` describes the format, ``fix`` is a hint."""

    def __init__(self, message: str, expected: str, fix: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.expected = expected
        self.fix = fix


def is_stream_name(text: str) -> bool:
    """Return whether a text is a valid name of a stream or side packet."""
    return _NAME.fullmatch(text) is not None


def _name_after_colon(text: str) -> str:
    return text.rpartition(":")[2]


def parse_stream(text: str) -> tuple[str | None, int, str]:
    """Split a stream into tag (None if absent), index and name."""
    parts = text.split(":")
    if len(parts) > 3:  # noqa: PLR2004 - tag, index, name
        raise InvalidName(f'"{text}" has {len(parts)} parts', "name, TAG:name or TAG:index:name")
    *place, name = parts
    tag = _checked_tag(place[0], text) if place else None
    index = _checked_index(place[1], text) if len(place) > 1 else 0
    if not is_stream_name(name):
        raise InvalidName(
            f'"{name}" in "{text}" is not a stream name',
            "lower-case letters, digits and _, no digit first",
            _spelt(name, name.lower()),
        )
    return tag, index, name


def parse_tag_index(text: str) -> Port:
    """Parse a port of ``input_stream_info`` or ``sync_set``: ``TAG``, ``TAG:2``, ``:1`` or empty."""
    tag, colon, index = text.partition(":")
    return Port(_checked_tag(tag, text) if tag else "", _checked_index(index, text) if colon else 0)


def _checked_tag(tag: str, text: str) -> str:
    if not _TAG.fullmatch(tag):
        raise InvalidName(
            f'"{tag}" in "{text}" is not a tag',
            "upper-case letters, digits and _, no digit first",
            _spelt(tag, tag.upper()),
        )
    return tag


def _checked_index(index: str, text: str) -> int:
    # Limit the length first: int() is slow for very long digit strings.
    if not _INDEX.fullmatch(index) or len(index) > len(str(_HIGHEST_INDEX)) or int(index) > _HIGHEST_INDEX:
        raise InvalidName(f'"{index}" in "{text}" is not an index', f"a number from 0 to {_HIGHEST_INDEX}")
    return int(index)


def _spelt(found: str, better: str) -> str:
    fits = _NAME.fullmatch(better) or _TAG.fullmatch(better)
    return f"write {better!r}" if fits and better != found else ""
