"""Generators of user code in a worker process: pulled by the server, ahead of it by a bounded credit."""

from __future__ import annotations

import os
import threading
import traceback
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextvars import Context, copy_context
from typing import TYPE_CHECKING, Any, Final, Protocol

from ovmstrio.isolation.codec import encode_error
from ovmstrio.isolation.process_exit import LOST_LOOP
from ovmstrio.util.stdio import finish_lines

if TYPE_CHECKING:
    import trio

__all__ = [
    "CREDIT",
    "ENDED",
    "RAISED",
    "Answer",
    "AsyncGeneratorHost",
    "GeneratorHost",
    "GeneratorLike",
    "LoopCall",
    "LoopThread",
]

# ----------------------------------------------------------------------
# The event loop of a worker process, for async code of users; there is none before somebody needs it
# ----------------------------------------------------------------------


class LoopCall:
    """One call on the loop."""

    def __init__(self, token: trio.lowlevel.TrioToken, scope: trio.CancelScope) -> None:
        self._token = token
        self._scope = scope

    def cancel(self) -> None:
        """Cancel it where it waits; from any thread."""
        self._token.run_sync_soon(self._scope.cancel)


class LoopThread:
    """A thread that runs trio's loop as long as the process lives."""

    def __init__(self) -> None:
        self._starting = threading.Lock()
        self._ready = threading.Event()
        self._token: trio.lowlevel.TrioToken | None = None
        self._nursery: trio.Nursery | None = None

    def call(
        self,
        function: Callable[[], Awaitable[Any]],
        done: Callable[[Any, BaseException | None], None],
        variables: Context | None = None,
    ) -> LoopCall:
        """Run an async function, and call ``done`` on the loop with what it gives or raises.

        Raises:
            ModuleNotFoundError: the interpreter has no trio.
        """
        import trio  # noqa: PLC0415 - only those who have async code need it

        token, scope = self._start(), trio.CancelScope()

        async def run() -> None:
            error: BaseException | None = None
            value = None
            with scope:
                try:
                    value = await function()
                except trio.Cancelled:
                    error = InterruptedError("cancelled")
                    raise
                except BaseException as raised:  # noqa: BLE001 - the border of user code
                    error = raised
                finally:
                    finish_lines()
                    done(value, error)

        def begin() -> None:
            if self._nursery is not None:
                (variables or copy_context()).copy().run(self._nursery.start_soon, run)

        token.run_sync_soon(begin)
        return LoopCall(token, scope)

    @staticmethod
    def turns() -> trio.Lock:
        """Make what functions that must not run side by side hold on the loop."""
        import trio  # noqa: PLC0415 - as above

        return trio.Lock()

    def _start(self) -> trio.lowlevel.TrioToken:
        with self._starting:
            if self._token is None:
                threading.Thread(target=self._host, name="loop of async user code", daemon=True).start()
                self._ready.wait()
            assert self._token is not None  # noqa: S101 - the thread has set it
            return self._token

    def _host(self) -> None:
        import trio  # noqa: PLC0415 - as above

        try:
            trio.run(self._run)
        except BaseException:  # noqa: BLE001 - nobody who waits for the loop would ever be answered
            traceback.print_exc()
        os._exit(LOST_LOOP)

    async def _run(self) -> None:
        import trio  # noqa: PLC0415 - as above

        async with trio.open_nursery() as nursery:
            self._nursery = nursery
            self._token = trio.lowlevel.current_trio_token()
            self._ready.set()
            await trio.sleep_forever()


# ----------------------------------------------------------------------
# Generators of user code in a worker process: pulled by the server, ahead of it by a bounded credit
# ----------------------------------------------------------------------

CREDIT: Final = 32
"""How many values a generator may be ahead of what has been taken."""

ENDED: Final = "ended"
RAISED: Final = "raised"

Answer = Callable[[int, Any], None]
"""Answers the request of a number."""


class GeneratorLike(Protocol):
    """A generator that the server pulls; requests are answered with values and maybe an end, or what closing raised."""

    def pull(self, number: int) -> None:
        """Answer with values, once there are some; may run the generator in this thread."""
        ...

    def leave(self, number: int) -> None:
        """Answer with nothing, for nobody waits for values any more; the generator stops."""
        ...

    def close(self, number: int) -> None:
        """Stop the generator, close it, and answer then."""
        ...


class GeneratorHost:
    """A plain generator, which runs in the threads that serve requests.

    Args:
        iterator: the user's.
        convert: makes of each value what is sent; what it raises counts as the iterator's.
        answer: how requests are answered.
        variables: the contextvars of each step.
        stop: tells a step that runs that it is the last.
        ended: is called once the server has been told of the end.
    """

    def __init__(
        self,
        iterator: Iterator[Any],
        convert: Callable[[Any], Any],
        answer: Answer,
        variables: Context | None,
        *,
        stop: Callable[[], None],
        ended: Callable[[], None],
    ) -> None:
        self._iterator = iterator
        self._convert = convert
        self._answer = answer
        self._variables = variables
        self._stop = stop
        self._ended = ended
        self._lock = threading.Lock()
        self._values: list[Any] = []
        self._end: list[Any] | None = None
        self._waiting: int | None = None
        self._closing: int | None = None
        self._is_running = False
        self._is_stopped = False
        self._is_over = False

    def pull(self, number: int) -> None:
        """Answer with the values that lie ready, or with the next; run ahead then."""
        if self._is_stopped:
            self._answer(number, [[], None])
            return
        with self._lock:
            self._waiting = number
            batch = self._batch()
            begins = not self._is_running and not self._is_over
            self._is_running = self._is_running or begins
        self._give(batch)
        if begins:
            self._run()

    def leave(self, number: int) -> None:
        """Stop within one step."""
        with self._lock:
            was_waiting = self._waiting == number
            if was_waiting:
                self._waiting = None
        self._is_stopped = True
        self._stop()
        if was_waiting:
            self._answer(number, [[], None])

    def close(self, number: int) -> None:
        """Stop within one step, and close the generator behind it."""
        with self._lock:
            self._is_stopped = True
            self._closing = number
            begins = not self._is_running
            self._is_running = True
        self._stop()
        if begins:
            self._run()

    def _batch(self) -> tuple[int, Any] | None:
        """Take what there is for whoever waits."""
        if self._waiting is None or not (self._values or self._end):
            return None
        batch = self._waiting, [self._values, self._end]
        self._waiting, self._values = None, []
        if self._end is not None:
            self._ended()
        return batch

    def _give(self, batch: tuple[int, Any] | None) -> None:
        if batch is not None:
            self._answer(*batch)

    def _run(self) -> None:
        """Take values until enough lie ready."""
        while self._goes_on():
            value, end = self._step()
            with self._lock:
                if end is None:
                    self._values.append(value)
                else:
                    self._end = end
                batch = self._batch()
            self._give(batch)

    def _goes_on(self) -> bool:
        with self._lock:
            if not self._is_stopped and not self._is_over and len(self._values) < CREDIT:
                return True
            if not self._is_stopped:
                self._is_running = False
                return False
        closed = self._close()
        self._ended()
        with self._lock:
            self._is_running = False
            waiting, self._waiting = self._waiting, None
            closing, self._closing = self._closing, None
        if waiting is not None:
            self._answer(waiting, [[], None])
        if closing is not None:
            self._answer(closing, closed)
        return False

    def _step(self) -> tuple[Any, list[Any] | None]:
        try:
            return self._in_context(self._next), None
        except StopIteration:
            self._is_over = True
            return None, [ENDED]
        except BaseException as error:  # noqa: BLE001 - the border of user code, SystemExit included
            self._close()
            return None, [RAISED, encode_error(error)]

    def _next(self) -> Any:
        try:
            return self._convert(next(self._iterator))
        finally:
            finish_lines()

    def _in_context(self, function: Callable[[], Any]) -> Any:
        return (copy_context() if self._variables is None else self._variables.copy()).run(function)

    def _close(self) -> list[Any]:
        """Close the iterator, once; give what that raised."""
        if self._is_over:
            return []
        self._is_over = True
        close = getattr(self._iterator, "close", None)
        try:
            if close is not None:
                self._in_context(close)
        except BaseException as error:  # noqa: BLE001 - as above
            return [encode_error(error)]
        return []


class AsyncGeneratorHost:
    """An async generator, which runs on the loop, one value at a time; arguments as for :class:`GeneratorHost`.

    The loop runs tasks in any order, and a step may go on behind its cancellation: closing waits for its end.
    """

    def __init__(
        self,
        iterator: AsyncIterator[Any],
        convert: Callable[[Any], Any],
        answer: Answer,
        variables: Context | None,
        *,
        loop: LoopThread,
        ended: Callable[[], None],
    ) -> None:
        self._iterator = iterator
        self._convert = convert
        self._answer = answer
        self._variables = variables
        self._loop = loop
        self._ended = ended
        self._lock = threading.Lock()
        self._step = loop.turns()
        self._pulling: LoopCall | None = None
        self._is_left = False

    def pull(self, number: int) -> None:
        """Run the generator to its next value, and answer with it."""

        def done(value: Any, error: BaseException | None) -> None:
            if isinstance(error, StopAsyncIteration):
                self._ended()
                self._answer(number, [[], [ENDED]])
            elif error is not None:
                self._answer(number, [[], [RAISED, encode_error(error)]])
            else:
                self._answer(number, [[value], None])

        with self._lock:
            is_left = self._is_left
            if not is_left:
                self._pulling = self._loop.call(self._next, done, self._variables)
        if is_left:
            self._answer(number, [[], None])

    async def _next(self) -> Any:
        async with self._step:
            return self._convert(await anext(self._iterator))

    def leave(self, number: int) -> None:
        """Cancel the step that runs, and begin no other."""
        del number
        with self._lock:
            self._is_left = True
            if self._pulling is not None:
                self._pulling.cancel()

    def close(self, number: int) -> None:
        """Close the generator, if it can be closed, once the step that runs has ended."""
        self.leave(number)

        def done(_: Any, error: BaseException | None) -> None:
            self._ended()
            self._answer(number, [] if error is None else [encode_error(error)])

        self._loop.call(self._aclose, done, self._variables)

    async def _aclose(self) -> None:
        close = getattr(self._iterator, "aclose", None)
        if close is not None:
            async with self._step:
                await close()
