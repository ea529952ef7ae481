"""Program of a worker process that hosts user code: threads that serve the server's requests.

::

    first                                        {"hosted": "module:name", "argument": ..., "path": [...]}
    ["call", method, value, call headers]        ["value", ...], ["generator", number] or ["raised", error]
    ["pull", number]                             [[value, ...], None, ["ended"] or ["raised", error]]
    ["close", number]                            [] or [error]
    ["cancel", request number], ["forget", value]   not answered

One thread at a time reads messages; it passes the reading on before it serves the request.
"""

from __future__ import annotations

import inspect
import logging
import os
import socket
import sys
import threading
import traceback
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextvars import Context, copy_context
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Any, Final, Protocol

from ovmstrio.isolation.blocking_channel import BlockingChannel, ChannelClosedByUserCode
from ovmstrio.isolation.exit_status import (
    CHANNEL_CLOSED,
    LOOP_FAILED,
    RECEIVE_FAILED,
    exit_with_parent,
    ignore_stop_signals,
)
from ovmstrio.isolation.messages import encode_error
from ovmstrio.isolation.trace_propagation import flush_spans, start_call_span
from ovmstrio.util.stdio import finish_lines, install_line_buffering

if TYPE_CHECKING:
    import trio

# ----------------------------------------------------------------------
# Hosted object: the interface of a kind of service
# ----------------------------------------------------------------------


def _nothing() -> None:
    pass


def _itself(value: Any) -> Any:
    return value


@dataclass(slots=True)
class Invocation:
    """One call of a user method.

    Attributes:
        function: the method; may be ``async`` and may return a generator of either kind.
        arguments: its arguments.
        variables: its context.
        convert: converts the result for sending; its exceptions count as the method's.
        convert_item: converts each value of a generator; None if generators are ordinary results.
        stop: signals running code that its caller was cancelled; thread-safe, may be called twice.
    """

    function: Callable[..., Any]
    arguments: tuple[Any, ...] = ()
    variables: Context | None = None
    convert: Callable[[Any], Any] = _itself
    convert_item: Callable[[Any], Any] | None = None
    stop: Callable[[], None] = _nothing


class HostedObject(Protocol):
    """The user's object in a worker process.

    A function with one argument creates it; anything that may fail or block belongs into the methods.
    """

    def invoke(self, method: str, value: Any) -> Invocation:
        """Return the call for a request; an exception counts as raised by the method."""
        ...

    def forget(self, value: Any) -> None:
        """Drop state kept between calls; must not take long."""
        ...


# ----------------------------------------------------------------------
# Generators, and the event loop of async code
# ----------------------------------------------------------------------

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
                if not self._is_left:
                    # The server does not close a generator that has failed.
                    self._ended()
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
            value = await anext(self._iterator)
            try:
                return self._convert(value)
            except BaseException:
                await self._close()
                raise

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
        async with self._step:
            await self._close()

    async def _close(self) -> None:
        close = getattr(self._iterator, "aclose", None)
        if close is not None:
            await close()


# ----------------------------------------------------------------------
# Program
# ----------------------------------------------------------------------

VALUE: Final = "value"
GENERATOR: Final = "generator"

_MAX_IDLE_THREADS: Final = 8
_ASYNC: Final = inspect.CO_COROUTINE | inspect.CO_ITERABLE_COROUTINE


class CodeHost:
    """Server of one channel to the server, for requests to the user's object ``hosted``."""

    def __init__(self, channel: BlockingChannel, hosted: HostedObject) -> None:
        self._channel = channel
        self._hosted = hosted
        self._process = os.getpid()
        self._read_lock = threading.Lock()
        self._count_lock = threading.Lock()
        self._idle = 0
        self._over = threading.Event()
        self._loop = LoopThread()
        self._generators: dict[int, HostedGenerator] = {}
        self._cancels: dict[int, Any] = {}
        self._span_ends: dict[int, Callable[[Any], None]] = {}

    def run(self) -> None:
        """Serve until the server closes the channel; running calls are abandoned.

        The calling thread runs no user code, because it receives signals.
        """
        self._start_thread()
        self._over.wait()

    # -- Threads -------------------------------------------------------------------------------------------------------

    def _start_thread(self) -> None:
        with self._count_lock:
            self._idle += 1
        threading.Thread(target=self._work, name="user code", daemon=True).start()

    def _work(self) -> None:
        while self._idle <= _MAX_IDLE_THREADS:
            with self._read_lock:
                message = self._read()
            if message is None:
                return
            number, request = message
            with self._count_lock:
                self._idle -= 1
                is_last = not self._idle
            if is_last:
                self._start_thread()
            self._serve(number, request)
            del message, request
            with self._count_lock:
                self._idle += 1
        with self._count_lock:
            self._idle -= 1

    def _read(self) -> tuple[int, Any] | None:
        """Read messages until one needs a thread; handle the others here."""
        while not self._over.is_set():
            try:
                message = self._channel.receive()
            except ChannelClosedByUserCode:
                os._exit(CHANNEL_CLOSED)
            except Exception:  # noqa: BLE001 - no caller would ever get an answer
                traceback.print_exc()
                os._exit(RECEIVE_FAILED)
            if message is None:
                self._over.set()
                break
            number, request = message.value
            if number:
                # A request may be cancelled as soon as the next message is read.
                if request[0] != "call":
                    self._cancels[number] = partial(self._leave_generator, request[1], number)
                else:
                    self._cancels[number] = _Cancellation()
                return number, request
            kind, value = request
            if kind == "forget":
                self._hosted.forget(value)
            elif self._cancel(value):
                return 0, ["close", value]
        return None

    def _cancel(self, number: int) -> bool:
        """Cancel a request; return whether it has already created a generator, which must then be closed."""
        cancel = self._cancels.get(number)
        if cancel is not None:
            cancel()
        return number in self._generators

    def _leave_generator(self, generator: int, number: int) -> None:
        found = self._generators.get(generator)
        if found is not None:
            found.leave(number)

    # -- Requests ------------------------------------------------------------------------------------------------------

    def _serve(self, number: int, request: Any) -> None:
        kind, *rest = request
        if kind == "call":
            self._call(number, *rest)
            return
        generator = self._generators.get(rest[0])
        if generator is None:
            self._answer(number, [])
        elif kind == "pull":
            generator.pull(number)
        else:
            generator.close(number)

    def _call(self, number: int, method: str, value: Any, trace: dict[str, str] | None = None) -> None:
        cancellation = self._cancels[number]
        try:
            invocation = self._hosted.invoke(method, value)
            if trace is not None:
                invocation.variables, self._span_ends[number] = start_call_span(invocation.variables, method, trace)
            cancellation.add(invocation.stop)
            if _is_async(invocation.function):
                self._await(number, invocation, partial(invocation.function, *invocation.arguments), cancellation)
                return
            result = _in_context(invocation, invocation.function, *invocation.arguments)
            if inspect.isawaitable(result):
                self._await(number, invocation, partial(_await_value, result), cancellation)
                return
            answer = self._answer_of(number, invocation, result)
        except BaseException as error:  # noqa: BLE001 - user code may raise anything, also SystemExit
            answer = [RAISED, encode_error(error)]
        self._answer(number, answer)

    def _await(self, number: int, invocation: Invocation, function: Any, cancellation: _Cancellation) -> None:
        def done(value: Any, error: BaseException | None) -> None:
            try:
                answer = self._answer_of(number, invocation, value) if error is None else [RAISED, encode_error(error)]
            except BaseException as wrong:  # noqa: BLE001 - as above
                answer = [RAISED, encode_error(wrong)]
            self._answer(number, answer)

        cancellation.add(self._loop.call(function, done, invocation.variables).cancel)

    def _answer_of(self, number: int, invocation: Invocation, result: Any) -> list[Any]:
        convert = invocation.convert_item
        is_async = inspect.isasyncgen(result)
        if convert is None or not (is_async or hasattr(result, "__next__")):
            return [VALUE, _in_context(invocation, invocation.convert, result)]

        def ended() -> None:
            self._generators.pop(number, None)

        if is_async:
            self._generators[number] = AsyncGeneratorHost(
                result, convert, self._answer, invocation.variables, loop=self._loop, ended=ended
            )
        else:
            self._generators[number] = GeneratorHost(
                result, convert, self._answer, invocation.variables, stop=invocation.stop, ended=ended
            )
        return [GENERATOR, number]

    def _answer(self, number: int, value: Any) -> None:
        if os.getpid() != self._process:
            # User code has forked, and this is the child process.
            os._exit(0)
        if (end_span := self._span_ends.pop(number, None)) is not None:
            end_span(value)
        cancellation = self._cancels.pop(number, None)
        if isinstance(cancellation, _Cancellation) and cancellation.is_cancelled and number in self._generators:
            self._generators[number].close(0)
        if not number:
            return
        try:
            try:
                self._channel.send([number, value])
            except (TypeError, OSError, MemoryError) as error:
                # The error is sent in place of a value that cannot be sent.
                error_answer = [RAISED, encode_error(error)]
                self._channel.send(
                    [number, [[], error_answer] if value and isinstance(value[0], list) else error_answer]
                )
        except ChannelClosedByUserCode:
            os._exit(CHANNEL_CLOSED)


class _Cancellation:
    """Steps to run on cancellation, which may come before a step is added."""

    __slots__ = ("_steps", "is_cancelled")

    def __init__(self) -> None:
        self._steps: list[Any] = []
        self.is_cancelled = False

    def add(self, step: Any) -> None:
        self._steps.append(step)
        if self.is_cancelled:
            step()

    def __call__(self) -> None:
        self.is_cancelled = True
        for step in self._steps:
            step()


def _in_context(invocation: Invocation, function: Any, *arguments: Any) -> Any:
    if invocation.variables is None:
        return _call_and_flush(function, *arguments)
    return invocation.variables.copy().run(_call_and_flush, function, *arguments)


def _call_and_flush(function: Any, *arguments: Any) -> Any:
    try:
        return function(*arguments)
    finally:
        finish_lines()


def _is_async(function: Any) -> bool:
    code = getattr(getattr(function, "__func__", function), "__code__", None)
    return code is not None and bool(code.co_flags & _ASYNC)


async def _await_value(value: Any) -> Any:
    return await value


def serve(end: int, lifeline: int) -> None:
    """Run the user object that the first request names; ends the process."""
    exit_with_parent(lifeline)
    ignore_stop_signals()
    install_line_buffering()
    channel = BlockingChannel(socket.socket(fileno=end))
    forwarder = channel.log_forwarder()
    logging.getLogger().addHandler(forwarder)
    os.register_at_fork(after_in_child=channel.close_in_fork)
    first = channel.receive()
    if first is not None:
        number, target = first.value
        try:
            if target["path"]:
                sys.path[:] = target["path"]
            module, _, name = target["hosted"].partition(":")
            hosted: HostedObject = getattr(import_module(module), name)(target["argument"])
        except BaseException as error:  # noqa: BLE001 - user code may raise anything
            channel.send([number, [RAISED, encode_error(error)]])
        else:
            channel.send([number, [VALUE, None]])
            CodeHost(channel, hosted).run()
    flush_spans()
    forwarder.flush()
    sys.stdout.flush()
    sys.stderr.flush()
    # Without exit handlers, because threads may still run user code.
    os._exit(0)
