"""Callbacks: what handlers have done after their answers were sent."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import Any, Final

import structlog
import trio

from ovmstrio.core.http import Callback
from ovmstrio.handlers.handler_code import HandlerCode
from ovmstrio.handlers.models.model_cache import lease_models
from ovmstrio.isolation.thread_pool import WorkerThreads
from ovmstrio.isolation.user_code import UserCodeRaisedError, call_user_code

__all__ = ["DRAIN_SECONDS", "Callbacks", "call_handler_code"]

DRAIN_SECONDS: Final = 10.0
"""How long what runs for a handler that is closed may go on."""
_THREADS: Final = 4
_STEP: Final = "callback"

log = structlog.get_logger(__name__)


class Callbacks:
    """Runs callbacks in threads of their own, so that none takes one from a request.

    Args:
        code: whose code they are.
    """

    def __init__(self, code: HandlerCode) -> None:
        self._code = code
        self._threads = WorkerThreads(limit=_THREADS, is_strict=True, names=code.names)
        self._nursery: trio.Nursery | None = None
        self._closing = trio.Event()

    async def run(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Host the callbacks until :meth:`close`, and those that run then for ``DRAIN_SECONDS``.

        Ownership: their tasks and threads.

        Cancellation: at any checkpoint; plain functions that run are left to end by themselves.
        """
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
        """Take no more callbacks, and let :meth:`run` end."""
        self._closing.set()

    def start(self, callbacks: Iterable[Callback]) -> None:
        """Run callbacks one after the other, without waiting for them; their errors are logged."""
        chosen = list(callbacks)
        if not chosen:
            return
        if self._nursery is None:
            log.warning("callbacks are not run: the server ends", callbacks=len(chosen))
            return
        self._nursery.start_soon(self._run_all, chosen, name="callbacks of an answer")

    async def _run_all(self, callbacks: list[Callback]) -> None:
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
    """Call a function of the user's, which holds its models for as long as it runs, though its caller may have left.

    Raises:
        UserCodeRaisedError: it raised.
        QueueTimeout: a plain function waited for a thread for ``start_within`` seconds.

    Cancellation: a plain function that waits for a thread is not called; one that runs keeps its thread until it ends,
    and its result is dropped; a coroutine is cancelled where it waits.
    """
    return await call_user_code(
        threads, function, (), arguments, around=lease_models, may_leave=True, start_within=start_within
    )
