"""Calls of user code: plain functions in worker threads, ``async def`` on the event loop."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import Context
from typing import Any

from ovmstrio.work.threads.worker_threads import WorkerThreads
from ovmstrio.work.user_code.calls import UserCodeRaisedError, call_here, call_on_loop, is_async
from pyovms.context import CURRENT

__all__ = ["UserCodeRaisedError", "call_user_code", "node_context"]


@contextmanager
def node_context(context: Context) -> Iterator[None]:
    """Let ``current_context()`` give, on the event loop, what it gives in ``context``."""
    current = context.get(CURRENT)
    if current is None:
        yield
        return
    token = CURRENT.set(current)
    try:
        yield
    finally:
        CURRENT.reset(token)


async def call_user_code(
    threads: WorkerThreads,
    method: Callable[..., Any],
    *args: Any,
    context: Context,
    on_cancel: Callable[[], None] | None = None,
) -> Any:
    """Call a method of a handler where it belongs, and await what it gives if that is a coroutine.

    Args:
        threads: where plain functions run.
        method: the user's.
        args: its arguments.
        context: the contextvars that it sees; a plain function runs in a copy.
        on_cancel: tells a plain function that nobody waits any more.

    Raises:
        UserCodeRaisedError: the user code raised.

    Cancellation: a plain function is given the pool's grace; a coroutine is cancelled where it waits.
    """
    if is_async(method):
        with node_context(context):
            return await call_on_loop(method, args)
    result = await threads.call(call_here, method, args, on_cancel=on_cancel, context=context.copy())
    if isinstance(result, UserCodeRaisedError):
        raise result
    if inspect.iscoroutine(result):
        with node_context(context):
            return await call_on_loop(lambda: result, ())
    return result
