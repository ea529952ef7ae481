"""Generators of user code in a worker process, and the event loop of its async user code.

The server pulls values; a generator may run ahead of the pulled values by a bounded credit.
"""

from __future__ import annotations

import os
import threading
import traceback
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextvars import Context, copy_context
from typing import TYPE_CHECKING, Any, Final, Protocol

from ovmstrio.isolation.codec import encode_error
from ovmstrio.isolation.exit_status import LOOP_FAILED
from ovmstrio.util.stdio import finish_lines

if TYPE_CHECKING:
    import trio

# -- Event loop --------------------------------------------------------------------------------------------------------


class LoopCallHandle:
    """Handle of a call on the loop."""

    def __init__(self, token: trio.lowlevel.TrioToken, scope: trio.CancelScope) -> None:
        self._token = token
        self._scope = scope

    def cancel(self) -> None:
        """Cancel the call; thread-safe."""
        self._token.run_sync_soon(self._scope.cancel)


class LoopThread:
    """Thread that runs a trio loop for the life of the process; started on first use."""

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
    ) -> LoopCallHandle:
        """Run an async function on the loop, then call ``done`` there with its result or exception.

        Raises ``ModuleNotFoundError`` if the interpreter has no trio.
        """
        import trio  # noqa: PLC0415 - needed for async user code only

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
                except BaseException as raised:  # noqa: BLE001 - user code may raise anything
                    error = raised
                finally:
                    finish_lines()
                    done(value, error)

        def begin() -> None:
            if self._nursery is not None:
                (variables or copy_context()).copy().run(self._nursery.start_soon, run)

        token.run_sync_soon(begin)
        return LoopCallHandle(token, scope)

    @staticmethod
    def turns() -> trio.Lock:
        """Create a lock for functions on the loop."""
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
        except BaseException:  # noqa: BLE001 - no waiting caller would ever get an answer
            traceback.print_exc()
        os._exit(LOOP_FAILED)

    async def _run(self) -> None:
        import trio  # noqa: PLC0415 - as above

        async with trio.open_nursery() as nursery:
            self._nursery = nursery
            self._token = trio.lowlevel.current_trio_token()
            self._ready.set()
            await trio.sleep_forever()


# -- Generators --------------------------------------------------------------------------------------------------------

CREDIT: Final = 32
"""How many values a generator may be ahead of the pulled ones."""

ENDED: Final = "ended"
RAISED: Final = "raised"

Answer = Callable[[int, Any], None]
"""Sends the answer to the request with this number."""


class HostedGenerator(Protocol):
    """Generator that the server pulls."""

    def pull(self, number: int) -> None:
        """Answer with values, once there are some; may run the generator in this thread."""
        ...

    def leave(self, number: int) -> None:
        """Answer without values and stop the generator, because the caller was cancelled."""
        ...

    def close(self, number: int) -> None:
        """Stop and close the generator, then answer."""
        ...


class GeneratorHost:
    """Plain generator, which runs in the threads that serve requests.

    Args:
        iterator: the user's generator.
        convert: converts each value for sending; its exceptions count as the iterator's.
        answer: sends answers.
        variables: context of each step.
        stop: signals a running step that it is the last.
        ended: called when the end has been sent.
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
        self._end_message: list[Any] | None = None
        self._waiting_request: int | None = None
        self._closing_request: int | None = None
        self._is_running = False
        self._is_stopped = False
        self._is_closed = False

    def pull(self, number: int) -> None:
        """Answer with the values that are ready, or with the next one; then run ahead."""
        if self._is_stopped:
            self._answer(number, [[], None])
            return
        with self._lock:
            self._waiting_request = number
            batch = self._batch()
            starts = not self._is_running and not self._is_closed
            self._is_running = self._is_running or starts
        self._answer_batch(batch)
        if starts:
            self._run()

    def leave(self, number: int) -> None:
        """Stop after the current step."""
        with self._lock:
            was_waiting = self._waiting_request == number
            if was_waiting:
                self._waiting_request = None
        self._is_stopped = True
        self._stop()
        if was_waiting:
            self._answer(number, [[], None])

    def close(self, number: int) -> None:
        """Stop after the current step and close the generator."""
        with self._lock:
            self._is_stopped = True
            self._closing_request = number
            starts = not self._is_running
            self._is_running = True
        self._stop()
        if starts:
            self._run()

    def _batch(self) -> tuple[int, Any] | None:
        """Take the ready values for the waiting request."""
        if self._waiting_request is None or not (self._values or self._end_message):
            return None
        batch = self._waiting_request, [self._values, self._end_message]
        self._waiting_request, self._values = None, []
        if self._end_message is not None:
            self._ended()
        return batch

    def _answer_batch(self, batch: tuple[int, Any] | None) -> None:
        if batch is not None:
            self._answer(*batch)

    def _run(self) -> None:
        """Run the generator until the credit is used."""
        while self._should_continue():
            value, end = self._step()
            with self._lock:
                if end is None:
                    self._values.append(value)
                else:
                    self._end_message = end
                batch = self._batch()
            self._answer_batch(batch)

    def _should_continue(self) -> bool:
        with self._lock:
            if not self._is_stopped and not self._is_closed and len(self._values) < CREDIT:
                return True
            if not self._is_stopped:
                self._is_running = False
                return False
        closed = self._close()
        self._ended()
        with self._lock:
            self._is_running = False
            waiting, self._waiting_request = self._waiting_request, None
            closing, self._closing_request = self._closing_request, None
        if waiting is not None:
            self._answer(waiting, [[], None])
        if closing is not None:
            self._answer(closing, closed)
        return False

    def _step(self) -> tuple[Any, list[Any] | None]:
        try:
            return self._in_context(self._next), None
        except StopIteration:
            self._is_closed = True
            return None, [ENDED]
        except BaseException as error:  # noqa: BLE001 - user code may raise anything, also SystemExit
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
        """Close the iterator, once; return the encoded exception, if any."""
        if self._is_closed:
            return []
        self._is_closed = True
        close = getattr(self._iterator, "close", None)
        try:
            if close is not None:
                self._in_context(close)
        except BaseException as error:  # noqa: BLE001 - as above
            return [encode_error(error)]
        return []


class AsyncGeneratorHost:
    """Async generator, which runs on the loop, one value at a time; arguments as for :class:`GeneratorHost`.

    The loop runs tasks in any order, and a step may continue after its cancellation, so closing waits for its end.
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
        self._pulling: LoopCallHandle | None = None
        self._is_left = False

    def pull(self, number: int) -> None:
        """Run the generator to its next value and answer with the value."""

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
        """Cancel the running step and start no other."""
        del number
        with self._lock:
            self._is_left = True
            if self._pulling is not None:
                self._pulling.cancel()

    def close(self, number: int) -> None:
        """Close the generator after the running step has ended."""
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
