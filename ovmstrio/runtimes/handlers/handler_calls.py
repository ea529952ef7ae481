"""Calls of a handler's code."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ovmstrio.runtimes.handlers.models.leases import lease_models
from ovmstrio.work.threads.worker_threads import WorkerThreads
from ovmstrio.work.user_code.calls import call_user_code

__all__ = ["call_handler_code"]


async def call_handler_code(threads: WorkerThreads, function: Callable[..., Any], /, **arguments: Any) -> Any:
    """Call a function of the user's, which holds its models for as long as it runs, though its caller may have left.

    Raises:
        UserCodeRaisedError: it raised.

    Cancellation: a plain function that waits for a thread is not called; one that runs keeps its thread until it ends,
    and its result is dropped; a coroutine is cancelled where it waits.
    """
    return await call_user_code(threads, function, (), arguments, around=lease_models, may_leave=True)
