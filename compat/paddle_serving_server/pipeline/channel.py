"""What Ops hand to each other, as custom ResponseOps see it."""

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
    """A channel was used that has been stopped."""

    def __init__(self) -> None:
        super().__init__("Channel stopped.")


class ChannelTimeoutError(RuntimeError):
    """A channel gave nothing in time."""

    def __init__(self) -> None:
        super().__init__("Channel timeout.")


class ThreadChannel:
    """The server's own; scripts have no use for one."""

    def __init__(self, *_: Any, **__: Any) -> None:
        raise NotImplementedError(f"{type(self).__name__} cannot be made by scripts: the server joins Ops itself")


class ProcessChannel(ThreadChannel):
    """The server's own; scripts have no use for one."""
