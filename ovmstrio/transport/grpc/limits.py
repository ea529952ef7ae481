"""Every bound of the transport in one place, with its unit in its name.

A connection asks for nothing that is not bounded here: bytes in flight, streams, header lists, frames that cost more
to answer than to send, and the time that a silent peer may stay.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, fields

__all__ = ["RateLimit", "TransportLimits"]


class RateLimit:
    """Allow at most ``limit`` events in each second that begins with an event."""

    __slots__ = ("_clock", "_count", "_limit", "_window_start")

    def __init__(self, limit: int, clock: Callable[[], float]) -> None:
        self._limit = limit
        self._clock = clock
        self._count = 0
        self._window_start = float("-inf")

    def exceeded(self, events: int = 1) -> bool:
        """Count events and say whether they are too many."""
        now = self._clock()
        if now - self._window_start >= 1.0:
            self._window_start = now
            self._count = 0
        self._count += events
        return self._count > self._limit

    def forgive(self) -> None:
        """Forget what was counted."""
        self._count = 0


_SMALLEST = {
    "stream_window_bytes": 65_535,
    "connection_window_bytes": 65_535,
    "max_receive_message_bytes": 0,
    "max_send_message_bytes": 0,
}
_LARGEST_WINDOW = 2**31 - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class TransportLimits:
    """What one server grants its peers.

    Attributes:
        max_receive_message_bytes: largest request message, after decompression; above it RESOURCE_EXHAUSTED.
        max_send_message_bytes: largest response message; above it RESOURCE_EXHAUSTED.
        max_concurrent_streams: open calls on one connection; further ones are reset with REFUSED_STREAM.
        max_connections: open connections of the server; further ones are closed at once.
        max_header_list_bytes: decoded size of one request's headers; above it RESOURCE_EXHAUSTED.
        max_continuations: CONTINUATION frames of one header block; above it the connection is closed.
        stream_window_bytes: request bytes of one call that may wait unread.
        connection_window_bytes: request bytes of one connection that may wait unread.
        write_high_water_bytes: response bytes that may wait for the socket before senders wait.
        max_write_backlog_bytes: bytes waiting for the socket, answers to control frames included, at which a peer
            that does not read loses its connection.
        max_resets_per_second: streams of one connection that may end in RST_STREAM, by either side.
        max_pings_per_second: PINGs of the peer while the server sends it no data.
        max_settings_per_second: entries in SETTINGS of the peer; a frame without any counts as one.
        max_window_updates_per_second: WINDOW_UPDATEs of the peer while the server sends it no data.
        max_idle_frames_per_second: frames that carry nothing: PRIORITY, GOAWAY, empty DATA, unknown types, PINGs that
            answer the server's.
        handshake_seconds: until TLS and the HTTP/2 preface must be complete.
        keepalive_idle_seconds: silence after which the server sends a PING.
        keepalive_timeout_seconds: how long that PING may stay unanswered.
        max_connection_age_seconds: age at which a connection is drained; ``inf`` for never.
        connection_age_grace_seconds: how long the calls of a connection that is too old may still take.
        flush_seconds: how long the last bytes of a closing connection may take.
    """

    max_receive_message_bytes: int = 64 * 1024 * 1024
    max_send_message_bytes: int = 64 * 1024 * 1024
    max_concurrent_streams: int = 2_048
    max_connections: int = 10_000
    max_header_list_bytes: int = 16 * 1024
    max_continuations: int = 16
    stream_window_bytes: int = 1024 * 1024
    connection_window_bytes: int = 16 * 1024 * 1024
    write_high_water_bytes: int = 256 * 1024
    max_write_backlog_bytes: int = 4 * 1024 * 1024
    max_resets_per_second: int = 2_000
    max_pings_per_second: int = 100
    max_settings_per_second: int = 100
    max_window_updates_per_second: int = 10_000
    max_idle_frames_per_second: int = 1_000
    handshake_seconds: float = 10.0
    keepalive_idle_seconds: float = 120.0
    keepalive_timeout_seconds: float = 20.0
    max_connection_age_seconds: float = math.inf
    connection_age_grace_seconds: float = 30.0
    flush_seconds: float = 1.0

    def __post_init__(self) -> None:
        """Refuse values that cannot work.

        Raises:
            ValueError: a limit is below its smallest useful value, or a window is above what HTTP/2 can say.
        """
        for field in fields(self):
            value = getattr(self, field.name)
            smallest = _SMALLEST.get(field.name, 0 if field.name.endswith("_seconds") else 1)
            if not value >= smallest:
                raise ValueError(f"{field.name}: expected at least {smallest}, got {value}")
            if field.name.endswith("window_bytes") and value > _LARGEST_WINDOW:
                raise ValueError(f"{field.name}: expected at most {_LARGEST_WINDOW}, got {value}")

    @classmethod
    def for_test(cls) -> TransportLimits:
        """Give small, quick limits for tests that drive the clock themselves."""
        return cls(
            max_receive_message_bytes=1024 * 1024,
            max_send_message_bytes=1024 * 1024,
            max_concurrent_streams=100,
            stream_window_bytes=65_535,
            connection_window_bytes=65_535 * 4,
            write_high_water_bytes=32 * 1024,
            max_write_backlog_bytes=256 * 1024,
            max_resets_per_second=50,
            max_pings_per_second=20,
            max_settings_per_second=20,
            max_window_updates_per_second=150,
            max_idle_frames_per_second=50,
        )
