"""Services that live in a task of the server's own: opened as a block, closed on demand, no trouble to their siblings.

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

__all__ = ["ResidentService", "host"]

log = structlog.get_logger(__name__)


class ResidentService:
    """What a hosted block gives; closing it ends the block."""

    def __init__(self) -> None:
        self._closing = trio.Event()
        self._closed = trio.Event()

    async def aclose(self) -> None:
        """End the block, and return when it has ended.

        Cancellation: nothing is left behind; the block goes on ending.
        """
        self._closing.set()
        await self._closed.wait()

    async def stay(self) -> None:
        """Return when the service is to be closed; for its host.

        Cancellation: at once.
        """
        await self._closing.wait()

    def gone(self) -> None:
        """Note that the block has ended; for its host."""
        self._closed.set()


ResidentT = TypeVar("ResidentT", bound=ResidentService)


async def host(
    tasks: trio.Nursery, opened: AbstractAsyncContextManager[ResidentT], *, kind: str, name: str
) -> ResidentT:
    """Enter a block in a task of its own, and give its service; the caller owns the service and closes it.

    Args:
        tasks: owns the task; must outlive the service.
        opened: the block.
        kind: what the log calls it.
        name: which one it is.

    Raises:
        ServerError: the block could not be entered; what it raises later is logged, and ends nothing else.

    Cancellation: while it is entered; nothing is left.
    """
    hosting = _Hosting(opened, kind, name)
    service: ResidentT | None = await tasks.start(hosting.run)
    if service is None:
        raise hosting.failure or ModelFailure(f"the {kind} {name!r} could not be loaded")
    return service


class _Hosting(Generic[ResidentT]):
    """The task in which a service lives; its failures never reach the tasks beside it."""

    def __init__(self, opened: AbstractAsyncContextManager[ResidentT], kind: str, name: str) -> None:
        self._opened = opened
        self._what = f"{'an' if kind[0] in 'aeiou' else 'a'} {kind}"
        self._names = {kind.replace(" ", "_"): name}
        self.failure: ServerError | None = None

    async def run(self, *, task_status: trio.TaskStatus[ResidentT | None]) -> None:
        """Host the block until its service is closed; reports the service, or None if it cannot be entered."""
        service: ResidentT | None = None
        try:
            async with self._opened as service:
                task_status.started(service)
                await service.stay()
        except* Exception as group:  # the border of one service
            if service is None:
                self.failure = self._first_of(group)
            else:
                log.exception("%s has ended", self._what, **self._names)
        finally:
            if service is not None:
                service.gone()
        if service is None:
            task_status.started(None)

    def _first_of(self, group: BaseExceptionGroup[Any]) -> ServerError:
        error: BaseException = group
        while isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        if isinstance(error, ServerError):
            return error
        log.error("%s could not be loaded", self._what, exc_info=error)
        return ModelFailure(f"{type(error).__name__}: {text_of(error)}")
