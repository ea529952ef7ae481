"""Main function of worker programs: the channel to the server and its requests."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial
from typing import Any, Final

import trio

from ovmstrio.isolation.channel import MessageChannel
from ovmstrio.isolation.exit_status import ignore_stop_signals
from ovmstrio.isolation.messages import Message
from ovmstrio.isolation.side_messages import (
    LOG_LEVELS,
    SAMPLING_REQUEST,
    RecordForwarder,
    apply_log_levels,
    create_process_sampler,
    encode_samples,
    flush_records,
    side_message_kind,
)
from ovmstrio.util.stdio import ignore_failed_writes

_NO_ANSWER: Final = 0
"""Number of unsolicited messages."""


class WorkRequest:
    """Request of the server; the receiver closes its ``descriptor``."""

    __slots__ = ("_channel", "_number", "descriptor", "value")

    def __init__(self, channel: MessageChannel, message: Message) -> None:
        self._channel = channel
        self._number, self.value = message.value
        self.descriptor = message.descriptor

    async def answer(self, value: Any) -> None:
        """Send the answer, at most once; ignored if the server has exited. Raises ``TypeError`` or ``OSError``."""
        with suppress(trio.BrokenResourceError):
            await self._channel.send([self._number, value])


class WorkRequests:
    """Requests of the server, until it closes the channel or exits."""

    def __init__(self, channel: MessageChannel, tasks: trio.Nursery) -> None:
        self._channel = channel
        self._tasks = tasks

    async def notify(self, value: Any) -> None:
        """Send an unsolicited message; ignored if the server has exited. Raises ``TypeError``."""
        with suppress(trio.BrokenResourceError):
            await self._channel.send([_NO_ANSWER, value])

    def log_forwarder(self) -> RecordForwarder:
        """Create a handler that sends log records to the server."""
        return self._channel.log_forwarder()

    async def next(self) -> WorkRequest | None:
        """Wait for a request; None at the end."""
        while (message := await self._channel.receive()) is not None:
            kind = side_message_kind(message.value)
            if kind == SAMPLING_REQUEST:
                self._tasks.start_soon(self._sample, *message.value[1])
            elif kind == LOG_LEVELS:
                apply_log_levels(message.value[1])
            else:
                return WorkRequest(self._channel, message)
        return None

    async def _sample(self, number: int, seconds: float, rate: float) -> None:
        sampler = create_process_sampler(rate)
        try:
            answer: Any = encode_samples(await trio.to_thread.run_sync(sampler.run, seconds, abandon_on_cancel=True))
        except RuntimeError as error:
            # No thread can be started; that is no reason to exit.
            answer = str(error)
        finally:
            sampler.stop()
        with suppress(trio.BrokenResourceError, OSError):
            await self._channel.send([SAMPLING_REQUEST, [number, answer]])

    async def handle_all(self, handle: Callable[[WorkRequest], Awaitable[None]], *, grace_seconds: float = 0) -> None:
        """Handle each request in its own task; tasks that run at the end get ``grace_seconds``."""
        async with trio.open_nursery() as nursery:
            while (request := await self.next()) is not None:
                nursery.start_soon(handle, request)
                # A large request must not stay in memory until the next one comes.
                del request
            nursery.cancel_scope.deadline = trio.current_time() + grace_seconds


ServeRequests = Callable[[WorkRequest, WorkRequests], Awaitable[None]]
"""Serves the first request, which configures the process, and then the others."""


def run_program(serve: ServeRequests) -> None:
    """Serve the server's requests until there are no more; the first argument is the descriptor of the socket."""
    ignore_stop_signals()
    ignore_failed_writes("stdout", "stderr")
    end = socket.socket(fileno=int(sys.argv[1]))
    end.set_inheritable(False)
    try:
        trio.run(partial(_serve, serve), end)
    finally:
        flush_records()
        # The channel closes with the process, after its exit handlers.
        end.detach()


async def _serve(serve: ServeRequests, end: socket.socket) -> None:
    failure: Exception | SystemExit | None = None
    async with trio.open_nursery() as tasks:
        requests = WorkRequests(MessageChannel(end), tasks)
        first = await requests.next()
        if first is not None:
            try:
                await serve(first, requests)
            except (Exception, SystemExit) as error:  # noqa: BLE001 - raised below without an exception group
                failure = error
        tasks.cancel_scope.cancel()
    if failure is not None:
        raise failure


def exit_now() -> None:
    """Exit without exit handlers, because threads may still run user code."""
    sys.stdout.flush()
    os._exit(0)
