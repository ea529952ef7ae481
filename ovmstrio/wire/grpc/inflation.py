"""Messages that come compressed: what those of one connection may become together."""

from __future__ import annotations

from typing import Final

import trio
from grpclib.const import Status
from grpclib.exceptions import GRPCError

from ovmstrio.core.byte_budget import ByteBudget
from ovmstrio.core.inflation import (
    DEFLATE_BITS,
    GZIP_BITS,
    Inflation,
    InflationError,
    InflationTooLargeError,
    in_inflating_thread,
)

__all__ = ["Inflater"]

_SIZE_BYTES: Final = 4
_INLINE_BYTES: Final = 64 * 1024
"""What is made on the event loop; a thread makes the rest."""


class Inflater:
    """Decompresses the messages of one connection: one at a time, and while those in use leave room for it.

    Args:
        max_bytes: what a message may become, and all of those that are in use together.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._in_use = ByteBudget(max_bytes)
        self._turn: trio.Lock | None = None

    async def inflate(self, data: bytes, encoding: str = "gzip") -> bytes:
        """Decompress a message, which is in use until it is given back to :meth:`release`.

        ``encoding`` is ``gzip`` or ``deflate``, which is zlib's own form.

        Raises:
            GRPCError: RESOURCE_EXHAUSTED when it is larger than it may be, INVALID_ARGUMENT when it is not so encoded.

        Cancellation: while it waits for others; a thread that works on it is waited for.
        """
        try:
            return await self._inflate(data, encoding)
        except InflationTooLargeError:
            raise GRPCError(
                Status.RESOURCE_EXHAUSTED,
                f"request message is larger than the limit of {self._max_bytes} bytes (max_receive_message_bytes)"
                " after decompression",
            ) from None
        except InflationError as error:
            raise GRPCError(Status.INVALID_ARGUMENT, f"request message is not valid {encoding}: {error}") from None

    async def _inflate(self, data: bytes, encoding: str) -> bytes:
        is_gzip = encoding == "gzip"
        inflation = Inflation(data, GZIP_BITS if is_gzip else DEFLATE_BITS, self._max_bytes)
        # What it says of its own size: gzip messages end with it, the others do not say.
        told = int.from_bytes(data[-_SIZE_BYTES:], "little") if is_gzip else _INLINE_BYTES
        size = min(told, self._max_bytes)
        if size > _INLINE_BYTES or not self._in_use.take(size):
            return await self._inflate_in_turn(inflation, size)
        try:
            if inflation.go_on(_INLINE_BYTES):
                message = inflation.finish()
                self._in_use.give_back(size - len(message))
                return message
        except InflationError:
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
                message = await in_inflating_thread(inflation.finish)
            except BaseException:
                self._in_use.give_back(size)
                raise
            self._in_use.give_back(size - len(message))
            return message

    def release(self, size: int) -> None:
        """Take a message of so many bytes as not in use any more."""
        self._in_use.give_back(size)
