"""Callbacks that run after the response of a handler has been sent."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import Any, Final

import structlog
import trio

from ovmstrio.core.http_messages import AfterResponse
from ovmstrio.handlers.error_reporter import ErrorReporter
from ovmstrio.handlers.models.model_cache import lease_models
from ovmstrio.isolation.thread_pool import WorkerThreads
from ovmstrio.isolation.user_code import UserCodeRaisedError, call_user_code

DRAIN_SECONDS: Final = 10.0
"""Maximum time that callbacks, batches and processes of a closed handler may continue."""
_THREADS: Final = 4
_STEP: Final = "callback"

log = structlog.get_logger(__name__)


class Callbacks:
    """Execution of callbacks in separate threads, so that they do not occupy threads of requests."""

    def __init__(self, code: ErrorReporter) -> None:
        self._code = code
        self._threads = WorkerThreads(limit=_THREADS, is_strict=True, names=code.log_fields)
        self._nursery: trio.Nursery | None = None
        self._closing = trio.Event()

    async def run(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Run callbacks until :meth:`close`, and drain for at most ``DRAIN_SECONDS``; running ones are abandoned."""
        try:
            async with trio.open_nursery() as threads_nursery:
                try:
                    await threads_nursery.start(self._threads.run)
                    await self._host(task_status)
                finally:
                    with trio.CancelScope(shield=True):
                        await self._threads.aclose()
        finally:
            self._nursery = None

    async def _host(self, task_status: trio.TaskStatus[None]) -> None:
        async with trio.open_nursery() as nursery:
            self._nursery = nursery
            task_status.started()
            await self._closing.wait()
            self._nursery = None
            nursery.cancel_scope.deadline = trio.current_time() + DRAIN_SECONDS

    def close(self) -> None:
        """Accept no more callbacks and end :meth:`run`."""
        self._closing.set()

    def start(self, callbacks: Iterable[AfterResponse]) -> None:
        """Run callbacks in sequence in the background; their errors are logged."""
        chosen = list(callbacks)
        if not chosen:
            return
        if self._nursery is None:
            log.warning("callbacks dropped at shutdown", callbacks=len(chosen))
            return
        self._nursery.start_soon(self._run_all, chosen, name="response callbacks")

    async def _run_all(self, callbacks: list[AfterResponse]) -> None:
        for callback in callbacks:
            try:
                await call_handler_code(self._threads, callback)
            except UserCodeRaisedError as raised:
                self._code.report(raised.error, _STEP)


async def call_handler_code(
    threads: WorkerThreads,
    function: Callable[..., Any],
    arguments: Mapping[str, Any] = MappingProxyType({}),
    *,
    start_within: float = math.inf,
) -> Any:
    """Call a user function; its models stay leased while it runs, even after its caller was cancelled.

    Raises:
        UserCodeRaisedError: the function raised.
        QueueTimeout: no thread became free in ``start_within`` seconds.

    Cancellation: see :meth:`LoadedHandler.call`.
    """
    return await call_user_code(
        threads, function, (), arguments, around=lease_models, may_leave=True, start_within=start_within
    )
