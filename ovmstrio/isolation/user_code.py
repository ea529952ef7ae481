"""Calls of user code, which may raise anything, on the event loop and in threads."""

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

import pyovms
from ovmstrio.isolation.thread_pool import Refusal, WorkerThreads
from ovmstrio.util.stdio import code_names, finish_lines
from ovmstrio.util.truncation import keep_texts, text_of

__all__ = [
    "LoopCalls",
    "SourceLine",
    "UserCodeRaisedError",
    "at_place",
    "call_here",
    "call_in_thread",
    "call_on_loop",
    "call_user_code",
    "describe",
    "is_async",
    "missing_module_fix",
    "place_in",
    "place_of",
    "trimmed",
]

# ----------------------------------------------------------------------
# Calls of user code, which may raise anything, on the event loop and in threads
# ----------------------------------------------------------------------

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


# ----------------------------------------------------------------------
# Async functions of users in tasks of their own, so that one that ignores its cancellation keeps nobody waiting
# ----------------------------------------------------------------------


class _LoopCall:
    """One call; ``is_over`` once the function has ended, with a value, an error, or neither if it was cancelled."""

    __slots__ = ("error", "is_over", "scope", "value")

    def __init__(self) -> None:
        self.scope = trio.CancelScope()
        self.is_over = trio.Event()
        self.value: Any = None
        self.error: Exception | None = None


class LoopCalls:
    """What :class:`WorkerThreads` is for plain functions whose callers may leave them.

    Args:
        nursery: hosts the calls; ends when all of them have ended.
        ended: gives what callers get when the nursery has been cancelled.
        refusal: says whether there may be another call, after callers have left theirs.
        names: say in the log whose code prints there, where not the caller's context does.
    """

    def __init__(
        self,
        nursery: trio.Nursery,
        ended: Callable[[], Exception],
        refusal: Refusal | None = None,
        names: Mapping[str, str] | None = None,
    ) -> None:
        self._names = names
        self._nursery = nursery
        self._ended = ended
        self._refusal = refusal
        self._under_way: set[_LoopCall] = set()

    @property
    def is_busy(self) -> bool:
        """Whether a call has not ended, with those whose callers have left."""
        return bool(self._under_way)

    async def call(self, function: Callable[..., Any], *args: Any) -> Any:
        """Call a function on the loop, and give what it gives, or what comes of awaiting that.

        Raises:
            UserCodeRaisedError: it raised.
            Exception: the nursery has been cancelled before it ended; or what ``refusal`` gives.

        Ownership: the arguments until the call has ended, which may be after this has been cancelled.

        Cancellation: at once; the call is cancelled, and goes on until it has ended.
        """
        if self._refusal is not None:
            refused = self._refusal(sum(call.scope.cancel_called for call in self._under_way))
            if refused is not None:
                raise refused
        call = _LoopCall()
        self._under_way.add(call)
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
        except GeneratorExit as raised:  # nobody closes a task, so that it is the function's own
            call.error = UserCodeRaisedError(raised)
        finally:
            self._under_way.discard(call)
            call.is_over.set()

    async def idle(self) -> None:
        """Wait until every call has ended.

        Cancellation: at once.
        """
        while self._under_way:
            await next(iter(self._under_way)).is_over.wait()


# ----------------------------------------------------------------------
# Where in a user's code an error comes from, and how it is told
# ----------------------------------------------------------------------

_MACHINERY: Final = (
    f"{Path(__file__).parents[1]}/",
    *(f"{Path(module.__file__).parent}/" for module in (trio, pyovms) if module.__file__ is not None),
)


class SourceLine(NamedTuple):
    """A line of a file."""

    file: str
    line: int

    def __str__(self) -> str:
        return f"{Path(self.file).name}:{self.line}"


def describe(error: BaseException) -> str:
    """Give an error's type and text, cut."""
    text = text_of(error)
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def at_place(text: str, place: SourceLine | None) -> str:
    """Put a place behind a text, if there is one."""
    return text if place is None else f"{text} ({place})"


def missing_module_fix(error: BaseException) -> str:
    """Tell what to do about an import of a module that is not there; empty for other errors."""
    if isinstance(error, ModuleNotFoundError) and error.name is not None:
        top = error.name.partition(".")[0]
        return f"install what brings {top!r}, or put {top}.py beside the handler"
    return ""


def place_of(method: Callable[..., Any]) -> SourceLine | None:
    """Give the line where a method is defined."""
    code = getattr(inspect.unwrap(method), "__code__", None)
    return None if code is None else SourceLine(code.co_filename, code.co_firstlineno)


def place_in(folder: Path, error: BaseException) -> SourceLine | None:
    """Give the line of the user's that an error comes from: the innermost in the folder of the user's code."""
    if isinstance(error, SyntaxError) and error.filename is not None and _is_in(folder, error.filename):
        return SourceLine(error.filename, error.lineno or 0)
    places: list[SourceLine] = []
    frames = trimmed(error)
    while frames is not None:
        places.append(SourceLine(frames.tb_frame.f_code.co_filename, frames.tb_lineno))
        frames = frames.tb_next
    theirs = [place for place in places if _is_in(folder, place.file)]
    return theirs[-1] if theirs else places[-1] if places else None


def _is_in(folder: Path, file: str) -> bool:
    return Path(file).is_relative_to(folder)


def trimmed(error: BaseException) -> TracebackType | None:
    """Give a traceback without the frames of the server and of the import system."""
    kept: list[TracebackType] = []
    frame = error.__traceback__
    while frame is not None:
        file = frame.tb_frame.f_code.co_filename
        if not file.startswith((*_MACHINERY, "<frozen importlib")):
            kept.append(frame)
        frame = frame.tb_next
    result: TracebackType | None = None
    for each in reversed(kept):
        result = TracebackType(result, each.tb_frame, each.tb_lasti, each.tb_lineno)
    return result
