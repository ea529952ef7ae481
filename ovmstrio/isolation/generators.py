"""Generators of user code in the server, pulled value by value.

A plain generator runs in turns: one call in a worker thread produces values until the credit is used or other calls
wait for a thread. Each value wakes the waiting task at once, and the next turn starts before the values run out. So a
fast generator costs one thread hop for many values, and a slow client holds no thread. An async generator runs where it
is pulled.
"""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractContextManager, nullcontext, suppress
from contextvars import Context as VarContext
from typing import Any, Final, Generic, Protocol, TypeVar

import trio

from ovmstrio.isolation.thread_pool import ThreadCall, WorkerThreads
from ovmstrio.util.stdio import finish_lines

CREDIT: Final = 32
"""How many values a generator may be ahead of the pulled ones."""
_LOW_WATER: Final = CREDIT // 2

_T = TypeVar("_T")
_T_co = TypeVar("_T_co", covariant=True)


class End:
    """Marker after the last value."""

    __slots__ = ()


class Failed:
    """Marker of an exception of the generator or of the conversion of its value."""

    __slots__ = ("error",)

    def __init__(self, error: BaseException) -> None:
        self.error = error


_END: Final = End()


class PulledGenerator(Protocol[_T_co]):
    """Generator that is pulled value by value."""

    async def pull(self) -> _T_co | End | Failed:
        """Return the next value, ``End`` or ``Failed``. Cancellation stops the generator."""
        ...

    async def aclose(self) -> BaseException | None:
        """Stop and close the generator, shielded for the grace period; return the exception of closing, if any."""
        ...


class ThreadGenerator(Generic[_T]):
    """Plain iterator in worker threads.

    Args:
        convert: converts each value in the same thread; its exceptions count as the iterator's.
        context: context of each turn, copied.
    """

    def __init__(
        self, iterator: Iterator[Any], convert: Callable[[Any], _T], threads: WorkerThreads, context: VarContext
    ) -> None:
        self._iterator = iterator
        self._convert = convert
        self._threads = threads
        self._context = context
        self._items: deque[_T | End | Failed] = deque()
        self._turn: ThreadCall | None = None
        self._waiter: trio.lowlevel.Task | None = None
        self._is_awaited = False
        self._is_ended = False
        self._is_stopped = False
        self._is_abandoned = False
        self._close_error: BaseException | None = None

    async def pull(self) -> _T | End | Failed:
        """Return the next value; see :class:`PulledGenerator`. Cancellation stops the generator after this step."""
        items = self._items
        while not items:
            self._start_turn()
            await self._wait()
        item = items.popleft()
        if len(items) <= _LOW_WATER:
            self._start_turn()
        return item

    async def aclose(self) -> BaseException | None:
        """Stop and close the generator in a worker thread; if its step does not end, it is closed after the step."""
        self._is_stopped = True
        if self._turn is not None and not await self._threads.finish(self._turn):
            return TimeoutError("the generator's step did not end; the generator is closed when it does")
        if not self._is_ended:
            await self._threads.finish(self._threads.start(self._close, context=self._context.copy()))
        return self._close_error

    def leave(self) -> None:
        """Stop the generator and schedule its closing."""
        self._is_stopped = self._is_abandoned = True
        if self._turn is None:
            self._close_soon()

    # -- On the event loop ---------------------------------------------------------------------------------------------

    def _start_turn(self) -> None:
        if self._turn is None and not self._is_ended and not self._is_stopped:
            self._turn = self._threads.start(self._run_turn, on_done=self._end_turn, context=self._context.copy())

    def _end_turn(self) -> None:
        self._turn = None
        if self._is_abandoned:
            # The turn may have ended before it saw the stop flag.
            self._close_soon()
        elif len(self._items) <= _LOW_WATER:
            self._start_turn()

    def _close_soon(self) -> None:
        if not self._is_ended:
            # A closed pool means that the owner of the generator has ended as well.
            with suppress(RuntimeError):
                self._threads.start(self._close, context=self._context.copy())

    async def _wait(self) -> None:
        self._is_awaited = True
        if self._items:
            self._is_awaited = False
            return
        self._waiter = trio.lowlevel.current_task()

        def abort(_raise_cancel: Any) -> trio.lowlevel.Abort:
            self._waiter = None
            self._is_stopped = True
            return trio.lowlevel.Abort.SUCCEEDED

        await trio.lowlevel.wait_task_rescheduled(abort)

    def _wake(self) -> None:
        waiter, self._waiter = self._waiter, None
        if waiter is not None:
            trio.lowlevel.reschedule(waiter)

    # -- In worker threads ---------------------------------------------------------------------------------------------

    def _run_turn(self) -> None:
        items = self._items
        while not self._is_stopped and not self._is_ended and len(items) < CREDIT:
            items.append(self._step())
            if self._is_awaited:
                self._is_awaited = False
                self._threads.wake(self._wake)
            if self._threads.has_waiting_calls:
                break
        if self._is_stopped:
            self._close()

    def _step(self) -> _T | End | Failed:
        try:
            return self._convert(next(self._iterator))
        except StopIteration:
            self._is_ended = True
            return _END
        except BaseException as error:  # noqa: BLE001 - user code may raise anything, also SystemExit
            self._close()
            return Failed(error)
        finally:
            finish_lines()

    def _close(self) -> None:
        if self._is_ended:
            return
        self._is_ended = True
        try:
            close = getattr(self._iterator, "close", None)
            if close is not None:
                close()
        except BaseException as error:  # noqa: BLE001 - as above
            self._close_error = error


class LoopGenerator(Generic[_T]):
    """Async iterator on the event loop; each step runs in the context manager that ``around`` returns."""

    def __init__(
        self,
        iterator: AsyncIterator[Any],
        convert: Callable[[Any], _T],
        grace_seconds: float,
        around: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        self._iterator = iterator
        self._convert = convert
        self._grace_seconds = grace_seconds
        self._around = around

    async def pull(self) -> _T | End | Failed:
        """Run to the next value; see :class:`PulledGenerator`. Closing after a failed conversion is shielded."""
        with self._around():
            try:
                value = await anext(self._iterator)
            except StopAsyncIteration:
                return _END
            except (Exception, SystemExit) as error:  # noqa: BLE001 - user code may raise anything
                return Failed(error)
            try:
                return self._convert(value)
            except (Exception, SystemExit) as error:  # noqa: BLE001 - as above
                failed = Failed(error)
        # Closed here, because it will not be pulled again.
        await self.aclose()
        return failed

    async def aclose(self) -> BaseException | None:
        """Close the iterator, if it has ``aclose``; see :class:`PulledGenerator`."""
        close = getattr(self._iterator, "aclose", None)
        if close is None:
            return None
        deadline = trio.current_time() + self._grace_seconds
        with trio.CancelScope(shield=True, deadline=deadline) as scope, self._around():
            try:
                await close()
            except (Exception, SystemExit) as error:  # noqa: BLE001 - as above
                return error
        return TimeoutError("the generator did not close in time") if scope.cancelled_caught else None
