"""Values as bytes and back: plain data and arrays, never code.

::

    length of the JSON (8 bytes, little-endian) | JSON | padding | buffer | padding | buffer ...

The JSON is ``[value, [[offset, length], ...]]``; offsets count from the first buffer.  What JSON does not have is an
object with one key, which tells what it is.
"""

from __future__ import annotations

import builtins
import fcntl
import json
import math
import mmap
import os
import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, is_dataclass
from types import CodeType, FunctionType, TracebackType
from typing import Any, Final

import numpy as np

from ovmstrio.util.truncation import MOST_CAUSES, MOST_CHARACTERS, cut, text_of

__all__ = [
    "MOST_KEPT",
    "Encoded",
    "MappedFile",
    "Region",
    "RegionLease",
    "RegionPool",
    "SharedPart",
    "decode",
    "decode_error",
    "encode_error",
    "find_shared",
]

# ----------------------------------------------------------------------
# Errors as plain data and back: whoever gets one from another process can treat it as if it had been raised here
# ----------------------------------------------------------------------

_MOST_FRAMES: Final = 25
_SHARED_PACKAGES: Final = frozenset({"ovmstrio", "pyovms", "cortex_internal"})
_ATTRIBUTES: Final = ("name", "path", "msg", "filename", "lineno", "offset", "text", "end_lineno", "end_offset")
"""What errors of Python's own keep outside of their dictionaries."""

_PROBLEM: Final = "problem"


def encode_error(error: BaseException, depth: int = MOST_CAUSES) -> dict[str, Any]:
    """Make plain data of an error and of up to ``depth`` others that it came from."""
    members = _members(error)
    text = str(error.message)[:MOST_CHARACTERS] if members else text_of(error)  # type: ignore[attr-defined]  # a group has one
    arguments = [one for one in map(_plain, error.args) if one is not _NOT_PLAIN]
    return {
        "classes": [[each.__module__, each.__qualname__] for each in type(error).__mro__],
        "text": text,
        "arguments": arguments if len(arguments) == len(error.args) else [text],
        "attributes": dict(_attributes(error)),
        "frames": _frames(error.__traceback__),
        "is_alone": error.__suppress_context__,
        "notes": [cut(str(note)) for note in getattr(error, "__notes__", [])[:MOST_CAUSES]],
        "cause": _encoded(error.__cause__, depth),
        "context": None if error.__suppress_context__ else _encoded(error.__context__, depth),
        "members": [encode_error(one, depth - 1) for one in members] if depth else [],
    }


def _encoded(error: BaseException | None, depth: int) -> dict[str, Any] | None:
    return None if error is None or depth <= 0 else encode_error(error, depth - 1)


def _members(error: BaseException) -> list[BaseException]:
    """Give the errors of a group."""
    if all(each.__name__ != "BaseExceptionGroup" for each in type(error).__mro__):
        return []
    return list(getattr(error, "exceptions", ()))[:MOST_CAUSES]


def _attributes(error: BaseException) -> Iterator[tuple[str, Any]]:
    own: dict[str, Any] = dict(getattr(error, "__dict__", {}))
    found = {name: getattr(error, name, None) for name in _ATTRIBUTES if name not in own}
    for name, value in {**own, **{name: one for name, one in found.items() if one is not None}}.items():
        plain = _plain(value)
        if not name.startswith("__") and plain is not _NOT_PLAIN:
            yield name, plain


_NOT_PLAIN: Final = object()


def _plain(value: Any) -> Any:
    """Give what can be sent of a value: itself if it is plain and not too large."""
    if value is None or type(value) in {bool, int, float}:
        return value
    if type(value) in {str, bytes}:
        return value[:MOST_CHARACTERS]
    if isinstance(value, (list, tuple)) and len(value) <= _MOST_FRAMES:
        members = [_plain(one) for one in value]
        return _NOT_PLAIN if any(one is _NOT_PLAIN for one in members) else type(value)(members)
    if is_dataclass(value) and type(value).__module__ == "ovmstrio.core.errors":
        return {_PROBLEM: asdict(value)}  # type: ignore[arg-type]  # no class is an argument of an error
    return _NOT_PLAIN


def _frames(traceback: TracebackType | None) -> list[list[Any]]:
    frames = []
    while traceback is not None:
        code = traceback.tb_frame.f_code
        frames.append([code.co_filename, traceback.tb_lineno, code.co_name])
        traceback = traceback.tb_next
    return frames if len(frames) <= 2 * _MOST_FRAMES else frames[:_MOST_FRAMES] + frames[-_MOST_FRAMES:]


def decode_error(data: dict[str, Any]) -> BaseException:
    """Make an error of what :func:`encode_error` gave.

    Raises:
        ValueError, LookupError, TypeError: it is not what that gives.
    """
    if data["members"]:
        error: BaseException = BaseExceptionGroup(data["text"], [decode_error(one) for one in data["members"]])
    else:
        error = _made(data["classes"], data["text"], tuple(map(_unpacked, data["arguments"])))
    for name, value in data["attributes"].items():
        try:
            setattr(error, name, _unpacked(value))
        except (AttributeError, TypeError):
            continue
    for note in data["notes"]:
        error.add_note(note)
    error.__cause__ = None if data["cause"] is None else decode_error(data["cause"])
    error.__context__ = error.__cause__ if data["context"] is None else decode_error(data["context"])
    error.__suppress_context__ = bool(data["is_alone"])
    return error.with_traceback(_traceback(data["frames"]))


def _unpacked(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return type(value)(map(_unpacked, value))
    if isinstance(value, dict) and _PROBLEM in value:
        return sys.modules["ovmstrio.core.errors"].Problem(**value[_PROBLEM])
    return value


def _made(classes: list[list[str]], text: str, arguments: tuple[Any, ...]) -> BaseException:
    """Make an error of the first class, or of one of its name under the nearest class that is known here."""
    module, name = classes[0]
    known = _known(module, name)
    if known is not None:
        # What is Python's own takes its arguments apart when it is initialized; others may want different ones.
        with suppress(Exception):
            return known(*arguments) if module == "builtins" else known.__new__(known, *arguments)
    base = next(found for found in (_known(*each) for each in classes[known is not None :]) if found is not None)
    made = type(name.rpartition(".")[2], (base,), {"__module__": module, "__str__": lambda _: text})
    return base.__new__(made, *arguments)


def _known(module: str, name: str) -> type[BaseException] | None:
    """Find a class of errors that both ends have; nothing is imported for it."""
    if module == "builtins":
        found = getattr(builtins, name, None)
    elif module.partition(".")[0] in _SHARED_PACKAGES:
        found = getattr(sys.modules.get(module), name, None)
    else:
        return None
    return found if isinstance(found, type) and issubclass(found, BaseException) else None


def _here() -> Any:
    """Give a frame."""
    return sys._getframe()  # noqa: SLF001 - frames can only be had from Python itself


_FRAME: Final[CodeType] = _here.__code__


def _traceback(frames: list[list[Any]]) -> TracebackType | None:
    """Make a traceback that names these lines."""
    made: TracebackType | None = None
    for file, line, name in reversed(frames):
        code = _FRAME.replace(co_filename=str(file), co_name=str(name))
        frame = FunctionType(code, {"sys": sys, "__name__": "", "__file__": file})()
        # Without a place in the code, nobody looks for the columns there.
        made = TracebackType(made, frame, -1, int(line))
    return made


# ----------------------------------------------------------------------
# Memory that two processes see: regions that one end writes messages to, and the other end's views of them
# ----------------------------------------------------------------------

MOST_KEPT: Final = 64 * 2**20
"""How many bytes of regions a pool keeps at most that nobody uses."""

_SMALLEST: Final = 128 * 1024

Array = np.ndarray[Any, Any]


class MappedFile:
    """A file in memory that is mapped here, whoever has made it; both go with the last view of it.

    Args:
        file: its descriptor, which belongs to this object from now on, also if it cannot be mapped.

    Raises:
        OSError: it is no such file, or there is no memory left.
        ValueError: it is empty.
    """

    def __init__(self, file: int) -> None:
        self.file = file
        # Whoever has made it may go mad, and must not take memory away that is in use.
        fcntl.fcntl(file, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
        self.size = os.fstat(file).st_size
        self.bytes: Array = np.frombuffer(mmap.mmap(file, self.size), np.uint8)
        self.address: int = self.bytes.__array_interface__["data"][0]
        _mapped.add(self)

    def __del__(self) -> None:
        # There may be more than one error in code that is being torn down.
        with suppress(Exception):
            os.close(self.file)


_mapped: Final[weakref.WeakSet[MappedFile]] = weakref.WeakSet()
"""All files of others that are mapped here: what the address of a buffer is looked up in."""


class SharedPart:
    """Where a buffer lies that another process can see, too."""

    __slots__ = ("mapped", "offset")

    def __init__(self, mapped: MappedFile, offset: int) -> None:
        self.mapped = mapped
        self.offset = offset


def find_shared(array: Array) -> SharedPart | None:
    """Tell in which mapped file an array lies, if it does so in one piece."""
    if not _mapped or not array.flags.c_contiguous:
        return None
    start = array.__array_interface__["data"][0]
    for mapped in list(_mapped):
        if mapped.address <= start and start + array.nbytes <= mapped.address + mapped.size:
            return SharedPart(mapped, start - mapped.address)
    return None


class _LeasedBytes(np.ndarray[Any, Any]):
    """Bytes of a mapped file, of which all views of one message are made, so that they keep its lease."""

    lease: RegionLease
    mapped: MappedFile


class RegionLease:
    """The right of one message's views to its memory; ends with the last of them.

    Args:
        ended: is called then, in whichever thread.
    """

    __slots__ = ("_ended",)

    def __init__(self, ended: Callable[[], None]) -> None:
        self._ended = ended

    def __del__(self) -> None:
        # As the interpreter ends, there may be nothing left to tell it to.
        with suppress(Exception):
            self._ended()

    def view(self, mapped: MappedFile, offset: int, size: int) -> memoryview:
        """Give a part of a mapped file.

        Raises:
            ValueError: the file is shorter.
        """
        if offset < 0 or size < 0 or offset + size > mapped.size:
            raise ValueError(f"{size} bytes from {offset} of a file of {mapped.size}")
        made = mapped.bytes[offset : offset + size].view(_LeasedBytes)
        made.lease = self
        made.mapped = mapped
        return memoryview(made)  # type: ignore[arg-type]  # an array offers its buffer in C


class Region:
    """A file in memory that this end has made and writes to.

    Attributes:
        is_known: whether the other end has its descriptor.
    """

    __slots__ = ("bytes", "file", "is_known", "number", "size")

    def __init__(self, number: int, size: int) -> None:
        self.number = number
        self.size = size
        self.is_known = False
        self.file = os.memfd_create("message", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(self.file, size)
            self.bytes = memoryview(mmap.mmap(self.file, size))
        except BaseException:
            os.close(self.file)
            raise

    def close(self) -> None:
        """Give the memory back, as far as this end is concerned."""
        file, self.file = self.file, -1
        if file >= 0:
            os.close(file)
            self.bytes.release()


class RegionPool:
    """The regions of one end: those in use, and some that wait for the next message.  Not for several threads at once.

    Args:
        most_kept: how many bytes wait at most.
    """

    def __init__(self, most_kept: int = MOST_KEPT) -> None:
        self._most_kept = most_kept
        self._numbers = 0
        self._kept: list[Region] = []

    @property
    def kept_bytes(self) -> int:
        """How much waits."""
        return sum(region.size for region in self._kept)

    def take(self, size: int) -> Region:
        """Give a region of at least that many bytes.

        Raises:
            OSError: there is no memory, or no descriptor, left.
        """
        fitting = [region for region in self._kept if size <= region.size <= 4 * max(size, _SMALLEST)]
        if fitting:
            region = min(fitting, key=lambda one: one.size)
            self._kept.remove(region)
            return region
        self._numbers += 1
        return Region(self._numbers, max(_SMALLEST, -(-size // mmap.PAGESIZE) * mmap.PAGESIZE))

    def give_back(self, region: Region) -> list[Region]:
        """Let a region wait for another message; give those that there is no room for any more, which are closed."""
        self._kept.append(region)
        dropped = []
        while self.kept_bytes > self._most_kept:
            dropped.append(self._kept.pop(0))
            dropped[-1].close()
        return dropped

    def close(self) -> None:
        """Give back what waits."""
        for region in self._kept:
            region.close()
        self._kept.clear()


# ----------------------------------------------------------------------
# Values as bytes and back: plain data and arrays, never code
# ----------------------------------------------------------------------

_LENGTH_BYTES: Final = 8
_JSON: Final = frozenset({type(None), bool, int, float, str})
_NEARLY_JSON: Final = (int, float, str)
_NUMPY: Final = (np.ndarray, np.generic)
_ALIGNMENT: Final = 64
_LETTERS: Final = frozenset("?bBhHiIlLqQefd")


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
