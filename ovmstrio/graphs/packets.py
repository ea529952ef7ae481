"""Packets of graphs: value types, the stream tags that select them, and MediaPipe timestamps.

The type of a stream is a Python class: ``pyovms.Tensor`` for Python nodes, the classes below for the others,
``InferRequest`` and ``InferResponse`` for graphs that process complete messages, ``bool`` for loopback, and
``object`` for any type.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from ovmstrio.core.request import InferRequest, InferResponse
from ovmstrio.core.tensor import Array
from ovmstrio.graphs.python_nodes.api import HttpPayload, Tensor

if TYPE_CHECKING:
    from ovmstrio.core.tensor import Datatype


class Packet(NamedTuple):
    """A value at a timestamp. All receivers share the value, so they must not change it."""

    value: Any
    timestamp: int


@dataclass(frozen=True, slots=True, eq=False)
class TensorValue:
    """A tensor without a name: ``array`` has the dtype ``datatype.numpy`` (``uint16`` bits for ``BF16``)."""

    datatype: Datatype
    array: Array


class OvTensor(TensorValue):
    """A tensor for OpenVINO nodes: tag ``OVTENSOR``, and streams without a known tag."""

    __slots__ = ()


class MediaPipeTensor(TensorValue):
    """A MediaPipe tensor: tag ``TENSOR``; FP32, FP16, INT32, INT8, UINT8 or BOOL, no dimension 0."""

    __slots__ = ()


class TfTensor(TensorValue):
    """A tensor for TensorFlow nodes: tag ``TFTENSOR``."""

    __slots__ = ()


class ImageFrame(TensorValue):
    """An image: tag ``IMAGE``; height, width, channels of UINT8, UINT16 or FP32."""

    __slots__ = ()


PYTHON_TENSOR_TAG: Final = "OVMS_PY_TENSOR"
TFLITE_TAG: Final = "TFLITE_TENSOR"
REQUEST_PAYLOAD_TAG: Final = "HTTP_REQUEST_PAYLOAD"
RESPONSE_PAYLOAD_TAG: Final = "HTTP_RESPONSE_PAYLOAD"

_TYPES: Final[tuple[tuple[str, type], ...]] = (
    (PYTHON_TENSOR_TAG, Tensor),
    ("OVTENSOR", OvTensor),
    ("TENSOR", MediaPipeTensor),
    ("TFTENSOR", TfTensor),
    ("IMAGE", ImageFrame),
    ("REQUEST", InferRequest),
    ("RESPONSE", InferResponse),
    (REQUEST_PAYLOAD_TAG, HttpPayload),
    (RESPONSE_PAYLOAD_TAG, Tensor),
)

_TYPE_NAMES: Final = {
    Tensor: "pyovms.Tensor",
    HttpPayload: "pyovms.HttpPayload",
    OvTensor: "ov::Tensor",
    MediaPipeTensor: "mediapipe::Tensor",
    TfTensor: "tensorflow::Tensor",
    ImageFrame: "mediapipe::ImageFrame",
    InferRequest: "the complete request",
    InferResponse: "the complete response",
}


def stream_type(tag: str) -> type:
    """Return the packet type of a graph stream by its tag's prefix; ``OvTensor`` for an unknown tag."""
    return next((kind for prefix, kind in _TYPES if tag.startswith(prefix)), OvTensor)


def tag_of_type(kind: type) -> str | None:
    """Return the tag that selects a packet type; None if there is none."""
    return next((prefix for prefix, known in _TYPES if known is kind), None)


def type_name(kind: type) -> str:
    """Return the name of a type for error messages."""
    return _TYPE_NAMES.get(kind, kind.__name__)


# Timestamps

_INT64_MIN: Final = -(2**63)
_INT64_MAX: Final = 2**63 - 1

UNSET: Final = _INT64_MIN
MIN: Final = _INT64_MIN + 3
"""The smallest timestamp of a packet."""
MAX: Final = _INT64_MAX - 3
"""The largest timestamp of a packet."""
DONE: Final = _INT64_MAX
"""The bound of a closed stream."""

_TIMESTAMP_NAMES: Final = {
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
    """Return whether a packet may have this timestamp."""
    return MIN <= timestamp <= MAX


def next_allowed(timestamp: int) -> int:
    """Return the smallest timestamp allowed after ``timestamp``."""
    return timestamp + 1 if timestamp < MAX else DONE


def format_timestamp(timestamp: int) -> str:
    """Format a timestamp as MediaPipe does: special values by name, others as numbers."""
    return _TIMESTAMP_NAMES.get(timestamp, str(timestamp))


class AutomaticTimestamps:
    """Timestamps for requests without one: microseconds since the epoch, strictly ascending."""

    __slots__ = ("_last",)

    def __init__(self) -> None:
        self._last = 0

    def next(self) -> int:
        """Return a timestamp larger than all previous ones."""
        self._last = max(time.time_ns() // 1000, self._last + 1)
        return self._last
