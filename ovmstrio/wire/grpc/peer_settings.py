"""What a peer's SETTINGS say of the frames and header blocks that it is sent (RFC 9113, 6.5)."""

from __future__ import annotations

from typing import Final

from ovmstrio.wire.grpc import frames
from ovmstrio.wire.grpc.frames import MAX_FRAME_BYTES, MAX_WINDOW, ConnectionFault, ErrorCode, Setting
from ovmstrio.wire.grpc.replies import TABLE_SIZE_ZERO

__all__ = ["SETTING_BYTES", "PeerSettings"]

SETTING_BYTES: Final = 6
_DEFAULT_TABLE_BYTES: Final = 4_096
_LARGEST_FRAME_SETTING: Final = 2**24 - 1


class PeerSettings:
    """The settings of one peer.

    Attributes:
        max_frame_bytes: of a payload that it is sent.
        table_update: what its next header block has to begin with; None if nothing.
    """

    __slots__ = ("_table_given_up", "max_frame_bytes", "table_update")

    def __init__(self) -> None:
        self.max_frame_bytes = MAX_FRAME_BYTES
        self.table_update: bytes | None = None
        self._table_given_up = False

    def apply(self, payload: bytes) -> int | None:
        """Take over the entries of a SETTINGS frame; gives the window that streams begin with, if it has one.

        A window that is too large is the last entry that is looked at.

        Raises:
            ConnectionFault: a value is impossible.
        """
        initial_window = None
        for start in range(0, len(payload), SETTING_BYTES):
            key, value = frames.setting(payload, start)
            if key == Setting.INITIAL_WINDOW_SIZE:
                initial_window = value
                if value > MAX_WINDOW:
                    break
            else:
                self._apply_one(key, value)
        return initial_window

    def _apply_one(self, key: int, value: int) -> None:
        if key == Setting.MAX_FRAME_SIZE:
            if not MAX_FRAME_BYTES <= value <= _LARGEST_FRAME_SETTING:
                raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, f"MAX_FRAME_SIZE {value}")
            self.max_frame_bytes = min(value, frames.LARGEST_SENT_BYTES)
        elif key == Setting.ENABLE_PUSH:
            if value > 1:
                raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, f"ENABLE_PUSH {value}")
        elif key == Setting.HEADER_TABLE_SIZE and value < _DEFAULT_TABLE_BYTES and not self._table_given_up:
            self._table_given_up = True
            self.table_update = TABLE_SIZE_ZERO
