"""Bytes of HTTP/2 clients for tests of the gRPC transport."""

from __future__ import annotations

from collections.abc import Sequence

from hpack import Decoder, Encoder

from ovmstrio.transport.grpc import frames
from ovmstrio.transport.grpc.frames import PREFACE, FrameType
from ovmstrio.transport.grpc.http2 import Event, ServerCore
from ovmstrio.transport.grpc.limits import TransportLimits
from tests.support.bare_http2 import END_HEADERS, END_STREAM, call_headers, frame, framed

__all__ = ["HELLO", "SMALL_LIMITS", "data", "decoded", "headers", "message", "receive_all", "request_headers"]

SMALL_LIMITS = TransportLimits(
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
HELLO = PREFACE + frames.settings({})
message = framed


def receive_all(core: ServerCore, script: bytes) -> list[Event]:
    events = core.receive(script)
    while core.more:
        events += core.go_on()
    return events


def data(stream_id: int, payload: bytes, *, end: bool = False) -> bytes:
    return frame(FrameType.DATA, END_STREAM if end else 0, stream_id, payload)


def request_headers(path: str = "/test.Echo/Unary", *extra: tuple[str, str]) -> list[tuple[str, str]]:
    return call_headers(path, extra)


def headers(
    stream_id: int, pairs: Sequence[tuple[str, str]] | None = None, *, encoder: Encoder | None = None, end: bool = False
) -> bytes:
    block = (encoder or Encoder()).encode(request_headers() if pairs is None else pairs)
    return frame(FrameType.HEADERS, END_HEADERS | (END_STREAM if end else 0), stream_id, block)


def decoded(block: bytes) -> list[tuple[str, str]]:
    return [(str(name), str(value)) for name, value in Decoder(100_000).decode(block)]
