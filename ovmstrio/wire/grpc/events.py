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
    """One open stream: what arrived, what may be sent, which directions are closed."""

    __slots__ = (
        "buffer",
        "content_left",
        "head",
        "local_closed",
        "receive_window",
        "remote_closed",
        "reset",
        "send_window",
        "stream_id",
        "uncredited",
    )

    def __init__(self, stream_id: int, head: RequestHead, receive_window: int, send_window: int) -> None:
        self.stream_id = stream_id
        self.head = head
        self.buffer = MessageBuffer()
        self.content_left = head.content_length
        self.receive_window = receive_window
        self.send_window = send_window
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
    """More may be sent: on one stream, or on all of them (``None``)."""

    stream: StreamState | None


@dataclass(slots=True)
class PingAcknowledged:
    """The peer answered a PING of this side."""

    payload: bytes


@dataclass(slots=True)
class PeerLeaving:
    """The peer sent GOAWAY: it opens no more streams."""


Event = RequestStarted | DataReceived | StreamReset | WindowOpened | PingAcknowledged | PeerLeaving
