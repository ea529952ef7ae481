"""What travels through graphs: packets, the kinds of value that they carry, and the tags that ask for these.

The type of a stream is a Python class: ``pyovms.Tensor`` for Python nodes, the classes below for the others,
``InferRequest`` and ``InferResponse`` for graphs that handle whole messages, ``bool`` for loopback, and ``object`` for
a stream that carries anything.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from ovmstrio.core.request import InferRequest, InferResponse
from ovmstrio.core.tensor import Array
from pyovms import HttpPayload, Tensor

if TYPE_CHECKING:
    from ovmstrio.core.tensor import Datatype

__all__ = [
    "DONE",
    "MAX",
    "MIN",
    "PYTHON_TENSOR",
    "REQUEST_PAYLOAD",
    "RESPONSE_PAYLOAD",
    "TFLITE",
    "UNSET",
    "AutomaticTimestamps",
    "ImageFrame",
    "MediaPipeTensor",
    "OvTensor",
    "Packet",
    "TensorValue",
    "TfTensor",
    "is_range_value",
    "next_allowed",
    "show",
    "stream_type",
    "tag_for",
    "type_name",
]

# ----------------------------------------------------------------------
# What travels through graphs: packets, the kinds of value that they carry, and the tags that ask for these
# ----------------------------------------------------------------------


class Packet(NamedTuple):
    """A value at a time.  The value is shared by everyone who receives it, and must not be changed."""

    value: Any
    timestamp: int


@dataclass(frozen=True, slots=True, eq=False)
class TensorValue:
    """A tensor without a name: ``array`` has the dtype ``datatype.numpy`` (``uint16`` bits for ``BF16``)."""

    datatype: Datatype
    array: Array


class OvTensor(TensorValue):
    """A tensor as OpenVINO nodes take it: ``OVTENSOR``, and streams without a tag that is known."""

    __slots__ = ()


class MediaPipeTensor(TensorValue):
    """A tensor of MediaPipe's own: ``TENSOR``; FP32, FP16, INT32, INT8, UINT8 or BOOL, no dimension 0."""

    __slots__ = ()


class TfTensor(TensorValue):
    """A tensor as TensorFlow nodes take it: ``TFTENSOR``."""

    __slots__ = ()


class ImageFrame(TensorValue):
    """A picture: ``IMAGE``; height, width, channels of UINT8, UINT16 or FP32."""

    __slots__ = ()


PYTHON_TENSOR: Final = "OVMS_PY_TENSOR"
TFLITE: Final = "TFLITE_TENSOR"
REQUEST_PAYLOAD: Final = "HTTP_REQUEST_PAYLOAD"
RESPONSE_PAYLOAD: Final = "HTTP_RESPONSE_PAYLOAD"

_TYPES: Final[tuple[tuple[str, type], ...]] = (
    (PYTHON_TENSOR, Tensor),
    ("OVTENSOR", OvTensor),
    ("TENSOR", MediaPipeTensor),
    ("TFTENSOR", TfTensor),
    ("IMAGE", ImageFrame),
    ("REQUEST", InferRequest),
    ("RESPONSE", InferResponse),
    (REQUEST_PAYLOAD, HttpPayload),
    (RESPONSE_PAYLOAD, Tensor),
)

_TYPE_NAMES: Final = {
    Tensor: "pyovms.Tensor",
    HttpPayload: "pyovms.HttpPayload",
    OvTensor: "ov::Tensor",
    MediaPipeTensor: "mediapipe::Tensor",
    TfTensor: "tensorflow::Tensor",
    ImageFrame: "mediapipe::ImageFrame",
    InferRequest: "the whole request",
    InferResponse: "the whole response",
}


def stream_type(tag: str) -> type:
    """Give the type of packets on a stream of the graph whose tag begins like one that is known, else OpenVINO's."""
    return next((kind for prefix, kind in _TYPES if tag.startswith(prefix)), OvTensor)


def tag_for(kind: type) -> str | None:
    """Give the tag by which a graph says that a stream carries this type; None where there is none."""
    return next((prefix for prefix, known in _TYPES if known is kind), None)


def type_name(kind: type) -> str:
    """Give a type's name as people who write graphs know it."""
    return _TYPE_NAMES.get(kind, kind.__name__)


# ----------------------------------------------------------------------
# Timestamps of packets: int64 numbers, some of which have a meaning of their own, as in MediaPipe
# ----------------------------------------------------------------------

_INT64_MIN: Final = -(2**63)
_INT64_MAX: Final = 2**63 - 1

UNSET: Final = _INT64_MIN
MIN: Final = _INT64_MIN + 3
"""The smallest timestamp that a packet of a stream may have."""
MAX: Final = _INT64_MAX - 3
"""The largest timestamp that a packet of a stream may have."""
DONE: Final = _INT64_MAX
"""The bound of a stream on which nothing will come any more."""

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
    """Tell whether a packet in the middle of a stream may have this timestamp."""
    return MIN <= timestamp <= MAX


def next_allowed(timestamp: int) -> int:
    """Give the smallest timestamp that the packet after one at ``timestamp`` may have."""
    return timestamp + 1 if timestamp < MAX else DONE


def show(timestamp: int) -> str:
    """Name a timestamp in MediaPipe's spelling: special ones by name, all others as numbers."""
    return _TIMESTAMP_NAMES.get(timestamp, str(timestamp))


class AutomaticTimestamps:
    """Timestamps for requests that bring none: microseconds since the epoch, always ascending."""

    __slots__ = ("_last",)

    def __init__(self) -> None:
        self._last = 0

    def next(self) -> int:
        """Give a timestamp larger than every one given before, and than those noted."""
        self._last = max(time.time_ns() // 1000, self._last + 1)
        return self._last
