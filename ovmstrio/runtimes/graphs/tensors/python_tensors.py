"""Python tensors: made from a request or an array, and turned back into bytes.

A known element type is checked against the bytes.  Any other name is the user's own: its bytes are handed over as they
came, whatever the shape says.
"""

from __future__ import annotations

from math import prod
from typing import Final

from ovmstrio.core.datatypes import BY_NAME, BYTES
from ovmstrio.core.request import Buffer, InferInput
from ovmstrio.runtimes.graphs.tensors.graph_rejections import (
    CONTENT_SIZE,
    MAX_BYTES,
    PRECISION,
    described,
    negative_dimension,
    no_contents,
    too_large,
)
from ovmstrio.runtimes.models.buffers import buffer_of, framed
from ovmstrio.runtimes.models.contents import to_array
from ovmstrio.runtimes.models.rejections import refused
from ovmstrio.runtimes.models.strings import elements_of
from pyovms import Tensor

__all__ = ["contents_of", "python_tensor", "read_python_tensor"]

_KNOWN: Final = {name: row for name, row in BY_NAME.items() if name not in {"BYTES", "BF16"}}
_ITEMSIZES: Final = {name: row.itemsize for name, row in _KNOWN.items()}

python_tensor: Final = Tensor._from_request  # noqa: SLF001 - pyovms's constructor for the server
"""Make a tensor of ``(name, raw, shape, datatype)``, whose buffer is ``raw`` itself."""


def read_python_tensor(given: InferInput, raw: Buffer | None) -> Tensor:
    """Make a tensor of one input of a request; raw bytes are not copied.

    Raises:
        InvalidRequest: a negative dimension, or values that do not fit the shape.
    """
    if raw is None:
        return _from_contents(given)
    count = 1
    for size in given.shape:
        if size < 0:
            raise negative_dimension(given)
        count *= size
    itemsize = _ITEMSIZES.get(given.datatype)
    if itemsize is not None and count * itemsize != len(raw):
        raise _wrong_size(given, count * itemsize, len(raw))
    return python_tensor(given.name, raw, given.shape, given.datatype)


def _wrong_size(given: InferInput, expected: int, actual: int) -> Exception:
    if expected > MAX_BYTES:
        return too_large(given)
    sizes = f"Actual: {actual}; Expected: {expected}"
    return refused(CONTENT_SIZE, f"Invalid Python tensor buffer size. {sizes}; input name: {given.name}")


def _from_contents(given: InferInput) -> Tensor:
    if any(size < 0 for size in given.shape):
        raise negative_dimension(given)
    if given.datatype == BYTES.name:
        elements = elements_of(given, None, described(given, BYTES))
        if not elements:
            raise no_contents(given)
        return python_tensor(given.name, framed(elements), given.shape, BYTES.name)
    datatype = _KNOWN.get(given.datatype)
    if datatype is None:
        rule = "custom datatypes are allowed only when raw_input_contents is used."
        raise refused(PRECISION, f"Provided datatype is invalid, {rule} Datatype: {given.datatype!r}")
    count = prod(given.shape)
    if count * datatype.itemsize > MAX_BYTES:
        raise too_large(given)
    if not count:
        raise no_contents(given)
    array = to_array(given.contents, given.shape, count, described(given, datatype))
    return python_tensor(given.name, buffer_of(array), given.shape, given.datatype)


def contents_of(tensor: Tensor) -> Buffer:
    """Give a tensor's bytes in C order, as they are now.

    They are copied unless nobody can write to them: user code may well fill the same array again before the bytes
    have left.
    """
    return tensor._frozen()._wire_bytes()  # noqa: SLF001 - pyovms's way out for the server
