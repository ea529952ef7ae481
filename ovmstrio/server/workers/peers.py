"""What the processes of one server ask each other, each at an address of its own that the others know.

::

    ask(row, value) ──> one connection a pair of processes ──> answer(value), a task each
         the answer, or the error that it raised  <──────────┘
"""

from __future__ import annotations

import itertools
import os
import socket
import struct
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any, Final

import structlog
import trio

from ovmstrio.core.errors import NotReady
from ovmstrio.work.messages.error_codec import decode_error, encode_error
from ovmstrio.work.processes.message_channel import MessageChannel

__all__ = ["Peers"]

log = structlog.get_logger(__name__)

_BACKLOG: Final = 64
_CREDENTIALS: Final = struct.Struct("3i")
_ANSWER_SECONDS: Final = 60.0
"""How long a question to all others may take."""
_CANCEL: Final = 0
"""The number of messages that tell of a caller's leaving."""

Answer = Callable[[Any], Awaitable[Any]]


class Peers:
    """The other processes, as one of them sees them.

    Args:
        secret: a text that all of them, and nobody else, have; addresses are made of it.
        rows: how many processes there are.
        row: this one's number.
    """

    def __init__(self, secret: str, rows: int, row: int) -> None:
        self._secret = secret
        self._others = [other for other in range(rows) if other != row]
        self._row = row
        self._nursery: trio.Nursery | None = None
        self._links: dict[int, _Link] = {}

    def _address(self, row: int) -> str:
        # The name has no file, and is free as soon as its process has ended.
        return f"\0ovmstrio-{self._secret}-{row}"

    # What others ask

    async def run(self, answer: Answer, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Answer what other processes ask, and own the connections to them, until cancelled.

        Args:
            answer: answers a question; errors of the server go to whoever asked.
            task_status: is told once questions are heard.

        Raises:
            OSError: the address cannot be had.

        Ownership: connections and answers.

        Cancellation: at once; who waits for an answer is told that the process is gone.
        """
        with trio.socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
            await listener.bind(self._address(self._row))
            listener.listen(_BACKLOG)
            async with trio.open_nursery() as nursery:
                self._nursery = nursery
                task_status.started()
                try:
                    while True:
                        accepted, _ = await listener.accept()
                        if _is_own(accepted):
                            nursery.start_soon(self._answer_all, _taken(accepted), answer)
                        else:
                            accepted.close()
                finally:
                    self._nursery = None

    async def _answer_all(self, end: socket.socket, answer: Answer) -> None:
        """Answer what comes on one connection.

        Cancellation: at once, and all answers.
        """
        channel = MessageChannel(end)
        scopes: dict[int, trio.CancelScope] = {}
        try:
            async with trio.open_nursery() as nursery:
                while (message := await channel.receive()) is not None:
                    number, value = message.value
                    if number == _CANCEL:
                        if value in scopes:
                            scopes[value].cancel()
                    else:
                        scopes[number] = trio.CancelScope()
                        nursery.start_soon(self._answer_one, channel, scopes, number, value, answer)
                    del message, value
                # Nobody hears the rest.
                nursery.cancel_scope.cancel()
        finally:
            channel.close()

    async def _answer_one(
        self, channel: MessageChannel, scopes: dict[int, trio.CancelScope], number: int, value: Any, answer: Answer
    ) -> None:
        try:
            with scopes[number]:
                try:
                    reply = [number, True, await answer(value)]
                except Exception as error:  # noqa: BLE001 - it is raised where the question came from
                    reply = [number, False, encode_error(error)]
                with suppress(trio.BrokenResourceError):
                    await channel.send(reply)
        finally:
            del scopes[number]

    # What is asked of others

    async def ask(self, row: int, value: Any) -> Any:
        """Ask one of the others.

        Args:
            row: its number.
            value: the question, plain data and arrays.

        Raises:
            NotReady: it cannot be reached, or has ended before it answered.
            Exception: what it raised.

        Cancellation: at once, and of its work.
        """
        link = self._links.get(row)
        if link is None or link.is_gone:
            link = await self._connect(row)
        return await link.ask(value)

    async def ask_all(self, question: str, *arguments: Any) -> list[Any]:
        """Ask all others that can be reached; see :class:`ovmstrio.core.siblings.Siblings`.

        Raises:
            NotReady: one of them took too long.
            Exception: what one of them raised.

        Cancellation: at once, and of their work.
        """
        answers: list[Any] = []
        errors: list[Exception] = []

        async def ask_one(row: int) -> None:
            try:
                link = await self._connect(row)
            except NotReady:
                return  # It is being started, and begins with what there is then.
            try:
                answers.append(await link.ask([question, *arguments]))
            except Exception as error:  # noqa: BLE001 - raised below, when all have answered
                errors.append(error)

        with trio.move_on_after(_ANSWER_SECONDS) as scope:
            async with trio.open_nursery() as nursery:
                for row in self._others:
                    nursery.start_soon(ask_one, row)
        if scope.cancelled_caught:
            raise NotReady(f"a process of the server did not answer in {_ANSWER_SECONDS:g} s")
        if errors:
            raise errors[0]
        return answers

    async def _connect(self, row: int) -> _Link:
        known = self._links.get(row)
        if known is not None and not known.is_gone:
            return known
        if self._nursery is None:
            raise NotReady("the server is shutting down")
        end = trio.socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            await end.connect(self._address(row))
        except OSError:
            end.close()
            raise NotReady("the process that this belongs to is being started: send it again") from None
        # Another task may have been faster.
        known = self._links.get(row)
        if known is not None and not known.is_gone:
            end.close()
            return known
        link = self._links[row] = _Link(MessageChannel(_taken(end)))
        self._nursery.start_soon(link.run)
        return link


class _Waiting:
    """Who waits for an answer."""

    __slots__ = ("is_answered", "is_good", "is_parked", "task", "value")

    def __init__(self) -> None:
        self.task = trio.lowlevel.current_task()
        self.is_parked = False
        self.is_answered = False
        self.is_good = False
        self.value: Any = None

    def wake(self) -> None:
        """Have the task look."""
        if self.is_parked:
            self.is_parked = False
            trio.lowlevel.reschedule(self.task)


class _Link:
    """A connection to another process."""

    def __init__(self, channel: MessageChannel) -> None:
        self.is_gone = False
        self._channel = channel
        self._numbers = itertools.count(_CANCEL + 1)
        self._waiting: dict[int, _Waiting] = {}

    async def run(self) -> None:
        """Take answers until the other process is gone.

        Cancellation: at once; whoever waits is told.
        """
        try:
            while (message := await self._channel.receive()) is not None:
                number, is_good, value = message.value
                waiting = self._waiting.pop(number, None)
                if waiting is not None:
                    waiting.is_answered, waiting.is_good, waiting.value = True, is_good, value
                    waiting.wake()
                del message, value
        finally:
            self.is_gone = True
            self._channel.close()
            waiting_still, self._waiting = self._waiting, {}
            for waiting in waiting_still.values():
                waiting.wake()

    async def ask(self, value: Any) -> Any:
        """Ask; as :meth:`Peers.ask`."""
        if self.is_gone:
            raise NotReady(_LOST)
        number, waiting = next(self._numbers), _Waiting()
        self._waiting[number] = waiting
        try:
            await self._channel.send([number, value])
            if not (waiting.is_answered or self.is_gone):
                await self._park(waiting, number)
        except trio.BrokenResourceError:
            raise NotReady(_LOST) from None
        finally:
            self._waiting.pop(number, None)
        if not waiting.is_answered:
            raise NotReady(_LOST)
        if not waiting.is_good:
            raise decode_error(waiting.value)
        return waiting.value

    async def _park(self, waiting: _Waiting, number: int) -> None:
        """Wait to be woken.

        Cancellation: at once; the other process is told.
        """

        def leave(_: Any) -> trio.lowlevel.Abort:
            waiting.is_parked = False
            self._channel.send_soon([_CANCEL, number])
            return trio.lowlevel.Abort.SUCCEEDED

        waiting.is_parked = True
        await trio.lowlevel.wait_task_rescheduled(leave)


_LOST: Final = "the process that this belongs to ended before it answered"


def _taken(taken: trio.socket.SocketType) -> socket.socket:
    return socket.socket(fileno=taken.detach())


def _is_own(accepted: trio.socket.SocketType) -> bool:
    """Tell whether a connection is of a process of the same user."""
    data = accepted.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    _, user, _ = _CREDENTIALS.unpack(data)
    return bool(user == os.geteuid())
