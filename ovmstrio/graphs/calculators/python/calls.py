"""Calls of user code: plain functions in worker threads, ``async def`` on the event loop."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import Context
from typing import Any, Final

from ovmstrio.graphs.worker_threads import WorkerThreads
from pyovms.context import CURRENT

__all__ = ["UserCodeRaisedError", "call_user_code", "is_async", "node_context"]


_ASYNC_CODE: Final = inspect.CO_COROUTINE | inspect.CO_ITERABLE_COROUTINE | inspect.CO_ASYNC_GENERATOR


class UserCodeRaisedError(Exception):
    """User code raised ``error``, which may be of any class, ``SystemExit`` too."""

    def __init__(self, error: BaseException) -> None:
        super().__init__(str(error))
        self.error = error


def is_async(method: Any) -> bool:
    """Tell whether a method belongs on the event loop, as far as its code shows; asked at every call."""
    code = getattr(getattr(method, "__func__", method), "__code__", None)
    return code is not None and bool(code.co_flags & _ASYNC_CODE)


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
            return await _on_loop(method, args)
    result = await threads.call(_caught, method, args, on_cancel=on_cancel, context=context.copy())
    if isinstance(result, UserCodeRaisedError):
        raise result
    if inspect.iscoroutine(result):
        with node_context(context):
            return await _on_loop(lambda: result, ())
    return result


def _caught(method: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    try:
        return method(*args)
    except BaseException as error:  # noqa: BLE001 - the border of user code
        return UserCodeRaisedError(error)


async def _on_loop(method: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    try:
        result = method(*args)
        return await result if inspect.isawaitable(result) else result
    except (Exception, SystemExit) as error:
        raise UserCodeRaisedError(error) from error
