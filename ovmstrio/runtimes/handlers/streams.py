"""Generators of a handler, as streams that can be closed."""

from __future__ import annotations

import contextvars
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any, Generic, Self, TypeVar

from ovmstrio.runtimes.handlers.handler_code import HandlerCode
from ovmstrio.runtimes.handlers.models.leases import lease_models
from ovmstrio.work.threads.worker_threads import WorkerThreads
from ovmstrio.work.user_code.pumps import AsyncPump, End, Failed, ThreadPump

__all__ = ["UserStream"]

_T = TypeVar("_T")


class UserStream(Generic[_T]):
    """The values of an iterator of the user's, plain ones in worker threads and async ones on the event loop.

    A plain iterator runs a bounded number of values ahead, holds a thread only while it makes values, and keeps the
    models that it asked for until the stream is over.

    Args:
        values: the iterator.
        convert: makes of a value what is given out, where the value was made.
        threads: of the handler.
        code: whose code it is.
        step: the method that the iterator comes from.
    """

    def __init__(
        self,
        values: Iterator[Any] | AsyncIterator[Any],
        convert: Callable[[Any], _T],
        threads: WorkerThreads,
        code: HandlerCode,
        step: str,
    ) -> None:
        self._context = contextvars.copy_context()
        self._leases = lease_models()
        self._context.run(self._leases.__enter__)
        self._pump: ThreadPump[_T] | AsyncPump[_T]
        if isinstance(values, AsyncIterator):
            self._pump = AsyncPump(values, convert, threads.grace_seconds)
        else:
            self._pump = ThreadPump(values, convert, threads, self._context)
        self._code = code
        self._step = step
        self._is_over = False

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> _T:
        """Give the next value.

        Raises:
            StopAsyncIteration: that was all.
            UserCodeError: the iterator raised; it has been logged.
            Exception: the iterator raised an error that passes.

        Cancellation: while none is ready.
        """
        if self._is_over:
            raise StopAsyncIteration
        item = await self._pump.pull()
        if isinstance(item, End):
            self._end()
            raise StopAsyncIteration
        if isinstance(item, Failed):
            self._end()
            raise self._code.failure(item.error, self._step) from None
        return item

    async def aclose(self) -> None:
        """Close the iterator: a plain one when the step that it is in has ended, without waiting for that.

        Cancellation: shielded; closing an async iterator is waited for, for the threads' grace.
        """
        if self._is_over:
            return
        self._end()
        if isinstance(self._pump, ThreadPump):
            self._pump.leave()
            return
        error = await self._pump.aclose()
        if error is not None:
            self._code.report(error, self._step)

    def _end(self) -> None:
        self._is_over = True
        self._context.run(self._leases.__exit__, None, None, None)
