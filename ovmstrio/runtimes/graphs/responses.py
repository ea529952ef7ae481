"""From packets to what a response carries."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ovmstrio.core.request import InferResponse
from ovmstrio.core.tensor import RawTensor, Tensor
from ovmstrio.runtimes.graphs.graph_failures import graph_failure
from ovmstrio.runtimes.graphs.packets import TensorValue
from ovmstrio.runtimes.graphs.tensors.python_tensors import contents_of
from pyovms import Tensor as PythonTensor

__all__ = ["to_output"]


def to_output(stream: str, value: Any) -> Tensor | RawTensor | InferResponse:
    """Make of a packet's value what a response shows under the stream's name.

    A Python tensor keeps its own name, datatype and shape, whether or not they fit its bytes.  A whole response
    stands for itself; the caller gets one of its own to fill in.

    Raises:
        GraphFailure: the value is of a type that no response can carry.
    """
    if isinstance(value, PythonTensor):
        return RawTensor(value.name, value.datatype, value.shape, contents_of(value))
    if isinstance(value, TensorValue):
        return Tensor(stream, value.datatype, value.array)
    if isinstance(value, InferResponse):
        return replace(value, outputs=list(value.outputs), parameters=dict(value.parameters))
    raise graph_failure(
        f'Packet type mismatch on the graph\'s output stream "{stream}": expected a tensor, an image or a response, '
        f"got {type(value).__name__}"
    )
