"""A graph file that has been read: streams, nodes and settings, each with the line it came from."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

from ovmstrio.config.located import Located

__all__ = ["DEFAULT_POLICY", "ChatRoles", "GraphConfig", "NodeConfig", "PolicyConfig", "Port", "StreamRef"]

DEFAULT_POLICY: Final = "DefaultInputStreamHandler"
_NOWHERE: Final = Located(None)


class Port(NamedTuple):
    """Where a stream meets a node or the border of the graph: ``TAG`` and index; ``("", i)`` where there is no tag."""

    tag: str
    index: int  # type: ignore[assignment]  # nobody looks for a member of a port

    def __str__(self) -> str:
        return f"{self.tag}:{self.index}" if self.index or not self.tag else self.tag


@dataclass(frozen=True, slots=True)
class StreamRef:
    """One ``TAG:index:name`` of an ``input_stream``, ``output_stream`` or side packet, and where it is written."""

    port: Port
    name: str
    at: Located = field(default=_NOWHERE, compare=False, repr=False)

    @property
    def line(self) -> int:
        """The line, which counts from 1."""
        return self.at.line


@dataclass(frozen=True, slots=True)
class PolicyConfig:
    """The input stream handler of a node.

    ``options`` is the message of its extension, such as ``mediapipe.SyncSetInputStreamHandlerOptions``; None where
    the file gives none.  ``tag_lines`` are the lines of the ``tag_index`` of its sets, in their order.
    """

    handler: str = DEFAULT_POLICY
    options: Any = None
    line: int = 0
    tag_lines: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class NodeConfig:
    """One node.

    Attributes:
        name: as written, may be empty.
        canonical_name: unique in the graph: ``name``, or the calculator's, with ``_1``, ``_2`` where several share it.
        inputs: in the order of the file; :attr:`sorted_inputs` is the order of tags.
        node_options: the messages of ``node_options``, unpacked, then the extensions of ``options``.
        policy: the node's own input stream handler, else the graph's.
        back_edges: the inputs that ``input_stream_info`` calls back edges.
        at: the node in the file.
        options_line: where ``node_options`` say the first thing, such as ``handler_path``; 0 where they say nothing.
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
        """The line where it begins."""
        return self.at.line

    @property
    def sorted_inputs(self) -> tuple[StreamRef, ...]:
        """The inputs by ascending tag (bytes) and index: the order in which calculators see them."""
        return tuple(sorted(self.inputs, key=lambda ref: ref.port))

    @property
    def sorted_outputs(self) -> tuple[StreamRef, ...]:
        """The outputs by ascending tag and index: the order in which they leave."""
        return tuple(sorted(self.outputs, key=lambda ref: ref.port))


@dataclass(frozen=True, slots=True)
class ChatRoles:
    """The streams of a graph by what they carry of a chat; empty where nothing does.

    Attributes:
        prompt: an input: the last message of the user, or a prompt as it is.
        messages: an input: all messages as JSON.
        text: an output: a piece of the answer in each packet.
        end: an output whose first packet ends the answer.
        usage: an output: how many tokens there were, as JSON.
    """

    text: str
    prompt: str = ""
    messages: str = ""
    end: str = ""
    usage: str = ""


@dataclass(frozen=True, slots=True)
class GraphConfig:
    """One graph file; the graph's own streams are in the order of the file.

    ``max_queue_size`` is the number of packets that an input stream may hold before whoever feeds it waits; -1 means
    no bound.  ``pool_size`` is the value of the ``OVMS_GRAPH_QUEUE_MAX_SIZE`` directive, 0 where there is none.
    ``chat`` says which streams carry a chat, None if the graph answers none.
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
        """The name of the input that takes whole requests over HTTP; empty if there is none."""
        return next((ref.name for ref in self.inputs if ref.port.tag.startswith("HTTP_REQUEST_PAYLOAD")), "")
