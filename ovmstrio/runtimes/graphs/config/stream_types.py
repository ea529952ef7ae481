"""What the streams of a graph carry, by the tag that the graph gives them."""

from __future__ import annotations

from typing import Final

from ovmstrio.core.request import InferRequest, InferResponse
from ovmstrio.runtimes.graphs.packets import ImageFrame, MediaPipeTensor, OvTensor, TfTensor
from pyovms import Tensor

__all__ = ["PYTHON_TENSOR", "TFLITE", "stream_type", "tag_for", "type_name"]

PYTHON_TENSOR: Final = "OVMS_PY_TENSOR"
TFLITE: Final = "TFLITE_TENSOR"

_TYPES: Final[tuple[tuple[str, type], ...]] = (
    (PYTHON_TENSOR, Tensor),
    ("OVTENSOR", OvTensor),
    ("TENSOR", MediaPipeTensor),
    ("TFTENSOR", TfTensor),
    ("IMAGE", ImageFrame),
    ("REQUEST", InferRequest),
    ("RESPONSE", InferResponse),
)

_NAMES: Final = {
    Tensor: "pyovms.Tensor",
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
