"""Timestamps of packets: int64 numbers, some of which have a meaning of their own, as in MediaPipe."""

from __future__ import annotations

import time
from typing import Final

__all__ = ["DONE", "MAX", "MIN", "UNSET", "AutomaticTimestamps", "is_range_value", "next_allowed", "show"]

_INT64_MIN: Final = -(2**63)
_INT64_MAX: Final = 2**63 - 1

UNSET: Final = _INT64_MIN
MIN: Final = _INT64_MIN + 3
"""The smallest timestamp that a packet of a stream may have."""
MAX: Final = _INT64_MAX - 3
"""The largest timestamp that a packet of a stream may have."""
DONE: Final = _INT64_MAX
"""The bound of a stream on which nothing will come any more."""

_NAMES: Final = {
    UNSET: "Timestamp::Unset()",
    _INT64_MIN + 1: "Timestamp::Unstarted()",
    _INT64_MIN + 2: "Timestamp::PreStream()",
    MIN: "Timestamp::Min()",
    MAX: "Timestamp::Max()",
    _INT64_MAX - 2: "Timestamp::PostStream()",
    _INT64_MAX - 1: "Timestamp::OneOverPostStream()",
    DONE: "Timestamp::Done()",
}


def is_range_value(timestamp: int) -> bool:
    """Tell whether a packet in the middle of a stream may have this timestamp."""
    return MIN <= timestamp <= MAX


def next_allowed(timestamp: int) -> int:
    """Give the smallest timestamp that the packet after one at ``timestamp`` may have."""
    return timestamp + 1 if timestamp < MAX else DONE


def show(timestamp: int) -> str:
    """Name a timestamp in MediaPipe's spelling: special ones by name, all others as numbers."""
    return _NAMES.get(timestamp, str(timestamp))


class AutomaticTimestamps:
    """Timestamps for requests that bring none: microseconds since the epoch, always ascending."""

    __slots__ = ("_last",)

    def __init__(self) -> None:
        self._last = 0

    def next(self) -> int:
        """Give a timestamp larger than every one given before, and than those noted."""
        self._last = max(time.time_ns() // 1000, self._last + 1)
        return self._last
