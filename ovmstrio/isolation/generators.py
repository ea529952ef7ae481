"""Generators of user code, pulled one value after the other.

A plain generator runs in *turns*: one call in a worker thread takes values until so many lie ready that nobody has
taken, or until others wait for a thread, and then gives the thread back.  A turn wakes whoever waits for a value at
once; whoever takes values starts the next turn before they have run out.  So a fast generator costs a thread hop for
many values, and one whose client is slow holds no thread.  An async generator runs where it is pulled.
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

__all__ = ["CREDIT", "AsyncPump", "End", "Failed", "Pump", "ThreadPump"]

CREDIT: Final = 32
"""How many values a generator may be ahead of what has been taken."""
_LOW: Final = CREDIT // 2

_T = TypeVar("_T")
_T_co = TypeVar("_T_co", covariant=True)


class End:
    """Comes after the last value."""

    __slots__ = ()


class Failed:
    """Comes where the generator raised, or yielded something wrong."""

    __slots__ = ("error",)

    def __init__(self, error: BaseException) -> None:
        self.error = error


_END: Final = End()


class Pump(Protocol[_T_co]):
    """A generator that is being pulled."""

    async def pull(self) -> _T_co | End | Failed:
        """Give the next value.

        Cancellation: while none is ready; the generator is told to stop.
        """
        ...

    async def aclose(self) -> BaseException | None:
        """Stop the generator and close it; gives what closing raised.

        Cancellation: shielded, for the pool's grace.
        """
        ...


class ThreadPump(Generic[_T]):
    """A plain iterator in worker threads.

    Args:
        iterator: the user's.
        convert: makes of what it yields what is pulled, in the same thread; what it raises counts as the iterator's.
        threads: where it runs.
        context: the contextvars of each turn, copied.
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
        self._is_left = False
        self._close_error: BaseException | None = None

    async def pull(self) -> _T | End | Failed:
        """Give the next value, once there is one; see :class:`Pump`.

        Cancellation: while none is ready; the generator stops within one step.
        """
        items = self._items
        while not items:
            self._begin_turn()
            await self._wait()
        item = items.popleft()
        if len(items) <= _LOW:
            self._begin_turn()
        return item

    async def aclose(self) -> BaseException | None:
        """Stop the generator and close it, in a worker thread; a step that does not end closes it when it does.

        Cancellation: shielded, for the pool's grace.
        """
        self._is_stopped = True
        if self._turn is not None and not await self._threads.finish(self._turn):
            return TimeoutError("the generator's step did not end; the generator is closed when it does")
        if not self._is_ended:
            await self._threads.finish(self._threads.start(self._close, context=self._context.copy()))
        return self._close_error

    def leave(self) -> None:
        """Stop the generator and have it closed as soon as a thread is there for it, without waiting for that."""
        self._is_stopped = self._is_left = True
        if self._turn is None:
            self._close_soon()

    # On the event loop

    def _begin_turn(self) -> None:
        if self._turn is None and not self._is_ended and not self._is_stopped:
            self._turn = self._threads.start(self._run_turn, on_done=self._end_turn, context=self._context.copy())

    def _end_turn(self) -> None:
        """A turn is over; go on if values have been taken meanwhile."""
        self._turn = None
        if self._is_left:
            # It may have been over before it could see that it was to stop.
            self._close_soon()
        elif len(self._items) <= _LOW:
            self._begin_turn()

    def _close_soon(self) -> None:
        if not self._is_ended:
            # The pool has ended together with whoever could still want the generator closed.
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

    # In worker threads

    def _run_turn(self) -> None:
        items = self._items
        while not self._is_stopped and not self._is_ended and len(items) < CREDIT:
            items.append(self._step())
            if self._is_awaited:
                self._is_awaited = False
                self._threads.wake(self._wake)
            if self._threads.is_crowded:
                break
        if self._is_stopped:
            self._close()

    def _step(self) -> _T | End | Failed:
        try:
            return self._convert(next(self._iterator))
        except StopIteration:
            self._is_ended = True
            return _END
        except BaseException as error:  # noqa: BLE001 - the border of user code, SystemExit included
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


class AsyncPump(Generic[_T]):
    """An async iterator on the event loop.

    Args:
        iterator: the user's.
        convert: makes of what it yields what is pulled.
        grace_seconds: how long closing may take.
        around: gives what each step runs in.
    """

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
        """Run the iterator to its next value; see :class:`Pump`.

        Cancellation: wherever the iterator waits; closing it behind a value that cannot be converted is shielded, for
        the pool's grace.
        """
        with self._around():
            try:
                value = await anext(self._iterator)
            except StopAsyncIteration:
                return _END
            except (Exception, SystemExit) as error:  # noqa: BLE001 - the border of user code
                return Failed(error)
            try:
                return self._convert(value)
            except (Exception, SystemExit) as error:  # noqa: BLE001 - as above
                failed = Failed(error)
        # It would go on if it was asked, and nobody will.
        await self.aclose()
        return failed

    async def aclose(self) -> BaseException | None:
        """Close the iterator, if it can be closed.

        Cancellation: shielded, for the pool's grace.
        """
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
