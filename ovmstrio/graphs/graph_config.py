"""Parsed graph file: streams, nodes and settings with their lines."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

from ovmstrio.config.documents import Located

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
