"""What happened on a connection, as the sync core tells the shell around it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ovmstrio.wire.grpc.core import StreamState

__all__ = [
    "DataReceived",
    "Event",
    "PeerLeaving",
    "PingAcknowledged",
    "RequestStarted",
    "StreamReset",
    "WindowOpened",
]


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
