"""Send budget: limit of response bytes that wait for clients, per server and per connection.

A byte counts from its encoding until the socket takes it. Unfinished calls count with the expected size of their
responses, so that they wait before computing responses that no client reads. Connections close clients that read
nothing for ``stall_timeout_seconds``.
"""

from __future__ import annotations

import math
import sys
from collections import OrderedDict
from contextvars import ContextVar
from typing import TYPE_CHECKING, Final, Protocol

import trio

if sys.platform == "linux":
    import fcntl
    import termios

if TYPE_CHECKING:
    from trio.abc import SendStream

# -- Byte budget -------------------------------------------------------------------------------------------------------


class ByteBudget:
    """Counter of held bytes with a limit and FIFO queues of waiting tasks. If nothing is held, any size is allowed.

    Attributes:
        limit: how many bytes may be held; ``math.inf`` for no limit.
        held: held bytes.
        waiting: number of waiting tasks.
    """

    __slots__ = ("_priority_queue", "_queue", "held", "limit", "waiting")

    def __init__(self, limit: float) -> None:
        self.limit = limit
        self.held = 0
        self.waiting = 0
        self._priority_queue: OrderedDict[trio.Event, int] = OrderedDict()
        self._queue: OrderedDict[trio.Event, int] = OrderedDict()

    def take(self, size: int) -> bool:
        """Hold bytes if there is room and no task waits; return whether they are held."""
        if self.waiting or (self.held and self.held + size > self.limit):
            return False
        self.held += size
        return True

    async def wait(self, size: int, *, has_priority: bool = False) -> None:
        """Hold bytes as soon as there is room, in FIFO order; tasks with ``has_priority`` come before all others."""
        if self.take(size):
            return
        turn, queue = trio.Event(), self._priority_queue if has_priority else self._queue
        queue[turn] = size
        self.waiting += 1
        self.wake_waiters()
        try:
            # The task that sets the event has already counted the bytes.
            await turn.wait()
        except trio.Cancelled:
            # The bytes may have been granted after the cancellation was decided.
            if queue.pop(turn, None) is None:
                self.held -= size
            else:
                self.waiting -= 1
            self.wake_waiters()
            raise

    def release(self, size: int) -> None:
        """Release held bytes."""
        self.held -= size
        self.wake_waiters()

    def wake_waiters(self) -> None:
        """Wake waiting tasks in order, as far as there is room."""
        while self.waiting:
            queue = self._priority_queue or self._queue
            turn, size = next(iter(queue.items()))
            if self.held and self.held + size > self.limit:
                return
            del queue[turn]
            self.waiting -= 1
            self.held += size
            turn.set()


# -- Server and connection budgets -------------------------------------------------------------------------------------

_MEBIBYTE: Final = 2**20
_CHECK_SECONDS: Final = 1.0
_CONTENDED_PATIENCE_SECONDS: Final = 5.0
"""Stall timeout while other clients wait for budget."""


class StallChecked(Protocol):
    """Response in transmission."""

    def look(self, now: float, stall_timeout_seconds: float) -> None:
        """Abort if the client has read nothing for ``stall_timeout_seconds``; ``now`` is trio time."""
        ...


class SendBudget:
    """Send budget of a server.

    Args:
        max_bytes: limit of all connections together.
        max_share_bytes: limit per connection.
        stalled_seconds: stall timeout of clients that read nothing; 0 for none.

    Attributes:
        budget: waiting and expected response bytes.
        watched: responses that ``watch`` checks.
    """

    def __init__(
        self, max_bytes: float = math.inf, max_share_bytes: int = 64 * _MEBIBYTE, stalled_seconds: float = 60.0
    ) -> None:
        self._max_share_bytes = max_share_bytes
        self._stalled_seconds = stalled_seconds or math.inf
        self.budget = ByteBudget(max_bytes)
        self.watched: set[StallChecked] = set()

    @property
    def stall_timeout_seconds(self) -> float:
        """Current stall timeout; shorter while others wait for budget."""
        if self.budget.waiting:
            return min(self._stalled_seconds, _CONTENDED_PATIENCE_SECONDS)
        return self._stalled_seconds

    async def watch(self) -> None:
        """Check for stalled clients every second, forever."""
        while True:
            await trio.sleep(_CHECK_SECONDS)
            now, patience = trio.current_time(), self.stall_timeout_seconds
            for each in tuple(self.watched):
                each.look(now, patience)

    def share(self) -> ConnectionBudget:
        """Create the share of a new connection, which must be closed with the connection."""
        return ConnectionBudget(self, self._max_share_bytes)


class ConnectionBudget:
    """Send budget of one connection."""

    __slots__ = ("_connection_budget", "_server_budget", "answers")

    def __init__(self, answers: SendBudget, max_bytes: int) -> None:
        self.answers = answers
        self._server_budget = answers.budget
        self._connection_budget = ByteBudget(max_bytes)

    @property
    def bytes(self) -> int:
        """Waiting and expected bytes."""
        return self._connection_budget.held

    @property
    def is_full(self) -> bool:
        """True if a limit is exceeded, so that nothing should be added."""
        return (
            self._connection_budget.held > self._connection_budget.limit
            or self._server_budget.held > self._server_budget.limit
        )

    @property
    def default_response_bytes(self) -> int:
        """Estimated size of a response of unknown size."""
        return int(min(self._connection_budget.limit, self._server_budget.limit) // 16)

    def take(self, size: int) -> bool:
        """Reserve expected bytes if there is room and no task waits; return whether they are reserved."""
        own, everyone = self._connection_budget, self._server_budget
        if own.waiting or everyone.waiting or own.held + size > own.limit or everyone.held + size > everyone.limit:
            return False
        own.held += size
        everyone.held += size
        return True

    async def wait(self, size: int) -> None:
        """Reserve expected bytes as soon as there is room. Clients with no pending responses come first."""
        await self._connection_budget.wait(size)
        try:
            await self._server_budget.wait(size, has_priority=self._connection_budget.held == size)
        except BaseException:
            self._connection_budget.release(size)
            raise

    def add(self, size: int) -> None:
        """Count bytes regardless of the limits."""
        self._connection_budget.held += size
        self._server_budget.held += size

    def release(self, size: int) -> None:
        """Release bytes that were sent or will not come."""
        own, everyone = self._connection_budget, self._server_budget
        own.held -= size
        everyone.held -= size
        if own.waiting:
            own.wake_waiters()
        if everyone.waiting:
            everyone.wake_waiters()

    def close(self) -> None:
        """Release all bytes at the end of the connection."""
        self.release(self._connection_budget.held)


current_connection_budget: Final[ContextVar[ConnectionBudget | None]] = ContextVar(
    "current_connection_budget", default=None
)
"""Send budget of the connection that the running task serves."""


# -- Peers that do not read -------------------------------------------------------------------------------------------


class ProgressTimer:
    """Timer of how long a sampled value has been unchanged."""

    __slots__ = ("_since", "_value")

    def __init__(self, now: float) -> None:
        self._value: object = None
        self._since = now

    def seconds(self, value: object, now: float) -> float:
        """Sample the value and return for how many seconds it has been unchanged."""
        if value != self._value:
            self._value = value
            self._since = now
        return now - self._since


def unsent_bytes(stream: SendStream) -> int:
    """Return the bytes in the socket's send buffer that the peer has not acknowledged; 0 if unknown.

    A socket accepts more only after much of its buffer was acknowledged, so this is the only early sign of a slow
    reader.
    """
    if isinstance(stream, trio.SSLStream):
        stream = stream.transport_stream
    sock = getattr(stream, "socket", None)
    if sock is None or sys.platform != "linux":
        return 0
    try:
        return int.from_bytes(fcntl.ioctl(sock.fileno(), termios.TIOCOUTQ, bytes(4)), sys.byteorder)
    except (OSError, ValueError):
        # A closed socket has the descriptor -1.
        return 0
