"""Server-sent events (SSE) of one request, produced in a separate task.

::

    nursery of the request
      ├─ sending task: view ──> head, then what the socket did not take at once
      └─ events task: make ──> socket

Cancel scopes and other context of the producer stay in its task. The response starts with the first event; an error
before that gets its own status.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import structlog
import trio

from ovmstrio.auth.revocable_streams import cancel_on_revocation
from ovmstrio.core.errors import ServerError
from ovmstrio.core.http_messages import HttpAnswer
from ovmstrio.transport.http.bounded_send import PushedBody

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from ovmstrio.core.http_messages import Headers, HttpRequest

log = structlog.get_logger(__name__)

NO_PROXY_BUFFERING: Final = ("x-accel-buffering", "no")
"""Header that disables response buffering in proxies."""

EVENT_HEADERS: Final[Headers] = (
    ("content-type", "text/event-stream; charset=utf-8"),
    ("cache-control", "no-cache"),
    NO_PROXY_BUFFERING,
)


_KEEP_ALIVE: Final = b": keep-alive\n\n"


class EventSink:
    """Sender of events to the response body; a closed body cancels the producer."""

    def __init__(self, scope: trio.CancelScope, task_status: trio.TaskStatus[PushedBody]) -> None:
        self._body = PushedBody()
        self._scope = scope
        self._task_status = task_status
        self._sent_at = trio.current_time()
        self.has_begun = False
        self.keeps_alive = False  # whether :meth:`keep_alive` runs

    async def send(self, data: bytes) -> None:
        """Send encoded events. Not a checkpoint if they can be sent at once."""
        self.begin()
        if self._body.can_write:
            self.send_now(data)
            if self._scope.cancel_called:
                await trio.lowlevel.checkpoint()
            return
        if self.keeps_alive:
            self._sent_at = trio.current_time()
        try:
            await self._body.send(data)
        except trio.BrokenResourceError:
            # The body was closed before the request's tasks were cancelled.
            self._scope.cancel()
            await trio.lowlevel.checkpoint()

    @property
    def can_send_now(self) -> bool:
        """True if :meth:`send_now` may be called: the response has begun, and the client has taken earlier events."""
        return self._body.can_write

    def send_now(self, data: bytes) -> None:
        """Send encoded events without waiting."""
        if self.keeps_alive:
            self._sent_at = trio.current_time()
        try:
            self._body.write(data)
        except (trio.BrokenResourceError, trio.ClosedResourceError, trio.WouldBlock):
            self._scope.cancel()

    def begin(self) -> None:
        """Start the response."""
        if not self.has_begun:
            self.has_begun = True
            self._task_status.started(self._body)

    async def keep_alive(self, seconds: float, scope: trio.CancelScope) -> None:
        """Send a comment after each interval without an event, until ``scope`` is cancelled."""
        self.keeps_alive = True
        with scope:
            while True:
                await trio.sleep_until(self._sent_at + seconds)
                if trio.current_time() >= self._sent_at + seconds:
                    await self.send(_KEEP_ALIVE)

    def break_off(self) -> None:
        """Mark the response as incomplete."""
        self._body.is_incomplete = True

    def close(self) -> None:
        """End the events."""
        self._body.close()


async def stream_events(
    request: HttpRequest,
    make: Callable[[EventSink], Awaitable[None]],
    write_error: Callable[[Exception], bytes] | None,
    headers: Headers = EVENT_HEADERS,
    *,
    keep_alive_seconds: float = 0,
) -> HttpAnswer:
    """Answer a request with the events that ``make`` sends; HEAD gets headers only.

    Args:
        request: request of a route with ``has_tasks``.
        make: sends events and returns after the last one; its ``ServerError`` before the first event is raised here.
        write_error: encodes an error as last event; None to abort the response.
        headers: response headers.
        keep_alive_seconds: interval of comments while there are no events, also before the first one, whose error then
            has no status; 0 for no comments.
    """
    if request.method == "HEAD":
        return HttpAnswer(200, headers)
    tasks: trio.Nursery = request.tasks
    return HttpAnswer(200, headers, await tasks.start(_run, request, make, write_error, keep_alive_seconds))


async def _run(
    request: HttpRequest,
    make: Callable[[EventSink], Awaitable[None]],
    write_error: Callable[[Exception], bytes] | None,
    keep_alive_seconds: float,
    *,
    task_status: trio.TaskStatus[PushedBody] = trio.TASK_STATUS_IGNORED,
) -> None:
    with trio.CancelScope() as scope:
        events, keeper = EventSink(scope, task_status), trio.CancelScope()
        if keep_alive_seconds:
            request.tasks.start_soon(events.keep_alive, keep_alive_seconds, keeper)
        try:
            with cancel_on_revocation(request.peer, request.headers):
                await make(events)
            events.begin()
        except ServerError as error:
            if not events.has_begun:
                raise
            await _end_with_error(events, error, write_error)
        except Exception as error:  # an error of one request must not affect others
            if not events.has_begun:
                raise
            log.exception("stream failed", path=request.path)
            await _end_with_error(events, error, write_error)
        finally:
            keeper.cancel()
            events.close()


async def _end_with_error(
    events: EventSink, error: Exception, write_error: Callable[[Exception], bytes] | None
) -> None:
    """Send the error as last event, or abort the response."""
    if write_error is None:
        log.warning("response aborted", reason=str(error))
        events.break_off()
    else:
        await events.send(write_error(error))
