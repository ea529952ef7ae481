"""Raw tensors read as values: what user code calls a tensor, made into one where its bytes are what it says."""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from ovmstrio.api.raw_contents import raw_contents, split_elements
from ovmstrio.core.datatypes import BY_NAME, BYTES
from ovmstrio.core.errors import InvalidRequest
from ovmstrio.core.tensor import Tensor

if TYPE_CHECKING:
    from ovmstrio.core.tensor import RawTensor

__all__ = ["read_raw"]

_NUMBERS: Final = {name: row for name, row in BY_NAME.items() if row.contents_field and row is not BYTES}
_WAY_OUT: Final = "ask for it as a binary tensor"


def read_raw(tensor: RawTensor) -> Tensor:
    """Give a raw tensor's elements, flat.

    ``BYTES`` are taken apart where each element stands behind its length; any other content is one element.

    Raises:
        InvalidRequest: it is of a datatype that JSON has nothing for, or its bytes do not fill its shape.
    """
    data = raw_contents(tensor)
    if tensor.datatype == BYTES.name:
        elements = split_elements(data)
        return Tensor(tensor.name, BYTES, _objects([bytes(data)] if elements is None else elements))
    datatype = _NUMBERS.get(tensor.datatype)
    if datatype is None:
        raise InvalidRequest(
            f"output {tensor.name}: its datatype {tensor.datatype!r} cannot be written as JSON, only"
            f" {', '.join(_NUMBERS)} and BYTES; {_WAY_OUT}"
        )
    if len(data) != prod(tensor.shape) * datatype.itemsize:
        raise InvalidRequest(
            f"output {tensor.name}: its {len(data)} bytes are not {tensor.datatype} elements of shape"
            f" {list(tensor.shape)}; {_WAY_OUT}"
        )
    array = np.frombuffer(data, datatype.numpy) if data else np.empty(0, datatype.numpy)
    return Tensor(tensor.name, datatype, array)


def _objects(elements: list[bytes]) -> np.ndarray[Any, Any]:
    array = np.empty(len(elements), object)
    array[:] = elements
    return array
