"""Services hosted in their own task: entered as a context manager, closed on demand; failures stay within the task.

::

    host() ──> task: async with opened as service ──> started ──> aclose() ──> the block ends ──> the task ends
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Generic, TypeVar

import structlog
import trio

from ovmstrio.core.errors import ModelFailure, ServerError
from ovmstrio.util.truncation import text_of

if TYPE_CHECKING:
    from contextlib import AbstractAsyncContextManager

log = structlog.get_logger(__name__)


class HostedService:
    """Base of services that a hosted context manager yields; closing one ends its block."""

    def __init__(self) -> None:
        self._closing = trio.Event()
        self._closed = trio.Event()

    async def aclose(self) -> None:
        """End the block and wait for its end; the block also ends under cancellation."""
        self._closing.set()
        await self._closed.wait()

    async def stay(self) -> None:
        """Return when the service is to be closed; for the host only."""
        await self._closing.wait()

    def gone(self) -> None:
        """Mark the block as ended; for the host only."""
        self._closed.set()


ResidentT = TypeVar("ResidentT", bound=HostedService)


async def host_service(
    tasks: trio.Nursery, opened: AbstractAsyncContextManager[ResidentT], *, kind: str, name: str
) -> ResidentT:
    """Enter a context manager in a new task of ``tasks``, and return its service, which the caller must close.

    ``kind`` and ``name`` are for log lines.

    Raises:
        ServerError: the block could not be entered; later errors are logged.
    """
    hosting = _HostTask(opened, kind, name)
    service: ResidentT | None = await tasks.start(hosting.run)
    if service is None:
        raise hosting.failure or ModelFailure(f"the {kind} {name!r} could not be loaded")
    return service


class _HostTask(Generic[ResidentT]):
    """The task of one hosted service."""

    def __init__(self, opened: AbstractAsyncContextManager[ResidentT], kind: str, name: str) -> None:
        self._opened = opened
        self._kind = kind
        self._log_fields = {kind.replace(" ", "_"): name}
        self.failure: ServerError | None = None

    async def run(self, *, task_status: trio.TaskStatus[ResidentT | None]) -> None:
        service: ResidentT | None = None
        try:
            async with self._opened as service:
                task_status.started(service)
                await service.stay()
        except* Exception as group:  # errors stay within one service
            if service is None:
                self.failure = self._load_error(group)
            else:
                log.exception("%s failed", self._kind, **self._log_fields)
        finally:
            if service is not None:
                service.gone()
        if service is None:
            task_status.started(None)

    def _load_error(self, group: BaseExceptionGroup[Any]) -> ServerError:
        error: BaseException = group
        while isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        if isinstance(error, ServerError):
            return error
        log.error("%s not loaded", self._kind, exc_info=error)
        return ModelFailure(f"{type(error).__name__}: {text_of(error)}")
