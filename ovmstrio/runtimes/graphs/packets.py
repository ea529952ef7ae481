"""What travels through graphs: packets, and the kinds of value that they carry.

The type of a stream is a Python class: ``pyovms.Tensor`` for Python nodes, the classes below for the others,
``InferRequest`` and ``InferResponse`` for graphs that handle whole messages, ``bool`` for loopback, and ``object`` for
a stream that carries anything.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from ovmstrio.core.tensor import Array

if TYPE_CHECKING:
    from ovmstrio.core.datatypes import Datatype

__all__ = ["ImageFrame", "MediaPipeTensor", "OvTensor", "Packet", "TensorValue", "TfTensor"]


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
