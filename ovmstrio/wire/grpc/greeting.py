"""The first bytes of a server: its settings, and the window of the connection."""

from __future__ import annotations

from ovmstrio.wire.grpc import frames
from ovmstrio.wire.grpc.frames import LARGEST_DATA_BYTES, Setting
from ovmstrio.wire.grpc.limits import TransportLimits
from ovmstrio.wire.grpc.windows import DEFAULT_WINDOW

__all__ = ["greeting"]


def greeting(limits: TransportLimits) -> bytes:
    """Write them, as the limits say."""
    written = frames.settings(
        {
            Setting.MAX_CONCURRENT_STREAMS: limits.max_concurrent_streams,
            Setting.INITIAL_WINDOW_SIZE: limits.stream_window_bytes,
            Setting.MAX_FRAME_SIZE: LARGEST_DATA_BYTES,
            Setting.MAX_HEADER_LIST_SIZE: limits.max_header_list_bytes,
        }
    )
    if limits.connection_window_bytes > DEFAULT_WINDOW:
        written += frames.window_update(0, limits.connection_window_bytes - DEFAULT_WINDOW)
    return written
