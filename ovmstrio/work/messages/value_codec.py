"""Values as bytes and back: plain data and arrays, never code.

::

    length of the JSON (8 bytes, little-endian) | JSON | padding | buffer | padding | buffer ...

The JSON is ``[value, [[offset, length], ...]]``; offsets count from the first buffer.  What JSON does not have is an
object with one key, which tells what it is.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any, Final

import numpy as np

from ovmstrio.work.messages.regions import SharedPart, find_shared

__all__ = ["Encoded", "decode"]

_LENGTH_BYTES: Final = 8
_JSON: Final = frozenset({type(None), bool, int, float, str})
_NEARLY_JSON: Final = (int, float, str)
_NUMPY: Final = (np.ndarray, np.generic)
_ALIGNMENT: Final = 64
_LETTERS: Final = frozenset("?bBhHiIlLqQefd")

Array = np.ndarray[Any, Any]


def _aligned(offset: int) -> int:
    return -(-offset // _ALIGNMENT) * _ALIGNMENT


class Encoded:
    """A value that is ready to be written, which must not change before it is.

    Args:
        value: plain data and arrays.
        shares_above: arrays of more bytes than that are not written if another process can see where they lie.
        shares_most: how many files there are at most that such arrays lie in.

    Attributes:
        size: how many bytes it takes.
        shared: where arrays lie that are not written; the receiver of the value needs their files in this order.

    Raises:
        TypeError: the value holds something that is neither plain data nor an array; the message says what can be sent.
    """

    def __init__(self, value: Any, *, shares_above: int = 0, shares_most: int = 0) -> None:
        self.shared: list[SharedPart] = []
        self._shares_above = shares_above
        self._shares_most = shares_most
        self._shared_arrays: list[Array] = []
        self._buffers: list[memoryview | Array] = []
        tree = self._tree(value)
        rows, end = [], 0
        for buffer in self._buffers:
            rows.append((_aligned(end), buffer.nbytes))
            end = _aligned(end) + buffer.nbytes
        self._text = json.dumps([tree, rows], separators=(",", ":")).encode()
        self._rows = rows
        self._base = _aligned(_LENGTH_BYTES + len(self._text))
        self.size = self._base + end

    def write(self, target: memoryview) -> None:
        """Write it to memory of its size."""
        target[:_LENGTH_BYTES] = len(self._text).to_bytes(_LENGTH_BYTES, "little")
        target[_LENGTH_BYTES : _LENGTH_BYTES + len(self._text)] = self._text
        for (offset, length), buffer in zip(self._rows, self._buffers, strict=True):
            start = self._base + offset
            if isinstance(buffer, memoryview):
                target[start : start + length] = buffer
            elif length:
                np.ndarray(buffer.shape, buffer.dtype, target, start)[...] = buffer

    def _tree(self, value: Any) -> Any:
        if type(value) in _JSON:
            return value
        if isinstance(value, _NUMPY):
            return self._array(value)
        if isinstance(value, _NEARLY_JSON):
            return value
        if isinstance(value, list):
            return [self._tree(one) for one in value]
        if isinstance(value, dict):
            return {"d": [[self._tree(key), self._tree(one)] for key, one in value.items()]}
        if isinstance(value, tuple | set | frozenset):
            return {type(value).__name__: [self._tree(one) for one in value]}
        if isinstance(value, bytes | bytearray | memoryview):
            return {"b": self._buffer(memoryview(value).cast("B"))}
        if isinstance(value, complex):
            return {"c": [value.real, value.imag]}
        raise TypeError(f"plain data and arrays, not {_name(value)}")

    def _array(self, value: Any) -> Any:
        array = np.asarray(value)
        if array.dtype.hasobject or array.dtype.names is not None:
            if array.dtype.names is None:
                return {"o": [self._tree(array.reshape(-1).tolist()), list(array.shape)]}
            raise TypeError(f"no arrays of {array.dtype}")
        if array.nbytes > self._shares_above and len(self.shared) < self._shares_most:
            part = find_shared(array)
            if part is not None:
                self.shared.append(part)
                # What keeps the memory must stay as long as this does.
                self._shared_arrays.append(array)
                return {"s": [len(self.shared) - 1, part.offset, _kind_of(array.dtype), list(array.shape)]}
        kind = "a" if isinstance(value, np.ndarray) else "g"
        return {kind: [self._buffer(array), _kind_of(array.dtype), list(array.shape)]}

    def _buffer(self, buffer: memoryview | Array) -> int:
        self._buffers.append(buffer)
        return len(self._buffers) - 1


def _kind_of(dtype: np.dtype[Any]) -> str:
    """Give the text that a type of elements is made of again; two that only differ in their letters stay two."""
    return dtype.char if dtype.isnative and dtype.char in _LETTERS else dtype.str


def _name(value: Any) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}"


def decode(source: memoryview, shared: Sequence[memoryview] = ()) -> Any:
    """Read a value; its arrays lie in the memory that it is read from, or in ``shared``.

    Raises:
        ValueError, LookupError, TypeError, RecursionError: it is not what :class:`Encoded` writes.
    """
    length = int.from_bytes(source[:_LENGTH_BYTES], "little")
    tree, rows = json.loads(bytes(source[_LENGTH_BYTES : _LENGTH_BYTES + length]))
    base = _aligned(_LENGTH_BYTES + length)
    return _Decoder([source[base + offset : base + offset + size] for offset, size in rows], shared).value(tree)


_COLLECTIONS: Final = {"tuple": tuple, "set": set, "frozenset": frozenset}


class _Decoder:
    """Makes values of their trees; is in no cycle, so that memory goes as soon as its last array does."""

    def __init__(self, buffers: list[memoryview], shared: Sequence[memoryview]) -> None:
        self._buffers = buffers
        self._shared = shared

    def value(self, tree: Any) -> Any:
        """Make one value."""
        if isinstance(tree, list):
            return [self.value(one) for one in tree]
        if isinstance(tree, dict):
            ((kind, inner),) = tree.items()
            return self._of_kind(kind, inner)
        return tree

    def _of_kind(self, kind: str, inner: Any) -> Any:
        match kind:
            case "d":
                return {self.value(key): self.value(one) for key, one in inner}
            case "a":
                return self._array(inner)
            case "g":
                return self._array(inner)[()]
            case "s":
                number, offset, dtype, shape = inner
                length = math.prod(shape) * np.dtype(dtype).itemsize
                return _as_array(self._shared[number][offset : offset + length], dtype, shape)
            case "o":
                return self._objects(inner)
            case "b":
                return bytes(self._buffers[inner])
            case "c":
                return complex(*inner)
        return _COLLECTIONS[kind](map(self.value, inner))

    def _array(self, parts: list[Any]) -> Array:
        number, kind, shape = parts
        return _as_array(self._buffers[number], kind, shape)

    def _objects(self, parts: list[Any]) -> Array:
        elements, shape = parts
        array = np.empty(len(elements), object)
        array[:] = self.value(elements)
        return array.reshape(shape)


def _as_array(buffer: memoryview, kind: str, shape: list[int]) -> Array:
    dtype = np.dtype(kind)
    if min(shape, default=0) < 0:
        raise ValueError(f"an array of shape {shape}")
    if not math.prod(shape) or not dtype.itemsize:
        return np.empty(shape, dtype)
    return np.frombuffer(buffer, dtype).reshape(shape)
