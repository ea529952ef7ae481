"""Program of a worker process that hosts user code: threads that serve the server's requests.

::

    first                                        {"hosted": "module:name", "argument": ..., "path": [...]}
    ["call", method, value, trace headers]       ["value", ...], ["generator", number] or ["raised", error]
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
from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import Any, Final

from ovmstrio.isolation.blocking_channel import BlockingChannel, ChannelClosedByUserCode
from ovmstrio.isolation.codec import encode_error
from ovmstrio.isolation.exit_status import CHANNEL_CLOSED, RECEIVE_FAILED, exit_with_parent, ignore_stop_signals
from ovmstrio.isolation.generator_hosts import RAISED, AsyncGeneratorHost, GeneratorHost, HostedGenerator, LoopThread
from ovmstrio.isolation.hosted_object import HostedObject, Invocation
from ovmstrio.isolation.trace_propagation import flush_spans, start_call_span
from ovmstrio.util.stdio import finish_lines, print_whole_lines

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
    print_whole_lines()
    channel = BlockingChannel(socket.socket(fileno=end))
    logging.getLogger().addHandler(channel.log_forwarder())
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
    sys.stdout.flush()
    sys.stderr.flush()
    # Without exit handlers, because threads may still run user code.
    os._exit(0)
