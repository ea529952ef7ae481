"""Messages between processes: values, arrays and errors as packets, with large arrays in shared memory.

Values::

    length of the JSON (8 bytes, little-endian) | JSON | padding | buffer | padding | buffer ...

The JSON is ``[value, [[offset, length], ...]]``; offsets count from the first buffer. Types that JSON lacks are objects
with one key, the type code. No code is serialised.
"""

from __future__ import annotations

import builtins
import fcntl
import json
import math
import mmap
import os
import socket
import struct
import sys
import weakref
from array import array as int_array
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, is_dataclass
from types import CodeType, FunctionType, TracebackType
from typing import Any, Final, NamedTuple

import numpy as np

from ovmstrio.util.truncation import MOST_CAUSES, MOST_CHARACTERS, cut, text_of

# ----------------------------------------------------------------------
# Serialisation
# ----------------------------------------------------------------------

# -- Errors ------------------------------------------------------------------------------------------------------------

_MAX_FRAMES: Final = 25
_ATTRIBUTES: Final = ("name", "path", "msg", "filename", "lineno", "offset", "text", "end_lineno", "end_offset")
"""Attributes that built-in errors keep outside of their ``__dict__``."""

_PROBLEM: Final = "problem"


def encode_error(error: BaseException, depth: int = MOST_CAUSES) -> dict[str, Any]:
    """Return an error, with up to ``depth`` levels of causes, as plain data."""
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
        "cause": _encode_optional(error.__cause__, depth),
        "context": None if error.__suppress_context__ else _encode_optional(error.__context__, depth),
        "members": [encode_error(one, depth - 1) for one in members] if depth else [],
    }


def _encode_optional(error: BaseException | None, depth: int) -> dict[str, Any] | None:
    return None if error is None or depth <= 0 else encode_error(error, depth - 1)


def _members(error: BaseException) -> list[BaseException]:
    """Return the errors of an exception group."""
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
    """Return a value that can be sent: strings are truncated, other values unchanged, else ``_NOT_PLAIN``."""
    if value is None or type(value) in {bool, int, float}:
        return value
    if type(value) in {str, bytes}:
        return value[:MOST_CHARACTERS]
    if isinstance(value, (list, tuple)) and len(value) <= _MAX_FRAMES:
        members = [_plain(one) for one in value]
        return _NOT_PLAIN if any(one is _NOT_PLAIN for one in members) else type(value)(members)
    if is_dataclass(value) and type(value).__module__ == "ovmstrio.core.errors":
        return {_PROBLEM: asdict(value)}  # type: ignore[arg-type]  # an instance, not a class
    return _NOT_PLAIN


def _frames(traceback: TracebackType | None) -> list[list[Any]]:
    frames = []
    while traceback is not None:
        code = traceback.tb_frame.f_code
        frames.append([code.co_filename, traceback.tb_lineno, code.co_name])
        traceback = traceback.tb_next
    return frames if len(frames) <= 2 * _MAX_FRAMES else frames[:_MAX_FRAMES] + frames[-_MAX_FRAMES:]


def decode_error(data: dict[str, Any]) -> BaseException:
    """Recreate an error of :func:`encode_error`; raises ``MALFORMED_MESSAGE_ERRORS`` if it is malformed."""
    if data["members"]:
        error: BaseException = BaseExceptionGroup(data["text"], [decode_error(one) for one in data["members"]])
    else:
        error = _create_error(data["classes"], data["text"], tuple(map(_decode_argument, data["arguments"])))
    for name, value in data["attributes"].items():
        try:
            setattr(error, name, _decode_argument(value))
        except (AttributeError, TypeError):
            continue
    for note in data["notes"]:
        error.add_note(note)
    error.__cause__ = None if data["cause"] is None else decode_error(data["cause"])
    error.__context__ = error.__cause__ if data["context"] is None else decode_error(data["context"])
    error.__suppress_context__ = bool(data["is_alone"])
    return error.with_traceback(_traceback(data["frames"]))


def _decode_argument(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return type(value)(map(_decode_argument, value))
    if isinstance(value, dict) and _PROBLEM in value:
        return sys.modules["ovmstrio.core.errors"].Problem(**value[_PROBLEM])
    return value


def _create_error(classes: list[list[str]], text: str, arguments: tuple[Any, ...]) -> BaseException:
    """Create an error of its class, or of a new class of that name below the nearest available base class."""
    module, name = classes[0]
    known_class = _known_class(module, name)
    if known_class is not None:
        # Built-in errors parse their arguments in __init__; other classes may have a different signature.
        with suppress(Exception):
            return known_class(*arguments) if module == "builtins" else known_class.__new__(known_class, *arguments)
    base = next(
        found for found in (_known_class(*each) for each in classes[known_class is not None :]) if found is not None
    )
    error_class = type(name.rpartition(".")[2], (base,), {"__module__": module, "__str__": lambda _: text})
    return base.__new__(error_class, *arguments)


def _known_class(module: str, name: str) -> type[BaseException] | None:
    """Return an error class that both processes have; imports nothing."""
    if module == "builtins":
        found = getattr(builtins, name, None)
    elif module.partition(".")[0] == "ovmstrio":
        found = getattr(sys.modules.get(module), name, None)
    else:
        return None
    return found if isinstance(found, type) and issubclass(found, BaseException) else None


def _current_frame() -> Any:
    return sys._getframe()  # noqa: SLF001 - no public access to frames


_FRAME_CODE: Final[CodeType] = _current_frame.__code__


def _traceback(frames: list[list[Any]]) -> TracebackType | None:
    """Create a traceback with these lines."""
    result: TracebackType | None = None
    for file, line, name in reversed(frames):
        code = _FRAME_CODE.replace(co_filename=str(file), co_name=str(name))
        frame = FunctionType(code, {"sys": sys, "__name__": "", "__file__": file})()
        # An instruction index of -1 prevents the lookup of columns.
        result = TracebackType(result, frame, -1, int(line))
    return result


# -- Shared memory -----------------------------------------------------------------------------------------------------

MAX_FREE_REGION_BYTES: Final = 64 * 2**20
"""Limit of unused region bytes that a pool keeps."""

_MIN_REGION_BYTES: Final = 128 * 1024

Array = np.ndarray[Any, Any]


class MappedFile:
    """Memory file of any process, mapped and sealed against shrinking; unmapped and closed with its last view.

    Takes over the descriptor, also on errors. Raises ``OSError``, or ``ValueError`` if the file is empty.
    """

    def __init__(self, file: int) -> None:
        self.file = file
        # Prevents that a faulty creator truncates memory in use.
        fcntl.fcntl(file, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
        self.size = os.fstat(file).st_size
        self.bytes: Array = np.frombuffer(mmap.mmap(file, self.size), np.uint8)
        self.address: int = self.bytes.__array_interface__["data"][0]
        _mapped_files.add(self)

    def __del__(self) -> None:
        # Attributes may be missing during interpreter shutdown.
        with suppress(Exception):
            os.close(self.file)


_mapped_files: Final[weakref.WeakSet[MappedFile]] = weakref.WeakSet()
"""All mapped files; ``find_shared`` looks up buffer addresses here."""


class SharedLocation:
    """Location of a buffer in a mapped file."""

    __slots__ = ("mapped", "offset")

    def __init__(self, mapped: MappedFile, offset: int) -> None:
        self.mapped = mapped
        self.offset = offset


def find_shared(array: Array) -> SharedLocation | None:
    """Return the location of a contiguous array in a mapped file, or None."""
    if not _mapped_files or not array.flags.c_contiguous:
        return None
    start = array.__array_interface__["data"][0]
    for mapped in list(_mapped_files):
        if mapped.address <= start and start + array.nbytes <= mapped.address + mapped.size:
            return SharedLocation(mapped, start - mapped.address)
    return None


class _LeasedBytes(np.ndarray[Any, Any]):
    """Base array of all views of one message, which keeps the lease."""

    lease: RegionLease
    mapped: MappedFile


class RegionLease:
    """Lease of one message's memory; ``ended`` is called after the last view, in any thread."""

    __slots__ = ("_ended",)

    def __init__(self, ended: Callable[[], None]) -> None:
        self._ended = ended

    def __del__(self) -> None:
        # Globals may be missing during interpreter shutdown.
        with suppress(Exception):
            self._ended()

    def view(self, mapped: MappedFile, offset: int, size: int) -> memoryview:
        """Return a part of a mapped file; raises ``ValueError`` if it exceeds the file."""
        if offset < 0 or size < 0 or offset + size > mapped.size:
            raise ValueError(f"{size} bytes from {offset} of a file of {mapped.size}")
        view = mapped.bytes[offset : offset + size].view(_LeasedBytes)
        view.lease = self
        view.mapped = mapped
        return memoryview(view)  # type: ignore[arg-type]  # an array offers its buffer in C


class Region:
    """Memory file that this process created and writes to; ``is_known`` if the peer has its descriptor."""

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
        """Unmap and close the region in this process."""
        file, self.file = self.file, -1
        if file >= 0:
            os.close(file)
            self.bytes.release()


class RegionPool:
    """Regions of this process: used ones, and up to ``max_free_bytes`` bytes of free ones. Not thread-safe."""

    def __init__(self, max_free_bytes: int = MAX_FREE_REGION_BYTES) -> None:
        self._max_free_bytes = max_free_bytes
        self._numbers = 0
        self._free: list[Region] = []

    @property
    def free_bytes(self) -> int:
        """Free bytes."""
        return sum(region.size for region in self._free)

    def take(self, size: int) -> Region:
        """Return a region of at least ``size`` bytes; raises ``OSError`` if out of memory or descriptors."""
        candidates = [region for region in self._free if size <= region.size <= 4 * max(size, _MIN_REGION_BYTES)]
        if candidates:
            region = min(candidates, key=lambda one: one.size)
            self._free.remove(region)
            return region
        self._numbers += 1
        return Region(self._numbers, max(_MIN_REGION_BYTES, -(-size // mmap.PAGESIZE) * mmap.PAGESIZE))

    def release(self, region: Region) -> list[Region]:
        """Return a region to the pool; return the free regions that were closed because of the limit."""
        self._free.append(region)
        dropped = []
        while self.free_bytes > self._max_free_bytes:
            dropped.append(self._free.pop(0))
            dropped[-1].close()
        return dropped

    def close(self) -> None:
        """Close all free regions."""
        for region in self._free:
            region.close()
        self._free.clear()


# -- Values ------------------------------------------------------------------------------------------------------------

_LENGTH_BYTES: Final = 8
_JSON: Final = frozenset({type(None), bool, int, float, str})
_JSON_SUBCLASSES: Final = (int, float, str)
_NUMPY: Final = (np.ndarray, np.generic)
_ALIGNMENT: Final = 64
_TYPE_CHARACTERS: Final = frozenset("?bBhHiIlLqQefd")


def _aligned(offset: int) -> int:
    return -(-offset // _ALIGNMENT) * _ALIGNMENT


class Encoded:
    """Serialised value, ready to be written; the value must not change before.

    Args:
        value: plain data and arrays.
        min_shared_bytes: size in bytes above which arrays in mapped files are passed by reference.
        max_shared_files: maximum number of such files.

    Attributes:
        size: serialised bytes.
        shared: locations of the referenced arrays; the receiver needs their files in this order.

    Raises:
        TypeError: the value is of another type; callers put the message after "expects" or similar.
    """

    def __init__(self, value: Any, *, min_shared_bytes: int = 0, max_shared_files: int = 0) -> None:
        self.shared: list[SharedLocation] = []
        self._shares_above = min_shared_bytes
        self._shares_most = max_shared_files
        self._shared_arrays: list[Array] = []
        self._buffers: list[memoryview | Array] = []
        tree = self._to_json(value)
        rows, end = [], 0
        for buffer in self._buffers:
            rows.append((_aligned(end), buffer.nbytes))
            end = _aligned(end) + buffer.nbytes
        self._text = json.dumps([tree, rows], separators=(",", ":")).encode()
        self._rows = rows
        self._base = _aligned(_LENGTH_BYTES + len(self._text))
        self.size = self._base + end

    def write(self, target: memoryview) -> None:
        """Write the value to memory of ``size`` bytes."""
        target[:_LENGTH_BYTES] = len(self._text).to_bytes(_LENGTH_BYTES, "little")
        target[_LENGTH_BYTES : _LENGTH_BYTES + len(self._text)] = self._text
        for (offset, length), buffer in zip(self._rows, self._buffers, strict=True):
            start = self._base + offset
            if isinstance(buffer, memoryview):
                target[start : start + length] = buffer
            elif length:
                np.ndarray(buffer.shape, buffer.dtype, target, start)[...] = buffer

    def _to_json(self, value: Any) -> Any:
        if type(value) in _JSON:
            return value
        if isinstance(value, _NUMPY):
            return self._array(value)
        if isinstance(value, _JSON_SUBCLASSES):
            return value
        if isinstance(value, list):
            return [self._to_json(one) for one in value]
        if isinstance(value, dict):
            return {"d": [[self._to_json(key), self._to_json(one)] for key, one in value.items()]}
        if isinstance(value, tuple | set | frozenset):
            return {type(value).__name__: [self._to_json(one) for one in value]}
        if isinstance(value, bytes | bytearray | memoryview):
            return {"b": self._buffer(memoryview(value).cast("B"))}
        if isinstance(value, complex):
            return {"c": [value.real, value.imag]}
        raise TypeError(f"plain data and arrays, not {_name(value)}")

    def _array(self, value: Any) -> Any:
        array = np.asarray(value)
        if array.dtype.hasobject or array.dtype.names is not None:
            if array.dtype.names is None:
                return {"o": [self._to_json(array.reshape(-1).tolist()), list(array.shape)]}
            raise TypeError(f"no arrays of {array.dtype}")
        if array.nbytes > self._shares_above and len(self.shared) < self._shares_most:
            part = find_shared(array)
            if part is not None:
                self.shared.append(part)
                # Keeps the referenced memory alive.
                self._shared_arrays.append(array)
                return {"s": [len(self.shared) - 1, part.offset, _dtype_text(array.dtype), list(array.shape)]}
        kind = "a" if isinstance(value, np.ndarray) else "g"
        return {kind: [self._buffer(array), _dtype_text(array.dtype), list(array.shape)]}

    def _buffer(self, buffer: memoryview | Array) -> int:
        self._buffers.append(buffer)
        return len(self._buffers) - 1


def _dtype_text(dtype: np.dtype[Any]) -> str:
    """Return the dtype as text; distinct type characters of equal size stay distinct."""
    return dtype.char if dtype.isnative and dtype.char in _TYPE_CHARACTERS else dtype.str


def _name(value: Any) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}"


def decode(source: memoryview, shared: Sequence[memoryview] = ()) -> Any:
    """Deserialise a value; its arrays are views of ``source`` or ``shared``. Raises ``MALFORMED_MESSAGE_ERRORS``."""
    length = int.from_bytes(source[:_LENGTH_BYTES], "little")
    tree, rows = json.loads(bytes(source[_LENGTH_BYTES : _LENGTH_BYTES + length]))
    base = _aligned(_LENGTH_BYTES + length)
    return _Decoder([source[base + offset : base + offset + size] for offset, size in rows], shared).value(tree)


_COLLECTIONS: Final = {"tuple": tuple, "set": set, "frozenset": frozenset}


class _Decoder:
    """Deserialiser without reference cycles, so that memory is released with the last array."""

    def __init__(self, buffers: list[memoryview], shared: Sequence[memoryview]) -> None:
        self._buffers = buffers
        self._shared = shared

    def value(self, tree: Any) -> Any:
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
        raise ValueError(f"negative dimension in array shape {shape}")
    if not math.prod(shape) or not dtype.itemsize:
        return np.empty(shape, dtype)
    return np.frombuffer(buffer, dtype).reshape(shape)


# ----------------------------------------------------------------------
# Packets: inline, in shared memory, or packed
# ----------------------------------------------------------------------

_PACKED: Final = b"s"

MAX_INLINE_BYTES: Final = 64 * 1024
"""Maximum size of a message inside a packet."""

MAX_PACKET_BYTES: Final = MAX_INLINE_BYTES + 1
"""Maximum packet size."""

MAX_PACKET_DESCRIPTORS: Final = 16
"""Maximum number of descriptors per packet."""

_DESCRIPTOR: Final = "i"

ANCILLARY_BYTES: Final = socket.CMSG_SPACE(MAX_PACKET_DESCRIPTORS * int_array(_DESCRIPTOR).itemsize)
"""Maximum size of the descriptors of a packet, as ancillary data of its socket."""


def encode_descriptors(files: Sequence[int]) -> list[tuple[int, int, Any]]:
    """Return the ancillary data of a packet with these descriptors."""
    return [(socket.SOL_SOCKET, socket.SCM_RIGHTS, int_array(_DESCRIPTOR, files))] if files else []


def decode_descriptors(ancillary: Sequence[tuple[int, int, bytes]]) -> list[int]:
    """Return the descriptors in the ancillary data of a packet."""
    files = int_array(_DESCRIPTOR)
    for _, _, data in ancillary:
        files.frombytes(data)
    return files.tolist()


MALFORMED_MESSAGE_ERRORS: Final = (ValueError, LookupError, TypeError, OSError, RecursionError)
"""Exceptions raised for a packet of a process with corrupted memory."""

_INLINE: Final = b"i"
_HEAD_LENGTH_BYTES: Final = 4
_IN_FILE: Final = b"f"
_RELEASED: Final = b"r"
_DROPPED: Final = b"d"
_HEAD: Final = struct.Struct("<QQQBB")
_NUMBER: Final = struct.Struct("<Q")


class Message(NamedTuple):
    """Received value, descriptor (closed by the receiver), and the trailing bytes of a ``PackedMessage`` message."""

    value: Any
    descriptor: int | None = None
    tail: memoryview | None = None


class PackedMessage(NamedTuple):
    """Small message of JSON and bytes, at a tenth of the usual cost.

    Values outside JSON, such as NaN, are not preserved.
    """

    head: list[Any]
    buffers: Sequence[Any] = ()


def encode_packed(head: list[Any], buffers: Sequence[Any]) -> bytes | None:
    """Encode the packet of a ``PackedMessage`` (JSON and buffers); None if it is too large or not JSON."""
    import orjson  # noqa: PLC0415 - may be missing in the environment of user code, which sends no such messages

    try:
        text = orjson.dumps(head)
    except TypeError:
        return None
    packet = b"".join((_PACKED, len(text).to_bytes(_HEAD_LENGTH_BYTES, "little"), text, *buffers))
    return packet if len(packet) <= MAX_PACKET_BYTES else None


def encode_inline(value: Any) -> bytes | None:
    """Encode the packet of a value without the state of a channel, in any thread; None if it is too large."""
    encoded = Encoded(value)
    if encoded.size > MAX_INLINE_BYTES:
        return None
    packet = bytearray(len(_INLINE) + encoded.size)
    packet[: len(_INLINE)] = _INLINE
    encoded.write(memoryview(packet)[len(_INLINE) :])
    return bytes(packet)


class PreparedMessage:
    """Message that is written and sent; finished with ``sent`` or ``withdraw``. ``files`` are not owned."""

    __slots__ = ("_encoded", "files", "number", "region", "size")

    def __init__(self, encoded: Encoded, number: int, region: Region | None, descriptor: int | None) -> None:
        self._encoded = encoded
        self.number = number
        self.region = region
        self.size = encoded.size
        self.files = [part.mapped.file for part in encoded.shared]
        if region is not None and not region.is_known:
            self.files.insert(0, region.file)
        if descriptor is not None:
            self.files.append(descriptor)

    def write(self) -> bytes | bytearray:
        """Copy the value to its region, if any, and return the packet."""
        region = self.region
        if region is None:
            packet = bytearray(len(_INLINE) + self.size)
            packet[: len(_INLINE)] = _INLINE
            self._encoded.write(memoryview(packet)[len(_INLINE) :])
            return packet
        self._encoded.write(region.bytes[: self.size])
        shared = len(self._encoded.shared)
        return _IN_FILE + _HEAD.pack(self.number, region.number, self.size, not region.is_known, shared)


class MessagePackets:
    """Encoder and decoder of one end, which tracks the memory in use.

    Not thread-safe, except that leases may end in any thread. ``send_now`` sends a packet without blocking, in any
    thread, and returns whether it was sent.
    """

    def __init__(self, send_now: Callable[[bytes], bool]) -> None:
        self._send_now = send_now
        self._pool = RegionPool()
        self._numbers = 0
        self._in_flight: dict[int, PreparedMessage] = {}
        self._mapped: dict[int, MappedFile] = {}
        self._backlog: deque[bytes] = deque()

    def prepare(self, value: Any, descriptor: int | None = None) -> PreparedMessage:
        """Prepare a message; the caller must call :meth:`sent` or :meth:`withdraw` for it."""
        encoded = Encoded(value, min_shared_bytes=MAX_INLINE_BYTES, max_shared_files=MAX_PACKET_DESCRIPTORS - 2)
        if encoded.size <= MAX_INLINE_BYTES and not encoded.shared:
            return PreparedMessage(encoded, 0, None, descriptor)
        region = self._pool.take(encoded.size)
        self._numbers += 1
        prepared = PreparedMessage(encoded, self._numbers, region, descriptor)
        self._in_flight[prepared.number] = prepared
        return prepared

    def sent(self, message: PreparedMessage) -> None:
        """Mark a message as sent."""
        if message.region is not None:
            message.region.is_known = True

    def withdraw(self, message: PreparedMessage) -> None:
        """Release the memory of a message that is not sent."""
        if message.region is not None:
            self._released(message.number)

    @property
    def has_backlog(self) -> bool:
        """True if packets must be sent before the next message."""
        return bool(self._backlog)

    def backlog(self) -> Iterator[bytes]:
        """Yield the packets that must be sent before the next message.

        A packet is removed when the next one is requested, so that none is lost on cancellation.
        """
        while self._backlog:
            yield self._backlog[0]
            self._backlog.popleft()

    def read(self, packet: bytes, files: list[int]) -> Message | None:
        """Decode a packet and take over its descriptors; return None if it has no message.

        Raises ``MALFORMED_MESSAGE_ERRORS`` exceptions for a malformed packet, whose descriptors are closed.
        """
        try:
            return self._read(packet, files)
        except BaseException:
            for file in files:
                os.close(file)
            raise

    def _read(self, packet: bytes, files: list[int]) -> Message | None:
        kind, rest = packet[:1], memoryview(packet)[1:]
        if kind == _INLINE:
            return Message(decode(memoryview(bytearray(rest))), _pop_descriptor(files))
        if kind == _PACKED:
            return _read_packed(rest)
        if kind == _IN_FILE:
            return self._read_from_region(rest, files)
        if files:
            raise ValueError(f"unexpected {len(files)} descriptors with a packet that begins with {packet[:8]!r}")
        number = int.from_bytes(rest, "little")
        if kind == _RELEASED:
            self._released(number)
        elif kind == _DROPPED:
            self._mapped.pop(number, None)
        else:
            raise ValueError(f"unknown packet type: {packet[:8]!r}")
        return None

    def _read_from_region(self, head: memoryview, files: list[int]) -> Message:
        if len(head) != _HEAD.size:
            raise ValueError(f"expected a packet of {_HEAD.size} bytes, got {len(head)}")
        number, region, size, is_new, shared = _HEAD.unpack(head)
        if is_new:
            self._mapped[region] = MappedFile(files.pop(0))
        lease = RegionLease(lambda: self.send_or_queue(_RELEASED + _NUMBER.pack(number)))
        source = lease.view(self._mapped[region], 0, size)
        shared_views = []
        for _ in range(shared):
            mapped = MappedFile(files.pop(0))
            shared_views.append(lease.view(mapped, 0, mapped.size))
        return Message(decode(source, shared_views), _pop_descriptor(files))

    def _released(self, number: int) -> None:
        message = self._in_flight.pop(number)
        if message.region is not None:
            for dropped in self._pool.release(message.region):
                if dropped.is_known:
                    self.send_or_queue(_DROPPED + _NUMBER.pack(dropped.number))

    def send_or_queue(self, packet: bytes) -> None:
        """Send a packet now, or before the next message if the socket is full."""
        if not self._send_now(packet):
            self._backlog.append(packet)

    def close(self) -> None:
        """Release all memory without views."""
        self._pool.close()
        for message in self._in_flight.values():
            if message.region is not None:
                message.region.close()
        self._in_flight.clear()
        self._mapped.clear()


def _read_packed(rest: memoryview) -> Message:
    import orjson  # noqa: PLC0415 - may be missing, as in encode_packed

    text_ends = _HEAD_LENGTH_BYTES + int.from_bytes(rest[:_HEAD_LENGTH_BYTES], "little")
    return Message(orjson.loads(rest[_HEAD_LENGTH_BYTES:text_ends]), tail=rest[text_ends:])


def _pop_descriptor(files: list[int]) -> int | None:
    """Return the descriptor that was passed with the message, if any."""
    if len(files) > 1:
        raise TypeError(f"expected at most one descriptor with a message, got {len(files)}")
    return files.pop() if files else None
