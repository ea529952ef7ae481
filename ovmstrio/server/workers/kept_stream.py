"""A connection of a worker process, whose parent goes on with it if the process dies."""

from __future__ import annotations

import socket
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING

import trio

from ovmstrio.core.peers import UNKNOWN
from ovmstrio.server.workers.journal import State
from ovmstrio.server.workers.socket_counts import UNCOUNTED
from ovmstrio.wire.http.recoverable import RecoverableStream

if TYPE_CHECKING:
    from collections.abc import Callable

    from ovmstrio.core.begun import BeginTold
    from ovmstrio.core.peers import ClientAddress
    from ovmstrio.server.workers.journal import Journal

__all__ = ["KeptStream"]


class KeptStream(RecoverableStream):
    """A connection that is kept in a journal, and whose end is told; its parent has a descriptor of it, too.

    Args:
        stream: the connection.
        passed: its socket.
        journal: of this process.
        slot: the connection's.
        closed: is called once it has ended.
        peer_address: its other end.
    """

    def __init__(
        self,
        stream: trio.SocketStream,
        passed: socket.socket,
        journal: Journal,
        slot: int,
        closed: Callable[[], None],
        *,
        peer_address: ClientAddress = UNKNOWN,
    ) -> None:
        self._stream = stream
        self._passed = passed
        self.peer_address = peer_address
        self._journal = journal
        self._slot = slot
        self._tell: Callable[[], None] | None = closed
        # What another process had read before it died.
        self._before = journal.kept(slot)
        self._unanswered = len(self._before)
        self._answered = journal.answered(slot)
        self._is_kept = False
        self._is_full = False
        self._is_answering = False
        self._number = 0
        self._size: int | None = None
        self._written = journal.written(slot)

    @property
    def socket(self) -> trio.socket.SocketType:
        """The socket below."""
        return self._stream.socket

    # What becomes of its bytes

    def begin_lane(self) -> None:
        """Keep what is read from here on; see :class:`RecoverableStream`."""
        self._is_kept = True
        self._journal.set_state(self._slot, State.WAITING)

    def begin(self, size: int | None) -> BeginTold:
        """Note that a request is to be answered; see :class:`RecoverableStream`."""
        self._number += 1
        self._size = size
        self._journal.begin(self._slot, size)
        return partial(self._note_begun, self._number)

    def _note_begun(self, number: int) -> None:
        # Calls whose callers have left may begin later, when the connection is at another request, or has ended.
        if number == self._number and not self._is_answering:
            self._journal.set_state(self._slot, State.BEGUN)

    def end_after(self, size: int) -> None:
        """Note where the answer ends; see :class:`RecoverableStream`."""
        if self._is_kept and self._written != UNCOUNTED:
            self._journal.end_answer_at(self._slot, self._written + size)

    def finish(self) -> None:
        """Note that the request has been answered; see :class:`RecoverableStream`."""
        size = self._size or 0
        self._number += 1
        self._is_answering = False
        self._answered += size
        self._unanswered -= size
        if not self._is_full:
            self._journal.finish(self._slot, size)
        elif self._unanswered:
            self._journal.set_state(self._slot, State.WAITING)
        else:
            self._is_full = False
            self._journal.restart(self._slot, self._answered)

    # As a stream

    async def receive_some(self, max_bytes: int | None = None) -> bytes:
        """Receive what there is."""
        if self._before:
            before, self._before = self._before, b""
            await trio.lowlevel.checkpoint()
            return before
        if not self._is_kept:
            self._journal.set_state(self._slot, State.UNKNOWN)
            return await self._stream.receive_some(max_bytes)
        data = None if self._is_full else await self._receive_kept()
        if data is None:
            self._is_full = True
            data = await self._stream.receive_some(max_bytes)
        self._unanswered += len(data)
        return data

    async def _receive_kept(self) -> bytes | None:
        await trio.lowlevel.checkpoint_if_cancelled()
        while True:
            if self._passed.fileno() < 0:
                raise trio.ClosedResourceError
            try:
                return self._journal.read(self._slot, self._passed)
            except BlockingIOError:
                await trio.lowlevel.wait_readable(self._passed)
            except OSError as error:
                raise trio.BrokenResourceError(f"the connection broke: {error}") from error

    async def send_all(self, data: bytes | bytearray | memoryview) -> None:
        """Send everything."""
        if self._is_kept and not self._is_answering:
            self._is_answering = True
            self._journal.set_state(self._slot, State.ANSWERING)
        await self._stream.send_all(data)
        if self._written != UNCOUNTED:
            self._written += len(data)

    async def wait_send_all_might_not_block(self) -> None:
        """Wait until there is room."""
        await self._stream.wait_send_all_might_not_block()

    async def send_eof(self) -> None:
        """Send no more."""
        await self._stream.send_eof()

    async def aclose(self) -> None:
        """Close the connection, though the parent has it, too."""
        tell, self._tell = self._tell, None
        self._number += 1
        try:
            if tell is not None:
                with suppress(OSError):
                    self._passed.shutdown(socket.SHUT_RDWR)
            await self._stream.aclose()
        finally:
            if tell is not None:
                self._journal.end(self._slot)
                tell()
