"""Server-sent events of one request, made in a task of its own.

::

    request's own nursery
      ├─ whoever sends the answer: view ──> body <──┐ one event at a time
      └─ events task: what makes the events ────────┘

What is open while events are made, such as cancel scopes, is open in that task and in no one else's.  An answer begins
with its first event; what fails before it has a status of its own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import structlog
import trio

from ovmstrio.auth.revocable_streams import while_known
from ovmstrio.core.callers import current_certificate
from ovmstrio.core.errors import ServerError
from ovmstrio.core.http import HttpAnswer

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from typing import Self

    from ovmstrio.core.http import Headers, HttpRequest

__all__ = ["UNBUFFERED", "EventSink", "answer_with_events"]

log = structlog.get_logger(__name__)

UNBUFFERED: Final = ("x-accel-buffering", "no")
"""A field that has proxies hand on what comes at once, where they know it."""

_EVENT_HEADERS: Final[Headers] = (
    ("content-type", "text/event-stream; charset=utf-8"),
    ("cache-control", "no-cache"),
    UNBUFFERED,
)


class _Body:
    """What comes of a sink; one that is broken off raises instead of its end, so that nobody takes it for whole."""

    def __init__(self, channel: trio.MemoryReceiveChannel[bytes]) -> None:
        self._channel = channel
        self.is_broken = False

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> bytes:
        try:
            return await self._channel.receive()
        except trio.EndOfChannel:
            if self.is_broken:
                raise trio.BrokenResourceError("the answer cannot be finished") from None
            raise StopAsyncIteration from None

    async def aclose(self) -> None:
        await self._channel.aclose()


class EventSink:
    """Takes events to whoever reads them; nobody reading cancels what makes them."""

    def __init__(self, scope: trio.CancelScope, task_status: trio.TaskStatus[_Body]) -> None:
        self._send, receive = trio.open_memory_channel[bytes](0)
        self._body = _Body(receive)
        self._scope = scope
        self._task_status = task_status
        self.has_begun = False

    async def send(self, data: bytes) -> None:
        """Send one event, or several, as they are written.  Not a checkpoint if somebody waits for them.

        Cancellation: while nobody takes them; then they are not sent.
        """
        self.begin()
        try:
            try:
                self._send.send_nowait(data)
            except trio.WouldBlock:
                await self._send.send(data)
        except trio.BrokenResourceError:
            # Nobody may read any more before the request's tasks are cancelled; that ends the events in the same way.
            self._scope.cancel()
            await trio.lowlevel.checkpoint()

    def begin(self) -> None:
        """Let the answer begin."""
        if not self.has_begun:
            self.has_begun = True
            self._task_status.started(self._body)

    def break_off(self) -> None:
        """Say that the rest cannot be made."""
        self._body.is_broken = True

    def close(self) -> None:
        """Say that there are no more."""
        self._send.close()


async def answer_with_events(
    request: HttpRequest,
    make: Callable[[EventSink], Awaitable[None]],
    write_error: Callable[[Exception], bytes] | None,
    headers: Headers = _EVENT_HEADERS,
) -> HttpAnswer:
    """Answer a request with the events that ``make`` sends; one that asks for the head alone with that.

    Args:
        request: one whose route has tasks.
        make: sends events, and returns behind the last one.
        write_error: writes what has ended them as one; None for answers that have no place for that, which break off.
        headers: of the answer.

    Raises:
        ServerError: ``make`` did before its first event.

    Ownership: the task that makes them is the request's.
    Cancellation: before the first event; what makes them is cancelled with the request's tasks.
    """
    if request.method == "HEAD":
        return HttpAnswer(200, headers)
    tasks: trio.Nursery = request.tasks
    return HttpAnswer(200, headers, await tasks.start(_run, request, make, write_error))


async def _run(
    request: HttpRequest,
    make: Callable[[EventSink], Awaitable[None]],
    write_error: Callable[[Exception], bytes] | None,
    *,
    task_status: trio.TaskStatus[_Body] = trio.TASK_STATUS_IGNORED,
) -> None:
    with trio.CancelScope() as scope:
        events = EventSink(scope, task_status)
        try:
            with while_known(request.headers, current_certificate.get()):
                await make(events)
            events.begin()
        except ServerError as error:
            if not events.has_begun:
                raise
            await _tell(events, error, write_error)
        except Exception as error:  # the border of one request, whose answer has begun
            if not events.has_begun:
                raise
            log.exception("stream failed", path=request.path)
            await _tell(events, error, write_error)
        finally:
            events.close()


async def _tell(events: EventSink, error: Exception, write_error: Callable[[Exception], bytes] | None) -> None:
    """Have the last event say what has ended them, or the answer break off."""
    if write_error is None:
        log.warning("an answer breaks off", why=str(error))
        events.break_off()
    else:
        await events.send(write_error(error))
