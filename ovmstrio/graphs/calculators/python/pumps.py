"""Generators, pulled one value after the other by the runs of a node.

A plain generator runs in *turns*: one call in a worker thread takes values until so many lie ready that nobody has
taken, or until others wait for a thread, and then gives the thread back.  A turn wakes whoever waits for a value at
once; whoever takes values starts the next turn before they have run out.  So a fast generator costs a thread hop for
many values, and one whose client is slow holds no thread.  An async generator runs where it is pulled.
"""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncGenerator, Iterator, Mapping
from contextvars import Context as VarContext
from typing import Any, Final, Protocol

import trio

from ovmstrio.graphs.calculators.python.calls import node_context
from ovmstrio.graphs.calculators.python.outputs import Outputs, routed_yield
from ovmstrio.graphs.config.values import Port
from ovmstrio.graphs.worker_threads import Job, WorkerThreads

__all__ = ["CREDIT", "AsyncPump", "End", "Failed", "Pump", "ThreadPump"]

CREDIT: Final = 32
"""How many values a generator may be ahead of what has been taken."""
_LOW: Final = CREDIT // 2


class End:
    """Comes after the last value."""

    __slots__ = ()


class Failed:
    """Comes where the generator raised, or yielded something wrong."""

    __slots__ = ("error",)

    def __init__(self, error: BaseException) -> None:
        self.error = error


Item = Outputs | End | Failed
_END: Final = End()


class Pump(Protocol):
    """A generator that is being pulled."""

    async def pull(self) -> Item:
        """Give the next value.

        Cancellation: while none is ready; the generator is told to stop.
        """
        ...

    async def aclose(self) -> BaseException | None:
        """Stop the generator and close it; gives what closing raised.

        Cancellation: shielded, for the pool's grace.
        """
        ...


class ThreadPump:
    """A plain iterator in worker threads.

    Args:
        iterator: what ``execute`` returned.
        ports: of the node's outputs by name.
        threads: where it runs.
        context: the contextvars of each turn, copied.
    """

    def __init__(
        self, iterator: Iterator[Any], ports: Mapping[str, Port], threads: WorkerThreads, context: VarContext
    ) -> None:
        self._iterator = iterator
        self._ports = ports
        self._threads = threads
        self._context = context
        self._items: deque[Item] = deque()
        self._turn: Job | None = None
        self._waiter: trio.lowlevel.Task | None = None
        self._is_awaited = False
        self._is_ended = False
        self._is_stopped = False
        self._close_error: BaseException | None = None

    async def pull(self) -> Item:
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

    # On the event loop

    def _begin_turn(self) -> None:
        if self._turn is None and not self._is_ended and not self._is_stopped:
            self._turn = self._threads.start(self._run_turn, on_done=self._end_turn, context=self._context.copy())

    def _end_turn(self) -> None:
        """A turn is over; go on if values have been taken meanwhile."""
        self._turn = None
        if len(self._items) <= _LOW:
            self._begin_turn()

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

    def _step(self) -> Item:
        try:
            return routed_yield(next(self._iterator), self._ports)
        except StopIteration:
            self._is_ended = True
            return _END
        except BaseException as error:  # noqa: BLE001 - the border of user code, SystemExit included
            self._close()
            return Failed(error)

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


class AsyncPump:
    """An async generator on the event loop.

    Args:
        generator: what ``execute`` returned.
        ports: of the node's outputs by name.
        context: holds what ``current_context()`` gives in the generator.
        grace_seconds: how long closing may take.
    """

    def __init__(
        self,
        generator: AsyncGenerator[Any, Any],
        ports: Mapping[str, Port],
        context: VarContext,
        grace_seconds: float,
    ) -> None:
        self._generator = generator
        self._ports = ports
        self._context = context
        self._grace_seconds = grace_seconds

    async def pull(self) -> Item:
        """Run the generator to its next value; see :class:`Pump`.

        Cancellation: wherever the generator waits.
        """
        with node_context(self._context):
            try:
                return routed_yield(await anext(self._generator), self._ports)
            except StopAsyncIteration:
                return _END
            except (Exception, SystemExit) as error:  # noqa: BLE001 - the border of user code
                return Failed(error)

    async def aclose(self) -> BaseException | None:
        """Close the generator.

        Cancellation: shielded, for the pool's grace.
        """
        deadline = trio.current_time() + self._grace_seconds
        with trio.CancelScope(shield=True, deadline=deadline) as scope, node_context(self._context):
            try:
                await self._generator.aclose()
            except (Exception, SystemExit) as error:  # noqa: BLE001 - as above
                return error
        return TimeoutError("the generator did not close in time") if scope.cancelled_caught else None
