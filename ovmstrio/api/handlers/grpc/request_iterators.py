"""The requests of a streaming client as a handler iterates over them."""

from __future__ import annotations

import queue
from typing import Any, Final, Self

import trio
from grpclib.exceptions import GRPCError, StreamTerminatedError

from ovmstrio.runtimes.handlers.grpc import CallEndedError
from ovmstrio.wire.grpc.stream import Call

__all__ = ["AsyncRequests", "BlockingRequests", "Requests"]

_AHEAD: Final = 4
"""Requests that may wait, parsed, for a handler in a thread; behind them the client's window fills."""


class Requests:
    """What both kinds have in common.

    Attributes:
        failure: why no more requests can be read, when that is the client's fault.
    """

    def __init__(self, call: Call) -> None:
        self._call = call
        self.failure: GRPCError | None = None

    async def feed(self) -> None:
        """Receive what has to be received ahead of the handler.

        Cancellation: while the client sends nothing.
        """

    def stop(self) -> None:
        """Let a handler that waits for a request go on: there will be none."""

    async def _receive(self) -> Any:
        """Give the next request, None after the last.

        Raises:
            CallEndedError: no more can be read.
        """
        try:
            return await self._call.recv_message()
        except GRPCError as error:
            self.failure = error
        except StreamTerminatedError:
            pass
        raise CallEndedError


class AsyncRequests(Requests):
    """For handlers on the event loop: nothing is read before it is asked for."""

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Any:
        """Give the next request.

        Raises:
            StopAsyncIteration: that was the last.
            CallEndedError: no more can be read.

        Cancellation: while the client sends nothing.
        """
        message = await self._receive()
        if message is None:
            raise StopAsyncIteration
        return message


class BlockingRequests(Requests):
    """For handlers in threads: a few requests are read ahead, so that few steps wait for the event loop."""

    def __init__(self, call: Call) -> None:
        super().__init__(call)
        self._loop = trio.lowlevel.current_trio_token()
        self._slots = trio.Semaphore(_AHEAD, max_value=_AHEAD)
        self._queue: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._ended: type[Exception] | None = None

    async def feed(self) -> None:
        """Receive requests as fast as the handler takes them, until the last or until none can be read.

        Cancellation: while the client sends nothing, or the handler takes nothing.
        """
        message = object()
        while message is not None:
            await self._slots.acquire()
            try:
                message = await self._receive()
            except CallEndedError:
                self._queue.put(CallEndedError)
                return
            self._queue.put(StopIteration if message is None else message)

    def stop(self) -> None:
        """Let a handler that waits for a request go on: there will be none."""
        self._ended = CallEndedError
        self._queue.put(CallEndedError)

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Any:
        """Give the next request, waiting for it; only in threads.

        Raises:
            StopIteration: that was the last.
            CallEndedError: no more can be read.
        """
        if self._ended is not None:
            raise self._ended
        message = self._queue.get()
        if message is StopIteration or message is CallEndedError:
            self._ended = message
            raise message
        self._loop.run_sync_soon(self._slots.release)
        return message
