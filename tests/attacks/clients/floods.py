"""Frames that are cheap to send and were dear to take: SETTINGS and WINDOW_UPDATE beside two thousand open calls."""

from __future__ import annotations

import contextlib
import struct
from typing import Final

from benchmarks.requests import framed_infer_request
from ovmstrio.wire.grpc import frames
from ovmstrio.wire.grpc.frames import FrameType, Setting
from tests.attacks.served import INFER, ROW, TRIVIAL, Ports
from tests.support.bare_http2 import BareConnection, ConnectionEnded, frame

STREAMS: Final = 2_000
SETTINGS_FRAMES: Final = 20
ENTRIES: Final = 2_730
WINDOW_UPDATE_BYTES: Final = 500_000


def _open_calls(ports: Ports) -> BareConnection:
    connection = BareConnection(ports.grpc, settings={Setting.INITIAL_WINDOW_SIZE: 0}, window=0)
    body = framed_infer_request(TRIVIAL, "b", ROW)
    for number in range(STREAMS):
        _, data = connection.begin(INFER, body if number % 2 else None)
        connection.send(data)
    return connection


def _until_answered(connection: BareConnection) -> str:
    mark = b"attacked"
    try:
        connection.send(frame(FrameType.PING, 0, 0, mark))
        while (got := connection.read()).kind != FrameType.PING or got.payload != mark:
            connection.take(got)
    except ConnectionEnded:
        code = connection.goaway and int.from_bytes(connection.goaway.payload[4:8], "big")
        return f"the connection was ended with code {code}"
    return "everything was taken"


def settings_flood(ports: Ports) -> str:
    """Change the window of every stream 54,600 times in 330 kB."""
    with _open_calls(ports) as connection:
        entries = (struct.pack(">HL", Setting.INITIAL_WINDOW_SIZE, number % 7) for number in range(ENTRIES))
        flood = frame(FrameType.SETTINGS, 0, 0, b"".join(entries))
        try:
            for _ in range(SETTINGS_FRAMES):
                connection.send(flood)
        except ConnectionEnded:
            pass
        return _until_answered(connection)


def window_update_flood(ports: Ports) -> str:
    """Open the connection's window by a byte, 38,000 times."""
    with _open_calls(ports) as connection:
        update = frames.window_update(0, 1)
        with contextlib.suppress(ConnectionEnded):
            connection.send(update * (WINDOW_UPDATE_BYTES // len(update)))
        return _until_answered(connection)
