"""Calls of user code on the event loop and in threads, and descriptions of its errors."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from contextvars import Context
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Any, Final, NamedTuple

import trio

from ovmstrio.isolation.thread_pool import RefusalCheck, WorkerThreads
from ovmstrio.util.stdio import code_names, finish_lines
from ovmstrio.util.truncation import keep_texts, text_of

# -- Calls -------------------------------------------------------------------------------------------------------------

_LOOP_EXCEPTIONS: Final = (trio.Cancelled, KeyboardInterrupt, GeneratorExit)
"""Exceptions of the event loop that pass through user code, alone or in groups."""

_NO_KEYWORDS: Final[Mapping[str, Any]] = MappingProxyType({})

_ASYNC_CODE: Final = inspect.CO_COROUTINE | inspect.CO_ITERABLE_COROUTINE | inspect.CO_ASYNC_GENERATOR


class UserCodeRaisedError(Exception):
    """User code raised ``error``, which may be of any class, ``SystemExit`` included.

    The texts of the error and its causes are created here, in the thread of the user code.
    """

    def __init__(self, error: BaseException) -> None:
        keep_texts(error)
        super().__init__(text_of(error))
        self.error = error


def is_async(method: Any) -> bool:
    """Return whether a method must run on the event loop, judged by its code object; checked at every call."""
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
    is_abandonable: bool = False,
    start_timeout_seconds: float = math.inf,
) -> Any:
    """Call a function in a thread, or on the event loop if it is ``async def`` or returns an awaitable.

    Args:
        threads: pool for plain functions.
        function: user function.
        args: positional arguments.
        keywords: keyword arguments.
        around: returns a context manager around the call.
        context: replaces ``around`` for plain functions, which run in a copy of it.
        on_cancel: like ``is_abandonable`` and ``start_timeout_seconds`` as for :meth:`WorkerThreads.call`.
        is_abandonable: see there.
        start_timeout_seconds: see there.

    Raises:
        QueueTimeout: no thread was free in time.
        UserCodeRaisedError: the function raised.
    """
    if is_async(function):
        with around():
            return await call_on_loop(function, args, keywords, threads.names)
    context_manager = around if context is None else nullcontext
    context_copy = None if context is None else context.copy()
    result = await threads.call(
        call_in_current_thread, function, args, keywords, context_manager,
        on_cancel=on_cancel, context=context_copy, is_abandonable=is_abandonable,
        start_timeout_seconds=start_timeout_seconds,
    )  # fmt: skip
    if isinstance(result, UserCodeRaisedError):
        raise result
    if inspect.isawaitable(result):
        with around():
            return await call_on_loop(lambda: result, names=threads.names)
    return result


async def call_in_thread(threads: WorkerThreads, function: Callable[..., Any], *args: Any) -> Any:
    """Call a plain function in a thread; if the caller is cancelled, the call continues and keeps its arguments.

    Raises:
        UserCodeRaisedError: the function raised.
        Exception: the pool refuses the call.
    """
    result = await threads.call(call_in_current_thread, function, args, is_abandonable=True)
    if isinstance(result, UserCodeRaisedError):
        raise result
    return result


def call_in_current_thread(
    method: Callable[..., Any],
    args: tuple[Any, ...],
    keywords: Mapping[str, Any] = _NO_KEYWORDS,
    around: Callable[[], AbstractContextManager[Any]] = nullcontext,
) -> Any:
    """Call a plain function in the current thread; return its exception as a ``UserCodeRaisedError``."""
    try:
        if around is nullcontext:
            return method(*args, **keywords)
        with around():
            return method(*args, **keywords)
    except BaseException as error:  # noqa: BLE001 - user code may raise anything
        return UserCodeRaisedError(error)


async def call_on_loop(
    method: Callable[..., Any],
    args: tuple[Any, ...] = (),
    keywords: Mapping[str, Any] = _NO_KEYWORDS,
    names: Mapping[str, str] | None = None,
) -> Any:
    """Call a function on the event loop and await its result if it is awaitable.

    ``names`` are the log fields of printed output; default: those of the context. Raises ``UserCodeRaisedError``.
    """
    token = code_names.set(names or code_names.get())
    try:
        result = method(*args, **keywords)
        return await result if inspect.isawaitable(result) else result
    except BaseExceptionGroup as group:
        loop_exceptions = group.subgroup(_LOOP_EXCEPTIONS)
        if loop_exceptions is not None:
            # A user error raised together with a cancellation must not end more than the cancelled scope.
            raise loop_exceptions from group
        raise UserCodeRaisedError(group) from group
    except _LOOP_EXCEPTIONS:
        raise
    except BaseException as error:
        raise UserCodeRaisedError(error) from error
    finally:
        finish_lines()
        code_names.reset(token)


# -- Calls that may be left by their callers ---------------------------------------------------------------------------


class _LoopCall:
    __slots__ = ("error", "is_over", "scope", "value")

    def __init__(self) -> None:
        self.scope = trio.CancelScope()
        self.is_over = trio.Event()
        self.value: Any = None
        self.error: Exception | None = None


class AbandonableLoopCalls:
    """Async counterpart of :class:`WorkerThreads` with ``is_abandonable``: cancelled callers do not wait.

    Args:
        nursery: runs the calls.
        ended: returns the error for callers after the nursery was cancelled.
        refusal: may refuse calls because of abandoned ones.
        names: log fields of printed output; default: those of the caller's context.
    """

    def __init__(
        self,
        nursery: trio.Nursery,
        ended: Callable[[], Exception],
        refusal: RefusalCheck | None = None,
        names: Mapping[str, str] | None = None,
    ) -> None:
        self._names = names
        self._nursery = nursery
        self._ended = ended
        self._refusal = refusal
        self._running: set[_LoopCall] = set()

    @property
    def is_busy(self) -> bool:
        """True if a call is running, including calls of cancelled callers."""
        return bool(self._running)

    async def call(self, function: Callable[..., Any], *args: Any) -> Any:
        """Call a function on the loop and return its result, awaited if necessary.

        Raises:
            UserCodeRaisedError: the function raised.
            Exception: returned by ``ended`` or ``refusal``.

        Cancellation: the call is cancelled too, and may continue with its arguments until it has ended.
        """
        if self._refusal is not None:
            refusal_error = self._refusal(sum(call.scope.cancel_called for call in self._running))
            if refusal_error is not None:
                raise refusal_error
        call = _LoopCall()
        self._running.add(call)
        self._nursery.start_soon(self._run, call, function, args)
        try:
            await call.is_over.wait()
        except trio.Cancelled:
            call.scope.cancel()
            raise
        if call.error is not None:
            raise call.error
        return call.value

    async def _run(self, call: _LoopCall, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
        try:
            with call.scope:
                call.value = await call_on_loop(function, args, names=self._names)
        except UserCodeRaisedError as raised:
            call.error = raised
        except trio.Cancelled:
            call.error = self._ended()
            raise
        except GeneratorExit as raised:  # raised by the function itself, because tasks are not closed
            call.error = UserCodeRaisedError(raised)
        finally:
            self._running.discard(call)
            call.is_over.set()

    async def idle(self) -> None:
        """Wait until every call has ended."""
        while self._running:
            await next(iter(self._running)).is_over.wait()


# -- Errors ------------------------------------------------------------------------------------------------------------

_TRIMMED_FOLDERS: Final = (f"{Path(__file__).parents[1]}/", f"{Path(trio.__file__).parent}/")


class SourceLine(NamedTuple):
    """Line of a file."""

    file: str
    line: int

    def __str__(self) -> str:
        return f"{Path(self.file).name}:{self.line}"


def describe_error(error: BaseException) -> str:
    """Return type and truncated text of an error."""
    text = text_of(error)
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def append_location(text: str, place: SourceLine | None) -> str:
    """Append a source line to a text, if known."""
    return text if place is None else f"{text} ({place})"


def missing_module_hint(error: BaseException) -> str:
    """Return a hint for an import of a missing module; empty for other errors."""
    if isinstance(error, ModuleNotFoundError) and error.name is not None:
        top = error.name.partition(".")[0]
        return f"install the package that provides {top!r}, or put {top}.py next to the handler"
    return ""


def definition_location(method: Callable[..., Any]) -> SourceLine | None:
    """Return the line where a method is defined."""
    code = getattr(inspect.unwrap(method), "__code__", None)
    return None if code is None else SourceLine(code.co_filename, code.co_firstlineno)


def error_location(folder: Path, error: BaseException) -> SourceLine | None:
    """Return the innermost line of an error in the folder of the user code."""
    if isinstance(error, SyntaxError) and error.filename is not None and _is_in(folder, error.filename):
        return SourceLine(error.filename, error.lineno or 0)
    places: list[SourceLine] = []
    frames = trim_traceback(error)
    while frames is not None:
        places.append(SourceLine(frames.tb_frame.f_code.co_filename, frames.tb_lineno))
        frames = frames.tb_next
    user_places = [place for place in places if _is_in(folder, place.file)]
    return user_places[-1] if user_places else places[-1] if places else None


def _is_in(folder: Path, file: str) -> bool:
    return Path(file).is_relative_to(folder)


def trim_traceback(error: BaseException) -> TracebackType | None:
    """Return the traceback without frames of the server and the import system."""
    kept_frames: list[TracebackType] = []
    frame = error.__traceback__
    while frame is not None:
        file = frame.tb_frame.f_code.co_filename
        if not file.startswith((*_TRIMMED_FOLDERS, "<frozen importlib")):
            kept_frames.append(frame)
        frame = frame.tb_next
    result: TracebackType | None = None
    for each in reversed(kept_frames):
        result = TracebackType(result, each.tb_frame, each.tb_lasti, each.tb_lineno)
    return result
