"""What has come of frames that are cut: header blocks over several frames, and DATA over several reads."""

from __future__ import annotations

from typing import NamedTuple

from ovmstrio.wire.grpc.frames import MAX_FRAME_BYTES, ConnectionFault, ErrorCode
from ovmstrio.wire.grpc.limits import TransportLimits

__all__ = ["ContinuedBlock", "CutData"]


class CutData(NamedTuple):
    """A frame of DATA of which a part has come: how many bytes have not, and its flags and stream."""

    left: int
    flags: int
    stream_id: int


class ContinuedBlock:
    """A header block that CONTINUATION frames are adding to."""

    __slots__ = ("_frames_left", "_limit", "data", "end_stream", "stream_id")

    def __init__(self, stream_id: int, end_stream: int, payload: bytes, limits: TransportLimits) -> None:
        self.stream_id = stream_id
        self.end_stream = end_stream
        self.data = bytearray(payload)
        self._limit = max(limits.max_header_list_bytes, MAX_FRAME_BYTES) * 2
        self._frames_left = limits.max_continuations

    def extend(self, payload: bytes) -> None:
        """Add a frame's payload.

        Raises:
            ConnectionFault: the block has too many frames or bytes.
        """
        self._frames_left -= 1
        self.data += payload
        if self._frames_left < 0 or len(self.data) > self._limit:
            raise ConnectionFault(ErrorCode.ENHANCE_YOUR_CALM, "too_many_continuations")
