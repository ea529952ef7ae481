"""The process of a worker, as the server sees it."""

from __future__ import annotations

from typing import Any, Final

import trio

from ovmstrio.runtimes.ops.executor.processes.channel import ProcessChannel
from ovmstrio.runtimes.ops.executor.processes.messages import is_spoiled
from ovmstrio.work.processes import describe_end, packet_pair, start_program

__all__ = ["NO_ANSWER", "Life"]

NO_ANSWER: Final = (ValueError, LookupError, TypeError, OSError)
"""What reading a message raises if a process whose memory is broken has written it."""

_SECONDS_TO_DIE: Final = 2.0


async def _end_with(process: trio.Process, channel: ProcessChannel) -> None:
    await process.wait()
    channel.end()


class Life:
    """One process, from its start to its end, and what it has been asked.

    Args:
        program: the module that it runs.

    Attributes:
        why: how it ended.
        is_over: whether it takes nothing any more, because it has ended or is of no use.
        is_unwanted: whether it ends because that is wanted.
        awaited: set when it has answered, or has recovered; None if it has nothing to do.
    """

    def __init__(self, program: str) -> None:
        self.why = "has ended"
        self.is_over = False
        self.is_unwanted = False
        self.awaited: trio.Event | None = None
        self._program = program
        self._answer: Any = None
        self._is_wanted = False
        self._process: trio.Process | None = None
        self._channel: ProcessChannel | None = None
        self._ended = trio.Event()

    @property
    def pid(self) -> int | None:
        """The number of the process."""
        return None if self._process is None else self._process.pid

    async def run(self, task_status: trio.TaskStatus[None]) -> None:
        """Be the process; never fails because of what it does.

        Raises:
            OSError: no process can be started.

        Cancellation: at once; the process is killed.
        """
        ours, theirs = packet_pair()
        self._channel = ProcessChannel(ours)
        try:
            with theirs:
                self._process = await start_program(self._program, theirs)
            task_status.started()
            async with trio.open_nursery() as nursery:
                nursery.start_soon(_end_with, self._process, self._channel)
                await self._receive_all(self._channel)
                nursery.cancel_scope.deadline = trio.current_time() + _SECONDS_TO_DIE
        finally:
            self.is_over = True
            self._channel.close()
            with trio.CancelScope(shield=True):
                await self._bury()
            self._settle(None)
            self._ended.set()

    async def _receive_all(self, channel: ProcessChannel) -> None:
        try:
            while (message := await channel.receive()) is not None:
                self._settle(message)
                # Its memory belongs to whoever waits for it, and not to this loop until the next one comes.
                del message
        except NO_ANSWER as error:
            self.condemn(error)

    def _settle(self, message: Any) -> None:
        awaited, self.awaited = self.awaited, trio.Event() if is_spoiled(message) else None
        if awaited is not None:
            # Large arrays must not lie here until the next answer comes.
            self._answer = message if self._is_wanted else None
            awaited.set()

    async def _bury(self) -> None:
        if self._process is not None:
            self._process.kill()
            status = await self._process.wait()
            if self.why == "has ended":
                self.why = describe_end(status)

    async def ask(self, message: Any) -> Any:
        """Send a message and give its answer; None if the process ended first.

        Ownership: nothing once it has ended.

        Cancellation: at once; the answer is dropped when it comes.
        """
        if self.is_over or self._channel is None:
            return None
        answered = self.awaited = trio.Event()
        self._is_wanted = True
        try:
            await self._channel.send(message)
        except trio.BrokenResourceError:
            await self._ended.wait()
            return None
        except BaseException:
            # It may have been sent or not, so that no answer could be told from the next one.
            self.kill()
            raise
        try:
            await answered.wait()
            return self._answer
        finally:
            self._is_wanted = False
            self._answer = None

    async def settle(self) -> None:
        """Wait until the process has nothing more to answer.

        Cancellation: at once.
        """
        while self.awaited is not None:
            await self.awaited.wait()

    def condemn(self, error: Exception) -> None:
        """Kill a process that sends nonsense."""
        self.why = f"sent what is no answer ({error!r}) and was killed"
        if self._process is not None:
            self._process.kill()

    def kill(self) -> None:
        """End the process at once, because it is of no use any more."""
        self.is_unwanted = self.is_over = True
        if self._process is not None:
            self._process.kill()

    async def aclose(self, grace_seconds: float) -> None:
        """Have the process end, by force if it takes too long.

        Cancellation: shielded, for it is bounded.
        """
        self.is_unwanted = True
        if self._channel is not None:
            self._channel.finish()
        with trio.move_on_after(grace_seconds, shield=True):
            await self._ended.wait()
        self.kill()
        with trio.CancelScope(shield=True):
            await self._ended.wait()
