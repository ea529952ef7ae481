"""Tasks that outlive their requests: background responses and batches."""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, Final

import structlog
import trio

from ovmstrio.core.callers import current_caller
from ovmstrio.core.errors import NotReady
from ovmstrio.core.events import current_event, current_request, current_request_id
from ovmstrio.core.limits import current_ticket
from ovmstrio.core.tracing import current_span
from ovmstrio.transport.send_budget import current_connection_budget

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

log = structlog.get_logger(__name__)


_OF_REQUEST: Final = (
    *(current_ticket, current_request, current_request_id, current_event, current_span, current_connection_budget),
)
"""Context of the request that starts a task, without its caller."""


class BackgroundTasks:
    """Nursery of tasks that end with the server; a task keeps the caller of the request that starts it."""

    def __init__(self) -> None:
        self._nursery: trio.Nursery | None = None
        self._first: list[Callable[[], Any]] = []

    def on_open(self, run: Callable[[], Any]) -> None:
        """Run a function that raises nothing once tasks can be started."""
        self._first.append(run)

    @asynccontextmanager
    async def opened(self) -> AsyncIterator[None]:
        """Run tasks within the block, and cancel them at its end."""
        async with trio.open_nursery() as nursery:
            self._nursery = nursery
            for run in self._first:
                nursery.start_soon(run)
            try:
                yield
            finally:
                self._nursery = None
                nursery.cancel_scope.cancel()

    async def start(self, run: Callable[..., Any], *, is_counted: bool = True) -> Any:
        """Start a task, and return the value with which it reports its start; raises what it raises before.

        ``is_counted`` is whether the task counts as a request of its caller.

        Raises:
            NotReady: the server is shutting down.
            CallerLimited: the caller has too many requests.
        """
        if self._nursery is None:
            raise NotReady("the server is shutting down")
        return await self._nursery.start(self._run, run, is_counted)

    async def _run(self, run: Callable[..., Any], is_counted: bool, *, task_status: trio.TaskStatus[Any]) -> None:
        for variable in _OF_REQUEST:
            variable.set(None)
        caller = current_caller.get() if is_counted else None
        if caller is not None:
            caller.enter()
        status = _Status(task_status)
        try:
            await run(task_status=status)
        except Exception:
            if not status.has_started:
                raise
            log.exception("background task failed")
        finally:
            if caller is not None:
                caller.leave()


class _Status:
    """Status of a starting task that remembers its start."""

    def __init__(self, status: trio.TaskStatus[Any]) -> None:
        self._status = status
        self.has_started = False

    def started(self, value: Any = None) -> None:
        self.has_started = True
        self._status.started(value)
