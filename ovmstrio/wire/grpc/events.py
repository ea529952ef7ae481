"""What happened on a connection, and on which of its streams, as the sync core tells the shell around it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ovmstrio.wire.grpc.messages import MessageBuffer

if TYPE_CHECKING:
    from ovmstrio.wire.grpc.headers import RequestHead

__all__ = [
    "DataReceived",
    "Event",
    "PeerLeaving",
    "PingAcknowledged",
    "RequestStarted",
    "StreamReset",
    "StreamState",
    "WindowOpened",
]


class StreamState:
    """One open stream: what arrived, what may be sent, which directions are closed.

    Attributes:
        credit: bytes that the peer granted this stream beyond its INITIAL_WINDOW_SIZE, less those that were sent.
        is_starved: whether somebody waits for its window to open; cleared when that is told.
    """

    __slots__ = (
        "buffer",
        "content_left",
        "credit",
        "head",
        "is_starved",
        "local_closed",
        "receive_window",
        "remote_closed",
        "reset",
        "stream_id",
        "uncredited",
    )

    def __init__(self, stream_id: int, head: RequestHead, receive_window: int) -> None:
        self.stream_id = stream_id
        self.head = head
        self.buffer = MessageBuffer()
        self.content_left = head.content_length
        self.receive_window = receive_window
        self.credit = 0
        self.is_starved = False
        self.uncredited = 0
        self.remote_closed = False
        self.local_closed = False
        self.reset = False


@dataclass(slots=True)
class RequestStarted:
    """A request's headers are complete; the shell owns the stream until it releases it."""

    stream: StreamState


@dataclass(slots=True)
class DataReceived:
    """A stream has more bytes, or its end."""

    stream: StreamState


@dataclass(slots=True)
class StreamReset:
    """A stream was given up, by the peer or because the peer broke a rule on it."""

    stream: StreamState


@dataclass(slots=True)
class WindowOpened:
    """More may be sent: on one stream that was starved, or wherever the connection's window was in the way."""

    stream: StreamState | None


@dataclass(slots=True)
class PingAcknowledged:
    """The peer answered a PING of this side."""

    payload: bytes


@dataclass(slots=True)
class PeerLeaving:
    """The peer sent GOAWAY: it opens no more streams."""


Event = RequestStarted | DataReceived | StreamReset | WindowOpened | PingAcknowledged | PeerLeaving
