"""A connection from one process of a server to another one, by which it asks questions.

::

    [number, question, order] ──>        [number, outcome, value] <──       parts of an answer come before it
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final

import structlog
import trio

from ovmstrio.core.errors import NotReady
from ovmstrio.work.messages.error_codec import decode_error
from ovmstrio.work.messages.message_packets import NO_MESSAGE, Swift, swift_packet

if TYPE_CHECKING:
    from ovmstrio.work.processes.message_channel import MessageChannel

__all__ = [
    "ANSWERED",
    "BEING_STARTED",
    "CANCEL",
    "FAILED",
    "NOT_BEGUN",
    "PART",
    "Gone",
    "NotBegun",
    "Order",
    "PeerLink",
    "WaitingCaller",
    "send_message",
]

log = structlog.get_logger(__name__)

CANCEL: Final = 0
"""The number of messages that tell of a caller's leaving."""
ANSWERED, FAILED, NOT_BEGUN, PART = range(4)
"""What becomes of a question."""

Order = Sequence[Any]
"""What questions have in common that are answered one after the other; plain data."""
BEING_STARTED: Final = "the process that this belongs to is being started: send it again"
_LOST: Final = "the process that this belongs to ended before it answered"


class Gone(NotReady):
    """The other process is not there, or has ended before it answered."""


class NotBegun(Gone):
    """A question that has not reached anybody who answers it, and may be asked again."""


class WaitingCaller:
    """Who waits for an answer."""

    __slots__ = ("heard", "is_answered", "is_parked", "number", "outcome", "task", "value")

    def __init__(self, number: int, heard: Callable[[Any], None] | None = None) -> None:
        self.number = number
        self.heard = heard
        self.task = trio.lowlevel.current_task()
        self.is_parked = False
        self.is_answered = False
        self.outcome = FAILED
        self.value: Any = None

    def wake(self) -> None:
        """Have the task look."""
        if self.is_parked:
            self.is_parked = False
            trio.lowlevel.reschedule(self.task)


class PeerLink:
    """A connection to another process."""

    def __init__(self, channel: MessageChannel) -> None:
        self.is_gone = False
        self._channel = channel
        self._numbers = itertools.count(CANCEL + 1)
        self._waiting: dict[int, WaitingCaller] = {}

    async def run(self) -> None:
        """Take answers until the other process is gone.

        Cancellation: at once; whoever waits is told.
        """
        try:
            while (message := await self._channel.receive()) is not None:
                number, outcome, value = message.value
                if message.tail is not None:
                    value.append(message.tail)
                if outcome == PART:
                    waiting = self._waiting.get(number)
                    if waiting is not None and waiting.heard is not None:
                        waiting.heard(value)
                    continue
                waiting = self._waiting.pop(number, None)
                if waiting is not None:
                    waiting.is_answered, waiting.outcome, waiting.value = True, outcome, value
                    waiting.wake()
                del message, value, waiting
        except NO_MESSAGE as error:
            log.error("another process is not heard any more", reason=repr(error))  # noqa: TRY400 - no fault here
        finally:
            self.is_gone = True
            self._channel.close()
            waiting_still, self._waiting = self._waiting, {}
            for waiting in waiting_still.values():
                waiting.wake()

    async def ask(self, value: Any) -> Any:
        """Ask; as :meth:`Peers.ask`."""
        return await self.wait(await self.send(value, None))

    def send_now(self, value: Swift, order: Order | None) -> WaitingCaller | None:
        """Send a question at once, whose answer is to be waited for; None where that cannot be done."""
        number = next(self._numbers)
        packet = swift_packet([number, value.head, order], value.buffers)
        try:
            if packet is None or not self._channel.send_packet_now(packet):
                return None
        except trio.BrokenResourceError:
            return None
        waiting = self._waiting[number] = WaitingCaller(number)
        return waiting

    async def send(self, value: Any, order: Order | None, heard: Callable[[Any], None] | None = None) -> WaitingCaller:
        """Send a question, whose answer is to be waited for.

        Raises:
            NotReady: the other process is gone.

        Cancellation: at once; it is sent or not.
        """
        if self.is_gone:
            raise NotBegun(BEING_STARTED)
        waiting = WaitingCaller(next(self._numbers), heard)
        self._waiting[waiting.number] = waiting
        try:
            await send_message(self._channel, [waiting.number, value, order])
        except BaseException as error:
            self._waiting.pop(waiting.number, None)
            if isinstance(error, trio.BrokenResourceError):
                self.is_gone = True
                raise NotBegun(BEING_STARTED) from None
            raise
        return waiting

    async def wait(self, waiting: WaitingCaller) -> Any:
        """Wait for the answer; as :meth:`Peers.ask`."""
        try:
            if not (waiting.is_answered or self.is_gone):
                await self._park(waiting)
        finally:
            self._waiting.pop(waiting.number, None)
        if not waiting.is_answered:
            raise Gone(_LOST)
        if waiting.outcome == NOT_BEGUN:
            raise NotBegun(BEING_STARTED)
        if waiting.outcome == FAILED:
            raise decode_error(waiting.value)
        return waiting.value

    async def _park(self, waiting: WaitingCaller) -> None:
        """Wait to be woken.

        Cancellation: at once; the other process is told.
        """

        def leave(_: Any) -> trio.lowlevel.Abort:
            waiting.is_parked = False
            # What somebody holds for this one, such as a turn, would not be given back without it.
            self._channel.send_later([CANCEL, waiting.number, None])
            return trio.lowlevel.Abort.SUCCEEDED

        waiting.is_parked = True
        await trio.lowlevel.wait_task_rescheduled(leave)


async def send_message(channel: MessageChannel, message: list[Any]) -> None:
    """Send a message, one of whose members may be swift.

    Raises:
        TypeError, ValueError, OSError, BrokenResourceError: as :meth:`MessageChannel.send`.

    Cancellation: as there.
    """
    for place, each in enumerate(message):
        if isinstance(each, Swift):
            message[place] = each.head
            packet = swift_packet(message, each.buffers)
            if packet is not None:
                await channel.send_packet(packet)
                return
            # It is too large: its bytes go as any others.
            message[place] = [*each.head, b"".join(each.buffers)]
            break
    await channel.send(message)
