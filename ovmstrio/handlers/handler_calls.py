"""Calls of a handler's methods, streams of their results, and callbacks after responses."""

from __future__ import annotations

import contextvars
import math
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any, Final, Generic, Self, TypeVar

import structlog
import trio

from ovmstrio.core.http_messages import AfterResponse
from ovmstrio.handlers.batches import Arguments, BatchItem, QueueTimeouts, current_request_id
from ovmstrio.handlers.error_reporter import ErrorReporter
from ovmstrio.handlers.handler_class import HandlerMethod
from ovmstrio.handlers.models.model_cache import lease_models
from ovmstrio.isolation.generators import End, Failed, LoopGenerator, ThreadGenerator
from ovmstrio.isolation.thread_pool import WorkerThreads
from ovmstrio.isolation.user_code import UserCodeRaisedError, call_in_thread, call_user_code
from ovmstrio.serving.batching import Batcher
from ovmstrio.util.stdio import attribute_output_to

# ----------------------------------------------------------------------
# Callbacks after responses
# ----------------------------------------------------------------------

DRAIN_SECONDS: Final = 10.0
"""Maximum time that callbacks, batches and processes of a closed handler may continue."""
_THREADS: Final = 4
_STEP: Final = "callback"

log = structlog.get_logger(__name__)


class Callbacks:
    """Execution of callbacks in separate threads, so that they do not occupy threads of requests."""

    def __init__(self, code: ErrorReporter) -> None:
        self._code = code
        self._threads = WorkerThreads(limit=_THREADS, is_strict=True, log_fields=code.log_fields)
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
        threads, function, (), arguments, around=lease_models, is_abandonable=True, start_timeout_seconds=start_within
    )


# ----------------------------------------------------------------------
# Calls and streams
# ----------------------------------------------------------------------

_T = TypeVar("_T")
_NO_TIMEOUTS: Final = QueueTimeouts()


class HandlerCalls:
    """Instance of the user's class ``Handler`` and the calls of its methods in this process.

    ``threads`` run plain methods, ``callbacks`` run after responses, and ``code`` reports errors of user code.
    """

    def __init__(
        self,
        instance: Any,
        methods: Mapping[str, HandlerMethod],
        threads: WorkerThreads,
        callbacks: Callbacks,
        *,
        code: ErrorReporter,
        batcher: Batcher[BatchItem, Any] | None = None,
        patience: QueueTimeouts = _NO_TIMEOUTS,
    ) -> None:
        self.instance = instance
        self.methods = methods
        self._threads = threads
        self._callbacks = callbacks
        self._code = code
        self._batcher = batcher
        self._timeouts = patience

    @property
    def unready_reason(self) -> str:
        """Empty: a handler in this process is always ready."""
        return ""

    async def call(self, name: str, /, **arguments: Any) -> Any:
        """Call a method and return its result; a returned generator has not started.

        ``arguments`` contains at least the arguments that the method accepts; others are ignored.

        Raises:
            UserCodeError: the method raised, which has been logged.
            HTTPError: raised by the method, or converted from Starlette's ``HTTPException``.
            ServerError: raised by the method.
            QueueTimeout: no thread became free in time.

        Cancellation: a queued call is dropped. A running plain method keeps its thread until it returns, and its result
        is dropped; an ``async def`` method is cancelled at its next checkpoint.
        """
        method = self.methods[name]
        given = {each: arguments[each] for each in method.arguments}
        if method.is_batched and self._batcher is not None:
            item = BatchItem(given, current_request_id())
            return await self._batcher.submit(item, start_within=self._timeouts.batch)
        if method.is_generator:
            return method.call(**given)
        return await call_method(self._threads, self._code, method, given, self._timeouts.thread)

    async def iterate(self, name: str, convert: Callable[[Any], _T], /, **arguments: Any) -> UserStream[_T]:
        """Call a method that returns an iterable; the caller must close the stream.

        ``convert`` converts the values as for :meth:`stream`. Errors are those of :meth:`call`; UserCodeError also if
        the result is not iterable.
        """
        result = await self.call(name, **arguments)
        if not isinstance(result, Iterator | AsyncIterator):
            try:
                result = aiter(result) if hasattr(result, "__aiter__") else iter(result)
            except TypeError:
                found = f"expected an iterable, got {type(result).__name__}"
                raise self._code.invalid_result(name, found) from None
        return self.stream(result, convert, name)

    def stream(
        self, values: Iterator[Any] | AsyncIterator[Any], convert: Callable[[Any], _T], step: str
    ) -> UserStream[_T]:
        """Create a stream of an iterator's values; the caller must close it.

        ``convert`` runs in the thread that produced a value, and its errors count as the iterator's.
        """
        return UserStream(values, convert, self._threads, self._code, step)

    def convert_error(self, error: BaseException, step: str) -> Exception:
        """Log an error of user code and return the exception to raise instead."""
        return self._code.convert_error(error, step)

    async def run_in_thread(self, function: Callable[..., _T], *args: Any) -> _T:
        """Call a plain function in a thread of the handler.

        Raises:
            BaseException: raised by the function.
        """
        try:
            result: _T = await call_in_thread(self._threads, function, *args)
        except UserCodeRaisedError as raised:
            raise raised.error from None
        return result

    def run_after(self, callbacks: Iterable[AfterResponse]) -> None:
        """Run the callbacks of a sent response in the background, outside the threads of requests."""
        self._callbacks.start(callbacks)


async def call_method(
    threads: WorkerThreads,
    code: ErrorReporter,
    method: HandlerMethod,
    given: Arguments,
    start_within: float = math.inf,
) -> Any:
    """Call a method; wait at most ``start_within`` seconds for a thread; errors are those of ``LoadedHandler.call``."""
    try:
        return await call_handler_code(threads, method.call, given, start_within=start_within)
    except UserCodeRaisedError as raised:
        raise code.convert_error(raised.error, method.name) from None


class UserStream(Generic[_T]):
    """Values of a user's iterator; plain iterators run in worker threads, async ones on the event loop.

    A plain iterator runs a bounded number of values ahead and holds a thread only while it produces values. Models that
    the iterator requests stay leased until the stream ends.
    """

    def __init__(
        self,
        values: Iterator[Any] | AsyncIterator[Any],
        convert: Callable[[Any], _T],
        threads: WorkerThreads,
        code: ErrorReporter,
        step: str,
    ) -> None:
        self._context = contextvars.copy_context()
        self._leases = lease_models()
        self._context.run(self._leases.__enter__)
        self._pump: ThreadGenerator[_T] | LoopGenerator[_T]
        if isinstance(values, AsyncIterator):
            self._pump = LoopGenerator(
                values, convert, threads.grace_seconds, partial(attribute_output_to, code.log_fields)
            )
        else:
            self._pump = ThreadGenerator(values, convert, threads, self._context)
        self._code = code
        self._step = step
        self._is_over = False

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> _T:
        """Return the next value; raise errors as :meth:`LoadedHandler.call`."""
        if self._is_over:
            raise StopAsyncIteration
        item = await self._pump.pull()
        if isinstance(item, End):
            self._end()
            raise StopAsyncIteration
        if isinstance(item, Failed):
            self._end()
            raise self._code.convert_error(item.error, self._step) from None
        return item

    async def aclose(self) -> None:
        """Close the iterator; a plain one after its current step, without waiting for it.

        Cancellation: shielded; the close of an async iterator is awaited for the threads' grace period.
        """
        if self._is_over:
            return
        self._end()
        if isinstance(self._pump, ThreadGenerator):
            self._pump.leave()
            return
        error = await self._pump.aclose()
        if error is not None:
            self._code.report(error, self._step)

    def _end(self) -> None:
        self._is_over = True
        self._context.run(self._leases.__exit__, None, None, None)


# Interface of local and isolated handlers
