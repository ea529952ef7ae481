"""Taking connections from listeners, and ending that without losing one that a client believes in.

::

    accept ──> told to stop ──> no new handshakes ──> those under way complete ──> close

A listening socket that is closed resets what waits in its queue, and so do clients' last packets of a handshake that
come after.  So new handshakes are held off first: their clients try again a second later, and find the next server or
none.  A socket that was inherited stays open elsewhere, and what waits in its queue is for the next server.
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

from ovmstrio.transport.direct_stream import close_now
from ovmstrio.transport.listeners import address_of, is_inherited, socket_of

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence

    from ovmstrio.transport.listeners import Listener

__all__ = ["NO_ROOM", "PAUSE_SECONDS", "QUIET_SECONDS", "Accepting", "Pace", "Spread", "bound_wakeups", "in_batches"]

# ----------------------------------------------------------------------
# A bound on the sockets that wake tasks in one turn of the event loop, so that thousands of them hold no other task
# ----------------------------------------------------------------------

_MOST: Final = 64


class _BoundedPoll:
    """An epoll object that tells of a few events at a time."""

    __slots__ = ("_poll", "close", "modify", "register", "unregister")

    def __init__(self, epoll: select.epoll) -> None:
        self._poll: Callable[[float, int], Any] = epoll.poll
        self.close = epoll.close
        self.modify = epoll.modify
        self.register = epoll.register
        self.unregister = epoll.unregister

    def poll(self, timeout: float, _: int) -> Any:
        """Wait for events, and return some of those that there are."""
        return self._poll(timeout, _MOST)


def bound_wakeups() -> None:
    """Bound the sockets that wake tasks in one turn of the running loop.

    trio has no option for this bound, so the poll object of the loop is wrapped.  A trio without the object is left as
    it is.
    """
    core: Any = trio._core  # noqa: SLF001 - as above
    run = getattr(core, "_run", None)
    manager: Any = None if run is None else getattr(run.GLOBAL_RUN_CONTEXT.runner, "io_manager", None)
    if isinstance(getattr(manager, "_epoll", None), select.epoll):
        manager._epoll = _BoundedPoll(manager._epoll)  # noqa: SLF001 - as above


# ----------------------------------------------------------------------
# Taking connections from listeners, and ending that without losing one that a client believes in
# ----------------------------------------------------------------------

log = structlog.get_logger(__name__)

SETTLE_SECONDS: Final = 0.1
"""What handshakes that are under way get to complete."""
PAUSE_SECONDS: Final = 0.1
"""How long accepting pauses when the system has no room for a connection."""
QUIET_SECONDS: Final = 1.0
"""Time between two lines about that."""

NO_ROOM: Final = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS})
"""Errors by which the system tells that it has no room for another connection."""
_SO_ATTACH_FILTER: Final = 26
_DROP_BARE_SYN: Final = b"".join(
    struct.pack("HBBI", *instruction)
    for instruction in (
        (0x30, 0, 0, 13),  # load the flags of TCP
        (0x54, 0, 0, 0x12),  # keep SYN and ACK
        (0x15, 0, 1, 0x02),  # SYN alone?
        (0x06, 0, 0, 0),  # drop
        (0x06, 0, 0, 0xFFFF_FFFF),  # pass
    )
)


class Accepting:
    """Accepts the connections of some listeners; of one use.

    Attributes:
        ended: set when the last listener is closed.
    """

    def __init__(self) -> None:
        self.ended = trio.Event()
        self._is_stopped = False
        self._untold: list[trio.CancelScope] = []

    async def run(
        self, listeners: Sequence[Listener], handler: Callable[[Any], Awaitable[object]], nursery: trio.Nursery
    ) -> None:
        """Accept until told to stop, and then what is on its way; each connection is a task of the nursery.

        Without room for more descriptors or memory accepting pauses, which is told once a second; clients wait.

        Raises:
            ExceptionGroup: of ``OSError``, a listener is broken.

        Ownership: the listeners, which are closed in any case; ``handler`` owns the connections.
        Cancellation: at once; what waits is reset.
        """
        bound_wakeups()
        try:
            async with trio.open_nursery() as each:
                for listener in listeners:
                    each.start_soon(self._accept_from, listener, handler, nursery)
        finally:
            self.ended.set()

    def stop(self) -> None:
        """Take what is on its way, unless another server will, and close the listeners."""
        self._is_stopped = True
        for scope in self._untold:
            scope.cancel()

    async def _accept_from(
        self, listener: Listener, handler: Callable[[Any], Awaitable[object]], nursery: trio.Nursery
    ) -> None:
        gate = _Gate(listener, handler, nursery)
        async with listener:
            if not self._is_stopped:
                with trio.CancelScope() as untold:
                    self._untold.append(untold)
                    await gate.take_all(untold)
            if is_inherited(listener):
                return
            _hold_off(listener)
            # A busy server may not get around to all of them in that time: the end is a time in which nobody came.
            accepted = -1
            while accepted < gate.accepted:
                accepted = gate.accepted
                with trio.move_on_after(SETTLE_SECONDS) as settling, suppress(OSError):
                    await gate.take_all(settling)


class _Gate:
    """One listener, and where its connections go.

    Attributes:
        accepted: how many have gone there.
    """

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
        self._quiet_until = float("-inf")
        self._pauses = 0

    async def take_all(self, scope: trio.CancelScope) -> None:
        """Accept until the scope ends; as long as there is no room for what waits, the scope does not end by time.

        Raises:
            OSError: the listener is broken.

        Cancellation: at once; a connection is accepted and handed on, or neither.
        """
        while True:
            try:
                stream = await self._listener.accept()
            except OSError as error:
                if error.errno not in NO_ROOM:
                    raise
                scope.deadline = max(scope.deadline, trio.current_time() + PAUSE_SECONDS + SETTLE_SECONDS)
                await self._pause(error)
            else:
                self.accepted += 1
                self._nursery.start_soon(self._handle, stream)

    async def _handle(self, stream: Any) -> None:
        try:
            await self._handler(stream)
        finally:
            await close_now(stream)

    async def _pause(self, error: OSError) -> None:
        self._pauses += 1
        now = trio.current_time()
        if now >= self._quiet_until:
            self._quiet_until = now + QUIET_SECONDS
            log.warning(
                "accepting pauses",
                address=address_of(self._listener),
                reason=f"{os.strerror(error.errno or 0)} ({errno.errorcode[error.errno or 0]})",
                pauses=self._pauses,
            )
        await trio.sleep(PAUSE_SECONDS)


def _hold_off(listener: Listener) -> None:
    """Let no further handshake begin, where the system can do that; what waits already stays."""
    sock = socket_of(listener)
    if sock is None:
        return
    with suppress(OSError):
        if sock.family == socket.AF_UNIX:
            # Of a Unix socket this refuses who comes, and keeps who waits.
            sock.shutdown(socket.SHUT_RD)
        else:
            instructions = ctypes.create_string_buffer(_DROP_BARE_SYN)
            program = struct.pack("HL", len(_DROP_BARE_SYN) // 8, ctypes.addressof(instructions))
            sock.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, program)


# ----------------------------------------------------------------------
# Work on thousands of connections in small parts, between which other tasks run
# ----------------------------------------------------------------------

_AT_ONCE: Final = 64
_PASS_AT_ONCE: Final = 16
_SECONDS_BETWEEN: Final = 0.000_25
"""About what the end of one connection takes."""

T = TypeVar("T")


async def in_batches(items: Iterable[T]) -> AsyncIterator[T]:
    """Iterate over items, and let other tasks run after every few of them.

    Cancellation: at each of these checkpoints.
    """
    for number, item in enumerate(items, 1):
        yield item
        if not number % _AT_ONCE:
            await trio.lowlevel.checkpoint()


class Pace:
    """A gate that few tasks pass in each turn of the event loop, in the order in which they come."""

    __slots__ = ("_limiter",)

    def __init__(self) -> None:
        self._limiter: trio.CapacityLimiter | None = None

    async def turn(self) -> None:
        """Wait for a turn in which few others pass.

        Cancellation: at once.
        """
        if self._limiter is None:
            self._limiter = trio.CapacityLimiter(_PASS_AT_ONCE)
        async with self._limiter:
            await trio.lowlevel.checkpoint()


class Spread:
    """Offsets of deadlines that would be the same, so that they wake their tasks one after the other."""

    __slots__ = ("_count",)

    def __init__(self) -> None:
        self._count = 0

    def next(self) -> float:
        """Return the next offset in seconds, 0 first."""
        count, self._count = self._count, self._count + 1
        return count * _SECONDS_BETWEEN
