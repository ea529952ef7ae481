"""One worker process, as the server sees it: calls that are under way, and how it came to its end."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any, Final

import numpy as np
import structlog
import trio

from ovmstrio.runtimes.pipelines.custom_nodes.isolation.channel import Channel
from ovmstrio.runtimes.pipelines.custom_nodes.isolation.memory_files import Message
from ovmstrio.runtimes.pipelines.custom_nodes.native.native_failures import NodeIdentity
from ovmstrio.runtimes.pipelines.custom_nodes.node_threads import CALLS_AT_ONCE
from ovmstrio.work.processes import describe_end, packet_pair, start_program

__all__ = ["WorkerEnded", "WorkerProcess"]

Ndarray = np.ndarray[Any, Any]

_PROGRAM: Final = "ovmstrio.runtimes.pipelines.custom_nodes.isolation.worker"
_SECONDS_TO_DIE: Final = 2.0
"""How long a process whose end of the channel is gone gets to end by itself, so that its own status is seen."""

_NO_ANSWER: Final = (ValueError, LookupError, TypeError, OSError)
"""What reading a message raises if a process whose memory is broken has written it."""

log = structlog.get_logger(__name__)


class WorkerEnded(Exception):
    """The worker process is gone, or is to take no more calls; ``was_called`` says whether it had got this one."""

    def __init__(self, why: str, *, was_called: bool) -> None:
        super().__init__(why)
        self.why = why
        self.was_called = was_called


class _Call:
    """One call that the worker has got, or is about to."""

    __slots__ = ("answer", "done", "is_abandoned")

    def __init__(self) -> None:
        self.done = trio.Event()
        self.answer: tuple[Message, dict[str, Ndarray]] | None = None
        self.is_abandoned = False


async def _end_with(process: trio.Process, channel: Channel) -> None:
    await process.wait()
    channel.end()


class WorkerProcess:
    """A process with one node in it.

    Args:
        identity: the node.
        params: its parameters.
        grace_seconds: how long a call may go on whose caller has left, before the process is replaced.

    Attributes:
        is_retired: whether it takes no more calls, because it has ended or is to end.
        ended: set when the process is gone.
        why: how it ended.
    """

    def __init__(self, identity: NodeIdentity, params: Mapping[str, str], grace_seconds: float) -> None:
        self.is_retired = False
        self.ended = trio.Event()
        self.why = ""
        self._is_stuck = False
        self._identity = identity
        self._params = dict(params)
        self._grace_seconds = grace_seconds
        self._limiter = trio.CapacityLimiter(CALLS_AT_ONCE)
        self._numbers = itertools.count(1)
        self._calls: dict[int, _Call] = {}
        self._process: trio.Process | None = None
        self._channel: Channel | None = None
        self._nursery: trio.Nursery | None = None

    @property
    def pid(self) -> int | None:
        """The process's number."""
        return None if self._process is None else self._process.pid

    # Life

    async def run(self, task_status: trio.TaskStatus[Message | None] = trio.TASK_STATUS_IGNORED) -> None:
        """Be the process, from its start to its end; to be started with ``nursery.start``.

        Gives what the worker answered to the request to open the node, None if it ended before.  Never fails because
        of what the process does.

        Raises:
            OSError: no process can be started.

        Ownership: the process, which is gone at the end, and everybody who waits for it has been told.

        Cancellation: at once; the process is killed.
        """
        ours, theirs = packet_pair()
        channel = self._channel = Channel(ours)
        try:
            with theirs:
                self._process = await start_program(_PROGRAM, theirs)
            if self.is_retired:
                self.kill()
            async with trio.open_nursery() as nursery:
                self._nursery = nursery
                nursery.start_soon(_end_with, self._process, channel)
                task_status.started(await self._open(channel))
                await self._receive_all(channel)
                nursery.cancel_scope.cancel()
            with trio.move_on_after(_SECONDS_TO_DIE):
                await self._process.wait()
        finally:
            self.is_retired = True
            self._nursery = None
            with trio.CancelScope(shield=True):
                await self._bury()
            channel.close()
            for number in list(self._calls):
                self._settle(number, None)
            self.ended.set()

    async def _open(self, channel: Channel) -> Message | None:
        request = {"path": str(self._identity.path), "name": self._identity.name, "params": self._params}
        try:
            await channel.send(request, {})
            received = await channel.receive()
        except trio.BrokenResourceError:
            return None
        except _NO_ANSWER as error:
            self._condemn(error)
            return None
        return None if received is None else received[0]

    async def _receive_all(self, channel: Channel) -> None:
        try:
            while (received := await channel.receive()) is not None:
                self._settle(received[0]["number"], received)
        except _NO_ANSWER as error:
            self._condemn(error)

    def _condemn(self, error: Exception) -> None:
        self.why = f"sent what is no answer ({error!r}) and was killed"
        self.kill()

    async def _bury(self) -> None:
        if self._process is not None:
            self._process.kill()
            self.why = self.why or describe_end(await self._process.wait())

    def kill(self) -> None:
        """End the process at once."""
        self.is_retired = True
        if self._process is not None:
            self._process.kill()

    async def close(self) -> None:
        """Have the node deinitialised and wait for the end; the process is killed if that takes ``grace_seconds``.

        Cancellation: shielded, for it is bounded.
        """
        self.is_retired = True
        if self._channel is not None:
            self._channel.finish()
        with trio.move_on_after(self._grace_seconds, shield=True):
            await self.ended.wait()
        self.kill()
        with trio.CancelScope(shield=True):
            await self.ended.wait()

    # Calls

    async def execute(self, inputs: Mapping[str, Ndarray]) -> tuple[Message, dict[str, Ndarray]]:
        """Have the worker make one call, and give its answer.

        Raises:
            WorkerEnded: the process ended before it answered, or takes no more calls.
            OSError: there is no memory left for the arrays.

        Ownership: the call; if the caller leaves, the process itself sees to it that it ends.

        Cancellation: at once.  A call that the worker has got gets ``grace_seconds`` to end by itself; after that the
        process takes no more calls, and is killed as soon as nobody waits for any other.
        """
        call, number = _Call(), next(self._numbers)
        await self._limiter.acquire_on_behalf_of(call)
        self._calls[number] = call
        try:
            await self._send(number, inputs)
        except BaseException:
            self._settle(number, None)
            raise
        try:
            await call.done.wait()
        except trio.Cancelled:
            self._abandon(call)
            raise
        if call.answer is None:
            raise WorkerEnded(self.why, was_called=True)
        return call.answer

    async def _send(self, number: int, inputs: Mapping[str, Ndarray]) -> None:
        if self.is_retired or self._channel is None:
            raise WorkerEnded(self.why, was_called=False)
        try:
            await self._channel.send({"number": number}, inputs)
        except trio.BrokenResourceError:
            await self.ended.wait()
            raise WorkerEnded(self.why, was_called=False) from None

    def _settle(self, number: int, answer: tuple[Message, dict[str, Ndarray]] | None) -> None:
        call = self._calls.pop(number)
        self._limiter.release_on_behalf_of(call)
        if not call.is_abandoned:
            call.answer = answer
        call.done.set()
        self._kill_if_unneeded()

    def _abandon(self, call: _Call) -> None:
        call.is_abandoned = True
        if self._nursery is not None and not call.done.is_set():
            self._nursery.start_soon(self._watch, call)
        self._kill_if_unneeded()

    async def _watch(self, call: _Call) -> None:
        """Retire the process if a call whose caller has left does not end.

        Cancellation: at once.
        """
        with trio.move_on_after(self._grace_seconds):
            await call.done.wait()
            return
        self.why = f"was killed because a call did not end within {self._grace_seconds:g} s of its caller's leaving"
        log.warning("custom node is replaced: a call does not end", node=str(self._identity), pid=self.pid)
        self.is_retired = self._is_stuck = True
        self._kill_if_unneeded()

    def _kill_if_unneeded(self) -> None:
        if self._is_stuck and all(call.is_abandoned for call in self._calls.values()):
            self.kill()
