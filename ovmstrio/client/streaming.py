"""What goes into a stream to a graph, and what comes out of it, whatever the protocol."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from ovmstrio.core.tensor import Array, RawTensor
from ovmstrio.protocol.wire_tensors import raw_tensor

__all__ = ["TIMESTAMP", "StreamOutput", "StreamReply", "StreamRequest", "Value", "to_wire"]

TIMESTAMP: Final = "OVMS_MP_TIMESTAMP"
"""The parameter of requests and responses that holds the timestamp of their packets."""

Value = bytes | Array
"""An input: bytes go as ``BYTES`` whose content is just these bytes, which is what Python nodes expect of text."""


@dataclass(frozen=True, slots=True)
class StreamRequest:
    """One request of a stream; without a ``timestamp`` the server gives it one."""

    inputs: Mapping[str, Value]
    timestamp: int | None = None
    id: str = ""
    parameters: Mapping[str, bool | int | str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class StreamOutput:
    """One output as it came: ``data`` is its content over gRPC, its JSON value over REST."""

    name: str
    datatype: str
    shape: tuple[int, ...]
    data: Any


@dataclass(frozen=True, slots=True)
class StreamReply:
    """One message of the server: outputs of one timestamp, or what was wrong with a request."""

    outputs: tuple[StreamOutput, ...] = ()
    timestamp: int | None = None
    error: str = ""


def to_wire(name: str, value: Value, datatype: str | None = None) -> RawTensor:
    """Give an input as it travels; an array by default as the type that its dtype says.

    Raises:
        InvalidRequest: KServe has no name for the array's type.
    """
    if isinstance(value, bytes):
        return RawTensor(name, "BYTES", (len(value),), value)
    return raw_tensor(name, value, datatype)
