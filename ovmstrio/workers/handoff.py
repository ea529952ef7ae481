"""Messages between supervisor and worker: worker start, drain and readiness notifications, accepted connections.

::

    supervisor ──(message with descriptor)──> ConnectionInbox ─> listener of the front end
"""

from __future__ import annotations

import math
import os
import socket
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
from weakref import WeakSet

import structlog
import trio
from pydantic import BaseModel

from ovmstrio.core.connection import UNKNOWN, socket_address
from ovmstrio.transport.accept_loop import LOG_INTERVAL_SECONDS
from ovmstrio.transport.direct_stream import DirectStream

if TYPE_CHECKING:
    from collections.abc import Callable

    from ovmstrio.core.connection import ClientAddress
    from ovmstrio.isolation.worker_program import WorkRequest
    from ovmstrio.server.plan import Plan

# Start and notifications

EXIT_CUT: Final = 3
"""Exit code of a worker that cancelled requests at the drain timeout."""

DRAIN: Final = "drain"
"""Message of the parent at the start of a drain; connections may still follow."""

CHANGED: Final = "changed"
"""First item of a message about a changed readiness, from a worker to the parent and from there to all workers.

The second item is the reason why that worker, or the server, is not ready.
"""


class WorkerTask(BaseModel):
    """Start message of a worker, sent with the descriptor of the shared state.

    Attributes:
        file: file of a project that is served alone, or None.
        secret: shared secret of the workers.
        reason: reason of an automatic number of workers.
    """

    file: Path | None
    options: dict[str, Any]
    rows: int
    row: int
    secret: str
    search_path: list[str] = []
    reason: str = ""

    @classmethod
    def of(cls, plan: Plan, rows: int, row: int, secret: str) -> WorkerTask:
        """Create the task of one worker of a plan."""
        options = plan.settings.model_dump(mode="json", exclude_unset=True)
        file = Path(plan.spec.services[0].origin) if plan.root else None
        if file is None:
            options["workers"] = rows
        arguments: dict[str, Any] = {"search_path": sys.path, "reason": plan.workers_reason}
        return cls(file=file, options=options, rows=rows, row=row, secret=secret, **arguments)


# Connections

log = structlog.get_logger(__name__)


class HandedOffStream(DirectStream):
    """Connection accepted by the parent; reports its end.

    Args:
        closed: called once when the connection is closed.
    """

    def __init__(
        self, stream: trio.SocketStream, closed: Callable[[], None], peer_address: ClientAddress = UNKNOWN
    ) -> None:
        super().__init__(stream, peer_address)
        self._closed: Callable[[], None] | None = closed

    def close(self) -> None:
        """Close the connection and report it."""
        super().close()
        closed, self._closed = self._closed, None
        if closed is not None:
            closed()


class ConnectionInbox(trio.abc.Listener[HandedOffStream]):
    """Listener of handed-off connections.

    Args:
        closed: is called for each closed connection.
    """

    def __init__(self, closed: Callable[[], None]) -> None:
        self._closed = closed
        self._next_log_at = float("-inf")
        # Unbounded: the parent accepts no more connections than it has descriptors.
        self._put, self._take = trio.open_memory_channel[HandedOffStream](math.inf)

    async def put(self, request: WorkRequest) -> None:
        """Add the connection of a message, which has the protocol and the client's host and port."""
        _, *address = request.value
        if request.descriptor is not None:
            connection = socket.socket(fileno=request.descriptor)
            stream = trio.SocketStream(trio.socket.from_stdlib_socket(connection))
            peer_address = socket_address(connection.family, tuple(address))
            self._put.send_nowait(HandedOffStream(stream, self._closed, peer_address))
            return
        # No free descriptor in this process: the kernel has closed the connection.
        self._closed()
        now = trio.current_time()
        if now >= self._next_log_at:
            self._next_log_at = now + LOG_INTERVAL_SECONDS
            log.warning("connections lost", reason="Too many open files (EMFILE)")

    async def accept(self) -> HandedOffStream:
        """Return the next connection; raises trio.ClosedResourceError if the listener is closed."""
        return await self._take.receive()

    async def aclose(self) -> None:
        """Close the listener and its pending connections."""
        while True:
            try:
                stream = self._take.receive_nowait()
            except (trio.WouldBlock, trio.ClosedResourceError, trio.EndOfChannel):
                break
            stream.close()
        self._take.close()


# Sockets between workers

_PRIVATE_SOCKETS: Final[WeakSet[socket.socket]] = WeakSet()


def close_on_fork(end: socket.socket) -> socket.socket:
    """Close the socket in forked children: they could outlive this process and keep its address."""
    _PRIVATE_SOCKETS.add(end)
    return end


def _close_in_child() -> None:
    for end in list(_PRIVATE_SOCKETS):
        if end.fileno() >= 0:
            os.close(end.detach())


os.register_at_fork(after_in_child=_close_in_child)
