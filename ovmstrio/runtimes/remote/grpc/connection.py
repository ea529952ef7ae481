"""One HTTP/2 connection on which calls are made: a reader, a writer, and callers that wait for their exchanges."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import trio

from ovmstrio.runtimes.remote.grpc.client_core import ClientCore, ProtocolViolation

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ovmstrio.core.request import Buffer
    from ovmstrio.runtimes.remote.grpc.client_core import Exchange

__all__ = ["RemoteConnection"]

_READ_BYTES: Final = 256 * 1024
_JOINED_UP_TO: Final = 64 * 1024
_MOST_UNSENT: Final = 2**20


class RemoteConnection:
    """Makes unary calls; owned by the task that runs it.

    Args:
        stream: the connection, which is closed with the task.
    """

    def __init__(self, stream: trio.abc.Stream) -> None:
        self._stream = stream
        self._core = ClientCore()
        self._has_output = trio.Event()
        self._moved = trio.Event()
        self._unsent = 0
        self._scope = trio.CancelScope()
        self._why = ""

    @property
    def takes_calls(self) -> bool:
        """Whether new calls may be made on it."""
        return not self._why and self._core.takes_calls

    @property
    def received(self) -> int:
        """How many bytes have come."""
        return self._core.received

    def break_off(self, why: str) -> None:
        """End the connection, and all calls on it with that reason."""
        self._why = self._why or why
        self._scope.cancel()

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Read and write until the connection ends; its calls have ended then, too.

        Cancellation: at any checkpoint; the connection is closed.
        """
        try:
            with self._scope:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(self._write)
                    task_status.started()
                    await self._read()
        finally:
            self._why = self._why or "the connection was closed"
            self._core.fail(self._why)
            self._wake_all()
            with trio.CancelScope(shield=True):
                await trio.aclose_forcefully(self._stream)

    async def call(self, headers: bytes, body: Sequence[Buffer], most: float) -> Exchange:
        """Make a call and give its exchange once it has ended.

        Args:
            headers: a block of literals.
            body: the framed message in pieces, which must stay unchanged until this returns.
            most: how many bytes the answer's message may have.

        An exchange whose ``is_untouched`` is set was not looked at by the server; its ``id`` is 0 if nothing was sent.

        Cancellation: at any checkpoint; the server is told.
        """
        while self.takes_calls and not self._core.has_room:
            await self._moved.wait()
        if not self.takes_calls:
            return self._unsent_exchange()
        exchange = self._core.begin(headers, most)
        try:
            await self._send(exchange, body)
            await exchange.ended.wait()
        finally:
            self._core.reset(exchange)
            self._tell_writer()
            self._wake_all()
        return exchange

    def _unsent_exchange(self) -> Exchange:
        from ovmstrio.runtimes.remote.grpc.client_core import Exchange  # noqa: PLC0415 - for this alone

        exchange = Exchange(0, 0, 0)
        exchange.is_untouched = True
        exchange.failure = self._why or "the server takes no more calls on this connection"
        return exchange

    async def _send(self, exchange: Exchange, body: Sequence[Buffer]) -> None:
        left = sum(map(len, body))
        pieces = [memoryview(piece) for piece in body if len(piece)]
        pieces.reverse()
        while left and not exchange.ended.is_set():
            core = self._core
            room = min(core.window, exchange.window, core.frame, _MOST_UNSENT - self._unsent)
            if room <= 0:
                await self._wait_moved(exchange)
                continue
            part, size = _cut(pieces, room)
            left -= size
            self._unsent += size
            core.send(exchange, part, size, ends=not left)
            self._has_output.set()

    async def _wait_moved(self, exchange: Exchange) -> None:
        """Wait until windows open, bytes go out or the exchange ends: all of it wakes those who wait here."""
        if not exchange.ended.is_set():
            await self._moved.wait()

    def _tell_writer(self) -> None:
        if self._core.out:
            self._has_output.set()

    def _wake_all(self) -> None:
        self._moved.set()
        self._moved = trio.Event()

    async def _read(self) -> None:
        try:
            while data := await self._stream.receive_some(_READ_BYTES):
                self._core.feed(bytes(data))
                self._tell_writer()
                self._wake_all()
            self.break_off("the server has closed the connection")
        except (trio.BrokenResourceError, trio.ClosedResourceError) as error:
            self.break_off(f"the connection broke: {error.__cause__ or error}")
        except ProtocolViolation as error:
            self.break_off(f"the server does not speak HTTP/2 as it should: {error}")

    async def _write(self) -> None:
        try:
            while True:
                if not self._core.out:
                    self._has_output = trio.Event()
                    await self._has_output.wait()
                pieces, self._core.out = self._core.out, []
                self._unsent = 0
                for batch in _batches(pieces):
                    await self._stream.send_all(batch)
                self._wake_all()
        except (trio.BrokenResourceError, trio.ClosedResourceError) as error:
            self.break_off(f"the connection broke: {error.__cause__ or error}")


def _cut(pieces: list[memoryview], room: int) -> tuple[list[memoryview], int]:
    """Take up to so many bytes from the end of a list of pieces, which is in reverse order."""
    part, size = [], 0
    while pieces and size < room:
        piece = pieces.pop()
        if len(piece) > room - size:
            pieces.append(piece[room - size :])
            piece = piece[: room - size]
        part.append(piece)
        size += len(piece)
    return part, size


def _batches(pieces: Sequence[Buffer]) -> list[Buffer]:
    """Join small pieces, so that they are sent together; large ones are sent from where they are."""
    batches: list[Buffer] = []
    small: list[Buffer] = []
    size = 0
    for piece in pieces:
        if len(piece) > _JOINED_UP_TO or size > _JOINED_UP_TO:
            batches += [b"".join(small)] if small else []
            small, size = [], 0
        if len(piece) > _JOINED_UP_TO:
            batches.append(piece)
        else:
            small.append(piece)
            size += len(piece)
    return [*batches, b"".join(small)] if small else batches
