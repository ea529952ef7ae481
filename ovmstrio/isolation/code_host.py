"""The program of a worker process that hosts code of users: threads that serve the server's requests.

::

    first                                        {"hosted": "module:name", "argument": ..., "path": [...]}
    ["call", method, value, headers of a trace]  ["value", ...], ["generator", number] or ["raised", error]
    ["pull", number]                             [[value, ...], None, ["ended"] or ["raised", error]]
    ["close", number]                            [] or [error]
    ["cancel", number of a request], ["forget", value]      are not answered

One thread at a time reads; it hands the reading over before it does what was asked.
"""

from __future__ import annotations

import inspect
import os
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import Any, Final

from ovmstrio.isolation.blocking_channel import BlockingChannel, ChannelLost
from ovmstrio.isolation.codec import encode_error
from ovmstrio.isolation.generator_hosts import RAISED, AsyncGeneratorHost, GeneratorHost, GeneratorLike, LoopThread
from ovmstrio.isolation.hosted import Hosted, Invocation
from ovmstrio.isolation.process_exit import LOST_CHANNEL, UNREADABLE, watch_lifeline
from ovmstrio.isolation.trace_propagation import flush_spans, follow_trace
from ovmstrio.util.stdio import finish_lines, print_whole_lines

__all__ = ["GENERATOR", "VALUE", "CodeHost", "serve"]

VALUE: Final = "value"
GENERATOR: Final = "generator"

_MOST_IDLE: Final = 8
_ASYNC: Final = inspect.CO_COROUTINE | inspect.CO_ITERABLE_COROUTINE


class CodeHost:
    """Serves one channel.

    Args:
        channel: the server's.
        hosted: what the requests are for.
    """

    def __init__(self, channel: BlockingChannel, hosted: Hosted) -> None:
        self._channel = channel
        self._hosted = hosted
        self._process = os.getpid()
        self._reading = threading.Lock()
        self._counting = threading.Lock()
        self._idle = 0
        self._over = threading.Event()
        self._loop = LoopThread()
        self._generators: dict[int, GeneratorLike] = {}
        self._cancels: dict[int, Any] = {}
        self._traced: dict[int, Callable[[Any], None]] = {}

    def run(self) -> None:
        """Serve until the server has nothing more to ask; what still runs then is left.

        The thread that calls this runs no code of users: it is the one that gets signals.
        """
        self._hire()
        self._over.wait()

    # Threads

    def _hire(self) -> None:
        with self._counting:
            self._idle += 1
        threading.Thread(target=self._work, name="user code", daemon=True).start()

    def _work(self) -> None:
        while self._idle <= _MOST_IDLE:
            with self._reading:
                message = self._read()
            if message is None:
                return
            number, request = message
            with self._counting:
                self._idle -= 1
                is_last = not self._idle
            if is_last:
                self._hire()
            self._serve(number, request)
            del message, request
            with self._counting:
                self._idle += 1
        with self._counting:
            self._idle -= 1

    def _read(self) -> tuple[int, Any] | None:
        """Wait for a request that takes time; what takes none is done here."""
        while not self._over.is_set():
            try:
                message = self._channel.receive()
            except ChannelLost:
                os._exit(LOST_CHANNEL)
            except Exception:  # noqa: BLE001 - nobody would ever be answered
                traceback.print_exc()
                os._exit(UNREADABLE)
            if message is None:
                self._over.set()
                break
            number, request = message.value
            if number:
                # A request may be cancelled as soon as the next message is read.
                if request[0] != "call":
                    self._cancels[number] = partial(self._leave, request[1], number)
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
        """Cancel a request, and tell whether it has made a generator meanwhile, which nobody knows of."""
        cancel = self._cancels.get(number)
        if cancel is not None:
            cancel()
        return number in self._generators

    def _leave(self, generator: int, number: int) -> None:
        found = self._generators.get(generator)
        if found is not None:
            found.leave(number)

    # Requests

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
                self._traced[number] = follow_trace(invocation, method, trace)
            cancellation.add(invocation.stop)
            if _is_async(invocation.function):
                self._await(number, invocation, partial(invocation.function, *invocation.arguments), cancellation)
                return
            result = _in_context(invocation, invocation.function, *invocation.arguments)
            if inspect.isawaitable(result):
                self._await(number, invocation, partial(_awaited, result), cancellation)
                return
            answer = self._answer_of(number, invocation, result)
        except BaseException as error:  # noqa: BLE001 - the border of user code, SystemExit included
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
            # Code of users has forked, and this is the child, which has come back from there.
            os._exit(0)
        if (end_span := self._traced.pop(number, None)) is not None:
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
                # What cannot be sent is told in its place, as a value of a generator or as that of a call.
                told = [RAISED, encode_error(error)]
                self._channel.send([number, [[], told] if value and isinstance(value[0], list) else told])
        except ChannelLost:
            os._exit(LOST_CHANNEL)


class _Cancellation:
    """What is to be done if a request is cancelled, which may be before it is known."""

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
        return _finished(function, *arguments)
    return invocation.variables.copy().run(_finished, function, *arguments)


def _finished(function: Any, *arguments: Any) -> Any:
    try:
        return function(*arguments)
    finally:
        finish_lines()


def _is_async(function: Any) -> bool:
    code = getattr(getattr(function, "__func__", function), "__code__", None)
    return code is not None and bool(code.co_flags & _ASYNC)


async def _awaited(value: Any) -> Any:
    return await value


def serve(end: int, lifeline: int) -> None:
    """Host what the first request names, for the server whose socket this is; ends the process.

    Signals that are meant for the whole group of processes have no effect: they must not take the process from a server
    that is still serving.
    """
    watch_lifeline(lifeline)
    for meant_for_the_server in (signal.SIGINT, signal.SIGTERM):
        signal.signal(meant_for_the_server, _leave_it_to_the_server)
    print_whole_lines()
    channel = BlockingChannel(socket.socket(fileno=end))
    os.register_at_fork(after_in_child=channel.disown)
    first = channel.receive()
    if first is not None:
        number, target = first.value
        try:
            hosted = _make(target)
        except BaseException as error:  # noqa: BLE001 - the border of user code
            channel.send([number, [RAISED, encode_error(error)]])
        else:
            channel.send([number, [VALUE, None]])
            CodeHost(channel, hosted).run()
    flush_spans()
    sys.stdout.flush()
    sys.stderr.flush()
    # Threads may still be in what belongs to users, whose exit handlers had better not run then.
    os._exit(0)


def _make(target: dict[str, Any]) -> Hosted:
    if target["path"]:
        sys.path[:] = target["path"]
    module, _, name = target["hosted"].partition(":")
    hosted: Hosted = getattr(import_module(module), name)(target["argument"])
    return hosted


def _leave_it_to_the_server(*_: object) -> None:
    """Do nothing; an ignored signal would be ignored by processes that users' code starts, too."""
