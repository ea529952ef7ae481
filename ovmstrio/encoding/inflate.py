"""Incremental gzip and deflate decompression with an output limit, which stops decompression bombs."""

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
_limiter: Final = trio.lowlevel.RunVar[trio.CapacityLimiter]("inflating")


class InflationError(ValueError):
    """Error of data that is not in the declared format."""


class InflationTooLargeError(InflationError):
    """Error of data whose decompressed size exceeds the limit."""


async def in_inflating_thread(work: Callable[[], _T]) -> _T:
    """Decompress in a thread, one at a time per trio run.

    Several threads would take CPU and the GIL from the event loop.

    Cancellation: while waiting for other work; a running thread is awaited.
    """
    try:
        limiter = _limiter.get()
    except LookupError:
        limiter = trio.CapacityLimiter(1)
        _limiter.set(limiter)
    return await trio.to_thread.run_sync(work, limiter=limiter)


class Inflation:
    """An incremental decompression.

    Args:
        data: the complete compressed data.
        bits: the ``wbits`` of zlib, which select the format.
        max_bytes: limit of the decompressed size.
    """

    __slots__ = ("_data", "_inflater", "_max_bytes", "_pieces", "_position", "_size")

    def __init__(self, data: bytes, bits: int, max_bytes: int) -> None:
        self._data = data
        self._max_bytes = max_bytes
        self._position = 0
        self._inflater = zlib.decompressobj(bits)
        # A growing buffer would be copied repeatedly under the GIL, for data that may still be refused.
        self._pieces: list[bytes] = []
        self._size = 0

    @property
    def has_more(self) -> bool:
        """Return whether data follows the compressed data; valid after the end was reached."""
        return bool(self._inflater.unused_data) or self._position < len(self._data)

    def go_on(self, until: int) -> bool:
        """Decompress until the output has ``until`` bytes or the data ends; return whether the data ended.

        Raises:
            InflationTooLargeError: the output exceeds the limit.
            InflationError: the data is not in the format.
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
        """Decompress the rest and return all output; raises as :meth:`go_on`."""
        self.go_on(self._max_bytes + 1)
        if len(self._pieces) == 1:
            return self._pieces[0]
        output = BytesIO()
        pieces = self._pieces[::-1]
        self._pieces = []
        while pieces:
            # Each piece is freed after its copy, so that memory holds the message once.
            output.write(pieces.pop())
        return output.getvalue()

    def _drop(self) -> None:
        # The error's traceback keeps this object alive for as long as the error is referenced.
        self._pieces, self._data = [], b""

    def _step(self) -> None:
        # Both input and output of a step are bounded: otherwise each step would copy all remaining input.
        left = self._inflater.unconsumed_tail
        if not left:
            left = self._data[self._position : self._position + _IN_BYTES]
            self._position += _IN_BYTES
        piece = self._inflater.decompress(left, _OUT_BYTES)
        if piece:
            self._pieces.append(piece)
            self._size += len(piece)
        if self._size > self._max_bytes:
            raise InflationTooLargeError(f"expected at most {self._max_bytes} decompressed bytes, got more")
        if not left and not piece and not self._inflater.eof:
            raise InflationError("unexpected end of data")
