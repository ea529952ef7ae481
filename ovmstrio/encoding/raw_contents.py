"""Raw contents: tensors as packed bytes, in gRPC and in the binary extension of REST."""

from __future__ import annotations

from collections.abc import Iterable
from struct import Struct
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from ovmstrio.core.errors import InvalidRequest
from ovmstrio.core.request import Buffer
from ovmstrio.core.tensor import BY_NAME, BYTES, Array, RawTensor, from_bf16, to_bf16
from ovmstrio.util.buffers import PiecedMessage

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from ovmstrio.core.request import InferResponse
    from ovmstrio.core.tensor import Tensor

# ----------------------------------------------------------------------
# Arrays
# ----------------------------------------------------------------------

_LENGTH = Struct("<I")
_pack_length = _LENGTH.pack


def framed(elements: Iterable[bytes]) -> bytes:
    """Join elements, each after its length as a little-endian uint32."""
    return b"".join([part for element in elements for part in (_pack_length(len(element)), element)])


def buffer_of(array: Array) -> Buffer:
    """Return an array's elements in row-major order, little-endian and packed; an object array as :func:`framed`.

    The buffer of a contiguous array is a view without a copy.
    """
    if array.dtype.hasobject:
        return framed(array.flat)
    if not array.flags.c_contiguous:
        array = np.ascontiguousarray(array)
    # Casting a memoryview is several times faster than an array view, but fails for an empty one.
    return array.data.cast("B") if array.size else b""


def wrapped(raw: Buffer, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
    """Create an array over bytes of the right size; copy the bytes only if they are not aligned."""
    array: Array = np.ndarray(shape, dtype, raw)
    return array if array.flags.aligned else array.copy()


# ----------------------------------------------------------------------
# Tensors and messages
# ----------------------------------------------------------------------

WrittenMessage = bytes | memoryview | PiecedMessage
"""A serialised message; its length is its size."""

_JOINED_AT_ONCE: Final = 2**20


def raw_contents(tensor: Tensor | RawTensor) -> Buffer:
    """Return a tensor's elements in row-major order, little-endian and packed; a raw tensor's bytes unchanged.

    Each ``BYTES`` element follows its length as a little-endian uint32.  The buffer of another contiguous tensor is a
    view without a copy.
    """
    if isinstance(tensor, RawTensor):
        data = tensor.data
        if not isinstance(data, memoryview):
            return data
        # An empty view cannot be cast.
        return data.cast("B") if data.nbytes else b""
    array = tensor.array
    if array.dtype.hasobject:
        return b"".join([part for element in array.flat for part in (_pack_length(len(element)), element)])
    if not array.flags.c_contiguous:
        array = np.ascontiguousarray(array)
    return array.reshape(-1).view(np.uint8).data


def gather_buffers(parts: Sequence[Buffer], response: InferResponse | None = None) -> WrittenMessage:
    """Create a message from its buffers.

    A small message is joined.  A large message is copied by NumPy, which releases the GIL, or is not copied if its
    response allows that (``lies_as_sent``).
    """
    size = sum(map(len, parts))
    if size <= _JOINED_AT_ONCE:
        return b"".join(parts)
    if response is not None and response.lies_as_sent:
        return PiecedMessage(parts)
    message = np.empty(size, np.uint8)
    end = 0
    for part in parts:
        start, end = end, end + len(part)
        message[start:end] = np.frombuffer(part, np.uint8) if part else ()
    return message.data


def join_buffers(parts: Sequence[Buffer]) -> bytes:
    """Join the buffers of a message to ``bytes``.

    A large message is copied in pieces first, so that a worker thread does not hold the GIL for long.
    """
    if sum(map(len, parts)) <= _JOINED_AT_ONCE:
        return b"".join(parts)
    return b"".join([piece for part in parts for piece in _pieces(part)])


def _pieces(part: Buffer) -> Iterator[bytes]:
    if isinstance(part, bytes):
        yield part
        return
    for start in range(0, len(part), _JOINED_AT_ONCE):
        yield bytes(part[start : start + _JOINED_AT_ONCE])


def split_elements(data: Buffer) -> list[bytes] | None:
    """Split a buffer of length-prefixed elements; None if the prefixes do not fit the buffer."""
    view = memoryview(data)
    position, end = 0, len(view)
    elements = []
    while position < end:
        start = position + _LENGTH.size
        if start > end:
            return None
        position = start + _LENGTH.unpack_from(view, position)[0]
        if position > end:
            return None
        elements.append(bytes(view[start:position]))
    return elements


# ----------------------------------------------------------------------
# Clients
# ----------------------------------------------------------------------

_BY_DTYPE: Final = {row.numpy: row.name for row in BY_NAME.values() if row.name not in {"BF16", "BYTES"}}


def datatype_of(array: Array) -> str:
    """Return the KServe datatype of an array.

    Raises:
        InvalidRequest: KServe has no datatype for the dtype.
    """
    if array.dtype.kind in "OSU":
        return BYTES.name
    name = _BY_DTYPE.get(array.dtype.newbyteorder("<"))
    if name is None:
        raise InvalidRequest(f"dtype {array.dtype} has no KServe datatype; convert it to one of {', '.join(BY_NAME)}")
    return name


def to_raw(array: Array, datatype: str) -> bytes:
    """Encode an array as raw contents; floats are rounded to the nearest ``BF16``.

    Raises:
        InvalidRequest: an element of ``BYTES`` is no text.
    """
    if datatype == BYTES.name:
        return framed(map(_text_element, array.flat))
    if datatype == "BF16" and array.dtype.kind == "f":
        array = to_bf16(array)
    return np.ascontiguousarray(array, BY_NAME[datatype].numpy).tobytes()


def _text_element(element: object) -> bytes:
    if isinstance(element, str):
        return element.encode()
    # ``bytes`` of an integer would be as many zeros.
    if not isinstance(element, bytes | bytearray | memoryview):
        raise InvalidRequest(f"expected str or bytes for BYTES, got {type(element).__name__}")
    return bytes(element)


def raw_tensor(name: str, array: Array, datatype: str | None = None) -> RawTensor:
    """Create a raw tensor of an array, by default with the datatype of its dtype; a contiguous array is not copied.

    Raises:
        InvalidRequest: KServe has no datatype for the dtype, or the array cannot be sent as the datatype.
    """
    try:
        datatype = datatype or datatype_of(array)
        return RawTensor(name, datatype, array.shape, _elements_as(array, datatype))
    except InvalidRequest as error:
        raise InvalidRequest(f"input {name!r}: {error.message}") from None


def _elements_as(array: Array, datatype: str) -> Buffer:
    known = BY_NAME.get(datatype)
    if known is None:
        raise InvalidRequest(f"expected a datatype of {', '.join(BY_NAME)}, got {datatype}")
    if known is BYTES:
        return to_raw(array, datatype)
    if array.dtype == known.numpy:
        return buffer_of(array)
    numbers: np.dtype[Any] = np.dtype(np.float32) if datatype == "BF16" else known.numpy
    if not np.can_cast(array.dtype, numbers, "same_kind"):
        raise InvalidRequest(f"an array of {array.dtype} cannot be sent as {datatype}")
    if numbers.kind in "iu" and array.dtype.kind in "iu" and array.size:
        limits, low, high = np.iinfo(numbers), int(array.min()), int(array.max())
        if low < limits.min or high > limits.max:
            outside = low if low < limits.min else high
            raise InvalidRequest(f"{outside} is out of range of {datatype} [{limits.min}, {limits.max}]")
    converted = array.astype(numbers)
    return buffer_of(to_bf16(converted) if datatype == "BF16" else converted)


def from_raw(raw: Buffer, datatype: str, shape: tuple[int, ...]) -> Array:
    """Decode raw contents to an array; ``BF16`` becomes ``float32``.

    Raises:
        ValueError: the bytes do not fit the datatype and shape.
    """
    if datatype == BYTES.name:
        elements = split_elements(raw)
        if elements is None:
            raise ValueError("BYTES element exceeds the contents")
        return bytes_array(elements, shape)
    array = np.frombuffer(raw, BY_NAME[datatype].numpy)
    if datatype == "BF16":
        array = from_bf16(array)
    return array.reshape(shape)


def bytes_array(elements: Sequence[bytes], shape: tuple[int, ...]) -> Array:
    """Create an object array of elements."""
    array = np.empty(len(elements), dtype=object)
    array[:] = elements
    return array.reshape(shape)
