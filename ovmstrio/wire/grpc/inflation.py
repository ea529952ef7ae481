"""Messages that come compressed: a little at a time, so that a few bytes never become more than a message may have."""

from __future__ import annotations

import zlib
from io import BytesIO
from typing import Final

import trio
from grpclib.const import Status
from grpclib.exceptions import GRPCError

from ovmstrio.core.byte_budget import ByteBudget

__all__ = ["Inflater", "Inflation"]

_GZIP_WINDOW_BITS: Final = 31
_SIZE_BYTES: Final = 4
_IN_BYTES: Final = 16 * 1024
_OUT_BYTES: Final = 64 * 1024
_INLINE_BYTES: Final = 64 * 1024
"""What is made on the event loop; a thread makes the rest."""


class Inflation:
    """One gzip message on its way.

    Args:
        data: the message as it came.
        max_bytes: what it may become.
    """

    __slots__ = ("_data", "_inflater", "_max_bytes", "_position", "_whole")

    def __init__(self, data: bytes, max_bytes: int) -> None:
        self._data = data
        self._max_bytes = max_bytes
        self._position = 0
        self._inflater = zlib.decompressobj(_GZIP_WINDOW_BITS)
        self._whole = BytesIO()

    @property
    def is_done(self) -> bool:
        """Whether all of it is there."""
        return self._inflater.eof

    @property
    def announced_size(self) -> int:
        """What it says of its own size, at most what it may become; gzip messages end with it."""
        return min(int.from_bytes(self._data[-_SIZE_BYTES:], "little"), self._max_bytes)

    def go_on(self, until: int) -> bool:
        """Make a message of so many bytes, or of all; whether it is done.

        Raises:
            GRPCError: RESOURCE_EXHAUSTED when it is larger than it may be, INVALID_ARGUMENT when it is not gzip.
        """
        try:
            while not self._inflater.eof and self._whole.tell() < until:
                self._step()
        except zlib.error as error:
            self._drop()
            raise GRPCError(Status.INVALID_ARGUMENT, f"request message is not valid gzip: {error}") from None
        except GRPCError:
            self._drop()
            raise
        return self._inflater.eof

    def _drop(self) -> None:
        # The error leads to the frames that it went through, and lives as long as whoever looks at it likes.
        self._whole, self._data = BytesIO(), b""

    def finish(self) -> bytes:
        """Make all that is left, and give the message; as :meth:`go_on`."""
        self.go_on(self._max_bytes + 1)
        return self._whole.getvalue()

    def _step(self) -> None:
        # What the last step left comes first: without bounds for both sides a step would copy all that is left.
        left = self._inflater.unconsumed_tail
        if not left:
            left = self._data[self._position : self._position + _IN_BYTES]
            self._position += _IN_BYTES
        piece = self._inflater.decompress(left, _OUT_BYTES)
        self._whole.write(piece)
        if self._whole.tell() > self._max_bytes:
            raise GRPCError(
                Status.RESOURCE_EXHAUSTED,
                f"request message is larger than the limit of {self._max_bytes} bytes (max_receive_message_bytes)"
                " after decompression",
            )
        if not left and not piece and not self._inflater.eof:
            raise GRPCError(Status.INVALID_ARGUMENT, "request message is not valid gzip: it ends too early")


class Inflater:
    """Decompresses the messages of one connection: one at a time, and while those in use leave room for it.

    Args:
        max_bytes: what a message may become, and all of those that are in use together.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._in_use = ByteBudget(max_bytes)
        self._turn: trio.Lock | None = None

    async def inflate(self, data: bytes) -> bytes:
        """Decompress a message, which is in use until it is given back to :meth:`release`.

        Raises:
            GRPCError: RESOURCE_EXHAUSTED when it is larger than it may be, INVALID_ARGUMENT when it is not gzip.

        Cancellation: while it waits for others; a thread that works on it is waited for.
        """
        inflation = Inflation(data, self._max_bytes)
        size = inflation.announced_size
        if size > _INLINE_BYTES or not self._in_use.take(size):
            return await self._inflate_in_turn(inflation, size)
        try:
            if inflation.go_on(_INLINE_BYTES):
                message = inflation.finish()
                self._in_use.give_back(size - len(message))
                return message
        except GRPCError:
            self._in_use.give_back(size)
            raise
        self._in_use.give_back(size)
        return await self._inflate_in_turn(inflation, self._max_bytes)

    async def _inflate_in_turn(self, inflation: Inflation, size: int) -> bytes:
        if self._turn is None:
            self._turn = trio.Lock()
        async with self._turn:
            await self._in_use.wait(size)
            try:
                message = await trio.to_thread.run_sync(inflation.finish)
            except BaseException:
                self._in_use.give_back(size)
                raise
            self._in_use.give_back(size - len(message))
            return message

    def release(self, size: int) -> None:
        """Take a message of so many bytes as not in use any more."""
        self._in_use.give_back(size)
