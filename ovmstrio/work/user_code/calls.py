"""Calls of user code, which may raise anything, on the event loop and in threads."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from contextvars import Context
from types import MappingProxyType
from typing import Any, Final

import trio

from ovmstrio.core.line_streams import code_names, finish_lines
from ovmstrio.core.texts import keep_texts, text_of
from ovmstrio.work.threads.worker_threads import WorkerThreads

__all__ = [
    "UserCodeRaisedError",
    "call_here",
    "call_in_thread",
    "call_on_loop",
    "call_user_code",
    "is_async",
]

_OF_THE_LOOP: Final = (trio.Cancelled, KeyboardInterrupt, GeneratorExit)
"""What passes through user code without being its own, alone or in groups."""

_NO_KEYWORDS: Final[Mapping[str, Any]] = MappingProxyType({})

_ASYNC_CODE: Final = inspect.CO_COROUTINE | inspect.CO_ITERABLE_COROUTINE | inspect.CO_ASYNC_GENERATOR


class UserCodeRaisedError(Exception):
    """User code raised ``error``, which may be of any class, ``SystemExit`` too.

    The texts of the error and of those before it are made here, in the thread of the user's code.
    """

    def __init__(self, error: BaseException) -> None:
        keep_texts(error)
        super().__init__(text_of(error))
        self.error = error


def is_async(method: Any) -> bool:
    """Tell whether a method belongs on the event loop, as far as its code shows; asked at every call."""
    code = getattr(getattr(method, "__func__", method), "__code__", None)
    return code is not None and bool(code.co_flags & _ASYNC_CODE)


async def call_user_code(
    threads: WorkerThreads,
    function: Callable[..., Any],
    args: tuple[Any, ...] = (),
    keywords: Mapping[str, Any] = _NO_KEYWORDS,
    *,
    around: Callable[[], AbstractContextManager[Any]] = nullcontext,
    context: Context | None = None,
    on_cancel: Callable[[], None] | None = None,
    may_leave: bool = False,
    start_within: float = math.inf,
) -> Any:
    """Call a function where it belongs: in a thread, or on the event loop if it is ``async def`` or gives an awaitable.

    Args:
        threads: where plain functions run.
        function: the user's.
        args: its arguments.
        keywords: those by name.
        around: gives what the code runs in, wherever that is.
        context: stands for ``around`` in a thread: the contextvars of which a plain function sees a copy.
        on_cancel: as :meth:`WorkerThreads.call`, as the next.
        may_leave: whether a plain function that runs is left when the caller is cancelled.
        start_within: for how many seconds a plain function may wait for a thread.

    Raises:
        QueueTimeout: it has waited for so long.
        UserCodeRaisedError: it raised.

    Cancellation: of a plain function as :meth:`WorkerThreads.call`; other code is cancelled where it waits.
    """
    if is_async(function):
        with around():
            return await call_on_loop(function, args, keywords, threads.names)
    inside = around if context is None else nullcontext
    own = None if context is None else context.copy()
    result = await threads.call(
        call_here, function, args, keywords, inside,
        on_cancel=on_cancel, context=own, may_leave=may_leave, start_within=start_within,
    )  # fmt: skip
    if isinstance(result, UserCodeRaisedError):
        raise result
    if inspect.isawaitable(result):
        with around():
            return await call_on_loop(lambda: result, names=threads.names)
    return result


async def call_in_thread(threads: WorkerThreads, function: Callable[..., Any], *args: Any) -> Any:
    """Call a plain function in a thread, and leave it there if the caller is cancelled.

    Raises:
        UserCodeRaisedError: it raised.
        Exception: the pool refuses the call.

    Ownership: the arguments until the call has ended, which may be after this has been cancelled.

    Cancellation: at once; a call that has begun goes on.
    """
    result = await threads.call(call_here, function, args, may_leave=True)
    if isinstance(result, UserCodeRaisedError):
        raise result
    return result


def call_here(
    method: Callable[..., Any],
    args: tuple[Any, ...],
    keywords: Mapping[str, Any] = _NO_KEYWORDS,
    around: Callable[[], AbstractContextManager[Any]] = nullcontext,
) -> Any:
    """Call a plain function in a thread of its own; what it raises is given back as a ``UserCodeRaisedError``."""
    try:
        if around is nullcontext:
            return method(*args, **keywords)
        with around():
            return method(*args, **keywords)
    except BaseException as error:  # noqa: BLE001 - the border of user code
        return UserCodeRaisedError(error)


async def call_on_loop(
    method: Callable[..., Any],
    args: tuple[Any, ...] = (),
    keywords: Mapping[str, Any] = _NO_KEYWORDS,
    names: Mapping[str, str] | None = None,
) -> Any:
    """Call a function on the event loop, and await what it gives if that can be awaited.

    Args:
        method: the function.
        args: its arguments.
        keywords: those by name.
        names: say in the log whose code prints there, where not the context does.

    Raises:
        UserCodeRaisedError: the user code raised.

    Cancellation: where the user code waits.
    """
    token = code_names.set(names or code_names.get())
    try:
        result = method(*args, **keywords)
        return await result if inspect.isawaitable(result) else result
    except BaseExceptionGroup as group:
        of_the_loop = group.subgroup(_OF_THE_LOOP)
        if of_the_loop is not None:
            # An error of the user's beside a cancellation must not end more than what is cancelled.
            raise of_the_loop from group
        raise UserCodeRaisedError(group) from group
    except _OF_THE_LOOP:
        raise
    except BaseException as error:
        raise UserCodeRaisedError(error) from error
    finally:
        finish_lines()
        code_names.reset(token)
