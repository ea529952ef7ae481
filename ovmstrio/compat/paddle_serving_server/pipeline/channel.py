"""Channel classes of Paddle Serving, for custom ResponseOps."""

from __future__ import annotations

from typing import Any

from ovmstrio.ext.ops import ChannelData, ChannelDataType
from ovmstrio.ext.ops import CustomExceptionCode as ChannelDataErrcode

__all__ = [
    "ChannelData",
    "ChannelDataErrcode",
    "ChannelDataType",
    "ChannelStopError",
    "ChannelTimeoutError",
    "ProcessChannel",
    "ThreadChannel",
]


class ChannelStopError(RuntimeError):
    """Use of a stopped channel."""

    def __init__(self) -> None:
        super().__init__("Channel stopped.")


class ChannelTimeoutError(RuntimeError):
    """Timeout of a channel."""

    def __init__(self) -> None:
        super().__init__("Channel timeout.")


class ThreadChannel:
    """Not supported: the server creates channels."""

    def __init__(self, *_: Any, **__: Any) -> None:
        raise NotImplementedError(f"{type(self).__name__} is not supported: the server connects Ops")


class ProcessChannel(ThreadChannel):
    """Not supported: the server creates channels."""
