"""What a call of a library is given: the node's parameters, and input tensors over the memory of numpy arrays."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from ctypes import c_uint64, c_void_p, cast

from ovmstrio.core.errors import CustomNodeFailure
from ovmstrio.core.tensor import Array
from ovmstrio.runtimes.pipelines.custom_nodes.native.abi import PRECISIONS, NodeParam, NodeTensor
from ovmstrio.runtimes.pipelines.custom_nodes.native.native_failures import NodeIdentity

__all__ = ["CallInputs", "as_node_params", "private", "refuse_unknown_types"]


def as_node_params(params: Mapping[str, str]) -> ctypes.Array[NodeParam]:
    """Give the parameters of a node in the form in which every call gets them."""
    return (NodeParam * len(params))(*(NodeParam(key.encode(), value.encode()) for key, value in params.items()))


def private(array: Array) -> Array:
    """Give an array that a library may be let at: the same one if nobody else has it, or a copy.

    An array that nobody else has is writeable; a copy is made as well of one that is not packed or not aligned.
    """
    return array if array.flags.carray else array.copy(order="C")


def refuse_unknown_types(identity: NodeIdentity, inputs: Mapping[str, Array]) -> None:
    """Raise ``CustomNodeFailure`` if an array has a dtype that the interface has no number for."""
    for name, array in inputs.items():
        if array.dtype not in PRECISIONS:
            detail = f"input {name!r} is of {array.dtype}, which custom nodes cannot take"
            raise CustomNodeFailure(f"Invalid precision; {identity}: {detail}")


class CallInputs:
    """The inputs of one call, which must be kept until the library has returned.

    Args:
        inputs: the arrays by name, of types that the interface knows; none of them is copied.
    """

    def __init__(self, inputs: Mapping[str, Array]) -> None:
        self._arrays = [inputs[name] for name in sorted(inputs)]
        self._sizes = [(c_uint64 * max(array.ndim, 1))(*array.shape) for array in self._arrays]
        self.array: ctypes.Array[NodeTensor] = (NodeTensor * len(inputs))(
            *map(self._tensor, sorted(inputs), range(len(inputs)))
        )
        self.count = len(inputs)

    def _tensor(self, name: str, index: int) -> NodeTensor:
        array = self._arrays[index]
        return NodeTensor(
            name=name.encode(),
            data=array.__array_interface__["data"][0],
            data_bytes=array.nbytes,
            dims=cast(self._sizes[index], c_void_p).value,
            dims_count=array.ndim,
            precision=PRECISIONS[array.dtype],
        )

    def holds(self, address: int) -> bool:
        """Tell whether an address lies within the memory of an input."""
        return any(0 <= address - array.__array_interface__["data"][0] < array.nbytes for array in self._arrays)
