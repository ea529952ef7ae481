"""Between numpy arrays, as the rest of the server has them, and OpenVINO's tensors.

There is one way in: ``set_input_tensor`` with a tensor that shares the array's memory.  Mixing it with OpenVINO's
copying ``infer(inputs)`` corrupts the heap in 2026.4.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
import openvino as ov

from ovmstrio.core.datatypes import BY_NAME, BYTES, to_bf16
from ovmstrio.core.tensor import Array, TensorSpec

__all__ = ["from_tensor", "idle_tensor", "placeholder", "set_inputs", "to_tensor", "view_of"]

_TYPES: Final = {row.name: getattr(ov.Type, row.openvino) for row in BY_NAME.values()}

# OpenVINO makes its tables of numpy's types when they are first needed, and lets go of Python's lock meanwhile: where
# two threads need them at once, each waits for ever for what the other holds.  Here nobody else can need them yet.
ov.Type.f32.to_dtype()
ov.Type(np.float32)


def to_tensor(array: Array, spec: TensorSpec) -> ov.Tensor:
    """Make a tensor that shares the array's memory, which may be read-only; whoever calls keeps the array alive.

    Strings are copied, and lose NULs at their ends: OpenVINO takes them in no other form from Python.
    """
    if spec.datatype is BYTES:
        tensor = ov.Tensor(ov.Type.string, ov.Shape(array.shape))
        if array.size:
            tensor.bytes_data = array.astype("S")
        return tensor
    # This constructor, unlike `Tensor(array, shared_memory=True)`, takes read-only arrays, such as views of bytes.
    return ov.Tensor(array, ov.Shape(array.shape), _TYPES[spec.datatype.name])


def from_tensor(tensor: ov.Tensor, spec: TensorSpec) -> Array:
    """Copy a tensor into an array of the dtype ``spec.datatype.numpy``."""
    if spec.datatype is BYTES:
        # OpenVINO looks for the longest string also where there is none, in memory that is not the tensor's.
        strings: Array = tensor.bytes_data.astype(object) if tensor.get_size() else np.empty(list(tensor.shape), object)
        return strings
    copy: Array = tensor.data.copy()
    return copy if copy.dtype == spec.datatype.numpy else copy.view(spec.datatype.numpy)


def view_of(tensor: ov.Tensor, spec: TensorSpec) -> Array:
    """Give a view of a tensor, of the dtype ``spec.datatype.numpy``, for as long as the tensor; of strings a copy."""
    if spec.datatype is BYTES:
        return from_tensor(tensor, spec)
    view: Array = tensor.data
    return view if view.dtype == spec.datatype.numpy else view.view(spec.datatype.numpy)


def _small_shape(spec: TensorSpec, more: int = 0) -> list[int]:
    least = [1 if dim.accepts(1) else dim.low for dim in spec.shape]
    return [size + more if dim.accepts(size + more) else size for size, dim in zip(least, spec.shape, strict=True)]


def placeholder(spec: TensorSpec, more: int = 0, *, value: int = 1) -> Array:
    """Make an input of ones, as small as can be; open dimensions are larger by ``more``.

    Zeros are not what models are made for: OpenVINO 2026.4 divides by a step of 0 in ``Range``, which ends the process.
    Strings are ``1``, or empty for a ``value`` of 0.
    """
    shape = _small_shape(spec, more)
    if spec.datatype is BYTES:
        return np.full(shape, str(value).encode() if value else b"", dtype=object)
    filled = np.full(shape, value, np.float32 if spec.datatype.name == "BF16" else spec.datatype.numpy)
    return to_bf16(filled) if spec.datatype.name == "BF16" else filled


def idle_tensor(spec: TensorSpec) -> ov.Tensor:
    """Make a tensor, of OpenVINO's own memory, for a request that is not in use to hold."""
    return ov.Tensor(_TYPES[spec.datatype.name], ov.Shape(_small_shape(spec)))


def set_inputs(request: ov.InferRequest, ports: Sequence[int], tensors: Sequence[ov.Tensor]) -> None:
    """Give a request its inputs; what it had before is let go."""
    for port, tensor in zip(ports, tensors, strict=True):
        request.set_input_tensor(port, tensor)
