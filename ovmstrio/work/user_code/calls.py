"""Calls of user code, which may raise anything, on the event loop and in threads."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, Final

import trio

__all__ = ["UserCodeRaisedError", "call_here", "call_on_loop", "is_async", "text_of"]

_OF_THE_LOOP: Final = (trio.Cancelled, KeyboardInterrupt, GeneratorExit)
"""What passes through user code without being its own, alone or in groups."""

_ASYNC_CODE: Final = inspect.CO_COROUTINE | inspect.CO_ITERABLE_COROUTINE | inspect.CO_ASYNC_GENERATOR


class UserCodeRaisedError(Exception):
    """User code raised ``error``, which may be of any class, ``SystemExit`` too."""

    def __init__(self, error: BaseException) -> None:
        super().__init__(text_of(error))
        self.error = error


def text_of(error: BaseException) -> str:
    """Give an error's text; the name of its class if it cannot even tell that."""
    try:
        return str(error)
    except BaseException:  # noqa: BLE001 - users write their errors' texts, too
        return type(error).__name__


def is_async(method: Any) -> bool:
    """Tell whether a method belongs on the event loop, as far as its code shows; asked at every call."""
    code = getattr(getattr(method, "__func__", method), "__code__", None)
    return code is not None and bool(code.co_flags & _ASYNC_CODE)


def call_here(method: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    """Call a plain function in a thread of its own; what it raises is given back as a ``UserCodeRaisedError``."""
    try:
        return method(*args)
    except BaseException as error:  # noqa: BLE001 - the border of user code
        return UserCodeRaisedError(error)


async def call_on_loop(method: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    """Call a function on the event loop, and await what it gives if that can be awaited.

    Raises:
        UserCodeRaisedError: the user code raised.

    Cancellation: where the user code waits.
    """
    try:
        result = method(*args)
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
