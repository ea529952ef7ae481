"""HTTP/2 frame constants, serialisers and errors (RFC 9113, sections 4 and 6)."""

from __future__ import annotations

from enum import IntEnum
from struct import Struct
from typing import Final

PREFACE: Final = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
FRAME_HEADER_BYTES: Final = 9
MAX_FRAME_BYTES: Final = 16_384
"""Default MAX_FRAME_SIZE."""
MAX_RECEIVED_DATA_BYTES: Final = 2**20
"""Largest DATA frame that peers may send; larger frames would not arrive faster than the stream window allows."""
MAX_SENT_DATA_BYTES: Final = 2**18
"""Largest DATA frame sent, so that calls of one connection alternate even if the peer accepts larger frames."""
MAX_STREAM_ID: Final = 2**31 - 1
MAX_WINDOW: Final = 2**31 - 1

FRAME_HEADER: Final = Struct(">BHBBL")
"""Length (high byte, low 16 bits), type, flags, stream id."""

_UINT32 = Struct(">L")
_SETTING = Struct(">HL")
_GOAWAY = Struct(">LL")
_pack_header = FRAME_HEADER.pack


class FrameType(IntEnum):
    """Frame types of RFC 9113; higher numbers are extensions and are ignored."""

    DATA = 0
    HEADERS = 1
    PRIORITY = 2
    RST_STREAM = 3
    SETTINGS = 4
    PUSH_PROMISE = 5
    PING = 6
    GOAWAY = 7
    WINDOW_UPDATE = 8
    CONTINUATION = 9


class Flag:
    """Flag bits; plain integers, because frames are parsed in the hot path."""

    ACK: Final = 0x1
    END_STREAM: Final = 0x1
    END_HEADERS: Final = 0x4
    PADDED: Final = 0x8
    PRIORITY: Final = 0x20


class Setting(IntEnum):
    """SETTINGS identifiers."""

    HEADER_TABLE_SIZE = 1
    ENABLE_PUSH = 2
    MAX_CONCURRENT_STREAMS = 3
    INITIAL_WINDOW_SIZE = 4
    MAX_FRAME_SIZE = 5
    MAX_HEADER_LIST_SIZE = 6


class ErrorCode(IntEnum):
    """Error codes of RST_STREAM and GOAWAY."""

    NO_ERROR = 0
    PROTOCOL_ERROR = 1
    INTERNAL_ERROR = 2
    FLOW_CONTROL_ERROR = 3
    SETTINGS_TIMEOUT = 4
    STREAM_CLOSED = 5
    FRAME_SIZE_ERROR = 6
    REFUSED_STREAM = 7
    CANCEL = 8
    COMPRESSION_ERROR = 9
    CONNECT_ERROR = 10
    ENHANCE_YOUR_CALM = 11
    INADEQUATE_SECURITY = 12
    HTTP_1_1_REQUIRED = 13


class ConnectionFault(Exception):
    """Protocol or limit violation of the peer that ends the connection."""

    def __init__(self, code: ErrorCode, reason: str) -> None:
        super().__init__(f"{code.name}: {reason}")
        self.code = code
        self.reason = reason


def header_frames(stream_id: int, block: bytes, max_frame: int, *, end_stream: bool) -> bytes:
    """Serialise a header block as a HEADERS frame, followed by CONTINUATION frames if needed."""
    flags = Flag.END_STREAM if end_stream else 0
    length = len(block)
    if length <= max_frame:
        return (
            _pack_header(length >> 16, length & 0xFFFF, FrameType.HEADERS, flags | Flag.END_HEADERS, stream_id) + block
        )
    frames = []
    kind = FrameType.HEADERS
    for start in range(0, length, max_frame):
        part = block[start : start + max_frame]
        if start + max_frame >= length:
            flags |= Flag.END_HEADERS
        frames.append(_pack_header(len(part) >> 16, len(part) & 0xFFFF, kind, flags, stream_id) + part)
        kind, flags = FrameType.CONTINUATION, 0
    return b"".join(frames)


def settings(values: dict[Setting, int]) -> bytes:
    """Serialise a SETTINGS frame."""
    payload = b"".join(_SETTING.pack(key, value) for key, value in values.items())
    return _pack_header(0, len(payload), FrameType.SETTINGS, 0, 0) + payload


def parse_setting(payload: bytes, start: int) -> tuple[int, int]:
    """Return identifier and value of the SETTINGS entry at ``start``."""
    key, value = _SETTING.unpack_from(payload, start)
    return key, value


def settings_ack() -> bytes:
    """Serialise a SETTINGS acknowledgement."""
    return _pack_header(0, 0, FrameType.SETTINGS, Flag.ACK, 0)


def ping(payload: bytes, *, ack: bool) -> bytes:
    """Serialise a PING with eight bytes of payload, or its acknowledgement."""
    return _pack_header(0, 8, FrameType.PING, Flag.ACK if ack else 0, 0) + payload


def rst_stream(stream_id: int, code: int) -> bytes:
    """Serialise a RST_STREAM frame."""
    return _pack_header(0, 4, FrameType.RST_STREAM, 0, stream_id) + _UINT32.pack(code)


def window_update(stream_id: int, increment: int) -> bytes:
    """Serialise a WINDOW_UPDATE frame; stream 0 is the connection."""
    return _pack_header(0, 4, FrameType.WINDOW_UPDATE, 0, stream_id) + _UINT32.pack(increment)


def goaway(last_stream_id: int, code: int, debug: bytes = b"") -> bytes:
    """Serialise a GOAWAY frame."""
    payload = _GOAWAY.pack(last_stream_id, code) + debug
    return _pack_header(0, len(payload), FrameType.GOAWAY, 0, 0) + payload


def check_frame_size(size: int, kind: int, max_control_bytes: int) -> None:
    """Raise ``ConnectionFault`` if a frame exceeds the size limit of DATA or of the other types."""
    if size > (max_control_bytes if kind else MAX_RECEIVED_DATA_BYTES):
        raise ConnectionFault(ErrorCode.FRAME_SIZE_ERROR, f"frame of {size} bytes exceeds the limit")


def strip_padding(payload: bytes | memoryview) -> bytes | memoryview:
    """Remove the padding of a PADDED frame's payload; raise ``ConnectionFault`` if the padding length is invalid."""
    if not payload or payload[0] >= len(payload):
        raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, "padding is longer than its frame")
    return payload[1 : len(payload) - payload[0]]
