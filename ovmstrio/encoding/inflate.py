"""Bodies and messages that come compressed: a little at a time, so that a few bytes never become more than they may."""

from __future__ import annotations

import zlib
from io import BytesIO
from typing import TYPE_CHECKING, Final, TypeVar

import trio

if TYPE_CHECKING:
    from collections.abc import Callable

_T = TypeVar("_T")

GZIP_BITS: Final = 16 + zlib.MAX_WBITS
DEFLATE_BITS: Final = zlib.MAX_WBITS
_IN_BYTES: Final = 16 * 1024
_OUT_BYTES: Final = 64 * 1024
_limiter: Final = trio.lowlevel.RunVar[trio.CapacityLimiter]("what is inflated")


class InflationError(ValueError):
    """What came is not compressed in the way that it is said to be."""


class InflationTooLargeError(InflationError):
    """It becomes larger than it may."""


async def in_inflating_thread(work: Callable[[], _T]) -> _T:
    """Inflate in a thread, one at a time in this run: several would take both processor and lock from the event loop.

    Cancellation: while others are under way; a thread that works is waited for.
    """
    try:
        limiter = _limiter.get()
    except LookupError:
        limiter = trio.CapacityLimiter(1)
        _limiter.set(limiter)
    return await trio.to_thread.run_sync(work, limiter=limiter)


class Inflation:
    """Something compressed on its way to be whole.

    Args:
        data: all of it, as it came.
        bits: what zlib calls its format.
        max_bytes: what it may become.
    """

    __slots__ = ("_data", "_inflater", "_max_bytes", "_pieces", "_position", "_size")

    def __init__(self, data: bytes, bits: int, max_bytes: int) -> None:
        self._data = data
        self._max_bytes = max_bytes
        self._position = 0
        self._inflater = zlib.decompressobj(bits)
        # A buffer that grows is copied again and again while nobody else runs: not for what may be refused yet.
        self._pieces: list[bytes] = []
        self._size = 0

    @property
    def has_more(self) -> bool:
        """Whether something follows the end of what was compressed, once that is whole."""
        return bool(self._inflater.unused_data) or self._position < len(self._data)

    def go_on(self, until: int) -> bool:
        """Make so many bytes of it, or all; whether it is done.

        Raises:
            InflationTooLargeError: it becomes larger than it may.
            InflationError: it is not of its format.
        """
        try:
            while not self._inflater.eof and self._size < until:
                self._step()
        except zlib.error as error:
            self._drop()
            raise InflationError(str(error)) from None
        except InflationError:
            self._drop()
            raise
        return self._inflater.eof

    def finish(self) -> bytes:
        """Make all that is left, and give what it has become; as :meth:`go_on`."""
        self.go_on(self._max_bytes + 1)
        if len(self._pieces) == 1:
            return self._pieces[0]
        whole = BytesIO()
        pieces = self._pieces[::-1]
        self._pieces = []
        while pieces:
            # Each is let go as it is copied, so that the message is held once.
            whole.write(pieces.pop())
        return whole.getvalue()

    def _drop(self) -> None:
        # The error leads to the frames that it went through, and lives as long as whoever looks at it likes.
        self._pieces, self._data = [], b""

    def _step(self) -> None:
        # What the last step left comes first: without bounds for both sides a step would copy all that is left.
        left = self._inflater.unconsumed_tail
        if not left:
            left = self._data[self._position : self._position + _IN_BYTES]
            self._position += _IN_BYTES
        piece = self._inflater.decompress(left, _OUT_BYTES)
        if piece:
            self._pieces.append(piece)
            self._size += len(piece)
        if self._size > self._max_bytes:
            raise InflationTooLargeError(f"it becomes more than {self._max_bytes} bytes")
        if not left and not piece and not self._inflater.eof:
            raise InflationError("it ends too early")
