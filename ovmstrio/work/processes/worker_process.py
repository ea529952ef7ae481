"""A worker process, as the server sees it: what it has been asked, and how it came to its end."""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Awaitable, Callable
from typing import Any, Final

import trio

from ovmstrio.work.processes.message_channel import NO_MESSAGE, Message, MessageChannel
from ovmstrio.work.processes.packet_socket import packet_pair
from ovmstrio.work.processes.program import describe_end, start_program

__all__ = ["WorkerEnded", "WorkerProcess"]

_SECONDS_TO_DIE: Final = 2.0
"""How long a process whose end of the channel is gone gets to end by itself, so that its own status is seen."""

_NO_ANSWER_EXPECTED: Final = 0


class WorkerEnded(Exception):
    """The worker process is gone, or is to take no more; ``was_called`` says whether it had got the request."""

    def __init__(self, why: str, *, was_called: bool) -> None:
        super().__init__(why)
        self.why = why or "has ended"
        self.was_called = was_called


class _PendingAnswer:
    """What a request is to be answered with, whether it has been, and whether anybody waits for it."""

    __slots__ = ("done", "is_abandoned", "is_answered", "value")

    def __init__(self) -> None:
        self.done = trio.Event()
        self.value: Any = None
        self.is_answered = False
        self.is_abandoned = False


async def _nothing() -> None:
    """Do nothing."""


class WorkerProcess:
    """One process, from its start to its end; it runs a program that :func:`run_program` is the main function of.

    Args:
        module: the program.
        calls_at_once: how many requests it has at most; others wait.
        grace_seconds: how long a request may go on whose caller has left.  After that the process takes no more, and is
            killed as soon as nobody waits for any other request.
        stuck: is called when that happens.
        own_group: as for :func:`start_program`.

    Attributes:
        is_retired: whether it takes no more requests, because it has ended or is to end.
        ended: set when the process is gone, and everybody who waited for it has been told.
        why: how it ended, in words.
        status: how it ended, below 0 for a signal.
    """

    def __init__(
        self,
        module: str,
        *,
        calls_at_once: int = 1,
        grace_seconds: float = math.inf,
        stuck: Callable[[], None] = lambda: None,
        own_group: bool = False,
    ) -> None:
        self.is_retired = False
        self.ended = trio.Event()
        self.why = ""
        self.status: int | None = None
        self._module = module
        self._grace_seconds = grace_seconds
        self._stuck = stuck
        self._is_stuck = False
        self._own_group = own_group
        self._limiter = trio.CapacityLimiter(calls_at_once)
        self._numbers = itertools.count(_NO_ANSWER_EXPECTED + 1)
        self._pending: dict[int, _PendingAnswer] = {}
        self._process: trio.Process | None = None
        self._channel: MessageChannel | None = None
        self._nursery: trio.Nursery | None = None

    @property
    def pid(self) -> int | None:
        """The process's number."""
        return None if self._process is None else self._process.pid

    @property
    def is_busy(self) -> bool:
        """Whether it has a request, be it one that nobody waits for any more."""
        return bool(self._pending)

    # Life

    async def start(
        self,
        nursery: trio.Nursery,
        first: Any,
        *,
        descriptor: int | None = None,
        buried: Callable[[], Awaitable[None]] = _nothing,
    ) -> Any:
        """Start the process, and give what it answers to its first request.

        Args:
            nursery: hosts the process.
            first: what the process is for.
            descriptor: goes along.
            buried: is called in the nursery when the process has ended, unless that was because of cancellation.

        Raises:
            OSError: no process can be started.
            WorkerEnded: it ended before it answered.

        Ownership: the process belongs to a task of the nursery, whose cancellation kills it.

        Cancellation: at once; the process is killed.
        """
        await nursery.start(self._live, buried)
        try:
            return await self.call(first, descriptor)
        except BaseException:
            self.kill()
            raise

    async def _live(self, buried: Callable[[], Awaitable[None]], *, task_status: trio.TaskStatus[None]) -> None:
        """Be the process; never fails because of what it does.

        Raises:
            OSError: no process can be started.

        Cancellation: at once; the process is killed.
        """
        ours, theirs = packet_pair()
        channel = self._channel = MessageChannel(ours)
        try:
            with theirs:
                process = self._process = await start_program(self._module, theirs, own_group=self._own_group)
            task_status.started()
            async with trio.open_nursery() as nursery:
                self._nursery = nursery
                nursery.start_soon(self._wait_for_end, process, channel)
                await self._receive_all(channel)
                with trio.move_on_after(_SECONDS_TO_DIE):
                    await process.wait()
                nursery.cancel_scope.cancel()
        finally:
            self.is_retired = True
            with trio.CancelScope(shield=True):
                await self._bury()
            channel.packets.close()
            for number in list(self._pending):
                self._settle(number)
            self.ended.set()
        await buried()

    async def _wait_for_end(self, process: trio.Process, channel: MessageChannel) -> None:
        try:
            await process.wait()
            channel.packets.end()
        finally:
            # The nursery takes no tasks once its last one has ended, which is before whoever opened it runs again.
            self._nursery = None

    async def _receive_all(self, channel: MessageChannel) -> None:
        try:
            while (message := await channel.receive()) is not None:
                self._take(message)
                # Its memory belongs to whoever waits for it, and not to this loop until the next one comes.
                del message
        except NO_MESSAGE as error:
            self.condemn(error)

    def _take(self, message: Message) -> None:
        """Hand an answer to whoever waits for it.

        Raises:
            ValueError, LookupError, TypeError: it is none.
        """
        if message.descriptor is not None:
            os.close(message.descriptor)
        number, value = message.value
        pending = self._pending[number]
        if not pending.is_abandoned:
            pending.value = value
        pending.is_answered = True
        self._settle(number)

    async def _bury(self) -> None:
        if self._process is not None:
            self._process.kill()
            self.status = await self._process.wait()
            self.why = self.why or describe_end(self.status)

    def condemn(self, error: Exception) -> None:
        """Kill a process that sends nonsense."""
        self.why = f"sent what is no answer ({error!r}) and was killed"
        self.kill()

    def kill(self) -> None:
        """End the process at once."""
        self.is_retired = True
        if self._process is not None:
            self._process.kill()

    def finish(self) -> None:
        """Tell the process that nothing more will come, so that it ends when it has done what it was asked."""
        self.is_retired = True
        if self._channel is not None:
            self._channel.packets.finish()

    async def close(self, grace_seconds: float) -> None:
        """Have the process finish, and wait for its end; it is killed if that takes too long.

        Cancellation: shielded, for it is bounded.
        """
        self.finish()
        with trio.move_on_after(grace_seconds, shield=True):
            await self.ended.wait()
        self.kill()
        with trio.CancelScope(shield=True):
            await self.ended.wait()

    # Requests

    async def tell(self, value: Any, descriptor: int | None = None) -> None:
        """Send what is not answered, and a copy of a descriptor with it.

        Raises:
            WorkerEnded: the process takes no more.
            TypeError: the value cannot be sent.
            OSError: there is no memory left.

        Cancellation: at once; it is sent as a whole or not at all.
        """
        try:
            await self._send(_NO_ANSWER_EXPECTED, value, descriptor)
        except trio.BrokenResourceError:
            raise WorkerEnded(self.why, was_called=False) from None

    async def call(self, value: Any, descriptor: int | None = None) -> Any:
        """Ask the process, and give its answer; as many as ``calls_at_once`` are asked side by side.

        Raises:
            WorkerEnded: the process ended before it answered, or takes no more.
            TypeError: the value cannot be sent; nothing has been.
            OSError: there is no memory left.

        Ownership: nothing once the caller has left.

        Cancellation: at once; what becomes of the request then is up to ``grace_seconds``.
        """
        pending, number = _PendingAnswer(), next(self._numbers)
        try:
            self._limiter.acquire_on_behalf_of_nowait(pending)
        except trio.WouldBlock:
            await self._limiter.acquire_on_behalf_of(pending)
        self._pending[number] = pending
        was_called = True
        try:
            await self._send(number, value, descriptor)
        except trio.BrokenResourceError:
            was_called = False
        except BaseException:
            self._settle(number)
            raise
        try:
            await pending.done.wait()
        except trio.Cancelled:
            self._abandon(pending)
            raise
        if not pending.is_answered:
            raise WorkerEnded(self.why, was_called=was_called)
        return pending.value

    async def _send(self, number: int, value: Any, descriptor: int | None) -> None:
        if self.is_retired or self._channel is None:
            raise WorkerEnded(self.why, was_called=False)
        await self._channel.send([number, value], descriptor)

    def _settle(self, number: int) -> None:
        pending = self._pending.pop(number, None)
        if pending is not None:
            self._limiter.release_on_behalf_of(pending)
            pending.done.set()
            self._kill_if_unneeded()

    def _abandon(self, pending: _PendingAnswer) -> None:
        pending.is_abandoned = True
        pending.value = None
        if self._nursery is not None and not pending.done.is_set():
            self._nursery.start_soon(self._watch, pending)
        self._kill_if_unneeded()

    async def _watch(self, pending: _PendingAnswer) -> None:
        """Retire the process if a request whose caller has left does not end.

        Cancellation: at once.
        """
        with trio.move_on_after(self._grace_seconds):
            await pending.done.wait()
            return
        self.why = f"was killed because a call did not end within {self._grace_seconds:g} s of its caller's leaving"
        self.is_retired = self._is_stuck = True
        self._stuck()
        self._kill_if_unneeded()

    def _kill_if_unneeded(self) -> None:
        if self._is_stuck and all(pending.is_abandoned for pending in self._pending.values()):
            self.kill()
