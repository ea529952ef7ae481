"""Arrays as the packed bytes that KServe calls raw contents, and arrays over such bytes."""

from __future__ import annotations

from collections.abc import Iterable
from struct import Struct
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from ovmstrio.core.request import Buffer
from ovmstrio.core.tensor import Array, RawTensor
from ovmstrio.util.buffers import PiecedMessage

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from ovmstrio.core.request import InferResponse
    from ovmstrio.core.tensor import Tensor

# ----------------------------------------------------------------------
# Arrays as the packed bytes that KServe calls raw contents, and arrays over such bytes
# ----------------------------------------------------------------------

_LENGTH = Struct("<I")
_pack_length = _LENGTH.pack


def framed(elements: Iterable[bytes]) -> bytes:
    """Put each element behind its length as a little-endian uint32."""
    return b"".join([part for element in elements for part in (_pack_length(len(element)), element)])


def buffer_of(array: Array) -> Buffer:
    """Give an array's elements in row-major order, little-endian and packed; those of an object array framed.

    Nothing is copied if the array is contiguous: the buffer is then a view of it.
    """
    if array.dtype.hasobject:
        return framed(array.flat)
    if not array.flags.c_contiguous:
        array = np.ascontiguousarray(array)
    # A memoryview is cast several times faster than an array is viewed, but not if it is empty.
    return array.data.cast("B") if array.size else b""


def wrapped(raw: Buffer, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
    """Make an array over bytes whose number fits; it is a copy only where they are not aligned."""
    array: Array = np.ndarray(shape, dtype, raw)
    return array if array.flags.aligned else array.copy()


# ----------------------------------------------------------------------
# Tensors as the packed bytes that KServe calls raw contents, the same on gRPC and in REST's binary extension
# ----------------------------------------------------------------------

WrittenMessage = bytes | memoryview | PiecedMessage
"""A serialised message; its length is its size."""

_JOINED_AT_ONCE: Final = 2**20


def raw_contents(tensor: Tensor | RawTensor) -> Buffer:
    """Give a tensor's elements in row-major order, little-endian and packed; of a raw tensor its bytes as they are.

    Elements of ``BYTES`` stand each behind its length as a little-endian uint32, all of them whatever the rank.
    Other tensors are not copied if their array is contiguous: the buffer is then a view of it.
    """
    if isinstance(tensor, RawTensor):
        data = tensor.data
        if not isinstance(data, memoryview):
            return data
        # A view with a size of zero cannot be cast.
        return data.cast("B") if data.nbytes else b""
    array = tensor.array
    if array.dtype.hasobject:
        return b"".join([part for element in array.flat for part in (_pack_length(len(element)), element)])
    if not array.flags.c_contiguous:
        array = np.ascontiguousarray(array)
    return array.reshape(-1).view(np.uint8).data


def gather_buffers(parts: Sequence[Buffer], response: InferResponse | None = None) -> WrittenMessage:
    """Make a message of its pieces, of bytes each.

    Small ones are joined.  Large ones are copied by numpy, which lets others have the interpreter's lock meanwhile, or
    left where they are if that is allowed by the response that they are of.
    """
    size = sum(map(len, parts))
    if size <= _JOINED_AT_ONCE:
        return b"".join(parts)
    if response is not None and response.lies_as_sent:
        return PiecedMessage(parts)
    whole = np.empty(size, np.uint8)
    end = 0
    for part in parts:
        start, end = end, end + len(part)
        whole[start:end] = np.frombuffer(part, np.uint8) if part else ()
    return whole.data


def join_buffers(parts: Sequence[Buffer]) -> bytes:
    """Join the pieces of a message, of bytes each, for who needs ``bytes``.

    Large ones are copied twice, piece by piece: so nobody waits long for the interpreter's lock while a thread does it.
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
    """Take apart elements that stand each behind their length; None for a buffer that is not made so."""
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
