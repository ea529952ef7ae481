"""What the processes of one server ask each other, each at an address of its own that the others know.

::

    ask(row, value) ──> one connection a pair of processes ──> answer(value), a task each
         the answer, or the error that it raised  <──────────┘

What has an order is sent in the order in which it is asked, also where it has to be sent again, and each of it is
answered when the one before has been.
"""

from __future__ import annotations

import itertools
import os
import socket
import struct
from bisect import insort
from collections.abc import Awaitable, Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import suppress
from contextvars import copy_context
from functools import partial
from operator import attrgetter
from typing import Any, Final

import structlog
import trio

from ovmstrio.core.errors import NotReady, ServerError
from ovmstrio.core.worker_peers import PartedAnswer
from ovmstrio.isolation.channel import NO_MESSAGE, MessageChannel, Swift, swift_packet
from ovmstrio.isolation.codec import decode_error, encode_error
from ovmstrio.transport.accepting import NO_ROOM, PAUSE_SECONDS
from ovmstrio.transport.direct_stream import told_of_waiting
from ovmstrio.workers.handoff import noted

__all__ = [
    "ANSWERED",
    "BEING_STARTED",
    "CANCEL",
    "FAILED",
    "LEFT",
    "NOT_BEGUN",
    "PART",
    "Gone",
    "LatePlace",
    "LateQuestions",
    "NotBegun",
    "Order",
    "PeerLink",
    "Peers",
    "WaitingCaller",
    "send_message",
]

# ----------------------------------------------------------------------
# A connection from one process of a server to another one, by which it asks questions
# ----------------------------------------------------------------------

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


# ----------------------------------------------------------------------
# Questions that nobody has begun to answer, which are sent again in the order in which they were asked
# ----------------------------------------------------------------------


class LateQuestions:
    """Those of one process that are late, by whom they are for and what they have in common.

    Attributes:
        lines: the late ones that are to be sent one after the other; few, as hardly any question is ever late.
    """

    def __init__(self) -> None:
        self.lines: dict[tuple[int, str], list[LatePlace]] = {}
        self._numbers = itertools.count()

    def place(self, row: int, order: Order) -> LatePlace:
        """Give a question its place among those that are late, should it be late, too."""
        return LatePlace(self, next(self._numbers), row, order)


class LatePlace:
    """Where a question is among those that are late; it has no place there unless it is.

    Attributes:
        number: is larger than those of questions that were asked before.
    """

    __slots__ = ("_is_late", "_late", "_moved", "_order", "_row", "number")

    def __init__(self, late: LateQuestions, number: int, row: int, order: Order) -> None:
        self.number = number
        self._late = late
        self._row = row
        self._order = order
        self._is_late = False
        self._moved: trio.Event | None = None

    @property
    def _line(self) -> tuple[int, str]:
        return self._row, repr(self._order)

    def may_go(self) -> bool:
        """Tell whether no question is late that was asked before this one, which is late as well otherwise."""
        if not self._late.lines:
            return True
        line = self._late.lines.get(self._line)
        if line is None or line[0].number >= self.number:
            return True
        self.join()
        return False

    def join(self) -> None:
        """Be late: what is asked from now on waits until this one has been sent, or given up."""
        if not self._is_late:
            self._is_late = True
            insort(self._late.lines.setdefault(self._line, []), self, key=attrgetter("number"))

    async def wait(self) -> None:
        """Wait for those that were asked before.

        Cancellation: at once.
        """
        # They may be about to hear that they are late.
        await trio.lowlevel.checkpoint()
        while not self.may_go():
            moved = self._moved = trio.Event()
            await moved.wait()

    def leave(self) -> None:
        """Let the next one go."""
        if self._is_late:
            self._is_late = False
            line = self._late.lines[self._line]
            line.remove(self)
            if not line:
                del self._late.lines[self._line]
            elif (moved := line[0]._moved) is not None:  # noqa: SLF001 - another one of this class
                moved.set()


# ----------------------------------------------------------------------
# What the processes of one server ask each other, each at an address of its own that the others know
# ----------------------------------------------------------------------

_BACKLOG: Final = 64
_CREDENTIALS: Final = struct.Struct("3i")
_LEAVE_SECONDS: Final = 5.0
LEFT: Final = "left"
"""The question by which a process tells that it needs no more answers."""
_REACH_SECONDS: Final = 30.0
"""How long a question with an order waits for a process that is being started."""

Answer = Callable[[Any], Awaitable[Any]]


class Peers:
    """The other processes, as one of them sees them.

    Args:
        secret: a text that all of them, and nobody else, have; addresses are made of it.
        rows: how many processes there are.
        row: this one's number.
    """

    def __init__(self, secret: str, rows: int, row: int) -> None:
        self.rows = rows
        self.row = row
        self._secret = secret
        self._others = [other for other in range(rows) if other != row]
        self._nursery: trio.Nursery | None = None
        self._links: dict[int, PeerLink] = {}
        self._turns = {other: trio.StrictFIFOLock() for other in self._others}
        self._late = LateQuestions()
        self._changed = trio.Event()
        self._left: set[int] = set()
        self._door = trio.CancelScope()
        self._is_closed = False
        self._at_work = 0

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
        with noted(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)) as end:
            listener = trio.socket.from_stdlib_socket(end)
            await listener.bind(self._address(self.row))
            listener.listen(_BACKLOG)
            async with trio.open_nursery() as nursery:
                self._nursery = nursery
                task_status.started()
                try:
                    with self._door:
                        await self._accept_all(listener, nursery, answer)
                    listener.close()
                    await trio.sleep_forever()
                finally:
                    self._nursery = None

    async def _accept_all(self, listener: trio.socket.SocketType, nursery: trio.Nursery, answer: Answer) -> None:
        while True:
            try:
                accepted, _ = await listener.accept()
            except OSError as error:
                if error.errno not in NO_ROOM:
                    raise
                log.warning("other processes are kept waiting", reason=error.strerror)
                await trio.sleep(PAUSE_SECONDS)
                continue
            if _is_own(accepted):
                nursery.start_soon(self._answer_all, _taken(accepted), answer)
            else:
                accepted.close()

    async def _answer_all(self, end: socket.socket, answer: Answer) -> None:
        """Answer what comes on one connection.

        Cancellation: at once, and all answers.
        """
        channel = MessageChannel(end)
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._hear, _Heard(channel, nursery, answer))
        finally:
            channel.close()

    async def _hear(self, heard: _Heard) -> None:
        """Take questions until the other process is gone, or an answer has to wait, and another task hears the rest.

        What is answered without waiting, as most steps of sequences are, needs no task of its own.

        Cancellation: at once.
        """
        try:
            while (asked := await self._next_question(heard)) is not None:
                task = heard.task
                await told_of_waiting(self._answer_one(heard, asked), partial(self._hand_over, heard), copy_context())
                del asked
                if heard.task is not task:
                    return
        except trio.BrokenResourceError:
            pass
        except NO_MESSAGE as error:
            log.error("another process is not heard any more", reason=repr(error))  # noqa: TRY400 - no fault here
        # Nobody hears the rest.
        heard.nursery.cancel_scope.cancel()

    def _hand_over(self, heard: _Heard) -> None:
        heard.task += 1
        heard.nursery.start_soon(self._hear, heard)

    async def _next_question(self, heard: _Heard) -> _Question | None:
        """Wait for a question that is to be answered; None once the other process is gone.

        Raises:
            BrokenResourceError: it is gone.
            ValueError, LookupError, TypeError, OSError, RecursionError: what came is no question.

        Cancellation: at once.
        """
        while (message := await heard.channel.receive()) is not None:
            number, value, order = message.value
            if message.tail is not None:
                value.append(message.tail)
            if number == CANCEL:
                if value in heard.questions:
                    heard.questions[value].scope.cancel()
            elif order is not None and self._is_closed:
                await heard.channel.send([number, NOT_BEGUN, None])
            else:
                turn = None if order is None else _Turn(heard.last, repr(order))
                asked = heard.questions[number] = _Question(number, value, turn)
                return asked
            del message, value
        return None

    async def _answer_one(self, heard: _Heard, asked: _Question) -> None:
        channel = heard.channel
        self._at_work += 1
        try:
            with asked.scope:
                try:
                    if asked.turn is not None:
                        await asked.turn.wait()
                    reply = [asked.number, ANSWERED, await self._whole(channel, asked, await heard.answer(asked.value))]
                except Exception as error:  # noqa: BLE001 - it is raised where the question came from
                    reply = [asked.number, FAILED, encode_error(error)]
                with suppress(trio.BrokenResourceError):
                    try:
                        await send_message(channel, reply)
                    except (TypeError, ValueError, OSError) as error:
                        await channel.send([asked.number, FAILED, encode_error(error)])
        finally:
            del heard.questions[asked.number]
            if asked.turn is not None:
                asked.turn.end()
            self._at_work -= 1
            if self._is_closed and not self._at_work:
                self.announce()

    async def _whole(self, channel: MessageChannel, asked: _Question, reply: Any) -> Any:
        """Send an answer that comes in parts, and give what is left of it to be sent.

        Raises:
            Exception: as the answer.
        """
        if not isinstance(reply, PartedAnswer):
            return reply
        try:
            async for part in reply:
                await channel.send([asked.number, PART, part])
        except trio.BrokenResourceError:
            pass
        finally:
            reply.close()
        return None

    # Their beginning and their end

    def announce(self) -> None:
        """Have those look again who wait for another process; one has begun or ended."""
        self._changed.set()
        self._changed = trio.Event()

    def note_left(self, row: int) -> None:
        """Note that a process needs no answers any more."""
        self._left.add(row)
        self.announce()

    async def leave(
        self,
        others: AbstractSet[int] | None,
        seconds: float = _LEAVE_SECONDS,
        last: Callable[[], Awaitable[None]] = trio.lowlevel.checkpoint,
    ) -> None:
        """Answer no more questions that have an order, when those that are being answered have been.

        Args:
            others: the processes that end as well and are waited for; None if this one ends alone.
            seconds: how long they may take to say that they need no more answers.
            last: is called when they have said so.

        Cancellation: at once.
        """
        with trio.move_on_after(seconds):
            if others is not None:
                # Those that are not waited for may wait for this one.
                with suppress(Exception):
                    await self.ask_all(LEFT, self.row)
            while not self._left.issuperset(others or ()):
                await self._changed.wait()
        await last()
        self._is_closed = True
        self._door.cancel()
        with trio.move_on_after(_LEAVE_SECONDS):
            while self._at_work:
                await self._changed.wait()

    # What is asked of others

    async def ask(
        self, row: int, value: Any, order: Order | None = None, is_its: Callable[[], bool] = lambda: True
    ) -> Any:
        """Ask one of the others.

        Args:
            row: its number.
            value: the question, plain data and arrays.
            order: what it has in common with others that are answered before and after it.  With an order the question
                waits for a while for a process that is being started.
            is_its: tells whether the question is that process's still, so that it is to be waited for.

        Raises:
            NotBegun: it cannot be reached, and the question is its no more.
            NotReady: it cannot be reached, or has ended before it answered.
            Exception: what it raised.

        Cancellation: at once, and of its work.
        """
        if order is None:
            return await (await self._connect(row)).ask(value)
        place = self._late.place(row, order)
        try:
            return await self._ask_in_order(row, value, order, place, is_its)
        finally:
            place.leave()

    async def _ask_in_order(
        self, row: int, value: Any, order: Order, place: LatePlace, is_its: Callable[[], bool]
    ) -> Any:
        deadline = trio.current_time() + _REACH_SECONDS
        sent = self._send_now(row, value, order) if isinstance(value, Swift) and place.may_go() else None
        while True:
            changed = self._changed
            try:
                if sent is None:
                    # What is answered may take its time.
                    with trio.CancelScope(deadline=deadline) as reaching:
                        sent = await self._send_in_turn(row, value, order, place)
                if sent is not None:
                    (link, asked), sent = sent, None
                    place.leave()
                    return await link.wait(asked)
            except NotBegun:
                place.join()
                with trio.CancelScope(deadline=deadline) as reaching:
                    await place.wait()
                    if not is_its():
                        raise
                    await changed.wait()
            if reaching.cancelled_caught:
                raise NotReady(BEING_STARTED)

    def _send_now(self, row: int, value: Swift, order: Order) -> tuple[PeerLink, WaitingCaller] | None:
        """Send a question at once if nothing is in its way."""
        link = self._links.get(row)
        if link is None or link.is_gone or self._turns[row].locked():
            return None
        asked = link.send_now(value, order)
        return None if asked is None else (link, asked)

    async def _send_in_turn(
        self, row: int, value: Any, order: Order, place: LatePlace
    ) -> tuple[PeerLink, WaitingCaller]:
        turn = self._turns[row]
        while True:
            try:
                turn.acquire_nowait()
            except trio.WouldBlock:
                await turn.acquire()
            try:
                if place.may_go():
                    link = await self._connect(row)
                    return link, await link.send(value, order)
            finally:
                turn.release()
            await place.wait()

    async def listen(self, row: int, value: Any, heard: Callable[[Any], None]) -> Any:
        """Ask one of the others for an answer that comes in parts, and give what comes after the last one.

        Args:
            row: its number.
            value: the question.
            heard: is called with each part, and must not wait.

        Raises:
            NotReady: it cannot be reached, or has ended before the end of the answer.
            Exception: what it raised.

        Cancellation: at once, and of its work.
        """
        link = await self._connect(row)
        return await link.wait(await link.send(value, None, heard))

    async def wait_change(self) -> None:
        """Wait until another process has begun or ended, or is ready or not any more.

        Cancellation: at once.
        """
        await self._changed.wait()

    async def ask_all(self, question: str, *arguments: Any, limit_seconds: float = 60) -> list[Any]:
        """Ask all others that can be reached; as :meth:`ask_each`."""
        return list((await self.ask_each(question, *arguments, limit_seconds=limit_seconds)).values())

    async def ask_each(self, question: str, *arguments: Any, limit_seconds: float = 60) -> dict[int, Any]:
        """Ask all others that can be reached, and give their answers by their numbers.

        Raises:
            NotReady: one of them took too long.
            Exception: what one of them raised; all are in the log.

        Cancellation: at once, and of their work.
        """
        answers: dict[int, Any] = {}
        errors: dict[int, Exception] = {}
        silent = set(self._others)

        async def ask_one(row: int) -> None:
            try:
                answers[row] = await (await self._connect(row)).ask([question, *arguments])
            except Gone:
                pass  # It is being started, or will be, and begins with what there is then.
            except Exception as error:  # noqa: BLE001 - raised below, when all have answered
                errors[row] = error
            silent.discard(row)

        with trio.move_on_after(limit_seconds) as scope:
            async with trio.open_nursery() as nursery:
                for row in self._others:
                    nursery.start_soon(ask_one, row)
        if scope.cancelled_caught:
            rows = ", ".join(map(str, sorted(silent)))
            raise NotReady(f"of the server's {self.rows} workers, {rows} did not answer in {limit_seconds:g} s")
        for row, error in errors.items():
            log.warning("another worker did not do what was asked", other=row, question=question, reason=str(error))
        for row, error in errors.items():
            raise _placed(error, row)
        return answers

    async def ask_soon(self, questions: Mapping[int, Sequence[Any]], seconds: float) -> dict[int, Any]:
        """Ask some of the others, and give what comes in time; see :class:`ovmstrio.core.worker_peers.Siblings`.

        Cancellation: at once, and of their work.
        """
        answers: dict[int, Any] = {}

        async def ask_one(row: int, question: Sequence[Any]) -> None:
            try:
                answers[row] = await (await self._connect(row)).ask(list(question))
            except NotReady:
                pass  # It is being started, or will be.
            except Exception as error:  # noqa: BLE001 - the others' answers are wanted all the same
                log.warning("another worker did not answer", other=row, question=question[0], reason=str(error))

        with trio.move_on_after(seconds):
            async with trio.open_nursery() as nursery:
                for row, question in questions.items():
                    nursery.start_soon(ask_one, row, question)
        return answers

    async def _connect(self, row: int) -> PeerLink:
        known = self._links.get(row)
        if known is not None and not known.is_gone:
            return known
        if self._nursery is None:
            raise NotReady("the server is shutting down")
        end = trio.socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            await end.connect(self._address(row))
            # Anybody can take an address that is free.
            is_own = _is_own(end)
        except OSError:
            is_own = False
        except BaseException:
            end.close()
            raise
        if not is_own:
            end.close()
            raise NotBegun(BEING_STARTED)
        # Another task may have been faster.
        known = self._links.get(row)
        if known is not None and not known.is_gone:
            end.close()
            return known
        link = self._links[row] = PeerLink(MessageChannel(_taken(end)))
        self._nursery.start_soon(link.run)
        return link


class _Turn:
    """The place of a question among those of one order.

    Args:
        last: the last one of each order, as long as it or one before it has not ended.
        order: this one's.

    Attributes:
        before: the one before; None once it and all others before this one have ended.
        ended: set once it has ended, be it because its caller has left before it could begin.
    """

    def __init__(self, last: dict[str, _Turn], order: str) -> None:
        self._last = last
        self._order = order
        self.before = last.get(order)
        self.ended = trio.Event()
        last[order] = self

    async def wait(self) -> None:
        """Wait for those before."""
        while self.before is not None:
            await self.before.ended.wait()
            # One that ended before it could begin had others before it.
            self.before = self.before.before

    def end(self) -> None:
        """Let the next one begin, when those before have ended."""
        self.ended.set()
        if self._last.get(self._order) is not self:
            return
        before = self.before
        while before is not None and before.ended.is_set():
            before = before.before
        if before is None:
            del self._last[self._order]
        else:
            self._last[self._order] = before


class _Heard:
    """A connection that another process asks by.

    Attributes:
        channel: where its questions come from.
        nursery: of the tasks that hear and answer.
        answer: answers a question.
        questions: those that are being answered, by their numbers.
        last: the last one of each order.
        task: the number of the task that hears.
    """

    __slots__ = ("answer", "channel", "last", "nursery", "questions", "task")

    def __init__(self, channel: MessageChannel, nursery: trio.Nursery, answer: Answer) -> None:
        self.channel = channel
        self.nursery = nursery
        self.answer = answer
        self.questions: dict[int, _Question] = {}
        self.last: dict[str, _Turn] = {}
        self.task = 0


class _Question:
    """What another process asks, as long as it is being answered."""

    __slots__ = ("number", "scope", "turn", "value")

    def __init__(self, number: int, value: Any, turn: _Turn | None) -> None:
        self.number = number
        self.value = value
        self.turn = turn
        self.scope = trio.CancelScope()


def _taken(taken: trio.socket.SocketType) -> socket.socket:
    return noted(socket.socket(fileno=taken.detach()))


def _placed(error: Exception, row: int) -> Exception:
    """Have the message of an error tell which process it comes from."""
    if isinstance(error, ServerError):
        error.message = f"worker {row}: {error.message}"
        error.args = (error.message,)
    return error


def _is_own(end: trio.socket.SocketType) -> bool:
    """Tell whether the other end of a connection is a process of the same user."""
    data = end.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    _, user, _ = _CREDENTIALS.unpack(data)
    return bool(user == os.geteuid())
