"""Input streams of nodes: queued packets and the timestamp bound."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from ovmstrio.graphs.packets import DONE, MAX, MIN, format_timestamp, is_range_value, next_allowed

if TYPE_CHECKING:
    from ovmstrio.graphs.graph_config import Port
    from ovmstrio.graphs.packets import Packet


class TimestampMismatch(Exception):
    """A packet's timestamp is below the bound of its stream, or invalid."""


def check_timestamp(name: str, timestamp: int, bound: int) -> None:
    """Check a packet's timestamp against the bound of the stream ``name``.

    Raises:
        TimestampMismatch: the timestamp is below the bound, or invalid; the text is MediaPipe's.
    """
    if not is_range_value(timestamp):
        illegal = f"timestamp not specified or set to illegal value: {format_timestamp(timestamp)}"
        raise TimestampMismatch(f'In stream "{name}", {illegal}')
    if timestamp < bound:
        raise TimestampMismatch(
            f'Packet timestamp mismatch on a calculator receiving from stream "{name}". Current minimum expected '
            f"timestamp is {format_timestamp(bound)} but received {format_timestamp(timestamp)}."
            " Are you using a custom InputStreamHandler?"
        )


class InputStream:
    """Queue of one input.

    Attributes:
        bound: the smallest timestamp of a future packet; ``DONE`` if the stream is closed.
        limit: queue length at which producers wait; -1 is no limit.
        is_graph_input: whether requests feed the stream, not a node.
    """

    __slots__ = ("bound", "is_back_edge", "is_graph_input", "limit", "name", "port", "queue")

    def __init__(
        self, name: str, port: Port, *, limit: int = -1, is_back_edge: bool = False, is_graph_input: bool = False
    ) -> None:
        self.name = name
        self.port = port
        self.limit = limit
        self.is_back_edge = is_back_edge
        self.is_graph_input = is_graph_input
        self.bound = MIN
        self.queue: deque[Packet] = deque()

    def push(self, packet: Packet) -> None:
        """Add a packet."""
        timestamp = packet.timestamp
        if timestamp < self.bound or timestamp > MAX:
            check_timestamp(self.name, timestamp, self.bound)
        self.bound = next_allowed(timestamp)
        self.queue.append(packet)

    def advance(self, bound: int) -> bool:
        """Raise the bound; False if it was not below ``bound``."""
        if bound <= self.bound:
            return False
        self.bound = bound
        return True

    def close(self) -> None:
        """Close the stream; queued packets stay."""
        self.bound = DONE

    @property
    def is_done(self) -> bool:
        """True if the stream is closed and its queue empty."""
        return not self.queue and self.bound == DONE

    @property
    def is_full(self) -> bool:
        """True if producers must wait."""
        return 0 <= self.limit <= len(self.queue)

    @property
    def earliest(self) -> int:
        """The timestamp of the first queued packet, else the bound."""
        return self.queue[0].timestamp if self.queue else self.bound
