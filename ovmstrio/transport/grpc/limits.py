"""Limits of the gRPC transport: sizes, counts, rates and timeouts."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Final

_MINIMUMS = {
    "stream_window_bytes": 65_535,
    "connection_window_bytes": 65_535,
    "max_receive_message_bytes": 0,
    "max_send_message_bytes": 0,
}
_MAX_WINDOW_BYTES = 2**31 - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class TransportLimits:
    """Limits that a server applies to its peers.

    Attributes:
        max_receive_message_bytes: largest request message after decompression; above it RESOURCE_EXHAUSTED.
        max_send_message_bytes: largest response message; above it RESOURCE_EXHAUSTED.
        max_concurrent_streams: open calls per connection; further calls are reset with REFUSED_STREAM.
        max_connections: open connections of the server; further ones are closed at once.
        max_header_list_bytes: decoded size of a request's headers; above it RESOURCE_EXHAUSTED.
        max_continuations: CONTINUATION frames per header block; above it the connection is closed.
        stream_window_bytes: unread request bytes per call.
        connection_window_bytes: unread request bytes per connection.
        write_high_water_bytes: unsent response bytes per connection, above which senders wait.
        max_write_backlog_bytes: unsent bytes, control frames included, above which the connection of a peer that does
            not read is closed.
        max_resets_per_second: streams per connection that end in RST_STREAM, sent by either side.
        max_pings_per_second: PINGs received while the server sends no data.
        max_settings_per_second: SETTINGS entries received; an empty frame counts as one.
        max_window_updates_per_second: WINDOW_UPDATEs received while the server sends no data.
        max_idle_frames_per_second: frames without content: PRIORITY, GOAWAY, empty DATA, unknown types, PING
            acknowledgements.
        handshake_seconds: timeout of TLS handshake and HTTP/2 preface.
        keepalive_idle_seconds: idle time after which the server sends a PING.
        keepalive_timeout_seconds: timeout of that PING.
        max_connection_age_seconds: age at which a connection is drained; ``inf`` for never.
        connection_age_grace_seconds: time for running calls of a connection drained because of its age.
        flush_seconds: timeout for the last bytes of a closing connection.
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
        for field in fields(self):
            value = getattr(self, field.name)
            smallest = _MINIMUMS.get(field.name, 0 if field.name.endswith("_seconds") else 1)
            if not value >= smallest:
                raise ValueError(f"{field.name}: expected at least {smallest}, got {value}")
            if field.name.endswith("window_bytes") and value > _MAX_WINDOW_BYTES:
                raise ValueError(f"{field.name}: expected at most {_MAX_WINDOW_BYTES}, got {value}")


CLIENT_LIMITS: Final = TransportLimits(
    max_header_list_bytes=64 * 1024,
    max_continuations=64,
    stream_window_bytes=8 * 2**20,
    connection_window_bytes=32 * 2**20,
    write_high_water_bytes=2**20,
    max_resets_per_second=2**31,  # limited by the calls, which only the client makes
)
"""Limits of our clients."""
