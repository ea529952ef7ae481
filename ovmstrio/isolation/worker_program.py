"""The main function of a worker process: a channel to the server, and the requests that come through it."""

from __future__ import annotations

import os
import signal
import socket
import sys
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial
from typing import Any, Final

import trio

from ovmstrio.isolation.channel import Message, MessageChannel
from ovmstrio.isolation.stack_requests import SAMPLES, encode_samples, is_for_samples, sampler_of_process
from ovmstrio.util.stdio import ignore_failed_writes

__all__ = ["ServeRequests", "WorkRequest", "WorkRequests", "leave", "run_program"]


_NO_ANSWER: Final = 0
"""The number of what is told without having been asked."""


class WorkRequest:
    """What the server asks of a worker process.

    Attributes:
        value: what is asked.
        descriptor: what came along, which is the receiver's to close.
    """

    __slots__ = ("_channel", "_number", "descriptor", "value")

    def __init__(self, channel: MessageChannel, message: Message) -> None:
        self._channel = channel
        self._number, self.value = message.value
        self.descriptor = message.descriptor

    async def answer(self, value: Any) -> None:
        """Answer once, if a request waits for it; a server that is gone gets none.

        Raises:
            TypeError: the value cannot be sent; another may be.
            OSError: there is no memory left.

        Cancellation: at once; the answer is sent as a whole or not at all.
        """
        with suppress(trio.BrokenResourceError):
            await self._channel.send([self._number, value])


class WorkRequests:
    """All that the server asks, until it has nothing more to ask or is gone."""

    def __init__(self, channel: MessageChannel, tasks: trio.Nursery) -> None:
        self._channel = channel
        self._tasks = tasks

    async def tell(self, value: Any) -> None:
        """Tell the server something that it has not asked for; one that is gone hears nothing.

        Raises:
            TypeError: the value cannot be sent.

        Cancellation: at once; it is told or not.
        """
        with suppress(trio.BrokenResourceError):
            await self._channel.send([_NO_ANSWER, value])

    async def next(self) -> WorkRequest | None:
        """Wait for a request; None if there will be none.

        Cancellation: at once; nothing is lost.
        """
        while (message := await self._channel.receive()) is not None:
            if not is_for_samples(message.value):
                return WorkRequest(self._channel, message)
            self._tasks.start_soon(self._sample, *message.value[1])
        return None

    async def _sample(self, number: int, seconds: float, rate: float) -> None:
        """Answer with the stacks of all threads.

        Cancellation: at once; the thread ends within a sample.
        """
        sampler = sampler_of_process(rate)
        try:
            answer: Any = encode_samples(await trio.to_thread.run_sync(sampler.run, seconds, abandon_on_cancel=True))
        except RuntimeError as error:
            # There is no room for another thread, which is no reason to end.
            answer = str(error)
        finally:
            sampler.stop()
        with suppress(trio.BrokenResourceError, OSError):
            await self._channel.send([SAMPLES, [number, answer]])

    async def handle_all(self, handle: Callable[[WorkRequest], Awaitable[None]], *, grace_seconds: float = 0) -> None:
        """Have each request handled in a task of its own; those that go on at the end get a grace.

        Raises:
            ExceptionGroup: of what handling them raised.

        Cancellation: at once, and all of them.
        """
        async with trio.open_nursery() as nursery:
            while (request := await self.next()) is not None:
                nursery.start_soon(handle, request)
                # What is large must not stay until the next one comes.
                del request
            nursery.cancel_scope.deadline = trio.current_time() + grace_seconds


ServeRequests = Callable[[WorkRequest, WorkRequests], Awaitable[None]]
"""Serves the request that says what the process is for, and then the others."""


def run_program(serve: ServeRequests) -> None:
    """Serve the requests of the server, whose socket's descriptor is the first argument, until there are no more.

    Signals that are meant for the whole group of processes have no effect: they must not take the program from a server
    that is still serving.

    Raises:
        Exception, SystemExit: as ``serve``.
    """
    for meant_for_the_server in (signal.SIGINT, signal.SIGTERM):
        signal.signal(meant_for_the_server, _leave_it_to_the_server)
    ignore_failed_writes("stdout", "stderr")
    end = socket.socket(fileno=int(sys.argv[1]))
    end.set_inheritable(False)
    try:
        trio.run(partial(_serve, serve), end)
    finally:
        # Its end is that of the process, which may still have exit handlers to run.
        end.detach()


async def _serve(serve: ServeRequests, end: socket.socket) -> None:
    failure: Exception | SystemExit | None = None
    async with trio.open_nursery() as tasks:
        requests = WorkRequests(MessageChannel(end), tasks)
        first = await requests.next()
        if first is not None:
            try:
                await serve(first, requests)
            except (Exception, SystemExit) as error:  # noqa: BLE001 - told as it is, and not as one of a group
                failure = error
        tasks.cancel_scope.cancel()
    if failure is not None:
        raise failure


def leave() -> None:
    """End the process: threads may still be in what belongs to users, whose exit handlers had better not run then."""
    sys.stdout.flush()
    os._exit(0)


def _leave_it_to_the_server(*_: object) -> None:
    """Do nothing; an ignored signal would be ignored by processes that users' code starts, too."""
