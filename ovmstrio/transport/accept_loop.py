"""Accept loop of listeners, and a shutdown that loses no established connection.

::

    accept ──> stop ──> drop new SYNs ──> running handshakes complete ──> close

Closing a listening socket resets the connections in its queue, and connections whose handshake is completing. So new
SYNs are dropped first: these clients retry a second later and reach the next server, if any. A shared socket stays
open in another process or for the next program, which accepts the queue.
"""

from __future__ import annotations

import ctypes
import errno
import os
import select
import socket
import struct
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final, TypeVar

import structlog
import trio

from ovmstrio.transport.direct_stream import close_forcefully
from ovmstrio.transport.listeners import bound_address, is_shared, listener_socket

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence

    from ovmstrio.transport.listeners import Listener

# -- Bounded wakeups per turn of the event loop ------------------------------------------------------------------------

_MAX_EVENTS: Final = 64


class _BoundedPoll:
    """Epoll object that returns a bounded number of events per call."""

    __slots__ = ("_poll", "close", "modify", "register", "unregister")

    def __init__(self, epoll: select.epoll) -> None:
        self._poll: Callable[[float, int], Any] = epoll.poll
        self.close = epoll.close
        self.modify = epoll.modify
        self.register = epoll.register
        self.unregister = epoll.unregister

    def poll(self, timeout: float, _: int) -> Any:
        return self._poll(timeout, _MAX_EVENTS)


def bound_wakeups() -> None:
    """Limit how many sockets wake tasks per turn of the event loop, so that thousands do not delay other tasks.

    trio has no option for this, so the epoll object of the loop is wrapped. Unknown trio versions are left unchanged.
    """
    core: Any = trio._core  # noqa: SLF001 - no public access
    run = getattr(core, "_run", None)
    manager: Any = None if run is None else getattr(run.GLOBAL_RUN_CONTEXT.runner, "io_manager", None)
    if isinstance(getattr(manager, "_epoll", None), select.epoll):
        manager._epoll = _BoundedPoll(manager._epoll)  # noqa: SLF001 - no public access


# -- Accept loop -------------------------------------------------------------------------------------------------------

log = structlog.get_logger(__name__)

HANDSHAKE_SETTLE_SECONDS: Final = 0.1
"""Time for running handshakes to complete."""
PAUSE_SECONDS: Final = 0.1
"""Pause after accept() failed for lack of resources."""
LOG_INTERVAL_SECONDS: Final = 1.0
"""Minimum interval of log lines about these pauses."""

OUT_OF_RESOURCES_ERRNOS: Final = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS})
"""accept() errors for lack of resources."""
_SO_ATTACH_FILTER: Final = 26
_DROP_SYN_FILTER: Final = b"".join(
    struct.pack("HBBI", *instruction)
    for instruction in (
        (0x30, 0, 0, 13),  # load the flags of TCP
        (0x54, 0, 0, 0x12),  # keep SYN and ACK
        (0x15, 0, 1, 0x02),  # SYN alone?
        (0x06, 0, 0, 0),  # drop
        (0x06, 0, 0, 0xFFFF_FFFF),  # pass
    )
)


class AcceptLoop:
    """Accept loop over several listeners, for single use; ``ended`` is set when all are closed."""

    def __init__(self) -> None:
        self.ended = trio.Event()
        self._is_stopped = False
        self._accept_scopes: list[trio.CancelScope] = []

    async def run(
        self, listeners: Sequence[Listener], handler: Callable[[Any], Awaitable[object]], nursery: trio.Nursery
    ) -> None:
        """Accept until ``stop``, drain the queues and close the listeners; each connection is a task of ``nursery``.

        Pauses while the system lacks descriptors or memory, with one log line per second. Raises an ``ExceptionGroup``
        of ``OSError`` if a listener fails.
        """
        bound_wakeups()
        try:
            async with trio.open_nursery() as each:
                for listener in listeners:
                    each.start_soon(self._accept_from, listener, handler, nursery)
        finally:
            self.ended.set()

    def stop(self) -> None:
        """Stop accepting: drain the queues of listeners that are not shared, then close the listeners."""
        self._is_stopped = True
        for scope in self._accept_scopes:
            scope.cancel()

    async def _accept_from(
        self, listener: Listener, handler: Callable[[Any], Awaitable[object]], nursery: trio.Nursery
    ) -> None:
        loop = _AcceptLoop(listener, handler, nursery)
        async with listener:
            if not self._is_stopped:
                with trio.CancelScope() as accept_scope:
                    self._accept_scopes.append(accept_scope)
                    await loop.accept_all(accept_scope)
            if is_shared(listener):
                return
            _drop_new_syns(listener)
            # A busy server may not drain the queue within that time: repeat until nothing arrived.
            accepted = -1
            while accepted < loop.accepted:
                accepted = loop.accepted
                with trio.move_on_after(HANDSHAKE_SETTLE_SECONDS) as settling, suppress(OSError):
                    await loop.accept_all(settling)


class _AcceptLoop:
    def __init__(
        self,
        listener: Listener,
        handler: Callable[[Any], Awaitable[object]],
        nursery: trio.Nursery,
    ) -> None:
        self._listener = listener
        self._handler = handler
        self._nursery = nursery
        self.accepted = 0
        self._next_log_at = float("-inf")
        self._pauses = 0

    async def accept_all(self, scope: trio.CancelScope) -> None:
        """Accept until the scope ends; while resources are lacking, the scope's deadline is extended."""
        while True:
            try:
                stream = await self._listener.accept()
            except OSError as error:
                if error.errno not in OUT_OF_RESOURCES_ERRNOS:
                    raise
                scope.deadline = max(scope.deadline, trio.current_time() + PAUSE_SECONDS + HANDSHAKE_SETTLE_SECONDS)
                await self._pause(error)
            else:
                self.accepted += 1
                self._nursery.start_soon(self._handle, stream)

    async def _handle(self, stream: Any) -> None:
        try:
            await self._handler(stream)
        finally:
            await close_forcefully(stream)

    async def _pause(self, error: OSError) -> None:
        self._pauses += 1
        now = trio.current_time()
        if now >= self._next_log_at:
            self._next_log_at = now + LOG_INTERVAL_SECONDS
            log.warning(
                "accept paused",
                address=bound_address(self._listener),
                reason=f"{os.strerror(error.errno or 0)} ({errno.errorcode[error.errno or 0]})",
                pauses=self._pauses,
            )
        await trio.sleep(PAUSE_SECONDS)


def _drop_new_syns(listener: Listener) -> None:
    """Drop new SYNs, where the system supports that; queued connections stay."""
    sock = listener_socket(listener)
    if sock is None:
        return
    with suppress(OSError):
        if sock.family == socket.AF_UNIX:
            # For a Unix socket this refuses new connections and keeps queued ones.
            sock.shutdown(socket.SHUT_RD)
        else:
            instructions = ctypes.create_string_buffer(_DROP_SYN_FILTER)
            program = struct.pack("HL", len(_DROP_SYN_FILTER) // 8, ctypes.addressof(instructions))
            sock.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, program)


# -- Work on thousands of connections in small batches -----------------------------------------------------------------

_BATCH: Final = 64
_MAX_PASSING: Final = 16
_SECONDS_BETWEEN: Final = 0.000_25
"""Approximate cost of closing one connection."""

T = TypeVar("T")


async def in_batches(items: Iterable[T]) -> AsyncIterator[T]:
    """Iterate over items with a checkpoint after every 64."""
    for number, item in enumerate(items, 1):
        yield item
        if not number % _BATCH:
            await trio.lowlevel.checkpoint()


class TurnLimiter:
    """Limiter that few tasks pass per turn of the event loop, in FIFO order."""

    __slots__ = ("_limiter",)

    def __init__(self) -> None:
        self._limiter: trio.CapacityLimiter | None = None

    async def turn(self) -> None:
        """Wait for this task's turn."""
        if self._limiter is None:
            self._limiter = trio.CapacityLimiter(_MAX_PASSING)
        async with self._limiter:
            await trio.lowlevel.checkpoint()


class DeadlineSpread:
    """Offsets that spread equal deadlines over time."""

    __slots__ = ("_count",)

    def __init__(self) -> None:
        self._count = 0

    def next(self) -> float:
        """Return the next offset in seconds, starting with 0."""
        count, self._count = self._count, self._count + 1
        return count * _SECONDS_BETWEEN
