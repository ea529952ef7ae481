"""What travels through graphs: packets, the kinds of value that they carry, and the tags that ask for these.

The type of a stream is a Python class: ``pyovms.Tensor`` for Python nodes, the classes below for the others,
``InferRequest`` and ``InferResponse`` for graphs that handle whole messages, ``bool`` for loopback, and ``object`` for
a stream that carries anything.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from ovmstrio.core.request import InferRequest, InferResponse
from ovmstrio.core.tensor import Array
from pyovms import HttpPayload, Tensor

if TYPE_CHECKING:
    from ovmstrio.core.datatypes import Datatype

__all__ = [
    "PYTHON_TENSOR",
    "REQUEST_PAYLOAD",
    "RESPONSE_PAYLOAD",
    "TFLITE",
    "ImageFrame",
    "MediaPipeTensor",
    "OvTensor",
    "Packet",
    "TensorValue",
    "TfTensor",
    "stream_type",
    "tag_for",
    "type_name",
]


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

_NAMES: Final = {
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
    return _NAMES.get(kind, kind.__name__)
