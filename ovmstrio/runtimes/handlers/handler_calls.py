"""Calls of a handler's code: plain functions in worker threads, ``async def`` on the event loop."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

from ovmstrio.runtimes.handlers.models.leases import lease_models
from ovmstrio.work.threads.worker_threads import WorkerThreads
from ovmstrio.work.user_code.calls import UserCodeRaisedError, call_here, call_on_loop, is_async

__all__ = ["call_handler_code"]


async def call_handler_code(threads: WorkerThreads, function: Callable[..., Any], /, **arguments: Any) -> Any:
    """Call a function of the user's where it belongs, and await what it gives if that is a coroutine.

    Raises:
        UserCodeRaisedError: it raised.

    Cancellation: a plain function that waits for a thread is not called; one that runs keeps its thread until it ends,
    and its result is dropped; a coroutine is cancelled where it waits.
    """
    call = partial(function, **arguments)
    if is_async(function):
        with lease_models():
            return await call_on_loop(call, ())
    result = await threads.call(call_here, _call_with_leases, (call,), may_leave=True)
    if isinstance(result, UserCodeRaisedError):
        raise result
    if inspect.iscoroutine(result):
        with lease_models():
            return await call_on_loop(lambda: result, ())
    return result


def _call_with_leases(call: Callable[[], Any]) -> Any:
    """Keep what the call holds for as long as it runs, which may be longer than its caller waits."""
    with lease_models():
        return call()
